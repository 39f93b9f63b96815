"""The settings of a guard, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from npt.errors import ConfigError, DataError

Loss = Literal["sum", "mean", "share"]


@dataclass(frozen=True)
class GuardSettings:
    """Settings of a guard: how it divides, clips, refuses and stops.

    Attributes:
        max_grad_norm: the norm to which the window's gradient is clipped.
        loss: what a micro-batch's loss is. `sum`: a sum over its tokens; the window's gradient is
            divided by the survivors' tokens. `mean`: a mean over its tokens; gradients are weighted
            by their tokens (by 1 if none are given) and divided by the sum of the weights. `share`:
            its share of the window's loss, already divided for the whole window; the caller
            computes it again after a refusal (`Guard.begin_again`).
        refuse: exceptions that refuse their micro-batch; any other exception propagates.
        spike_sigmas: refuse a window whose loss or norm exceeds the accepted ones by this many
            robust standard deviations; None turns the check off.
        max_refused: raise TooManyRefusalsError after this many refusals in a row.
        trace: how many refused micro-batches each process computes again to find the operation
            that made the NaN; each costs a few slow passes.
        recheck: compute one window in this many twice, and repair what a faulty machine changed in
            it (npt/guard/recheck.py); 0 for none.
        postmortem: the folder for post-mortem bundles. When `max_refused` is reached, the last
            refused micro-batches, weights, moments and reasons are written there.
    """

    max_grad_norm: float = math.inf
    loss: Loss = "sum"
    refuse: tuple[type[Exception], ...] = (FloatingPointError,)
    spike_sigmas: float | None = None
    max_refused: int = 10
    trace: int = 0
    recheck: int = 0
    postmortem: str | Path | None = None

    def __post_init__(self) -> None:
        are_exceptions = isinstance(self.refuse, tuple) and all(map(_is_exception, self.refuse))
        if not are_exceptions:
            raise ConfigError(f"refuse is {self.refuse!r}; pass a tuple of exception classes")
        losses = get_args(Loss)
        if self.loss not in losses:
            raise ConfigError(f"loss is {self.loss!r}; choose from {', '.join(losses)}")
        for name in ("max_grad_norm", "spike_sigmas", "max_refused"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise ConfigError(f"{name} is {number}; it must be above 0")
        for name in ("trace", "recheck"):
            number = getattr(self, name)
            if number < 0:
                raise ConfigError(f"{name} is {number}; it must be 0 or more")


def _is_exception(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings that belong to the Trainer, and for invalid values."""
    for name in {"loss", "max_grad_norm"}.intersection(settings):
        raise ConfigError(
            f"a Trainer's guard has no setting {name!r}: the Trainer computes the loss, and its own"
            " max_grad_norm, or Lightning's gradient_clip_val, sets the norm"
        )
    GuardSettings(**{"trace": 1, **settings})


def trainer_settings(settings: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of a Trainer's guard, from the user's and the Trainer's output folder."""
    refuse = settings.get("refuse", GuardSettings.refuse)
    return {
        "trace": 1,
        "postmortem": Path(folder, "postmortem"),
        **settings,
        "refuse": (*refuse, DataError),
        "loss": "share",
    }
