"""The samples of a run: in a seeded order, mixed with replayed ones, resumable at any sample.

The order of an epoch depends only on data, settings, seed and epoch. Saved positions rely on it, so
it must never change. Prefetched batches are not part of a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from npt.batch import IGNORE_INDEX, Batch, Sample, collate
from npt.config import DataConfig
from npt.data.encoding import Encoder, RecordCounts, no_sample
from npt.data.packing import pack
from npt.data.source import Record, is_sequence
from npt.errors import DataError

SHUFFLE_BLOCK = 1024  # an epoch is shuffled in blocks of at least so many samples
AHEAD = 8  # batches to prefetch
_RECORDS_AT_ONCE = 32
_ROUNDS = 8  # four are too few: some of ten items came first measurably more often
_POLL_SECONDS = 0.1
_CLOSE_SECONDS = 2.0

T = TypeVar("T")


def cut(
    records: Iterable[Record],
    tokenizer: Any,
    config: DataConfig,
    counts: RecordCounts | None = None,
) -> Iterator[Sample]:
    """Tokenise records and cut them into samples, lazily and in order; count them in `counts`. A
    record without its text is a DataError with its id or number.
    """
    encoder = Encoder(tokenizer, config, counts)
    for number, record in enumerate(records):
        yield from encoder.samples(number, record)


def within(samples: Iterable[Sample], vocab_size: int) -> Iterator[Sample]:
    """Yield the samples whose ids and targets all lie in [0, V)."""
    for sample in samples:
        targets = (label for label in sample.labels or () if label != IGNORE_INDEX)
        ids = (*sample.read, *targets)
        if min(ids) >= 0 and max(ids) < vocab_size:
            yield sample


def permutation(n: int, key: str, start: int = 0) -> Iterator[int]:
    """Yield a seeded permutation of range(n) from position `start` on, without storing it.

    A balanced Feistel network permutes the next power of four, repeatedly until a value is below n
    (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    """
    half = max(1, ((max(n, 2) - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    digest = hashlib.sha512(key.encode()).digest()
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "big") for i in range(_ROUNDS)]
    for value in range(start, n):
        while True:
            left = value >> half
            right = value & mask
            for each in keys:
                left ^= _mixed(right ^ each) & mask
                left, right = right, left
            value = left << half | right
            if value < n:
                break
        yield value


def uniform(key: int, counter: int) -> float:
    """Return a number in [0, 1) that depends only on the arguments."""
    return (_mixed(_mixed(key) ^ counter) >> 11) / 2**53


def _mixed(value: int) -> int:
    """Hash a 64-bit integer with the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ value >> 31


class SourcePlace(NamedTuple):
    """A position in one source.

    Attributes:
        epoch: from 0.
        record: first record of the current block.
        before: samples of the epoch in earlier blocks.
        taken: samples already taken from the block.
    """

    epoch: int = 0
    record: int = 0
    before: int = 0
    taken: int = 0


START = SourcePlace()


class Samples:
    """The training samples of a source, epoch after epoch, in an order determined by the seed.

    A sequence of records is visited in one random order, a stream in its own. In every epoch the
    samples are shuffled (and packed) again, within blocks of SHUFFLE_BLOCK or a few more, so that
    at most one block is kept in memory. `num_samples` counts samples before packing. A sequence
    without a sample is a DataError. With `hold_out`, held-out samples are left out.

    Attributes:
        sized: whether the records are a sequence.
    """

    def __init__(
        self,
        records: Iterable[Record],
        tokenizer: Any,
        config: DataConfig,
        *,
        seed: int,
        hold_out: bool = True,
    ):
        self._records = records
        self._config = config
        self._seed = seed
        self._hold_out = hold_out
        self._encoder = Encoder(tokenizer, config)
        self._counted: int | None = None
        self.sized = is_sequence(records)
        if self.sized:  # refuse faulty first records before the run
            first = itertools.islice(self._numbered(), _RECORDS_AT_ONCE)
            begun = list(self._cut(first))
            self.count_anew()
            if not begun and next(self._cut(self._numbered()), None) is None:
                raise no_sample(self.counts)
        self.count_anew()

    @property
    def counts(self) -> RecordCounts:
        return self._encoder.counts

    def count_anew(self) -> None:
        """Reset the counts after a look ahead."""
        self._encoder.counts = RecordCounts()

    def count(self) -> int | None:
        """Return the number of samples of an epoch, None for a stream; tokenises the records."""
        if self._counted is None and self.sized:
            rows: Iterator[Any] = self.walk()
            if not self._config.packing:  # then their number does not depend on their order
                rows = itertools.islice(self._cut(self._numbered()), self._config.num_samples)
            self._counted = sum(1 for _ in rows)
            self.count_anew()
        return self._counted

    def epoch(self, number: int) -> Iterator[Sample]:
        """Yield the samples of an epoch, counted from 0."""
        return (sample for sample, _ in self.walk(SourcePlace(number)))

    def walk(
        self, start: SourcePlace = START, end: float | None = None
    ) -> Iterator[tuple[Sample, SourcePlace]]:
        """Yield samples from a position on, each with the position after it.

        Stop at epoch `end` (default: after one epoch; math.inf: never) or after an empty epoch.
        """
        end = start.epoch + 1 if end is None else end
        while start.epoch < end:
            place = start
            for sample, place in self._rest_of_epoch(start):
                yield sample, place
            if place == SourcePlace(start.epoch):  # nothing came of a whole epoch
                return
            start = SourcePlace(start.epoch + 1)

    def _rest_of_epoch(self, start: SourcePlace) -> Iterator[tuple[Sample, SourcePlace]]:
        most = sys.maxsize if self._config.num_samples is None else self._config.num_samples
        epoch, record, before, taken = start
        records = self._numbered(record)
        more = True
        while more and before < most:
            first = record  # a position names its block by the first record
            block: list[Sample] = []
            while more and len(block) < min(SHUFFLE_BLOCK, most - before):
                chunk = list(itertools.islice(records, _RECORDS_AT_ONCE))
                more = len(chunk) > 0
                record += len(chunk)
                block += self._cut(chunk)
            del block[most - before :]
            rows = pack(block, self._config.max_length) if self._config.packing else block
            for number in permutation(len(rows), f"{self._seed}/{epoch}/{first}", taken):
                taken += 1
                yield rows[number], SourcePlace(epoch, first, before, taken)
            before += len(block)
            taken = 0

    def _cut(self, records: Iterable[tuple[int, Record]]) -> Iterator[Sample]:
        """Yield the samples of numbered records, without held-out ones if `hold_out` is set."""
        for number, record in records:
            for sample in self._encoder.samples(number, record):
                if not (self._hold_out and sample.heldout):
                    yield sample

    def _numbered(self, start: int = 0) -> Iterator[tuple[int, Record]]:
        records: Any = self._records
        if self.sized:
            order = permutation(len(records), f"{self._seed}/documents", start)
            return ((number, records[number]) for number in order)
        # a Hub stream can skip records without decoding them
        if start and hasattr(records, "skip"):
            return enumerate(records.skip(start), start)
        return itertools.islice(enumerate(records), start, None)


@dataclass(frozen=True)
class Position:
    """A position in the data of a run.

    Attributes:
        place: position in the training source.
        replay: position in the replayed source.
        drawn: samples so far from both sources.
        begun: samples of the first epoch before the run's start.
    """

    place: SourcePlace = START
    replay: SourcePlace = START
    drawn: int = 0
    begun: int = 0

    def as_dict(self) -> dict[str, Any]:
        epoch, *place = self.place
        replay_epoch, *replay = self.replay
        values = {"epoch": epoch, "place": place, "drawn": self.drawn}
        values |= {"replay_epoch": replay_epoch, "replay_place": replay}
        if self.begun:
            values["begun"] = self.begun
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Position:
        place = SourcePlace(values["epoch"], *values["place"])
        replay = SourcePlace(values["replay_epoch"], *values["replay_place"])
        return cls(place, replay, values["drawn"], values.get("begun", 0))


class Loader:
    """Batches from a position on, epoch after epoch. No batch spans two epochs.

    Attributes:
        samples: training samples, read `epochs` times (math.inf: without end).
        replay: samples mixed in, repeated without end; they are `share` of all samples.
        pin: put batches into pinned memory, for copies to a GPU.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        epochs: float = 1,
        replay: Samples | None = None,
        share: float = 0.0,
        seed: int = 0,
    ):
        self.samples = samples
        self.replay = replay
        self.pin = False
        self._batch_size = batch_size
        self._epochs = epochs
        self._share = share
        self._seed = seed

    def count(self, limit: int = sys.maxsize, begun: int = 0) -> int | None:
        """Return the number of batches without the first `begun` samples, at most `limit`; None for
        a stream."""
        size = self.samples.count()
        if size is None:
            return None
        total = drawn = epoch = 0
        while epoch < self._epochs and total < limit:
            first = drawn
            left = size if epoch else size - begun
            if self.replay is None:
                drawn += left
                left = 0
            while left:  # replayed samples come on top of an epoch's own
                left -= not self._is_replayed(drawn)
                drawn += 1
            total += math.ceil((drawn - first) / self._batch_size)
            epoch += 1
        return min(total, limit)

    def _is_replayed(self, drawn: int) -> bool:
        return self.replay is not None and uniform(self._seed, drawn) < self._share

    def batches(self, start: Position = Position()) -> Iterator[tuple[Batch, Position]]:
        """Yield batches from a position on, each with the position after it."""
        for _, steps in itertools.groupby(self._mixed(start), lambda step: step[1].place.epoch):
            while group := list(itertools.islice(steps, self._batch_size)):
                position = group[-1][1]
                batch = collate([sample for sample, _ in group])
                batch = replace(batch, offset=position.drawn - len(group))
                yield batch.pinned() if self.pin else batch, position

    def _mixed(self, position: Position) -> Iterator[tuple[Sample, Position]]:
        replay = self._replayed(position.replay)
        for sample, place in self.samples.walk(position.place, self._epochs):
            if place.epoch != position.place.epoch:
                position = replace(position, place=SourcePlace(place.epoch))
            while self._is_replayed(position.drawn):
                other, after = next(replay)
                position = replace(position, drawn=position.drawn + 1, replay=after)
                yield other, position
            position = replace(position, drawn=position.drawn + 1, place=place)
            yield sample, position

    def _replayed(self, start: SourcePlace) -> Iterator[tuple[Sample, SourcePlace]]:
        """Yield replayed samples without end; every fault says that it is theirs."""
        assert self.replay is not None
        try:
            yield from self.replay.walk(start, math.inf)
            raise DataError("no sample came from it; check --replay_dataset and columns")
        except DataError as error:
            raise DataError(f"replay data: {error}") from error


class Window(NamedTuple):
    """The micro-batches of all processes for one optimizer step, and the position after them.

    There are K per process, fewer at the end of the data. Every process reads all of them, since a
    sample's position depends on all tokens before it. Process i of P computes numbers i, i + P, ...
    """

    batches: list[Batch]
    position: Position = Position()


def windows(
    batches: Iterator[tuple[Batch, Position]], size: int, stop: Callable[[], Any] = bool
) -> Generator[Window]:
    """Yield windows of `size` batches until `stop()`. Closing ends the thread that prefetches them.

    A window may span two epochs. Only the last window may be shorter.
    """
    with contextlib.closing(prefetched(batches, stop=stop)) as ahead:
        while group := list(itertools.islice(ahead, size)):
            yield Window([batch for batch, _ in group], group[-1][1])


def prefetched(
    items: Iterator[T], depth: int = AHEAD, stop: Callable[[], Any] = bool
) -> Generator[T]:
    """Yield items that a thread produces up to `depth` ahead, and raise its errors in turn.

    Ends when `stop()` is true, also while waiting. Closing ends the thread unless its source hangs.
    """
    ready: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
    closed = threading.Event()

    # both sides wait in short steps, so that they notice `closed` and `stop`
    def put(item: Any, error: BaseException | None = None) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((item, error), timeout=_POLL_SECONDS)
                return

    def work() -> None:
        try:
            while not closed.is_set():
                put(next(items))
        except BaseException as error:  # StopIteration too; raised in turn by the consumer
            put(None, error)

    # a daemon: a source that hangs must not keep the process
    thread = threading.Thread(target=work, name="npt-data", daemon=True)
    thread.start()
    try:
        while not stop():
            try:
                item, error = ready.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        closed.set()
        thread.join(timeout=_CLOSE_SECONDS)
