"""Gradient windows over a test's own parameters, and micro-batches made by a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from npt.random_state import micro_batch_draws
from npt.step.gradient_window import GradientWindow
from npt.step.guarded_update import GuardedUpdate


@dataclass
class Sums:
    """The sums of a test's micro-batch."""

    loss: Tensor
    tokens: int
    report: Tensor = field(default_factory=lambda: torch.zeros(0))


def window_over(
    parameters: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    rates: Sequence[float],
    *,
    late: bool | None = None,
    **rest: Any,
) -> GradientWindow[Any]:
    """Return a gradient window; the arguments are those of it and of its update."""
    update = GuardedUpdate(parameters, optimizer, late)
    return GradientWindow(update, max_grad_norm, rates, **rest)


def add_filled(
    window: GradientWindow[Any],
    fill: Callable[[], Any],
    sample_ids: tuple[str, ...] = (),
    offset: int = 0,
    seed: int = 0,
) -> None:
    """Add the micro-batch whose gradients and sums `fill` makes, with its own random numbers."""
    window.begin()
    with micro_batch_draws(seed, sample_ids, offset):
        sums = fill()
    window.add(sums, sample_ids)
