"""Greedy agreement over many tokens: how many texts are still the same after n of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from npt.data.batch import Sample
from npt.evaluation.greedy import Comparison, Divergence, compare_in_batches, divergence
from npt.evaluation.metrics import mean_and_error


@dataclass(frozen=True)
class Equal:
    """The share of prompts whose texts are the same for their first `tokens` tokens, or to an
    earlier end."""

    tokens: int
    share: float
    share_se: float


@dataclass(frozen=True)
class Agreement:
    """divergence: of the same texts. equal: for 1, 2, 4, ... tokens."""

    divergence: Divergence
    equal: tuple[Equal, ...]


def measure_agreement(
    model: PreTrainedModel,
    prompts: Sequence[Sample],
    ends: frozenset[int],
    *,
    max_new_tokens: int,
    batch_size: int,
    between: Callable[[], None] | None = None,
) -> Agreement:
    """Continue the prompts greedily and compare, `between` being called before every batch."""
    compared = compare_in_batches(model, prompts, ends, max_new_tokens, batch_size, between)
    return Agreement(divergence(compared, max_new_tokens), equal_shares(compared, max_new_tokens))


def equal_shares(compared: Sequence[Comparison], limit: int) -> tuple[Equal, ...]:
    """Return the shares of texts that are the same for 1, 2, 4, ... tokens, up to a limit."""
    found = []
    ones = torch.ones(len(compared), dtype=torch.float64)
    tokens = 1
    while tokens <= limit:
        same = [c.position is None or c.position >= tokens for c in compared]
        share, error = mean_and_error(torch.tensor(same, dtype=torch.float64), ones)
        found.append(Equal(tokens, share, error))
        tokens *= 2
    return tuple(found)
