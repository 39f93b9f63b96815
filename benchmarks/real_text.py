"""The text of `real.py`: documents to fit, to choose by, and to measure on.

A document belongs to one part only, and equal texts are one document. The documents of a text file
are its articles, if it has WikiText's headings (` = Title = `), else blocks of paragraphs of some
thousand characters; those of a folder with many files are the files; otherwise they are the
records. A source with held-out documents of its own is measured on these.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from npt.batch import Sample
from npt.config import DataConfig
from npt.data.samples import cut, within
from npt.data.source import PIECE, Record, open_source, own_heldout
from npt.errors import DataError

T = TypeVar("T")

HEADING = re.compile(r"^ *= (?!=)(.+)(?<!=) = *$", re.MULTILINE)
BLOCK = 8000
"""Fewest characters of a document built from paragraphs."""
FEW = 8
"""Fewest documents: a source with fewer is cut at headings or paragraphs."""
LARGEST = 1 << 23
"""Most characters to read."""
LEAST = 64
"""Fewest tokens of a measured sample, unless all are shorter."""


class Document(NamedTuple):
    """A text and its name."""

    name: str
    text: str


@dataclass(frozen=True)
class Text:
    """Samples; no document is in two parts.

    Attributes:
        length: most tokens of a sample.
        fitted: samples to fit; every document comes once before any comes twice.
        choosing: samples that choose the best student, one of each document.
        heldout: samples to measure on, one of each document.
    """

    length: int
    fitted: list[Sample]
    choosing: list[Sample]
    heldout: list[Sample]

    def sizes(self) -> dict[str, int]:
        """Return length, documents and tokens."""
        parts = {name: getattr(self, name) for name in ("fitted", "choosing", "heldout")}
        tokens = {f"{name}_tokens": token_count(part) for name, part in parts.items()}
        return {"length": self.length, "heldout_documents": len(self.heldout), **tokens}


def token_count(samples: Iterable[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)


def read_text(
    name: str,
    tokenizer: Any,
    vocab_size: int,
    *,
    length: int = 512,
    heldout_tokens: int = 8192,
    choosing_tokens: int = 4096,
    seed: int = 0,
) -> Text:
    """Return the samples of a dataset (a file, a folder, a glob, or a name for --dataset_name).

    One sample of each held-out document is measured; at most a quarter of the documents is held
    out, and at most an eighth chooses. Samples with ids of V or more are left out. The seed fixes
    the split and the samples' positions in their documents.

    Raises:
        DataError: the text cannot be read, or is too little to fit and measure.
    """
    config = DataConfig(dataset_name=name, max_length=length)
    seen: set[str] = set()

    def windows(documents: Iterable[Document]) -> list[list[Sample]]:
        samples: dict[str, list[Sample]] = {}
        new = shuffled(unique(documents, seen), seed)
        records = ({"text": document.text, "id": document.name} for document in new)
        for sample in within(cut(records, tokenizer, config), vocab_size):
            samples.setdefault(sample.id.rpartition("@")[0], []).append(sample)
        for title, parts in samples.items():
            random.Random(f"{seed}/{title}").shuffle(parts)
        return list(samples.values())

    def take(documents: list[list[Sample]], tokens: int, share: int) -> list[Sample]:
        """Remove documents from the list and return a sample of each."""
        count = min(-(-tokens // length), len(documents) // share)
        taken = documents[:count]
        del documents[:count]
        least = min(LEAST, length)
        return [
            next((sample for sample in samples if len(sample.input_ids) >= least), samples[0])
            for samples in taken
        ]

    apart = own_heldout(config)
    measured = windows(documents_of(apart)) if apart is not None else []
    documents = windows(read_documents(config))
    count = len(documents)
    heldout = take(
        documents if apart is None else measured, heldout_tokens, 4 if apart is None else 1
    )
    choosing = take(documents, choosing_tokens, 8)
    if min(len(heldout), len(choosing)) < 2 or not documents:
        raise DataError(
            f"--text {name} has {count} documents, which leaves {len(heldout)} to measure on,"
            f" {len(choosing)} to choose by and {len(documents)} to fit: add text until each part"
            " has two documents"
        )
    return Text(length, list(in_turn(documents)), choosing, heldout)


def in_turn(documents: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield the first part of every document, then the second parts, and so on."""
    turns = itertools.zip_longest(*documents)
    return (part for turn in turns for part in turn if part is not None)


def shuffled(documents: Iterable[Document], seed: int) -> list[Document]:
    """Return documents in an order that depends only on their texts and the seed."""
    return sorted(documents, key=lambda d: hashlib.sha256(f"{seed}/{d.text}".encode()).hexdigest())


def read_documents(config: DataConfig) -> list[Document]:
    """Return the documents of a dataset."""
    documents = documents_of(open_source(config))
    if len(documents) >= FEW:
        return documents
    return [part for document in documents for part in divided(document)]


def documents_of(records: Iterable[Record]) -> list[Document]:
    """Return records as documents, with the pieces of a text joined, up to LARGEST characters."""
    documents: list[Document] = []
    pieces: list[str] = []
    size = 0
    for number, record in enumerate(records):
        text = record.get("text")
        if not isinstance(text, str):
            raise DataError(f"--text: record {number} has no 'text': name a source of plain text")
        pieces.append(text)
        size += len(text)
        if record.get(PIECE, (True, True))[1] or size >= LARGEST:
            name = str(record.get("id", number))
            name = name.partition("#")[0] if PIECE in record else name
            documents.append(Document(name, "".join(pieces)))
            pieces.clear()
        if size >= LARGEST:
            break
    return documents


def unique(documents: Iterable[Document], seen: set[str]) -> Iterator[Document]:
    """Yield documents with new texts under unique names, and remember the texts."""
    names: set[str] = set()
    for name, text in documents:
        if text in seen or not text.strip():
            continue
        seen.add(text)
        name = name if name not in names else f"{name} ({len(names)})"
        names.add(name)
        yield Document(name, text)


def divided(document: Document) -> list[Document]:
    """Return the articles of a text, or blocks of its paragraphs."""
    name, text = document
    headings = list(HEADING.finditer(text))
    if len(headings) >= FEW:
        ends = [*(heading.start() for heading in headings[1:]), len(text)]
        return [
            Document(f"{name}: {heading[1].strip()}", text[heading.start() : end])
            for heading, end in zip(headings, ends, strict=True)
        ]
    blocks = [""]
    for paragraph in re.split(r"\n\s*\n", text):
        if len(blocks[-1]) >= BLOCK:
            blocks.append("")
        blocks[-1] += paragraph + "\n\n"
    return [Document(f"{name}: block {number}", block) for number, block in enumerate(blocks)]
