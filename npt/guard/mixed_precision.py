"""torch's GradScaler under a guard: an overflow costs micro-batches, and seldom a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from npt.step.window_result import Refusal


class LossScale:
    """The scale of fp16 losses, moved as a run without the refused micro-batches moves it.

    A scaler alone drops every window with one overflow and halves its scale. Here a window with
    survivors is stepped and counts as one without overflow. The scale falls only after two windows
    in a row of which nothing survived, since a bad batch and a scale that is too high look alike.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer):
        self._scaler, self._optimizer = scaler, optimizer
        self._unscaled = False
        self._lost = 0

    def unscale(self) -> None:
        """Divide `.grad` by the scale."""
        assert self._scaler is not None
        self._scaler.unscale_(self._optimizer)
        self._unscaled = True

    def forget(self) -> None:
        """Leave the scale as it was before a window that an error ended."""
        if self._unscaled:
            assert self._scaler is not None
            before = self._scaler.state_dict()
            self._scaler.update()  # which lets it unscale again
            self._scaler.load_state_dict(before)
        self._unscaled = False

    def update(self, applied: bool, refusals: Sequence[Refusal]) -> None:
        """Move the scale after a window."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return
        before = scaler.state_dict()
        if self._unscaled:
            scaler.update()
        if not applied and self._unscaled:
            scaler.load_state_dict(before)
        self._unscaled = False
        overflowed = not applied and any(refusal.kind == "gradient" for refusal in refusals)
        self._lost = self._lost + 1 if overflowed else 0
        if self._lost > 1:
            scale = scaler.get_scale() * scaler.get_backoff_factor()
            scaler.load_state_dict({**before, "scale": scale, "_growth_tracker": 0})
