"""The batches of a run: epochs of samples, mixed with replayed ones, prepared ahead of training, from any position on.

Which sample stands where depends on seed, data and position alone. A position is a handful of numbers, and every batch comes with
the one behind it; so what a thread has prepared ahead is never part of what a checkpoint has to know.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, TypeVar

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
    """Where a run stands in its data: the epoch and place of either source, and how many samples were drawn. begun: samples of the
    first epoch that the run has begun behind."""

    epoch: int = 0
    place: Place = field(default_factory=Place)
    replay_epoch: int = 0
    replay_place: Place = field(default_factory=Place)
    drawn: int = 0
    begun: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON. `begun` is in it where it is not 0, as in all positions of earlier versions."""
        values = {**asdict(self), "place": list(self.place), "replay_place": list(self.replay_place)}
        return values if self.begun else {name: value for name, value in values.items() if name != "begun"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """The position that `as_dict` gave."""
        return cls(**{**values, "place": Place(*values["place"]), "replay_place": Place(*values["replay_place"])})


@dataclass(frozen=True)
class Loaded:
    """A batch, the epoch it is of, and the position behind it."""

    epoch: int
    batch: Batch
    position: Position


class Loader:
    """Batches from a position on, epoch after epoch; a batch never crosses the end of one.

    Args:
        samples: what is trained on; its end is the epoch's.
        batch_size, pad_id, side: of the batches.
        epochs: how many.
        replay: a second source, over and over, its samples mixed in.
        replay_share: probability of a slot to be a replayed sample; drawn per slot from the seed and its number.
        seed: of those draws.
        pin: put the batches into pinned memory, for a GPU to copy from; whoever works ahead does it, and not the training.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        pad_id: int,
        *,
        side: str = "right",
        epochs: int = 1,
        replay: Samples | None = None,
        replay_share: float = 0.0,
        seed: int = 0,
        pin: bool = False,
    ):
        self.samples, self.replay = samples, replay
        self._batch_size, self._pad_id, self._side, self._epochs = batch_size, pad_id, side, epochs
        self._share, self._seed, self._pin = replay_share if replay is not None else 0.0, seed, pin

    def count(self, limit: int | None = None, begun: int = 0) -> int | None:
        """Batches of all epochs, counted no further than `limit`; None where only reading on would tell.

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
            if not self._share:
                drawn += left
            for _ in range(left if self._share else 0):
                drawn += self._replays_from(drawn) + 1
            total += math.ceil((drawn - first) / self._batch_size)
            if limit is not None and total >= limit:
                return limit
        return total

    def _replays_from(self, slot: int) -> int:
        """How many slots from this one on are replayed samples, up to the next that is not."""
        count = 0
        while uniform(self._seed, slot + count) < self._share:
            count += 1
        return count

    def batches(self, start: Position = Position()) -> Iterator[Loaded]:
        """The batches from `start` on, made as they are asked for."""
        group: list[Sample] = []
        last = start
        for sample, position in self._drawn(start):
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
        batch = replace(collate(group, self._pad_id, side=self._side), offset=position.drawn - len(group))
        return Loaded(position.epoch, batch.pinned() if self._pin else batch, position)

    def _drawn(self, position: Position) -> Iterator[tuple[Sample, Position]]:
        """Samples of both sources in their drawn order, each with the position behind it."""
        replayed = self._replayed(position)
        for epoch in range(position.epoch, self._epochs):
            if epoch != position.epoch:
                position = replace(position, epoch=epoch, place=Place())
            for sample, place in self.samples.walk(epoch, position.place):
                for _ in range(self._replays_from(position.drawn)):
                    other, replay_epoch, replay_place = next(replayed)
                    position = replace(position, replay_epoch=replay_epoch, replay_place=replay_place, drawn=position.drawn + 1)
                    yield other, position
                position = replace(position, place=place, drawn=position.drawn + 1)
                yield sample, position

    def _replayed(self, position: Position) -> Iterator[tuple[Sample, int, Place]]:
        assert self.replay is not None or not self._share
        epoch, place = position.replay_epoch, position.replay_place
        while self.replay is not None:
            start, empty = place, True
            for sample, behind in self.replay.walk(epoch, start):
                empty = False
                yield sample, epoch, behind
            if empty and start == Place():
                raise DataError("no sample came out of the replay data; check --replay_dataset")
            epoch, place = epoch + 1, Place()


class Ahead(Generic[T]):
    """An iterator that a thread works in front of, `depth` items at most; what it raises is raised here, in its turn.

    Args:
        items: advanced by the thread alone.
        depth: of the queue.
        stop: looked at while waiting; the iteration ends when it says so.
    """

    def __init__(self, items: Iterator[T], depth: int = AHEAD, stop: Callable[[], bool] = lambda: False):
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
        """Stop the thread; what it has prepared is dropped. One that waits for its source is left to itself."""
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
