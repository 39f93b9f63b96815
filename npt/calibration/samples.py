"""The text of a calibration: samples up to a number of tokens, in batches to fit and to check."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from npt.config import DataConfig
from npt.data.batch import Batch, Sample
from npt.data.samples import cut, within
from npt.data.source import Record
from npt.errors import TooLittleTextError

HELDOUT_ONE_IN = 8
"""Batches that choose ridge and steps instead of being fitted."""


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
) -> list[Sample]:
    """Return samples of `tokens` tokens in all, the last one cut, without ids that no model has."""
    items = iter(data)
    first = next(items, None)
    rest: Iterable[Any] = [] if first is None else itertools.chain([first], items)
    if not isinstance(first, Sample):
        rest = cut(rest, tokenizer, DataConfig(max_length=max_length))
    found, left = [], tokens
    for sample in within(rest, vocab_size):
        found.append(_shortened(sample, left))
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


def split(found: list[Batch]) -> Parts:
    """Hold every eighth batch out, and put these last."""
    if len(found) == 1:
        raise TooLittleTextError(
            "calibration fills one batch only, and needs one to fit and one to check; give it more"
            " data, or lower --batch_size"
        )
    heldout = found[HELDOUT_ONE_IN - 1 :: HELDOUT_ONE_IN] or found[-1:]
    chosen = {id(batch) for batch in heldout}
    fitted = [batch for batch in found if id(batch) not in chosen]
    return Parts([*fitted, *heldout], sum(b.tokens for b in found), sum(b.tokens for b in heldout))
