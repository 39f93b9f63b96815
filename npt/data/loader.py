"""The batches of a run: epochs of samples, mixed with those of other sources, prepared ahead of
training, from any position on.

Which sample stands where depends on seed, data and position alone. A position is a handful of
numbers, and every batch comes with the one behind it; so what a thread has prepared ahead is never
part of what a checkpoint has to know.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

from npt.data.batch import Batch, collate
from npt.data.order import uniform
from npt.data.samples import Place, Sample, Samples
from npt.errors import DataError

AHEAD = 8
"""Batches prepared before they are asked for."""

_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """Where a run stands in its data: the epoch and place of every source, and how many samples
    were drawn.

    epoch, place: of the source whose end is an epoch's. replay_epoch, replay_place: of the first
    one that is mixed in. begun: samples of the first epoch that the run has begun behind. further:
    epoch and place of each source that is mixed in behind that one.
    """

    epoch: int = 0
    place: Place = field(default_factory=Place)
    replay_epoch: int = 0
    replay_place: Place = field(default_factory=Place)
    drawn: int = 0
    begun: int = 0
    further: tuple[tuple[int, Place], ...] = ()

    def turn(self, number: int) -> tuple[int, Place]:
        """Epoch and place of a source that is mixed in, counted from 0."""
        turns = ((self.replay_epoch, self.replay_place), *self.further)
        return turns[number] if number < len(turns) else (0, Place())

    def behind(self, number: int, epoch: int, place: Place) -> Position:
        """The position behind a sample of that source."""
        if number == 0:
            return replace(self, replay_epoch=epoch, replay_place=place, drawn=self.drawn + 1)
        turns = [self.turn(i) for i in range(1, max(number, len(self.further)) + 1)]
        turns[number - 1] = (epoch, place)
        return replace(self, further=tuple(turns), drawn=self.drawn + 1)

    def as_dict(self) -> dict[str, Any]:
        """For JSON. `begun` and `further` are in it where there is something in them, as in all
        positions of earlier versions.
        """
        values = {**vars(self), "place": list(self.place), "replay_place": list(self.replay_place)}
        values["further"] = [[epoch, list(place)] for epoch, place in self.further]
        return {
            name: value
            for name, value in values.items()
            if value or name not in ("begun", "further")
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """The position that `as_dict` gave."""
        further = tuple((epoch, Place(*place)) for epoch, place in values.get("further", ()))
        places = {name: Place(*values[name]) for name in ("place", "replay_place")}
        return cls(**{**values, **places, "further": further})


@dataclass(frozen=True)
class Loaded:
    """A batch, the epoch it is of, and the position behind it."""

    epoch: int
    batch: Batch
    position: Position


class Other(NamedTuple):
    """A source that is mixed in, over and over: `share` of all samples are its. label: what
    messages call it.
    """

    samples: Samples
    share: float
    label: str = "replay data"


class Loader:
    """Batches from a position on, epoch after epoch; a batch never crosses the end of one.

    Args:
        samples: what is trained on; its end is the epoch's.
        batch_size, pad_id, side: of the batches.
        epochs: how many.
        others: sources that are mixed in. Whose sample a slot is, is drawn from the seed and the
            slot's number, by the shares.
        seed: of those draws.
        pin: put the batches into pinned memory, for a GPU to copy from; whoever works ahead does
            it, and not the training.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        pad_id: int,
        *,
        side: str = "right",
        epochs: int = 1,
        others: Sequence[Other] = (),
        seed: int = 0,
        pin: bool = False,
    ):
        self.samples, self.others = samples, tuple(others)
        self._batch_size, self._pad_id, self._side, self._epochs = batch_size, pad_id, side, epochs
        self._bounds = tuple(accumulate(other.share for other in self.others))
        self._seed, self._pin = seed, pin

    def count(self, limit: int | None = None, begun: int = 0) -> int | None:
        """Batches of all epochs, counted no further than `limit`; None where only reading on would
        tell.

        Args:
            limit: what is enough.
            begun: samples of the first epoch that the run begins behind.
        """
        size = self.samples.count(None if limit is None else limit * self._batch_size + begun)
        if size is None:
            return None
        total = drawn = 0
        for epoch in range(self._epochs):
            first, left = drawn, size if epoch else size - begun
            if not self.others:
                drawn += left
            for _ in range(left if self.others else 0):
                while self._other_at(drawn) is not None:
                    drawn += 1
                drawn += 1
            total += math.ceil((drawn - first) / self._batch_size)
            if limit is not None and total >= limit:
                return limit
        return total

    def _other_at(self, slot: int) -> int | None:
        """Which of the sources that are mixed in a slot belongs to; None where to none of them."""
        if not self._bounds:
            return None
        drawn = uniform(self._seed, slot)
        return next((number for number, bound in enumerate(self._bounds) if drawn < bound), None)

    def batches(self, start: Position = Position()) -> Iterator[Loaded]:
        """The batches from `start` on, made as they are asked for."""
        group: list[Sample] = []
        last = start
        for sample, position in self.drawn(start):
            if position.epoch != last.epoch and group:
                yield self._loaded(group, last)
                group = []
            group.append(sample)
            last = position
            if len(group) == self._batch_size:
                yield self._loaded(group, position)
                group = []
        if group:
            yield self._loaded(group, last)

    def _loaded(self, group: list[Sample], position: Position) -> Loaded:
        batch = replace(
            collate(group, self._pad_id, side=self._side), offset=position.drawn - len(group)
        )
        return Loaded(position.epoch, batch.pinned() if self._pin else batch, position)

    def drawn(self, position: Position = Position()) -> Iterator[tuple[Sample, Position]]:
        """Samples of all sources in their drawn order, each with the position behind it."""
        turns = [
            self._over_and_over(other, *position.turn(number))
            for number, other in enumerate(self.others)
        ]
        for epoch in range(position.epoch, self._epochs):
            if epoch != position.epoch:
                position = replace(position, epoch=epoch, place=Place())
            for sample, place in self.samples.walk(epoch, position.place):
                while (number := self._other_at(position.drawn)) is not None:
                    other, again, there = next(turns[number])
                    position = position.behind(number, again, there)
                    yield other, position
                position = replace(position, place=place, drawn=position.drawn + 1)
                yield sample, position

    def _over_and_over(
        self, other: Other, epoch: int, place: Place
    ) -> Iterator[tuple[Sample, int, Place]]:
        while True:
            start, empty = place, True
            for sample, behind in other.samples.walk(epoch, start):
                empty = False
                yield sample, epoch, behind
            if empty and start == Place():
                raise DataError(
                    f"{other.label}: no sample came out of it; check its name and its columns"
                )
            epoch, place = epoch + 1, Place()


class Ahead(Generic[T]):
    """An iterator that a thread works in front of, `depth` items at most; what it raises is raised
    here, in its turn.

    Args:
        items: advanced by the thread alone.
        depth: of the queue.
        stop: looked at while waiting; the iteration ends when it says so.
    """

    def __init__(
        self, items: Iterator[T], depth: int = AHEAD, stop: Callable[[], bool] = lambda: False
    ):
        self._items, self._stop = items, stop
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="npt-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while not self._stop():
            try:
                kind, value = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if kind == "item":
                yield value
            elif kind == "end":
                return
            else:
                raise value

    def close(self) -> None:
        """Stop the thread; what it has prepared is dropped. One that waits for its source is left
        to itself.
        """
        self._closed.set()
        self._thread.join(timeout=_CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except BaseException as error:  # raised where the item would have come
            self._put("error", error)

    def _put(self, kind: str, value: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put((kind, value), timeout=_POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False
