"""Held-out documents: whole texts that no training has seen a part of."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from npt.config import DataConfig
from npt.data.batch import Sample
from npt.data.samples import cut, within
from npt.data.source import PROSE, Record, own_heldout
from npt.errors import DataError

MOST = 512
"""Documents that are looked at: some are chosen among them, the same in every run."""


def heldout_documents(config: DataConfig | None) -> tuple[str, list[Record]]:
    """Return the name of a text and its held-out documents: those of a data set that has some of
    its own, else those of `builtin-prose`. Of other data sets single samples are held out, and what
    surrounds one is trained on. Empty if this Python has no prose.
    """
    named = DataConfig(dataset_name=PROSE)
    config = named if config is None or config.dataset_mix is not None else config
    own = own_heldout(config)
    try:
        if own is None:
            config, own = named, own_heldout(named)
        return config.dataset_name, list(own or ())
    except DataError:
        return config.dataset_name, []


def beginnings(
    documents: Iterable[Record], tokenizer: Any, length: int, tokens: int, vocab_size: int
) -> list[Sample]:
    """Return the first `length` tokens at most of documents drawn at random, the same in every run,
    until there are so many tokens.
    """
    records = list(documents)[:MOST]
    random.Random("behaviour").shuffle(records)
    found: list[Sample] = []
    for sample in within(cut(records, tokenizer, DataConfig(max_length=length)), vocab_size):
        if tokens <= 0:
            break
        if sample.id.endswith("@0"):  # the first of its document
            found.append(sample)
            tokens -= len(sample.input_ids)
    return found
