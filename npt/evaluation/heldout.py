"""Held-out samples, by the rule that training and evaluation share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

from npt.config import DataConfig
from npt.data.batch import Sample
from npt.data.samples import cut, within
from npt.data.source import Record


def evaluation_samples(
    records: Iterable[Record],
    tokenizer: Any,
    config: DataConfig,
    count: int,
    vocab_size: int,
    heldout: Iterable[Record] | None = None,
) -> tuple[list[Sample], bool]:
    """Return at most `count` samples to evaluate on, and whether they are held out: spread over
    `heldout`, the source's own held-out records, else the one in twenty that training on `records`
    leaves out; if there is none, training samples. Samples with ids outside the vocabulary are left
    out.
    """
    if heldout is not None:
        samples = spread(within(cut(heldout, tokenizer, config), vocab_size), count)
    else:
        held = (s for s in cut(records, tokenizer, config) if s.heldout)
        samples = list(itertools.islice(within(held, vocab_size), count))
    if samples:
        return samples, True
    return list(itertools.islice(within(cut(records, tokenizer, config), vocab_size), count)), False


def spread(samples: Iterable[Sample], count: int) -> list[Sample]:
    """Return `count` samples drawn from the first 64 times as many, the same in every run: a few
    long texts do not make up an evaluation, and runs are compared on the same tokens."""
    pool = list(itertools.islice(samples, 64 * count))
    return pool if len(pool) <= count else random.Random("evaluation").sample(pool, count)
