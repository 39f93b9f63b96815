"""From records to samples: tokens of at most `max_length`, in a seeded order, with some held out.

The tokenizer's end token closes each text. A text longer than `max_length` becomes several samples
and loses nothing, unless a single token is left over: a sample of one token has nothing to predict
or to attend to, and is dropped. A prompt with its completion is one sample always: what does not
fit is cut from the prompt's front, then from the completion's end, and counted.

Which sample stands where in an epoch depends on data, settings, seed and epoch alone, and is part
of every saved position: it must never change.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.encoding import Counts, Encoded, encode
from npt.data.order import Permutation
from npt.data.packing import pack
from npt.data.sample import IGNORE_INDEX, Sample
from npt.data.source import Record
from npt.errors import DataError

_RECORDS_AT_ONCE = 32
SHUFFLE_BLOCK = 1024
"""Samples, at least, among which an epoch's order is shuffled."""


def cut(
    records: Iterable[Record], tokenizer: Any, config: DataConfig, counts: Counts | None = None
) -> Iterator[Sample]:
    """Tokenise records and cut them to samples, in order and lazily.

    Args:
        records: {text_column: str}, {"prompt": ..., "completion": ...} or {"input_ids": [int, ...]}
            each; an "id" entry names the record in reports.
        tokenizer: of the base model.
        config: columns and `max_length`.
        counts: told what becomes of each record.

    Raises:
        DataError: a record with nothing of this in it, named by its id or its position.
    """
    counts = counts if counts is not None else Counts()
    for _, samples in _cut_numbered(enumerate(records), tokenizer, config, counts):
        yield from samples


def _cut_numbered(
    numbered: Iterable[tuple[int, Record]], tokenizer: Any, config: DataConfig, counts: Counts
) -> Iterator[tuple[int, list[Sample]]]:
    """Chunks of records, which come with their position in the data: how many they were, and their
    samples.
    """
    numbered = iter(numbered)
    while chunk := list(itertools.islice(numbered, _RECORDS_AT_ONCE)):
        samples = []
        for encoded in encode(chunk, tokenizer, config, counts):
            for sample in _fit(encoded, config.max_length, counts):
                counts.samples += 1
                counts.tokens += len(sample.input_ids)
                samples.append(sample)
        yield len(chunk), samples


def _fit(record: Encoded, max_length: int, counts: Counts) -> Iterator[Sample]:
    """What becomes of a record; text is cut into windows that lie side by side."""
    if record.prompt is not None:
        yield from _fit_completion(record, record.prompt, max_length, counts)
        return
    pieces = 0
    for start in range(0, len(record.ids), max_length):
        window = slice(start, start + max_length)
        labels = None if record.labels is None else tuple(record.labels[window])
        if len(record.ids[window]) < 2:
            continue
        pieces += 1
        if labels is not None and all(label == IGNORE_INDEX for label in labels[1:]):
            counts.skipped["no target"] += 1
            continue
        yield Sample(f"{record.name}@{start}", tuple(record.ids[window]), labels)
    if not pieces:
        counts.skipped["fewer than two tokens"] += 1


def _fit_completion(
    record: Encoded, prompt: int, max_length: int, counts: Counts
) -> Iterator[Sample]:
    """The completion whole if it fits behind one token of prompt, and as much of the prompt's end
    as there is room for.
    """
    answer = record.ids[prompt:]
    room = max_length - min(prompt, 1)  # the first token of a row is predicted by nothing
    if len(answer) > room:
        answer = answer[:room]
        counts.cut_completions += 1
    kept = min(prompt, max_length - len(answer))
    if kept < prompt:
        counts.cut_prompts += 1
    ids = record.ids[prompt - kept : prompt] + answer
    if len(ids) < 2:
        counts.skipped["no target"] += 1
        return
    yield Sample(f"{record.name}@{prompt - kept}", tuple(ids), (*[IGNORE_INDEX] * kept, *answer))


class Place(NamedTuple):
    """Where in an epoch a run stands: in front of sample `taken` of the block that begins at record
    `record`, with `before` samples in the blocks in front of it. Three numbers find it again,
    whatever was read, skipped or shuffled."""

    record: int = 0
    before: int = 0
    taken: int = 0


class Samples:
    """The training samples of a run: epoch after epoch, in an order that the seed fixes.

    A sequence of records is visited in an order drawn once; a stream as it comes. Either way the
    samples of an epoch are shuffled (and packed) within blocks of SHUFFLE_BLOCK or a few more, anew
    every epoch, and tokenised when they are needed: a run reads no more than a block beyond what it
    uses, and keeps no more than a block. A generator that is spent cannot serve a second epoch.

    Args:
        records: the data.
        tokenizer: of the base model.
        config: how to cut, `num_samples` (counted before packing) and `packing`.
        seed: of both shuffles.
        hold_out: leave out the held-out samples (False where the evaluation has its own data).

    Raises:
        DataError: no sample comes out of a sequence.
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
        self._records, self._tokenizer, self._config, self._seed = records, tokenizer, config, seed
        self.hold_out = hold_out
        self.counts = Counts()
        # A list, or a `datasets` object; a stream of either kind has no length.
        self.sized = hasattr(records, "__len__") and hasattr(records, "__getitem__")
        if self.sized and not self.count(1):
            counts = Counts()
            for _ in _cut_numbered(self._numbered(0), tokenizer, config, counts):
                pass
            raise no_sample(counts)

    def count(self, limit: int | None = None) -> int | None:
        """Samples of an epoch, counted no further than `limit`; None where only reading on would
        tell. Reads and cuts them.
        """
        if not self.sized:
            return None
        total = 0
        for size in self._sizes():
            total += size
            if limit is not None and total >= limit:
                return limit
        return total

    def _sizes(self) -> Iterator[int]:
        """Samples of an epoch, in as small steps as they can be told in."""
        if self._config.packing:
            yield from (len(block) for _, block in self._blocks(0, Place(), Counts()))
            return
        left = self._config.num_samples
        for _, samples in _cut_numbered(self._numbered(0), self._tokenizer, self._config, Counts()):
            size = sum(not (self.hold_out and s.heldout) for s in samples)
            yield size if left is None else min(size, left)
            left = None if left is None else max(0, left - size)
            if left == 0:
                return

    def epoch(self, number: int) -> Iterator[Sample]:
        """The samples of epoch `number` (from 0)."""
        return (sample for sample, _ in self.walk(number))

    def walk(self, number: int, start: Place = Place()) -> Iterator[tuple[Sample, Place]]:  # noqa: B008 - a constant
        """The samples of an epoch from a place on, each with the place behind it."""
        for place, block in self._blocks(number, start, self.counts):
            for taken in range(start.taken if place.record == start.record else 0, len(block)):
                yield block[taken], place._replace(taken=taken + 1)

    def _blocks(
        self, number: int, start: Place, counts: Counts
    ) -> Iterator[tuple[Place, list[Sample]]]:
        """Blocks of an epoch from the one that `start` lies in; each depends on its place, the
        epoch and the seed alone.
        """
        config = self._config
        chunks = _cut_numbered(self._numbered(start.record), self._tokenizer, config, counts)
        record, before, more = start.record, start.before, True
        while more and (config.num_samples is None or before < config.num_samples):
            first = record
            samples: list[Sample] = []
            wanted = (
                SHUFFLE_BLOCK
                if config.num_samples is None
                else min(SHUFFLE_BLOCK, config.num_samples - before)
            )
            while len(samples) < wanted:
                read, cut_samples = next(chunks, (0, []))
                record += read
                samples += [s for s in cut_samples if not (self.hold_out and s.heldout)]
                if not read:
                    more = False
                    break
            place = Place(first, before)
            samples = (
                samples if config.num_samples is None else samples[: config.num_samples - before]
            )
            before += len(samples)
            if config.packing:
                samples = pack(samples, config.max_length)
            if samples:
                order = Permutation(len(samples), f"{self._seed}/{number}/{first}")
                yield place, [samples[order[i]] for i in range(len(order))]

    def _numbered(self, start: int) -> Iterator[tuple[int, Record]]:
        """Records from position `start` of the epoch on, with their number in the data."""
        if self.sized:
            records: Any = self._records
            order = Permutation(len(records), f"{self._seed}/documents")
            return ((order[i], records[order[i]]) for i in range(start, len(order)))
        stream: Any = self._records
        # a hub stream passes over records without handing them out
        if start and hasattr(stream, "skip"):
            return enumerate(stream.skip(start), start)
        return itertools.islice(enumerate(stream), start, None)


def no_sample(counts: Counts) -> DataError:
    """What to say of data that nothing came of but `counts`."""
    reasons = [f"{counts.samples:,} held out"] if counts.samples else []
    reasons += [counts.lost()] if counts.lost() else []
    of = f" of {counts.records:,} records ({', '.join(reasons)})" if reasons else " of the data"
    return DataError(
        f"no sample to train on came{of}; check --dataset_name and the columns (--text_column,"
        " --prompt_column)"
    )


def evaluation_samples(
    records: Iterable[Record],
    tokenizer: Any,
    config: DataConfig,
    count: int,
    vocab_size: int,
    own: Iterable[Record] | None = None,
) -> tuple[list[Sample], bool]:
    """`count` samples to evaluate on, and whether they are held out; the rule that training and
    evaluation share.

    Args:
        records: what is trained on; one sample in twenty of it is held out where it has no held-out
            records of its own.
        tokenizer, config: as for `cut`.
        count: samples at most.
        vocab_size: V; samples with ids outside it are passed over.
        own: held-out records of their own, which the samples are spread over.

    Returns:
        The samples. Where nothing is held out they are training samples, which the caller has to
        say.
    """
    if own is not None:
        samples = spread(within(cut(own, tokenizer, config), vocab_size), count)
    else:
        samples = held_out(records, tokenizer, config, count, vocab_size)
    if samples:
        return samples, True
    return list(itertools.islice(within(cut(records, tokenizer, config), vocab_size), count)), False


def held_out(
    records: Iterable[Record],
    tokenizer: Any,
    config: DataConfig,
    limit: int,
    vocab_size: int | None = None,
) -> list[Sample]:
    """The first `limit` held-out samples of the records: those that `Samples` leaves out; with
    `vocab_size`, only `within` it.
    """
    samples = (s for s in cut(records, tokenizer, config) if s.heldout)
    return list(
        itertools.islice(samples if vocab_size is None else within(samples, vocab_size), limit)
    )


def within(samples: Iterable[Sample], vocab_size: int) -> Iterator[Sample]:
    """Samples whose ids and targets all lie in [0, V). Training refuses the others one by one; an
    evaluation does without them.
    """
    for sample in samples:
        ids = (
            *sample.input_ids,
            *(label for label in sample.labels or () if label != IGNORE_INDEX),
        )
        if min(ids) >= 0 and max(ids) < vocab_size:
            yield sample


def spread(samples: Iterable[Sample], count: int) -> list[Sample]:
    """`count` samples drawn from the first 64 times as many, so that a few long texts do not make
    up an evaluation.

    The draw is the same in every run, whatever its seed: figures of different runs are figures on
    the same tokens.
    """
    pool = list(itertools.islice(samples, 64 * count))
    return pool if len(pool) <= count else random.Random("evaluation").sample(pool, count)
