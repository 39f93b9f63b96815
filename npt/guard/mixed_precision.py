"""torch's GradScaler under a guard: an overflow costs its micro-batches, and no window."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from npt.guard.refusal import Refusal


class LossScale:
    """The scale of fp16 losses under a guard.

    A scaler alone drops every window with one overflow and halves its scale. Here micro-batches
    alone are lost, and a bad one looks the same as a scale that is too high. So a window with a
    refused gradient costs the scale nothing if it is the only one within the scaler's
    `growth_interval`; if they recur, the scale falls as a scaler alone lowers it. It never grows on
    one.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer):
        self.scaler, self._optimizer = scaler, optimizer
        self._unscaled = False
        self._quiet = math.inf  # windows since the last one with a refused gradient

    def unscale(self) -> None:
        """Divide `.grad` by the scale."""
        assert self.scaler is not None
        self.scaler.unscale_(self._optimizer)
        self._unscaled = True

    def forget(self) -> None:
        """Restore the scale from before a window that ended in an error."""
        if self._unscaled:
            assert self.scaler is not None
            state = self.scaler.state_dict()
            self.scaler.update()  # which lets it unscale again
            self.scaler.load_state_dict(state)
        self._unscaled = False

    def update(self, applied: bool, refusals: Sequence[Refusal]) -> None:
        """Move the scale after a window."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        state = scaler.state_dict()
        if self._unscaled:
            scaler.update()
        self._unscaled = False
        overflowed = any(refusal.kind == "gradient" for refusal in refusals)
        recurred = overflowed and self._quiet < scaler.get_growth_interval()
        self._quiet = 0 if overflowed else self._quiet + 1
        if recurred:
            scale = state["scale"] * scaler.get_backoff_factor()
            scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": 0})
        elif not applied or (overflowed and scaler.get_scale() > state["scale"]):
            scaler.load_state_dict(state)
