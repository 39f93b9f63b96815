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

from npt.guard.lists import are_finite, norms_of
from npt.random_state import micro_batch_draws, random_state, set_random_state

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
    """

    def __init__(self, model: nn.Module):
        found = [
            (f"{path}.{name}".removeprefix("."), module._buffers, name)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and _is_written(module, buffer)
        ]
        self._names = [path for path, _, _ in found]
        self._held = [(buffers, name) for _, buffers, name in found]
        self._checked: list[int] | None = None  # those that began finite: a mask may hold -inf
        self._copies: list[Tensor | None] = []
        self._start: list[Tensor | None] | None = None  # of the window

    def begin(self) -> None:
        self._copies = self.now()
        if self._start is None:
            self._start = self._copies

    def spoilt(self, home: torch.device) -> Spoilt | None:
        """Return which buffers the micro-batch made other than finite; None if all are finite and
        the host may know.
        """
        if self._checked is None:
            floats = {i: c for i, c in enumerate(self._copies) if _is_float(c)}
            sizes = norms_of([*floats.values()], math.inf).tolist() if floats else []
            self._checked = [i for i, size in zip(floats, sizes, strict=True) if size < math.inf]
        now = {i: self._held[i][0].get(self._held[i][1]) for i in self._checked}
        floats = {i: buffer.detach() for i, buffer in now.items() if _is_float(buffer)}
        if not floats or (home.type == "cpu" and are_finite([*floats.values()])):
            return None
        flags = ~(norms_of([*floats.values()], math.inf, home) < math.inf)
        return Spoilt([self._names[i] for i in floats], flags)

    def settle(self, keep: Tensor | None) -> None:
        self._restore(self._copies, keep)

    def rewind(self, keep: Tensor | None = None) -> None:
        if self._start is not None:
            self._restore(self._start, keep)
        self.forget()

    def forget(self) -> None:
        self._start = None

    def now(self) -> list[Tensor | None]:
        """Return copies of the buffers."""
        each = [held.get(name) for held, name in self._held]
        return [None if buffer is None else buffer.detach().clone() for buffer in each]

    def put(self, copies: Sequence[Tensor | None]) -> None:
        """Set the buffers to copies."""
        self._restore(copies, None)

    def put_start(self) -> None:
        """Set the buffers to what they were before the window."""
        if self._start is not None:
            self._restore(self._start, None)

    @torch.no_grad()
    def _restore(self, copies: Sequence[Tensor | None], keep: Tensor | None) -> None:
        for (held, name), copy in zip(self._held, copies, strict=True):
            now = held.get(name)
            if copy is None or now is None or now.shape != copy.shape or now.device != copy.device:
                if now is not copy and (keep is None or not bool(keep)):  # replaced; rare
                    held[name] = None if copy is None else copy.clone()
            elif keep is None:
                now.data.copy_(copy)  # .data: a graph of an earlier forward may hold the buffer
            else:
                torch.where(keep.to(now.device), now, copy, out=now.data)


def _is_float(buffer: Tensor | None) -> TypeGuard[Tensor]:
    return buffer is not None and buffer.is_floating_point() and buffer.numel() > 0


def _is_written(module: nn.Module, buffer: Tensor) -> bool:
    if buffer.is_inference() or buffer.layout != torch.strided:
        return False
    if torch._debug_has_internal_overlap(buffer) == 1:  # expanded, so not writable
        return False
    statistics = getattr(module, "track_running_stats", False)
    return statistics or (buffer.is_floating_point() and buffer.numel() <= LARGEST_BUFFER)


def equal_states(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
