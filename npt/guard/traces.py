"""What a micro-batch leaves besides its gradients: random numbers drawn, buffers written to.

`begin` comes before it, `settle` after it. Its window ends with `rewind`, or with `forget` after a
step. `keep` says whether what it left stays: a scalar bool on the device, or None for no.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from npt.random_state import micro_batch_draws, random_state, set_random_state

LARGEST_BUFFER = 2**20
"""Numbers in a buffer that is copied before each micro-batch."""


class Draws:
    """torch's random numbers, drawn again after a refusal.

    A window that is refused as a whole is rewound to its first micro-batch, unless the loop itself
    drew in between, for its data: those draws are not the guard's to repeat.
    """

    before: Mapping[str, Tensor] = {}
    _start: Mapping[str, Tensor] | None = None
    _end: Mapping[str, Tensor] | None = None

    def begin(self) -> None:
        self.before = random_state()
        if self._end is None:
            self._start = self.before
        elif not equal_states(self.before, self._end):
            self._start = None

    def drawing(self, ids: Sequence[str], offset: int) -> AbstractContextManager[None]:
        return nullcontext()

    def settle(self, keep: Tensor | None) -> None:
        # what drew nothing need not wait for the device
        if not equal_states(random_state(), self.before) and (keep is None or not bool(keep)):
            set_random_state(self.before)
        self._end = random_state()

    def rewind(self, keep: Tensor | None = None) -> None:
        if (
            self._start is not None
            and self._end is not None
            and (keep is None or not bool(keep))
            and equal_states(random_state(), self._end)
        ):
            set_random_state(self._start)
        self.forget()

    def forget(self) -> None:
        self._start = self._end = None


class Seeded(Draws):
    """Random numbers of each micro-batch by its name, so that nothing is to be drawn again: they do
    not depend on what was refused before, on the process, or on a resume.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def begin(self) -> None:
        """Take no state, which has no part in it."""

    def drawing(self, ids: Sequence[str], offset: int) -> AbstractContextManager[None]:
        """Return a context in which the numbers are those of these samples at this place."""
        return micro_batch_draws(self.seed, tuple(ids), offset)

    def settle(self, keep: Tensor | None) -> None:
        """Leave the state, which `drawing` has put back."""


class Buffers:
    """The buffers that a forward may write to: running statistics, codebooks, observed ranges.

    Those of normalisation layers, and all others of floating-point numbers up to a size: larger
    ones are tables, and copying them for each micro-batch would cost too much.
    """

    def __init__(self, model: nn.Module):
        self._held = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_written(module, buffer)
        ]
        self._copies: list[Tensor | None] = []
        self._start: list[Tensor | None] | None = None  # of the window

    def begin(self) -> None:
        now = [held.get(name) for held, name in self._held]
        self._copies = [None if buffer is None else buffer.detach().clone() for buffer in now]
        if self._start is None:
            self._start = self._copies

    def settle(self, keep: Tensor | None) -> None:
        self._restore(self._copies, keep)

    def rewind(self, keep: Tensor | None = None) -> None:
        if self._start is not None:
            self._restore(self._start, keep)
        self.forget()

    def forget(self) -> None:
        self._start = None

    @torch.no_grad()
    def _restore(self, copies: Sequence[Tensor | None], keep: Tensor | None) -> None:
        for (held, name), copy in zip(self._held, copies, strict=True):
            now = held.get(name)
            if copy is None or now is None or now.shape != copy.shape or now.device != copy.device:
                if now is not copy and (keep is None or not bool(keep)):  # assigned anew, and rare
                    held[name] = None if copy is None else copy.clone()
            elif keep is None:
                now.data.copy_(copy)  # .data: a graph of an earlier forward may hold the buffer
            else:
                torch.where(keep.to(now.device), now, copy, out=now.data)


def _is_written(module: nn.Module, buffer: Tensor) -> bool:
    if buffer.is_inference() or buffer.layout != torch.strided:
        return False
    if torch._debug_has_internal_overlap(buffer) == 1:  # expanded: nothing can be written to it
        return False
    statistics = getattr(module, "track_running_stats", False)
    return statistics or (buffer.is_floating_point() and buffer.numel() <= LARGEST_BUFFER)


def equal_states(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
