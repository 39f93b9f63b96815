"""A budget of ranks, spent on the layers that gain most by a rank."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from npt.errors import ConfigError


def check_budget(budget: int, layers: int, hidden_size: int) -> None:
    """Refuse a budget that leaves a layer without a rank, or that cannot be spent."""
    if not layers <= budget <= layers * hidden_size:
        raise ConfigError(
            f"--rank_budget is {budget}; {layers} converted layers of a model of hidden size"
            f" {hidden_size} take {layers} to {layers * hidden_size} ranks in all"
        )


def spend(budget: int, worth: Mapping[int, Sequence[float]]) -> dict[int, int]:
    """Return ranks by layer: one each, then always one more for the layer whose next direction is
    worth most, the lowest of equal ones.

    Args:
        budget: ranks in all, within the bounds of `check_budget`.
        worth: of each direction by layer, largest first.
    """
    ranks = dict.fromkeys(worth, 1)
    queue = [(-values[1], index) for index, values in worth.items() if len(values) > 1]
    heapq.heapify(queue)
    for _ in range(budget - len(ranks)):
        _, index = heapq.heappop(queue)
        ranks[index] += 1
        if ranks[index] < len(worth[index]):
            heapq.heappush(queue, (-worth[index][ranks[index]], index))
    return ranks
