"""The batches of a run: epochs of samples, mixed with replayed ones, from any position on.

Every batch comes with the position after it. What is prepared ahead is never part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice, starmap
from typing import Any, Generic, NamedTuple, TypeVar

from npt.data.batch import Batch, Sample, collate
from npt.data.samples import EpochPlace, Samples, uniform
from npt.errors import DataError

AHEAD = 8  # batches prepared before they are asked for
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """A position in the data.

    Attributes:
        epoch: of the first source.
        place: in that epoch.
        drawn: samples so far, of both sources.
        begun: samples of the first epoch before the run's start.
        replay_epoch: of the replayed source.
        replay_place: in that epoch.
    """

    epoch: int = 0
    place: EpochPlace = field(default_factory=EpochPlace)
    drawn: int = 0
    begun: int = 0
    replay_epoch: int = 0
    replay_place: EpochPlace = field(default_factory=EpochPlace)

    def as_dict(self) -> dict[str, Any]:
        """Return the position for JSON, in the format of earlier versions."""
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {name: value for name, value in values.items() if value or name != "begun"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        """Return the position that `as_dict` gave."""
        places: dict[str, Any] = {
            k: EpochPlace(*v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**places)


class Loaded(NamedTuple):
    """A batch, and the position after it."""

    batch: Batch
    position: Position


class Window(NamedTuple):
    """K micro-batches of every process, fewer at the end of the data, and the position after them.

    Every process has all of them, and computes number i, i + P, ... as process i of P: where a
    sample is, and so the position after the window, depends on the tokens of all before it.
    """

    batches: list[Batch]
    position: Position = Position()


def windows(
    batches: Iterator[Loaded], size: int, stop: Callable[[], Any] = bool
) -> Generator[Window]:
    """Yield windows of `size` batches until `stop()`; closing ends the thread that prepares them.

    Windows continue from one epoch into the next; the last one of all may be shorter.
    """
    with contextlib.closing(Prefetcher(batches, stop=stop)) as ahead:
        stream = iter(ahead)
        while loaded := list(islice(stream, size)):
            yield Window([each.batch for each in loaded], loaded[-1].position)


class Loader:
    """Batches from a position on, epoch after epoch; a batch never crosses the end of one.

    Attributes:
        samples: of the first source, `epochs` times over, or if `endless` for as long as they can
            be read again.
        replay: of a source that is mixed in, over and over: `share` of all samples, drawn by the
            seed and a sample's number.
        pin: put the batches into pinned memory, for a GPU to copy from.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        epochs: int = 1,
        endless: bool = False,
        replay: Samples | None = None,
        share: float = 0.0,
        seed: int = 0,
    ):
        self.samples, self.replay, self.pin = samples, replay, False
        self._batch_size, self._epochs = batch_size, epochs
        self._end = math.inf if endless else epochs
        self._share, self._seed = share, seed

    def count(self, limit: int | None = None, begun: int = 0) -> int | None:
        """Count the batches of `epochs` but the `begun` samples, no further than `limit`; None for
        a stream."""
        size = self.samples.count(None if limit is None else limit * self._batch_size + begun)
        if size is None:
            return None
        total = drawn = 0
        for epoch in range(self._epochs):
            first, left = drawn, size if epoch else size - begun
            if self.replay is None:
                drawn, left = drawn + left, 0
            while left:
                left -= not self._is_replayed(drawn)
                drawn += 1
            total += math.ceil((drawn - first) / self._batch_size)
            if limit is not None and total >= limit:
                return limit
        return total

    def _is_replayed(self, drawn: int) -> bool:
        """Return whether the next sample is of the source that is mixed in."""
        return self.replay is not None and uniform(self._seed, drawn) < self._share

    def batches(self, start: Position = Position()) -> Iterator[Loaded]:
        """Return the batches from a position on, made as they are asked for."""
        return starmap(self._loaded, self.groups(start, self._batch_size))

    def _loaded(self, group: list[Sample], position: Position) -> Loaded:
        batch = replace(collate(group), offset=position.drawn - len(group))
        return Loaded(batch.pinned() if self.pin else batch, position)

    def groups(self, position: Position, size: int) -> Iterator[tuple[list[Sample], Position]]:
        """Yield the samples of both sources, `size` at a time, with the position after them."""
        replay: Iterator[tuple[Sample, int, EpochPlace]] = iter(())
        if self.replay is not None:
            replay = self.replay.walk(position.replay_epoch, position.replay_place, math.inf)
        group: list[Sample] = []
        for sample, epoch, place in self.samples.walk(position.epoch, position.place, self._end):
            if epoch != position.epoch:
                if group:
                    yield group, position
                    group = []
                position = replace(position, epoch=epoch, place=EpochPlace())
            replayed = True
            while replayed:
                replayed = self._is_replayed(position.drawn)
                position = replace(position, drawn=position.drawn + 1)
                if not replayed:
                    group.append(sample)
                    position = replace(position, place=place)
                elif (drawn := next(replay, None)) is not None:
                    group.append(drawn[0])
                    position = replace(position, replay_epoch=drawn[1], replay_place=drawn[2])
                else:
                    raise DataError(
                        "replay data: no sample came out of it; check its name and its columns"
                    )
                if len(group) == size:
                    yield group, position
                    group = []
        if group:
            yield group, position


class Prefetcher(Generic[T]):
    """An iterator that a thread keeps `depth` items ahead, errors included; it ends early if
    `stop()`, asked while waiting.
    """

    def __init__(self, items: Iterator[T], depth: int = AHEAD, stop: Callable[[], Any] = bool):
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
        """Stop the thread, unless it hangs in its source, and drop its items."""
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
