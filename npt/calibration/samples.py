"""The text of a calibration: samples up to a number of tokens, in batches to fit and to check.

Tokens of one text resemble each other, its attention outputs most of all: as many tokens taken from
more texts fit others better (SmolLM2-135M, layer 22, rank 144, linear start: 14,336 consecutive
tokens leave a held-out cost of 0.00351, as many spread over three times the text 0.00297, all of
that text 0.00294).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from npt.config import DataConfig
from npt.data.batch import PAD_ID, Batch, Sample, batches
from npt.data.samples import Permutation, cut, within
from npt.data.source import Record
from npt.errors import TooLittleTextError

HELDOUT_ONE_IN = 8
"""One token in so many is not fitted, but chooses the ridge and whether the passes are kept."""

READ_AHEAD = 8
"""Times the tokens asked for that are read, if there are so many, to draw them from."""


@dataclass(frozen=True)
class Parts:
    """Batches, those that are not fitted last, and their tokens."""

    batches: list[Batch]
    tokens: int
    heldout: int


def read_samples(
    data: Iterable[Record] | Iterable[Sample],
    tokenizer: Any,
    max_length: int,
    tokens: int,
    vocab_size: int,
    seed: int = 0,
) -> list[Sample]:
    """Return samples of `tokens` tokens in all, the last one cut, without ids that no model has,
    drawn from the data's beginning, READ_AHEAD times as much of it.
    """
    items = iter(data)
    first = next(items, None)
    rest: Iterable[Any] = [] if first is None else itertools.chain([first], items)
    if not isinstance(first, Sample):
        rest = cut(rest, tokenizer, DataConfig(max_length=max_length))
    read, left = [], READ_AHEAD * tokens
    for sample in within(rest, vocab_size):
        read.append(sample)
        left -= len(sample.input_ids)
        if left <= 0:
            break
    found, left = [], tokens
    order = Permutation(len(read), f"calibration/{seed}")
    for number in range(len(read)):
        found.append(_shortened(read[order[number]], left))
        left -= len(found[-1].input_ids)
        if left < 2:
            break
    if len(found) < 2:
        raise TooLittleTextError(
            "calibration needs two samples of text, one to fit and one to check, and the data gave"
            f" {len(found)}; give it more"
        )
    return found


def _shortened(sample: Sample, length: int) -> Sample:
    if len(sample.input_ids) <= length:
        return sample
    labels = None if sample.labels is None else sample.labels[:length]
    lengths, kept = [], length
    for document in sample.lengths or ():
        lengths.append(min(document, kept))
        kept -= lengths[-1]
    documents = None if sample.lengths is None else tuple(size for size in lengths if size)
    return replace(sample, input_ids=sample.input_ids[:length], labels=labels, lengths=documents)


def split(samples: list[Sample], batch_size: int, pad_id: int = PAD_ID) -> Parts:
    """Batch the samples, and put last those that are held out: about an eighth of the tokens, in
    whole documents if they come to half of that, else in single samples. A row of several packed
    documents counts as one.
    """
    sizes: Counter[str] = Counter()
    for sample in samples:
        sizes[sample.document] += len(sample.input_ids)
    wanted = sum(sizes.values()) // HELDOUT_ONE_IN
    room, documents = wanted, set[str]()
    for document, size in sizes.items():
        if size <= room:
            documents.add(document)
            room -= size
    if documents and room <= wanted / 2:
        held = [sample for sample in samples if sample.document in documents]
        fitted = [sample for sample in samples if sample.document not in documents]
    else:
        held = samples[HELDOUT_ONE_IN - 1 :: HELDOUT_ONE_IN] or samples[-1:]
        chosen = {id(sample) for sample in held}
        fitted = [sample for sample in samples if id(sample) not in chosen]
    parts = [list(batches(part, batch_size, pad_id)) for part in (fitted, held)]
    tokens = [sum(batch.tokens for batch in part) for part in parts]
    return Parts([*parts[0], *parts[1]], sum(tokens), tokens[1])
