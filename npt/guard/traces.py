"""What a micro-batch leaves besides its gradients: random numbers drawn, statistics of batch norms.

Both are taken before it and put back if it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from npt.random_state import random_state, set_random_state

States = Mapping[str, Tensor]


class Draws:
    """torch's random numbers, drawn again after a refusal.

    A window that is refused as a whole is rewound to its first micro-batch, unless the loop itself
    drew in between, for its data: those draws are not the guard's to repeat.
    """

    def __init__(self) -> None:
        self._start: States | None = None
        self._end: States | None = None

    def begin(self) -> States:
        """Return the state before a micro-batch."""
        state = random_state()
        if self._end is None:
            self._start = state
        elif not _equal(state, self._end):
            self._start = None
        return state

    def end(self) -> None:
        """Note the state after a micro-batch."""
        self._end = random_state()

    def drew(self, before: States) -> bool:
        """Return whether random numbers were drawn since."""
        return not _equal(random_state(), before)

    def undo(self, before: States) -> None:
        """Draw again what was drawn since."""
        set_random_state(before)
        self._end = before

    def rewind(self) -> None:
        """Draw again what the window's micro-batches drew."""
        if self._start is not None and self._end is not None and not self.drew(self._end):
            set_random_state(self._start)

    def forget(self) -> None:
        """Begin another window."""
        self._start = self._end = None


class BatchStatistics:
    """The running statistics of a model's normalisation layers, which a forward changes."""

    def __init__(self, model: nn.Module | None):
        self._tensors = [
            buffer
            for module in (() if model is None else model.modules())
            if getattr(module, "track_running_stats", False)
            for buffer in module.buffers(recurse=False)
        ]

    def copy(self) -> list[Tensor]:
        """Return copies; empty for most language models."""
        return [tensor.clone() for tensor in self._tensors]

    @torch.no_grad()
    def restore(self, copies: list[Tensor]) -> None:
        """Put copies back."""
        for tensor, copy in zip(self._tensors, copies, strict=True):
            tensor.copy_(copy)


def _equal(one: States, other: States) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
