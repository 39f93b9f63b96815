"""From records to samples: tokens of at most `max_length`, in a seeded order, with some held out.

The tokenizer's end token closes each text. A text longer than `max_length` becomes several samples and loses nothing, unless
a single token is left over: a sample of one token has nothing to predict or to attend to, and is dropped.
"""

from __future__ import annotations

import hashlib
import itertools
import numbers
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from npt.config import DataConfig
from npt.data.source import Record
from npt.errors import DataError

_HELDOUT_ONE_IN = 20
_TEXTS_AT_ONCE = 32
SHUFFLE_BLOCK = 1024
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Sample:
    """One row of a batch. `id` names its origin: the record, and the token it starts at."""

    id: str
    input_ids: tuple[int, ...]

    @property
    def heldout(self) -> bool:
        """One sample in twenty, by a hash of its tokens: the same on every machine, and for every copy of a sample."""
        digest = hashlib.sha256(",".join(map(str, self.input_ids)).encode()).digest()
        return int.from_bytes(digest[:4], "big") % _HELDOUT_ONE_IN == 0


def cut(records: Iterable[Record], tokenizer: Any, config: DataConfig) -> Iterator[Sample]:
    """Tokenise records and cut them to samples, in order and lazily.

    Args:
        records: {text_column: str} or {"input_ids": [int, ...]} each; an "id" entry names the record in reports.
        tokenizer: of the base model.
        config: `text_column` and `max_length`.

    Raises:
        DataError: a record without text or token ids, named by its id or its position.
    """
    return _cut_numbered(enumerate(records), tokenizer, config)


def _cut_numbered(numbered: Iterable[tuple[int, Record]], tokenizer: Any, config: DataConfig) -> Iterator[Sample]:
    """`cut` for records that come with their position in the data, whatever order they come in."""
    numbered = iter(numbered)
    while chunk := list(itertools.islice(numbered, _TEXTS_AT_ONCE)):
        for name, ids in _tokenise(chunk, tokenizer, config.text_column):
            for start in range(0, len(ids), config.max_length):
                window = ids[start : start + config.max_length]
                if len(window) > 1:
                    yield Sample(f"{name}@{start}", tuple(window))


def _tokenise(chunk: list[tuple[int, Record]], tokenizer: Any, column: str) -> Iterator[tuple[str, list[int]]]:
    checked = [_content(number, record, column) for number, record in chunk]
    texts = [content for _, content in checked if isinstance(content, str)]
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if texts else ())
    end = tokenizer.eos_token_id
    for name, content in checked:
        if not isinstance(content, str):
            yield name, content
            continue
        ids = list(next(encoded))
        if content:
            yield name, ids if end is None or ids[-1:] == [end] else [*ids, end]


def _content(number: int, record: Any, column: str) -> tuple[str, str | list[int]]:
    """A record's name and its text or token ids."""
    if not isinstance(record, Mapping):
        raise DataError(f"record {number} is a {type(record).__name__}, not a mapping like {{{column!r}: ...}}")
    name = str(record.get("id", number))
    if "input_ids" in record:
        ids = _integers(name, "input_ids", record["input_ids"])
        if record.get("attention_mask") is None:
            return name, ids
        mask = _integers(name, "attention_mask", record["attention_mask"])
        if len(mask) != len(ids):
            raise DataError(f"record {name} has {len(ids)} input_ids but an attention_mask of {len(mask)}; the two belong together")
        return name, [i for i, real in zip(ids, mask, strict=True) if real]  # padding that came with the data stays out
    text = record.get(column)
    if not isinstance(text, str):
        have = ", ".join(sorted(map(str, record))) or "nothing"
        what = "has no" if column not in record else f"has a {type(text).__name__} as"
        raise DataError(f"record {name} {what} {column!r} (it has: {have}); set --text_column")
    return name, text


def _integers(name: str, field: str, values: Any) -> list[int]:
    values = values.tolist() if hasattr(values, "tolist") else values  # an array or a tensor
    whole = isinstance(values, list | tuple) and all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in values)
    if not whole or any(abs(i) > _INT64_MAX for i in values):
        raise DataError(f"record {name} has {field} that are no list of 64-bit integers: {str(values)[:60]}")
    return [int(i) for i in values]


class Samples:
    """The training samples of a run: epoch after epoch, in an order that the seed fixes.

    A sequence of records is visited in an order shuffled once; its samples are cut when they are first needed, kept, and
    shuffled anew every epoch within blocks of `SHUFFLE_BLOCK`. So a run reads no more than it uses, and how long it is
    going to be changes nothing about the samples it starts with. Anything else (a generator, a stream) is read as it
    comes, and kept nowhere; a generator that is spent cannot serve a second epoch.

    Args:
        records: the data.
        tokenizer: of the base model.
        config: how to cut, and `num_samples`.
        seed: of both shuffles.
        hold_out: leave out the held-out samples (False where the evaluation has its own data).

    Raises:
        DataError: no sample comes out of a sequence.
    """

    def __init__(self, records: Iterable[Record], tokenizer: Any, config: DataConfig, *, seed: int, hold_out: bool = True):
        self._records, self._tokenizer, self._config, self._seed = records, tokenizer, config, seed
        self._hold_out = hold_out
        # A list, or a `datasets` object; a stream of either kind has no length.
        self.sized = hasattr(records, "__len__") and hasattr(records, "__getitem__")
        self._kept: list[Sample] = []
        self._coming: Iterator[Sample] = iter(())
        if self.sized:
            sequence: Any = records
            order = list(range(len(sequence)))
            random.Random(f"{seed}/documents").shuffle(order)
            self._coming = itertools.islice(self._cut((i, sequence[i]) for i in order), config.num_samples)
            if not self.count(1):
                raise DataError("no sample of two tokens or more came out of the data; check --dataset_name and --text_column")

    def count(self, limit: int | None = None) -> int | None:
        """Samples of an epoch, counted no further than `limit`; None where only reading on would tell."""
        if not self.sized:
            return None
        self._kept.extend(itertools.islice(self._coming, None if limit is None else max(0, limit - len(self._kept))))
        return len(self._kept) if limit is None else min(limit, len(self._kept))

    def epoch(self, number: int) -> Iterator[Sample]:
        """The samples of epoch `number` (from 0)."""
        if not self.sized:
            yield from itertools.islice(self._cut(enumerate(self._records)), self._config.num_samples)
            return
        for block in itertools.count():
            self.count((block + 1) * SHUFFLE_BLOCK)
            samples = self._kept[block * SHUFFLE_BLOCK : (block + 1) * SHUFFLE_BLOCK]
            if not samples:
                return
            random.Random(f"{self._seed}/{number}/{block}").shuffle(samples)
            yield from samples

    def _cut(self, numbered: Iterable[tuple[int, Record]]) -> Iterator[Sample]:
        samples = _cut_numbered(numbered, self._tokenizer, self._config)
        return (s for s in samples if not s.heldout) if self._hold_out else samples


def evaluation_samples(
    records: Iterable[Record],
    tokenizer: Any,
    config: DataConfig,
    count: int,
    vocab_size: int,
    own: Iterable[Record] | None = None,
) -> tuple[list[Sample], bool]:
    """`count` samples to evaluate on, and whether they are held out; the rule that training and evaluation share.

    Args:
        records: what is trained on; one sample in twenty of it is held out where it has no held-out records of its own.
        tokenizer, config: as for `cut`.
        count: samples at most.
        vocab_size: V; samples with ids outside it are passed over.
        own: held-out records of their own, which the samples are spread over.

    Returns:
        The samples. Where nothing is held out they are training samples, which the caller has to say.
    """
    if own is not None:
        samples = spread(within(cut(own, tokenizer, config), vocab_size), count)
    else:
        samples = held_out(records, tokenizer, config, count, vocab_size)
    if samples:
        return samples, True
    return list(itertools.islice(within(cut(records, tokenizer, config), vocab_size), count)), False


def held_out(records: Iterable[Record], tokenizer: Any, config: DataConfig, limit: int, vocab_size: int | None = None) -> list[Sample]:
    """The first `limit` held-out samples of the records: those that `Samples` leaves out; with `vocab_size`, only `within` it."""
    samples = (s for s in cut(records, tokenizer, config) if s.heldout)
    return list(itertools.islice(samples if vocab_size is None else within(samples, vocab_size), limit))


def within(samples: Iterable[Sample], vocab_size: int) -> Iterator[Sample]:
    """Samples whose ids all lie in [0, V). Training refuses the others one by one; an evaluation has to do without them."""
    return (s for s in samples if min(s.input_ids) >= 0 and max(s.input_ids) < vocab_size)


def spread(samples: Iterable[Sample], count: int) -> list[Sample]:
    """`count` samples drawn from the first 64 times as many, so that a few long texts do not make up an evaluation.

    The draw is the same in every run, whatever its seed: figures of different runs are figures on the same tokens.
    """
    pool = list(itertools.islice(samples, 64 * count))
    return pool if len(pool) <= count else random.Random("evaluation").sample(pool, count)
