"""Gradient windows over a test's own parameters, and micro-batches made by a function."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from faults.bench import add_batch
from npt.distill.step import student_guard, summed
from npt.guard.outcome import MicroBatch
from npt.guard.update import GuardedUpdate
from npt.guard.window import GradientWindow
from npt.random_state import micro_batch_draws


class StudentStep:
    """A student's windows under a guard, without the training loop around them."""

    def __init__(
        self,
        model: Any,
        strategy: Any,
        config: Any,
        rates: Sequence[float],
        *,
        late: bool | None = None,
        **settings: Any,
    ):
        self.model, self.strategy, self.config = model, strategy, config
        self.guard = student_guard(model, config, rates, late=late, **settings)
        self.window, self.update = self.guard.window, self.guard.update

    def forward_backward(self, batch: Any) -> Any:
        return summed(self.model, lambda *rest: self.strategy(*rest), batch, self.config)

    def add(self, batch: Any, check: bool = True) -> None:
        vocab_size = self.model.config.vocab_size if check else None
        add_batch(self.guard, batch, self.forward_backward, vocab_size)

    def run(self, batches: Sequence[Any], check: bool = True) -> list[Any]:
        for batch in batches:
            self.add(batch, check)
        return self.guard.step()


def window_over(
    parameters: dict[str, Any],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
    rates: Sequence[float],
    *,
    late: bool | None = None,
    **rest: Any,
) -> GradientWindow:
    """Return a gradient window; the arguments are those of it and of its update."""
    update = GuardedUpdate(parameters, optimizer, late)
    return GradientWindow(update, max_grad_norm, rates, **rest)


def add_filled(
    window: GradientWindow,
    fill: Callable[[], Any],
    sample_ids: tuple[str, ...] = (),
    offset: int = 0,
    seed: int = 0,
) -> None:
    """Add the micro-batch whose gradients and sums `fill` makes, with its own random numbers."""
    for parameter in window.update.parameters:
        parameter.grad = torch.zeros_like(parameter)
    with micro_batch_draws(seed, sample_ids, offset):
        sums = fill()
    window.gradients.collect()
    micro = MicroBatch(sums.loss, sums.tokens, sums.report, sample_ids)
    window.add(micro, sums.loss)
