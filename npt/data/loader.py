"""The batches of a run: epochs of samples, mixed with other sources, from any position on.

Every batch comes with the position after it. What is prepared ahead is never part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, starmap
from typing import Any, Generic, NamedTuple, TypeVar

from npt.data.batch import Batch, Sample, collate
from npt.data.samples import Place, Samples, uniform
from npt.errors import DataError

AHEAD = 8  # batches prepared before they are asked for
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """A position in the data: epoch and place in the first source, samples drawn of all sources,
    samples of the first epoch before the run's start, epoch and place in each other source."""

    epoch: int = 0
    place: Place = field(default_factory=Place)
    drawn: int = 0
    begun: int = 0
    others: tuple[tuple[int, Place], ...] = ()

    def other(self, number: int) -> tuple[int, Place]:
        """Return epoch and place in a source that is mixed in, counted from 0."""
        return self.others[number] if number < len(self.others) else (0, Place())

    def after_other(self, number: int, epoch: int, place: Place) -> Position:
        """Return the position after a sample of that source."""
        before = tuple(self.other(i) for i in range(number))
        others = (*before, (epoch, place), *self.others[number + 1 :])
        return replace(self, others=others, drawn=self.drawn + 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the position for JSON, in the format of earlier versions."""
        epoch, place = self.other(0)
        values: dict[str, Any] = {"epoch": self.epoch, "place": list(self.place)}
        values |= {"replay_epoch": epoch, "replay_place": list(place), "drawn": self.drawn}
        further = [[epoch, list(place)] for epoch, place in self.others[1:]]
        rest = {"begun": self.begun, "further": further}
        return values | {name: value for name, value in rest.items() if value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """Return the position that `as_dict` gave."""
        replay = (values["replay_epoch"], values["replay_place"])
        others = tuple((e, Place(*p)) for e, p in (replay, *values.get("further", ())))
        others = () if set(others) == {(0, Place())} else others
        place, begun = Place(*values["place"]), values.get("begun", 0)
        return cls(values["epoch"], place, values["drawn"], begun, others)


class Loaded(NamedTuple):
    """A batch, its epoch, and the position after it."""

    epoch: int
    batch: Batch
    position: Position


class Other(NamedTuple):
    """A source that is mixed in, over and over, and its share of all samples."""

    samples: Samples
    share: float
    label: str = "replay data"


class Loader:
    """Batches from a position on, epoch after epoch; a batch never crosses the end of one.

    others: sources that are mixed in, drawn by the seed, their shares and a sample's number.
    endless: the data begin again after `epochs` too, for as long as they can be read again. pin:
    put the batches into pinned memory, for a GPU to copy from.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        epochs: int = 1,
        endless: bool = False,
        others: Sequence[Other] = (),
        seed: int = 0,
    ):
        self.samples, self.others = samples, tuple(others)
        self._batch_size, self._epochs = batch_size, epochs
        self._end = math.inf if endless else epochs
        self._bounds = tuple(accumulate(other.share for other in self.others))
        self._seed = seed
        self.pin = False

    def count(self, limit: int | None = None, begun: int = 0) -> int | None:
        """Count the batches of `epochs` but the `begun` samples, no further than `limit`; None for
        a stream."""
        size = self.samples.count(None if limit is None else limit * self._batch_size + begun)
        if size is None:
            return None
        total = drawn = 0
        for epoch in range(self._epochs):
            before, left = drawn, size if epoch else size - begun
            if not self.others:
                drawn, left = drawn + left, 0
            while left:
                left -= self._other_at(drawn) is None
                drawn += 1
            total += math.ceil((drawn - before) / self._batch_size)
            if limit is not None and total >= limit:
                return limit
        return total

    def _other_at(self, drawn: int) -> int | None:
        """Return which of the others the next sample is of; None for the first source."""
        draw = uniform(self._seed, drawn) if self._bounds else 1.0
        return next((n for n, bound in enumerate(self._bounds) if draw < bound), None)

    def batches(self, start: Position = Position()) -> Iterator[Loaded]:
        """Return the batches from a position on, made as they are asked for."""
        return starmap(self._loaded, self.groups(start, self._batch_size))

    def _loaded(self, group: list[Sample], position: Position) -> Loaded:
        batch = collate(group)
        batch = replace(batch, offset=position.drawn - len(group))
        return Loaded(position.epoch, batch.pinned() if self.pin else batch, position)

    def groups(self, position: Position, size: int) -> Iterator[tuple[list[Sample], Position]]:
        """Yield the samples of all sources, `size` at a time, with the position after them."""
        walks = [
            other.samples.walk(*position.other(number), end=math.inf)
            for number, other in enumerate(self.others)
        ]
        group: list[Sample] = []
        for own, epoch, place in self.samples.walk(position.epoch, position.place, self._end):
            if epoch != position.epoch:
                if group:
                    yield group, position
                    group = []
                position = replace(position, epoch=epoch, place=Place())
            number: int | None = 0
            while number is not None:
                number = self._other_at(position.drawn)
                if number is None:
                    group.append(own)
                    position = replace(position, place=place, drawn=position.drawn + 1)
                elif (found := next(walks[number], None)) is None:
                    said = "no sample came out of it; check its name and its columns"
                    raise DataError(f"{self.others[number].label}: {said}")
                else:
                    group.append(found[0])
                    position = position.after_other(number, *found[1:])
                if len(group) == size:
                    yield group, position
                    group = []
        if group:
            yield group, position


class Prefetcher(Generic[T]):
    """An iterator that a thread keeps `depth` items ahead, errors included; it ends early if
    `stop`, asked while waiting, says so."""

    def __init__(
        self, items: Iterator[T], depth: int = AHEAD, stop: Callable[[], bool] = lambda: False
    ):
        self._items, self._stop = items, stop
        self._ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="npt-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while not self._stop():
            try:
                item, error = self._ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item

    def close(self) -> None:
        """Stop the thread and drop its items; a thread that waits for its source is left alone."""
        self._closed.set()
        self._thread.join(timeout=_CLOSE_SECONDS)

    def _work(self) -> None:
        try:
            while not self._closed.is_set():
                self._put(next(self._items))
        except BaseException as error:  # StopIteration included; raised in the item's turn
            self._put(None, error)

    def _put(self, item: Any, error: BaseException | None = None) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put((item, error), timeout=_POLL_SECONDS)
                return
