"""Which rows of the data set a Trainer's micro-batches hold, for the names in refusals.

The batch sampler notes what it yields and yields the same: order and random numbers stay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

Names = tuple[object, ...]


def note_order(loader: Any) -> None:
    """Let the batch sampler of `loader`, if it has one, note what it yields."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or hasattr(sampler, "noted"):
        return
    kind = type(sampler)

    def noting(self: Any) -> Iterator[list[Any]]:
        noted = self.noted = deque()
        for indices in kind.__iter__(self):
            noted.append(indices)
            yield indices

    with suppress(TypeError):  # a sampler of slots, or of C: its batches get their places
        # of one base, since only that has the same layout
        sampler.__class__ = type(f"Noting{kind.__name__}", (kind,), {"__iter__": noting})
        sampler.noted = deque()


class Order:
    """Names the micro-batches of one run as they are drawn."""

    def __init__(self) -> None:
        self._epoch: Any = None
        self._noted: deque[list[Any]] = deque()
        self._place = 0

    def names(self, epoch: Any, count: int, loader: Any, skipped: int) -> list[Names]:
        """Name the `count` micro-batches last drawn from the iterator `epoch` of `loader`.

        They are the data set's indices; or, of data without indices and of loaders that do not keep
        the sampler's order, the place in the epoch. skipped: of the run's first epoch.
        """
        if epoch is not self._epoch:
            self._place = skipped if self._epoch is None else 0
            self._epoch = epoch
            self._noted = getattr(getattr(loader, "batch_sampler", None), "noted", deque())
            for _ in range(min(self._place, len(self._noted))):
                self._noted.popleft()
        names: list[Names] = []
        for _ in range(count):
            rows = self._noted.popleft() if self._noted else []
            if not rows or None in rows or not _keeps_order(loader):
                rows = [f"batch {self._place} of the epoch"]
            names.append(tuple(rows))
            self._place += 1
        return names


def skipped_by(trainer: Any, loader: Any) -> int:
    """Return how many micro-batches of its epoch a Trainer that begins or resumes passes over."""
    if trainer.args.ignore_data_skip:
        return 0
    size = trainer.args.gradient_accumulation_steps
    try:
        steps = max(1, math.ceil(len(loader) / size))
    except TypeError:  # data without a length are one epoch
        steps = trainer.args.max_steps
    return int(trainer.state.global_step % steps * size)


def _keeps_order(loader: Any) -> bool:
    from accelerate.data_loader import DataLoaderDispatcher

    return getattr(loader, "in_order", True) and not isinstance(loader, DataLoaderDispatcher)
