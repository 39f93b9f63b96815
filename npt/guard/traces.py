"""What a micro-batch changes besides gradients: the random state and the model's buffers.

Call `begin` before it and `settle` after it. End the window with `rewind`, or with `forget` after a
step. `keep` tells whether the changes stay: a scalar bool on the device, or None for no.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn

from npt.guard.lists import FiniteCheck, norms_of
from npt.random_state import micro_batch_draws, random_state, set_random_state

Copy = tuple[Tensor | None, Tensor | None]
"""A buffer, or None, and its copy."""

LARGEST_BUFFER = 2**20
"""The most elements of a buffer that is copied before each micro-batch."""


class Draws:
    """torch's random state, restored after a refusal.

    If a whole window is refused, the state from before its first micro-batch is restored, unless
    the loop itself drew random numbers in between.
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
        # a micro-batch that drew nothing need not wait for the device
        if not equal_states(random_state(), self.before) and (keep is None or not bool(keep)):
            set_random_state(self.before)
        self._end = random_state()

    def rewind(self, keep: Tensor | None = None) -> None:
        start = self._start
        end = self._end
        self.forget()
        if start is None or end is None or (keep is not None and bool(keep)):
            return
        if equal_states(random_state(), end):
            set_random_state(start)

    def forget(self) -> None:
        self._start = self._end = None


class Seeded(Draws):
    """Random numbers seeded by each micro-batch's sample ids, so that they do not depend on earlier
    refusals, on the process, or on a resume. Nothing needs to be restored.
    """

    def __init__(self, seed: int):
        self.seed = seed

    def begin(self) -> None:
        """Do nothing: the random state plays no part."""

    def drawing(self, ids: Sequence[str], offset: int) -> AbstractContextManager[None]:
        """Return a context that draws the numbers of these samples at this offset."""
        return micro_batch_draws(self.seed, tuple(ids), offset)

    def settle(self, keep: Tensor | None) -> None:
        """Do nothing: `drawing` has restored the state."""


@dataclass(frozen=True)
class Spoilt:
    """The buffers that a micro-batch may have made NaN or Inf.

    Attributes:
        names: in the model.
        flags: [buffers] bool, on the guard's device.
    """

    names: Sequence[str]
    flags: Tensor


class Buffers:
    """The buffers that a forward may write to: running statistics, codebooks, observed ranges.

    Covers normalisation layers, and other floating-point buffers up to `LARGEST_BUFFER`. Larger
    ones are tables, too costly to copy for each micro-batch.

    Args:
        model: the model.
        reads: whether the host may read a flag at no cost.
    """

    def __init__(self, model: nn.Module, reads: bool = False):
        self._reads = reads
        # name in the model, and where it is held under which name
        self._found = [
            (f"{path}.{name}".removeprefix("."), module._buffers, name)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_written(module, buffer)
        ]
        self._copies: list[Copy] = []
        self._start: list[Copy] | None = None  # of the window
        self._check = FiniteCheck()

    def begin(self) -> None:
        self._copies = self.now()
        if self._start is None:
            self._start = self._copies

    def spoilt(self, home: torch.device) -> Spoilt | None:
        """Return which buffers the micro-batch made NaN, or Inf in the shape that they had: a mask
        may grow with -inf. None if all are finite and the host may know.
        """
        names: list[str] = []
        before: list[Tensor] = []
        after: list[Tensor] = []
        for (path, held, name), (_, copy) in zip(self._found, self._copies, strict=True):
            now = held.get(name)
            if copy is not None and _is_number(now) and now.shape == copy.shape:
                names.append(path)
                before.append(copy)
                after.append(now)
        if not names or (self._reads and self._check(after)):
            return None
        sizes = norms_of(after, math.inf, home)
        had = norms_of(before, math.inf, home)
        return Spoilt(names, sizes.isnan() & ~had.isnan() | sizes.isinf() & had.isfinite())

    def settle(self, keep: Tensor | None) -> None:
        self._put_unless(keep, self._copies)

    def rewind(self, keep: Tensor | None = None) -> None:
        if self._start is not None:
            self._put_unless(keep, self._start)
        self.forget()

    def forget(self) -> None:
        self._start = None

    def now(self) -> list[Copy]:
        """Return the buffers and their copies."""
        each = [held.get(name) for _, held, name in self._found]
        return [(b, None if b is None else b.detach().clone()) for b in each]

    def put_start(self) -> None:
        """Set the buffers to what they were before the window."""
        if self._start is not None:
            self.put(self._start)

    def _put_unless(self, keep: Tensor | None, copies: Sequence[Copy]) -> None:
        if not self._reads:
            self.put(copies, keep)
        elif keep is None or not bool(keep):
            self.put(copies)

    @torch.no_grad()
    def put(self, copies: Sequence[Copy], keep: Tensor | None = None) -> None:
        """Write copies back into the buffers that were copied, unless `keep`."""
        for (_, held, name), (original, copy) in zip(self._found, copies, strict=True):
            now = held.get(name)
            if copy is None or now is None or _form(now) != _form(copy):  # rare
                if now is not copy and (keep is None or not bool(keep)):
                    held[name] = None if copy is None else copy.clone()
                continue
            replaced = now is not original
            if replaced:  # it may be the user's tensor, and is not written to
                held[name] = copy.clone() if keep is None else torch.where(keep, now, copy)
            elif keep is None:
                now.data.copy_(copy)  # .data: a graph of an earlier forward may hold the buffer
            else:  # takes no memory: nothing may fail after the step
                torch.where(keep.to(now.device), now, copy, out=now.data)


def _form(buffer: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return buffer.shape, buffer.dtype, buffer.device


def _is_number(buffer: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether a buffer holds numbers that have a norm: those of 8 bits have none."""
    return buffer is not None and buffer.is_floating_point() and buffer.itemsize > 1


def _is_written(module: nn.Module, buffer: Tensor) -> bool:
    if buffer.is_inference() or buffer.layout != torch.strided:
        return False
    if torch._debug_has_internal_overlap(buffer) == 1:  # expanded, so not writable
        return False
    statistics = getattr(module, "track_running_stats", False)
    return statistics or (buffer.is_floating_point() and buffer.numel() <= LARGEST_BUFFER)


def equal_states(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
