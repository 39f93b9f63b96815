"""The text of `real.py`: documents, and which of them are fitted, choose, and are measured on.

A document is in one part only, and a text that occurs twice is one document. Of a text file the
documents are its articles, if it has headings as WikiText writes them (` = Title = `), else whole
paragraphs up to some thousand characters; of a folder with many files they are the files; of
anything else, the records. A source that has held-out documents of its own is measured on these.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from npt.config import DataConfig
from npt.data.batch import Sample
from npt.data.content import PIECE
from npt.data.samples import cut, within
from npt.data.source import Record, open_source, own_heldout
from npt.errors import DataError, TooLittleTextError

T = TypeVar("T")

HEADING = re.compile(r"^ *= (?!=)(.+)(?<!=) = *$", re.MULTILINE)
BLOCK = 8000
"""Characters at least of a document that is made of paragraphs."""
FEW = 8
"""Documents at least; a source with fewer is cut at headings or paragraphs."""
LARGEST = 1 << 23
"""Characters after which nothing further is read."""
LEAST = 64
"""Tokens at least of a sample that is measured, unless all are shorter."""


class Document(NamedTuple):
    """A text and its name."""

    name: str
    text: str


@dataclass(frozen=True)
class Text:
    """Samples of whole documents each: those that rows are fitted to, in an order in which every
    document comes once before any comes twice; those that settings are chosen on; those that all
    rows are measured on.
    """

    fitted: list[Sample]
    choosing: list[Sample]
    heldout: list[Sample]

    @property
    def fingerprint(self) -> str:
        """A hash of all three."""
        ids = [[s.input_ids for s in part] for part in (self.fitted, self.choosing, self.heldout)]
        return hashlib.sha256(repr(ids).encode()).hexdigest()[:16]


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
    """Return the samples of a data set, by document.

    As many documents are held out as it takes to have one sample of each, or a quarter of all; the
    ones that choose are an eighth at most.

    Args:
        name: a file, a folder, a glob, or a name for --dataset_name.
        tokenizer: of the base model.
        vocab_size: V; samples with other ids are left out.
        length: tokens of a sample at most.
        heldout_tokens, choosing_tokens: of these parts, about.
        seed: of the split and of the samples' places in their documents.

    Raises:
        DataError: nothing can be read.
        TooLittleTextError: no text is left to be fitted, or too little to be measured on.
    """
    config = DataConfig(dataset_name=name, max_length=length)

    def windows(documents: Iterable[Document]) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = {}
        records = ({"text": d.text, "id": d.name} for d in documents)
        for sample in within(cut(records, tokenizer, config), vocab_size):
            found.setdefault(sample.document, []).append(sample)
        for title, samples in found.items():
            random.Random(f"{seed}/{title}").shuffle(samples)
        return found

    own = own_heldout(config)
    known: set[str] = set()
    measured = shuffled(unique(documents_of(own), known), seed) if own is not None else []
    rest = windows(shuffled(unique(read_documents(config), known), seed))
    documents, least = list(rest.values()), min(LEAST, length)
    if own is not None:
        heldout = take(windows(measured).values(), heldout_tokens, least)
    else:
        count = min(-(-heldout_tokens // length), len(documents) // 4)
        heldout = take(documents[:count], heldout_tokens, least)
        documents = documents[count:]
    count = min(-(-choosing_tokens // length), len(documents) // 8)
    choosing = take(documents[:count], choosing_tokens, least)
    fitted = list(in_turn(documents[count:]))
    if min(len({s.document for s in part}) for part in (heldout, choosing)) < 2 or not fitted:
        raise TooLittleTextError(
            f"--text {name} has {len(rest)} documents, which leaves {len(heldout)} samples to"
            f" measure on, {len(choosing)} to choose by and {len(fitted)} to fit; give it more text"
            " (two documents each at least)"
        )
    return Text(fitted, choosing, heldout)


def in_turn(documents: Iterable[Iterable[T]]) -> Iterator[T]:
    """Yield the first part of every document, then the second of every one that has it, ..."""
    turns = itertools.zip_longest(*documents)
    return (part for turn in turns for part in turn if part is not None)


def take(documents: Iterable[Sequence[Sample]], tokens: int, least: int) -> list[Sample]:
    """Return samples in turn, none of fewer than `least` tokens, up to a number of tokens."""
    long = [[sample for sample in d if len(sample.input_ids) >= least] for d in documents]
    found: list[Sample] = []
    for sample in in_turn(long):
        if tokens < least:
            break
        found.append(Sample(sample.id, sample.input_ids[:tokens]))
        tokens -= len(found[-1].input_ids)
    return found


def shuffled(documents: Iterable[Document], seed: int) -> list[Document]:
    """Return documents in an order that depends on their texts and the seed alone."""
    return sorted(documents, key=lambda d: hashlib.sha256(f"{seed}/{d.text}".encode()).hexdigest())


def read_documents(config: DataConfig) -> list[Document]:
    """Return the documents of a data set."""
    found = documents_of(open_source(config))
    return [part for one in found for part in divided(one)] if len(found) < FEW else found


def documents_of(records: Iterable[Record]) -> list[Document]:
    """Return records as documents, pieces of one text together, up to LARGEST characters."""
    found: list[Document] = []
    pieces: list[str] = []
    size = 0
    for number, record in enumerate(records):
        text = record.get("text")
        if not isinstance(text, str):
            raise DataError(f"--text: record {number} has no 'text'; name a source of plain text")
        pieces.append(text)
        size += len(text)
        if record.get(PIECE, (True, True))[1] or size >= LARGEST:
            name = str(record.get("id", number))
            name = name.partition("#")[0] if PIECE in record else name
            found.append(Document(name, "".join(pieces)))
            pieces.clear()
        if size >= LARGEST:
            break
    return found


def unique(documents: Iterable[Document], known: set[str]) -> Iterator[Document]:
    """Yield documents whose text was not seen, under names that were not; note the texts."""
    names: set[str] = set()
    for name, text in documents:
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest in known or not text.strip():
            continue
        known.add(digest)
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
