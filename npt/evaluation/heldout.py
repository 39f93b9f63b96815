"""Choose held-out samples, by the same rule in training and evaluation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

from npt.batch import Sample
from npt.config import DataConfig
from npt.data.first_look import FirstLook
from npt.data.samples import cut, within
from npt.data.source import Record


def evaluation_samples(
    records: Iterable[Record],
    tokenizer: Any,
    config: DataConfig,
    count: int,
    vocab_size: int,
    heldout: Iterable[Record] | None = None,
    look: FirstLook | None = None,
) -> tuple[list[Sample], bool]:
    """Return at most `count` samples to evaluate on, and whether they are held out.

    They come from `heldout`, the source's own held-out records, else from the one sample in twenty
    that training on `records` leaves out, else from the training samples. Samples with ids outside
    the vocabulary are skipped. `look` notes the records that are searched for held-out samples.
    """
    if heldout is not None:
        samples = spread(within(cut(heldout, tokenizer, config), vocab_size), count)
    else:
        look = look or FirstLook()
        every = cut(records, tokenizer, config, look.counts)
        held = (sample for sample in look.at(every) if sample.heldout)
        samples = list(itertools.islice(within(held, vocab_size), count))
    if samples:
        return samples, True
    trained = within(cut(records, tokenizer, config), vocab_size)
    return list(itertools.islice(trained, count)), False


def spread(samples: Iterable[Sample], count: int) -> list[Sample]:
    """Return `count` samples drawn from the first 64 times as many, so that a few long texts do not
    dominate. Every run draws the same ones, so that runs are compared on the same tokens."""
    pool = list(itertools.islice(samples, 64 * count))
    return pool if len(pool) <= count else random.Random("evaluation").sample(pool, count)
