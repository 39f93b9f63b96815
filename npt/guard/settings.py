"""The settings of a guard, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from npt.errors import ConfigError

Loss = Literal["sum", "mean", "share"]


@dataclass(frozen=True)
class GuardSettings:
    """The rules by which a guard divides, clips, decides and stops.

    Attributes:
        max_grad_norm: to which the window's gradient is clipped.
        loss: of a micro-batch. `sum`: over its tokens; the window's gradient is the sum divided by
            the tokens of the micro-batches that count. `mean`: over its tokens; each gradient is
            weighted by the micro-batch's tokens (by 1 if none are given), the sum divided by these
            weights. `share`: of the window's loss, already divided by what belongs to the whole
            window, which the caller computes again after a refusal (`Guard.begin_again`).
        refuse: exceptions inside a micro-batch that refuse it; others leave it and are raised.
        spike_sigmas: refuse a window whose loss or norm lies so many robust standard deviations
            above the accepted ones.
        max_refused: refusals in a row before TooManyRefusalsError.
        trace: refused micro-batches, on each process, that are computed again to name the guilty
            operation; each costs a few slow passes.
        postmortem: a folder; when `max_refused` is reached, a folder in it gets the last refused
            micro-batches, weights, moments and reasons.
    """

    max_grad_norm: float = math.inf
    loss: Loss = "sum"
    refuse: tuple[type[Exception], ...] = (FloatingPointError,)
    spike_sigmas: float | None = None
    max_refused: int = 10
    trace: int = 0
    postmortem: str | Path | None = None

    def __post_init__(self) -> None:
        classes = self.refuse if isinstance(self.refuse, tuple) else (None,)
        if not all(isinstance(each, type) and issubclass(each, Exception) for each in classes):
            raise ConfigError(f"refuse is {self.refuse!r}; give a tuple of classes of exceptions")
        if self.loss not in get_args(Loss):
            raise ConfigError(f"loss is {self.loss!r}; choose from {', '.join(get_args(Loss))}")
        for name in ("max_grad_norm", "spike_sigmas", "max_refused"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ConfigError(f"{name} is {number}; it must be above 0")
        if self.trace < 0:
            raise ConfigError(f"trace is {self.trace}; it must be 0 or more")
