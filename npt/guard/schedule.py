"""The learning rate as a pure function of applied steps: nothing to advance or to roll back."""

from __future__ import annotations

import math


def rate_table(peak: float, kind: str, warmup_steps: int, total_steps: int | None) -> list[float]:
    """Return the learning rate of every step; the last one holds for all later steps.

    If the run's length is unknown, the rate stays constant after warm-up.
    """
    if total_steps is None:
        kind = "constant"
    steps = range(warmup_steps + 1 if total_steps is None else total_steps)
    return [peak * learning_rate_scale(step, kind, warmup_steps, total_steps) for step in steps]


def learning_rate_scale(step: int, kind: str, warmup_steps: int, total_steps: int | None) -> float:
    """Return the factor on the peak learning rate for the step after `step` applied ones.

    Linear warm-up reaches 1 after `warmup_steps` steps. It starts above 0, since a step at rate 0
    changes only the optimizer's moments. The rate then stays `constant`, or falls to 0 after the
    last step as `linear` or `cosine` (Loshchilov & Hutter 2017, without restarts). Only `constant`
    needs no `total_steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "constant":
        return 1.0
    assert total_steps is not None, "a falling schedule has an end"
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
