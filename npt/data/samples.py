"""Records to samples: tokens of at most `max_length`, in a seeded order, some held out.

A text longer than `max_length` becomes several samples; only a single token left over is dropped. A
prompt with its completion is always one: what does not fit is cut from the prompt's start, then
from the completion's end. The order of an epoch depends on data, settings, seed and epoch alone,
and is part of every saved position: it must never change.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.batch import IGNORE_INDEX, Sample
from npt.data.encoding import Encoded, Encoder, RecordCounts, no_sample
from npt.data.source import Record, is_sequence

_RECORDS_AT_ONCE = 32
SHUFFLE_BLOCK = 1024  # samples, at least, among which an epoch is shuffled
_ROUNDS = 8  # with four, of ten things one came first measurably more often than others


class Permutation:
    """A seeded permutation of range(n), computed, not stored: `permutation[i]` comes i-th.

    A balanced Feistel network over the next power of four; its cycles are walked until a value
    below n comes out (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
    """

    def __init__(self, n: int, key: str):
        self.n = n
        self._half = max(1, ((max(n, 2) - 1).bit_length() + 1) // 2)
        digest = hashlib.sha512(key.encode()).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "big") for i in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} of an order of {self.n}")
        value, half, mask = position, self._half, (1 << self._half) - 1
        while True:
            left, right = value >> half, value & mask
            for key in self._keys:
                left, right = right, left ^ (_mixed(right ^ key) & mask)
            value = left << half | right
            if value < self.n:
                return value


def uniform(key: int, counter: int) -> float:
    """Return a number in [0, 1) that depends on both arguments alone."""
    return (_mixed(_mixed(key) ^ counter) >> 11) / 2**53


def _mixed(value: int) -> int:
    """Hash a 64-bit integer: the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
    return value ^ value >> 31


def cut(
    records: Iterable[Record],
    tokenizer: Any,
    config: DataConfig,
    counts: RecordCounts | None = None,
) -> Iterator[Sample]:
    """Tokenise records and cut them to samples, in order and lazily, counting each in `counts`. A
    record with nothing to train on in it is a DataError, by its id or number.
    """
    counts = counts if counts is not None else RecordCounts()
    return _cut(enumerate(records), Encoder(tokenizer, config), config.max_length, counts)


def _cut(
    numbered: Iterator[tuple[int, Record]], encoder: Encoder, max_length: int, counts: RecordCounts
) -> Iterator[Sample]:
    while chunk := list(itertools.islice(numbered, _RECORDS_AT_ONCE)):
        for encoded in encoder.encode(chunk, counts):
            yield from fit(encoded, max_length, counts)


def fit(record: Encoded, max_length: int, counts: RecordCounts) -> list[Sample]:
    """Return the samples of a record, counted."""
    cut_ = _fit_text if record.prompt is None else _fit_completion
    samples = cut_(record, max_length, counts)
    counts.samples += len(samples)
    counts.tokens += sum(len(sample.input_ids) for sample in samples)
    return samples


def _fit_text(record: Encoded, max_length: int, counts: RecordCounts) -> list[Sample]:
    """Cut a text, or given ids, to windows that do not overlap."""
    samples: list[Sample] = []
    for start in range(0, max(1, len(record.ids) - 1), max_length):
        ids = tuple(record.ids[start : start + max_length])
        labels = None if record.labels is None else tuple(record.labels[start : start + max_length])
        if len(ids) < 2:
            counts.skipped["fewer than two tokens"] += 1
        elif labels is not None and set(labels[1:]) == {IGNORE_INDEX}:
            counts.skipped["no target"] += 1
        else:
            samples.append(Sample(f"{record.name}@{start}", ids, labels))
    return samples


def _fit_completion(record: Encoded, max_length: int, counts: RecordCounts) -> list[Sample]:
    """Keep the whole completion if it fits after one token of prompt, and as much of the prompt's
    end as then fits."""
    assert record.prompt is not None
    answer = record.ids[record.prompt :]
    room = max_length - min(record.prompt, 1)  # the first token of a row is predicted by nothing
    if len(answer) > room:
        answer = answer[:room]
        counts.cut_completions += 1
    start = max(0, record.prompt - (max_length - len(answer)))
    counts.cut_prompts += start > 0
    ids = record.ids[start : record.prompt] + answer
    if len(ids) < 2:
        counts.skipped["no target"] += 1
        return []
    labels = [IGNORE_INDEX] * (record.prompt - start) + answer
    name = f"{record.name}@{start}"
    return [Sample(name, tuple(ids), tuple(labels), undated=record.undated)]


class EpochPlace(NamedTuple):
    """A place in an epoch: after `taken` samples of the block that begins at a record; `before`
    samples are in earlier blocks."""

    record: int = 0
    before: int = 0
    taken: int = 0


class Samples:
    """The training samples of a source: epoch after epoch, in an order that the seed fixes.

    A sequence of records is visited in an order drawn once, a stream as it comes. Their samples are
    shuffled (and packed) anew every epoch within blocks of SHUFFLE_BLOCK or a few more, so no more
    than a block is read ahead or kept. `num_samples` is counted before packing. A sequence that no
    sample comes out of is a DataError.

    Attributes:
        counts: of what became of the records read by the run.
        hold_out: leave out held-out samples.
        sized: the records are a sequence.
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
        self._records, self._config, self._seed, self.hold_out = records, config, seed, hold_out
        self._encoder = Encoder(tokenizer, config)
        self.counts = RecordCounts()
        self._counted: int | None = None
        self.sized = is_sequence(records)
        if self.sized and not self.count(1):
            counts = RecordCounts()
            list(_cut(self._numbered(), self._encoder, config.max_length, counts))
            raise no_sample(counts)

    def count(self, limit: int | None = None) -> int | None:
        """Count the samples of an epoch, no further than `limit`; None for a stream. The whole
        number is remembered, so that the records are tokenised for it once.
        """
        if not self.sized:
            return None
        if self._counted is None:
            if self._config.packing:
                samples: Iterator[Any] = self.walk(0, counts=RecordCounts())
            else:
                length, most = self._config.max_length, self._config.num_samples
                every = _cut(self._numbered(), self._encoder, length, RecordCounts())
                samples = itertools.islice(self._kept(every), most)
            count = sum(1 for _ in itertools.islice(samples, limit))
            if count == limit:
                return count
            self._counted = count
        return self._counted if limit is None else min(limit, self._counted)

    def epoch(self, number: int) -> Iterator[Sample]:
        """Yield the samples of an epoch, from 0."""
        return (sample for sample, _, _ in self.walk(number))

    def walk(
        self,
        epoch: int,
        start: EpochPlace = EpochPlace(),  # noqa: B008 - a constant
        end: float | None = None,
        counts: RecordCounts | None = None,
    ) -> Iterator[tuple[Sample, int, EpochPlace]]:
        """Yield samples from a place on, each with its epoch and the place after it.

        Ends at epoch `end` (default: after one; math.inf for never), or after an empty epoch.
        """
        end = epoch + 1 if end is None else end
        counts = self.counts if counts is None else counts
        while epoch < end:
            empty = start == EpochPlace()
            for step in self._walk(epoch, start, counts):
                empty = False
                yield step
            if empty:
                return
            epoch, start = epoch + 1, EpochPlace()

    def _walk(
        self, epoch: int, start: EpochPlace, counts: RecordCounts
    ) -> Iterator[tuple[Sample, int, EpochPlace]]:
        """Yield the rest of an epoch, block by block."""
        length, most = self._config.max_length, self._config.num_samples
        record, before, taken = start
        records = self._numbered(record)
        more = True
        while more and (most is None or before < most):
            first, samples = record, list[Sample]()
            room = SHUFFLE_BLOCK if most is None else min(SHUFFLE_BLOCK, most - before)
            while more and len(samples) < room:
                chunk = list(itertools.islice(records, _RECORDS_AT_ONCE))
                more = len(chunk) > 0
                record += len(chunk)
                samples += self._kept(_cut(iter(chunk), self._encoder, length, counts))
            samples = samples if most is None else samples[: most - before]
            rows = samples
            if self._config.packing:
                from npt.data.packing import pack

                rows = pack(samples, length)
            order = Permutation(len(rows), f"{self._seed}/{epoch}/{first}")
            for position in range(taken, len(rows)):
                yield rows[order[position]], epoch, EpochPlace(first, before, position + 1)
            before, taken = before + len(samples), 0

    def _kept(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        return (sample for sample in samples if not (self.hold_out and sample.heldout))

    def _numbered(self, start: int = 0) -> Iterator[tuple[int, Record]]:
        """Return records from position `start` of an epoch on, with their number in the data."""
        records: Any = self._records
        if self.sized:
            order = Permutation(len(records), f"{self._seed}/documents")
            numbers, same = itertools.tee(map(order.__getitem__, range(start, len(order))))
            return zip(numbers, map(records.__getitem__, same), strict=True)
        # a hub stream passes over records without handing them out
        if start and hasattr(records, "skip"):
            return enumerate(records.skip(start), start)
        return itertools.islice(enumerate(records), start, None)


def within(samples: Iterable[Sample], vocab_size: int) -> Iterator[Sample]:
    """Yield samples whose ids and targets all lie in [0, V)."""
    for sample in samples:
        targets = (label for label in sample.labels or () if label != IGNORE_INDEX)
        ids = (*sample.input_ids, *targets)
        if min(ids) >= 0 and max(ids) < vocab_size:
            yield sample
