"""The text of a calibration, drawn from a longer stretch of data, since one text is too uniform."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from npt.batch import Sample
from npt.config import DataConfig
from npt.data.samples import cut, permutation, within
from npt.data.source import Given, records_from
from npt.errors import DataError

READ_AHEAD = 8
"""Samples are drawn from the first READ_AHEAD times as many tokens, if the data have so many."""


def read_samples(
    data: Given | Iterable[Sample],
    tokenizer: Any,
    max_length: int,
    tokens: int,
    vocab_size: int,
    seed: int = 0,
) -> list[Sample]:
    """Return `draw_samples`; raise DataError for fewer than two."""
    chosen = draw_samples(data, tokenizer, max_length, tokens, vocab_size, seed)
    if len(chosen) < 2:
        raise DataError(
            f"calibration needs two samples of text, but the data yield {len(chosen)}: add data,"
            " raise --calibration_tokens or pass --init random"
        )
    return chosen


def draw_samples(
    data: Given | Iterable[Sample],
    tokenizer: Any,
    max_length: int,
    tokens: int,
    vocab_size: int,
    seed: int = 0,
) -> list[Sample]:
    """Draw samples with `tokens` tokens in total from the beginning of the data; cut the last one.
    Samples with ids outside the vocabulary are left out.
    """
    every = samples_of(data, tokenizer, DataConfig(max_length=max_length))
    read = first_tokens(within(every, vocab_size), READ_AHEAD * tokens)
    chosen = []
    left = tokens
    for number in permutation(len(read), f"calibration/{seed}"):
        sample = _shortened(read[number], left)
        chosen.append(sample)
        left -= len(sample.input_ids)
        if left < 2:  # one token predicts nothing
            break
    return chosen


def samples_of(
    data: Given | Iterable[Sample], tokenizer: Any, config: DataConfig
) -> Iterator[Sample]:
    """Return the samples of a caller's data: cut from records, unless they are samples already."""
    items = iter(records_from(data, config, "data"))
    first = list(itertools.islice(items, 1))
    every = itertools.chain(first, items)
    if first and isinstance(first[0], Sample):
        return every
    return cut(every, tokenizer, config)


def first_tokens(samples: Iterable[Sample], count: int) -> list[Sample]:
    """Return the first samples, with `count` tokens or a few more in all."""
    first = []
    for sample in samples:
        first.append(sample)
        count -= len(sample.input_ids)
        if count <= 0:
            break
    return first


def tokens_of(samples: Iterable[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)


def _shortened(sample: Sample, length: int) -> Sample:
    if len(sample.input_ids) <= length:
        return sample
    labels = sample.labels
    if labels is not None:
        labels = labels[:length]
    lengths: tuple[int, ...] | None = None
    if sample.lengths is not None:
        lengths = ()
        for document in sample.lengths:
            kept = min(document, length - sum(lengths))
            if kept:
                lengths += (kept,)
    return replace(sample, input_ids=sample.input_ids[:length], labels=labels, lengths=lengths)
