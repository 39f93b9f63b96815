"""torch's GradScaler under a guard: an overflow costs its micro-batch, not the window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from npt.guard.outcome import Outcome, Refusal


class LossScale:
    """The scale of fp16 losses under a guard.

    Bad data and too high a scale look the same in one micro-batch. If most of a window overflows,
    which bad data seldom causes, the scale falls at once and the data is not blamed. If a few
    overflow, it falls only when that recurs within the scaler's `growth_interval`. It never grows
    on an overflow. With a scale of 1 or less, an overflow counts as a normal refusal.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer):
        # one that is off changes nothing
        self.scaler = torch.amp.GradScaler(enabled=False) if scaler is None else scaler
        self._optimizer = optimizer
        self._unscaled = False
        self._quiet = math.inf  # windows since the last overflow

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss as the loop differentiates it."""
        return self.scaler.scale(loss)

    def unscale(self) -> None:
        self.scaler.unscale_(self._optimizer)
        self._unscaled = True

    def forget(self) -> None:
        """Restore the scale from before a window that ended in an error."""
        if self._unscaled:
            state = self.scaler.state_dict()
            self.scaler.update()  # lets it unscale again
            self.scaler.load_state_dict(state)
        self._unscaled = False

    def lost(self, refusals: Sequence[Refusal], micro_batches: int) -> bool:
        """Return whether the scale left a window without survivors."""
        overflowed = len(refusals) >= micro_batches and any(
            refusal.overflowed for refusal in refusals
        )
        return overflowed and self.scaler.get_scale() > 1

    def update(self, outcome: Outcome) -> bool:
        """Adjust the scale after a window; return whether it caused overflows and so falls.

        If no micro-batch survived, overflows are removed from the refusals.
        """
        scaler = self.scaler
        if not scaler.is_enabled():
            return False
        state = scaler.state_dict()
        refused = outcome.refused
        if self._unscaled:
            scaler.update()
        self._unscaled = False
        others = [refusal for refusal in refused if not refusal.overflowed]
        overflowed = len(refused) - len(others)
        computed = outcome.micro_batches - len(others)
        most = state["scale"] > 1 and overflowed > computed / 2
        # a few overflows may be the data's, unless they recur
        recurs = self._quiet < scaler.get_growth_interval()
        falls = overflowed > 0 and (most or recurs)
        self._quiet = 0 if overflowed else self._quiet + 1
        if most and outcome.loss is None:
            _excuse(outcome, others)
        if falls:
            scale = state["scale"] * scaler.get_backoff_factor()
            scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": 0})
        # it never grows on an overflow
        elif not outcome.applied or (overflowed and scaler.get_scale() > state["scale"]):
            scaler.load_state_dict(state)
        return bool(falls and state["scale"] > 1)


def _excuse(outcome: Outcome, others: Sequence[Refusal]) -> None:
    """Remove overflows from an outcome's refusals, and what a post-mortem would keep of them."""
    outcome.refused = tuple(others)
    for micro in outcome.own:
        if micro.refusal is not None and micro.refusal.overflowed:
            micro.stored = None
