"""What a run would be trained on: counts, ids and a few decoded samples of a data set, before any
base is loaded.

One pass in constant memory: a histogram of lengths, reservoirs of a few samples, a bounded sketch
of hashes.
"""

from __future__ import annotations

import hashlib
import random
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from typing import Any, Generic, TypeVar

from npt.config import DataConfig
from npt.data.encoding import Counts
from npt.data.packing import pack
from npt.data.sample import IGNORE_INDEX, Sample
from npt.data.samples import SHUFFLE_BLOCK, cut
from npt.data.source import BUILTIN, Record, check_source
from npt.tools.data_doctor.broken import Broken, Origin, Reading

SHOWN = 3
"""Samples that are decoded."""

EDGE = 24
"""Tokens that are shown of either end of a longer stretch."""

STRETCHES = 8
"""Stretches of targets and of masked tokens that are shown of a sample, at most."""

SKETCH = 1 << 16
"""Distinct hashes that are kept to find copies; beyond it, of a part of all hashes."""

PADDING_WORTH_SAYING = 0.5
CUT_WORTH_SAYING = SKIPPED_WORTH_SAYING = 0.01
COPIES_WORTH_SAYING = 0.05

_RECORDS_AT_ONCE = 32

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """Something to mend, and how. fatal: training would stop at it or refuse batches; else it
    wastes time or spoils a figure.
    """

    problem: str
    remedy: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one kind, decoded. kind: target, masked, or left out (its text is
    empty).
    """

    kind: str
    tokens: int
    text: str


@dataclass(frozen=True)
class Shown:
    """A sample for reading, with its loss mask."""

    id: str
    tokens: int
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class DataReport:
    """What came out of a data set.

    complete: False where `max_records` ended the pass. blank_lines: of .jsonl files. shortest,
    median, longest: tokens of a sample. padding, padding_packed: expected share of a batch's
    tokens, without and with packing. heldout: samples; None where the source has held-out records
    of its own. targets: tokens whose label is not -100. moved_labels: targets whose label is
    another token. outside: ids and labels outside the vocabulary, the first of them in the sample
    `outside_first`. double_starts: samples that begin with two start tokens. copies: share of
    samples that repeat another one; copies_exact: whether it was counted or estimated.
    """

    name: str
    complete: bool
    counts: Counts
    blank_lines: int
    broken: tuple[Broken, ...]
    broken_total: int
    shortest: int
    median: int
    longest: int
    batch_size: int
    packing: bool
    padding: float
    padding_packed: float
    heldout: int | None
    targets: int
    moved_labels: int
    id_min: int | None
    id_max: int | None
    vocab_size: int
    outside: int
    outside_first: str | None
    double_starts: int
    copies: float
    copies_exact: bool
    shown: tuple[Shown, ...]
    problems: tuple[Problem, ...] = ()

    @property
    def trainable(self) -> bool:
        """No problem that training would stop at."""
        return not any(problem.fatal for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        values = asdict(self)
        counts = self.counts.as_dict()
        del values["counts"]
        return {
            "name": values.pop("name"),
            "complete": values.pop("complete"),
            **counts,
            **values,
            "trainable": self.trainable,
        }


def examine(
    config: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    *,
    batch_size: int = 4,
    seed: int = 0,
    max_records: int | None = None,
) -> DataReport:
    """Read a data set once, as training would, and report on it; what is broken is noted and passed
    over.

    Args:
        config: the data and how they are cut. `num_samples` is not applied.
        tokenizer: of the base model.
        vocab_size: V, of the base model.
        batch_size: for the padding.
        seed: of the samples that are shown.
        max_records: look at the first ones only.

    Raises:
        DataError: there is no such data set, or nothing of it can be opened.
    """
    check_source(config)
    reading, tally = Reading(config), _Tally(tokenizer, vocab_size, seed)
    records = iter(reading)
    chosen = records if max_records is None else islice(records, max_records)
    while chunk := list(islice(chosen, _RECORDS_AT_ONCE)):
        for sample in _samples(chunk, tokenizer, config, tally.counts, reading):
            tally.add(sample)
    complete = next(records, None) is None
    packed = Lengths()
    for row in pack(tally.block.kept, config.max_length):
        packed.add(len(row.input_ids))
    report = DataReport(
        name=config.dataset_name,
        complete=complete,
        counts=tally.counts,
        blank_lines=reading.blank_lines,
        broken=tuple(sorted(reading.broken, key=lambda b: (b.where, b.line or 0))),
        broken_total=reading.broken_total,
        shortest=tally.lengths.at(0.0),
        median=tally.lengths.at(0.5),
        longest=tally.lengths.at(1.0),
        batch_size=batch_size,
        packing=config.packing,
        padding=tally.lengths.padding(batch_size),
        padding_packed=packed.padding(batch_size),
        heldout=None if config.dataset_name == BUILTIN else tally.heldout,
        targets=tally.targets,
        moved_labels=tally.moved_labels,
        id_min=tally.id_min,
        id_max=tally.id_max,
        vocab_size=vocab_size,
        outside=tally.outside,
        outside_first=tally.outside_first,
        double_starts=tally.double_starts,
        copies=tally.copies.share,
        copies_exact=tally.copies.exact,
        shown=tuple(show(sample, tokenizer, vocab_size) for sample in tally.shown.kept),
    )
    return replace(report, problems=tuple(_problems(report)))


def _samples(
    chunk: list[tuple[Record, Origin]],
    tokenizer: Any,
    config: DataConfig,
    counts: Counts,
    reading: Reading,
) -> Iterator[Sample]:
    """The samples of some records, `counts` and broken records filled in."""
    trial = Counts()
    try:
        samples = list(cut((record for record, _ in chunk), tokenizer, config, trial))
    except Exception as error:  # a tokenizer or a template may raise anything
        if len(chunk) > 1:
            for pair in chunk:
                yield from _samples([pair], tokenizer, config, counts, reading)
            return
        reading.note_record(*chunk[0], error)
        return
    for name, value in vars(trial).items():
        setattr(counts, name, getattr(counts, name) + value)
    yield from samples


class Lengths:
    """A histogram of lengths."""

    def __init__(self) -> None:
        self._histogram: Counter[int] = Counter()

    def add(self, length: int) -> None:
        self._histogram[length] += 1

    def at(self, share: float) -> int:
        """The length that a share of all are not longer than: 0 the shortest, 0.5 the (lower)
        median; 0 of none.
        """
        passed, total = 0, self._histogram.total()
        for length in sorted(self._histogram):
            passed += self._histogram[length]
            if passed >= share * total:
                return length
        return 0

    def padding(self, batch_size: int) -> float:
        """Expected share of padding in a batch of `batch_size` drawn without replacement, padded to
        its longest.

        P(longest <= l) is the chance that all of them are among the samples not longer than l.
        """
        total = self._histogram.total()
        if not total:
            return 0.0
        drawn = min(batch_size, total)
        longest = below = 0.0
        passed = 0
        for length in sorted(self._histogram):
            passed += self._histogram[length]
            up_to = 1.0
            for i in range(drawn):
                up_to *= max(0, passed - i) / (total - i)
            longest += length * (up_to - below)
            below = up_to
        mean = sum(length * n for length, n in self._histogram.items()) / total
        return max(0.0, 1 - mean / longest)


class Copies:
    """The share of samples that repeat another one, in bounded memory.

    Hashes are counted; when too many distinct ones are kept, the half of them that a further bit
    tells is dropped and left out from then on (distinct sampling: Gibbons, VLDB 2001). What is kept
    is a random part of the distinct samples with all their copies.
    """

    def __init__(self, limit: int = SKETCH):
        self._limit, self._mask = limit, 0
        self._counts: Counter[int] = Counter()

    def add(self, ids: Iterable[int]) -> None:
        key = int.from_bytes(
            hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest(), "big"
        )
        if key & self._mask:
            return
        self._counts[key] += 1
        while len(self._counts) > self._limit:
            self._mask = self._mask << 1 | 1
            self._counts = Counter({k: n for k, n in self._counts.items() if not k & self._mask})

    @property
    def exact(self) -> bool:
        """Counted, not estimated."""
        return self._mask == 0

    @property
    def share(self) -> float:
        total = self._counts.total()
        return 1 - len(self._counts) / total if total else 0.0


class Reservoir(Generic[T]):
    """A uniform draw of `size` of the things that are added (Vitter's algorithm R), in the order
    they came in.
    """

    def __init__(self, size: int, seed: int):
        self._size, self._random = size, random.Random(seed)
        self._kept: list[tuple[int, T]] = []
        self._seen = 0

    def add(self, thing: T) -> None:
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append((self._seen, thing))
        elif (place := self._random.randrange(self._seen)) < self._size:
            self._kept[place] = (self._seen, thing)

    @property
    def kept(self) -> list[T]:
        return [thing for _, thing in sorted(self._kept, key=lambda pair: pair[0])]


class _Tally:
    """What is counted over samples."""

    def __init__(self, tokenizer: Any, vocab_size: int, seed: int):
        self.counts, self.lengths, self.copies = Counts(), Lengths(), Copies()
        self.shown: Reservoir[Sample] = Reservoir(SHOWN, seed)
        self.block: Reservoir[Sample] = Reservoir(SHUFFLE_BLOCK, seed)  # what is packed together
        self.heldout = self.targets = self.moved_labels = self.outside = self.double_starts = 0
        self.id_min: int | None = None
        self.id_max: int | None = None
        self.outside_first: str | None = None
        self._vocab_size, self._start = vocab_size, getattr(tokenizer, "bos_token_id", None)

    def add(self, sample: Sample) -> None:
        ids = sample.input_ids
        self.lengths.add(len(ids))
        self.copies.add(ids)
        self.shown.add(sample)
        self.block.add(sample)
        self.heldout += sample.heldout
        self.double_starts += self._start is not None and ids[:2] == (self._start, self._start)
        low, high = min(ids), max(ids)
        self.id_min = low if self.id_min is None else min(self.id_min, low)
        self.id_max = high if self.id_max is None else max(self.id_max, high)
        outside = (
            sum(not 0 <= i < self._vocab_size for i in ids)
            if low < 0 or high >= self._vocab_size
            else 0
        )
        if sample.labels is None:
            self.targets += len(ids)
        else:
            for token, label in zip(ids, sample.labels, strict=True):
                if label != IGNORE_INDEX:
                    self.targets += 1
                    self.moved_labels += label != token
                    outside += label != token and not 0 <= label < self._vocab_size
        if outside and self.outside_first is None:
            self.outside_first = sample.id
        self.outside += outside


def show(sample: Sample, tokenizer: Any, vocab_size: int) -> Shown:
    """Decode a sample stretch by stretch; long stretches lose their middle, ids outside the
    vocabulary are named by number.
    """
    labels = sample.labels if sample.labels is not None else sample.input_ids
    kinds = ["masked" if label == IGNORE_INDEX else "target" for label in labels]
    stretches = []
    for kind, group in groupby(zip(kinds, sample.input_ids, strict=True), key=lambda pair: pair[0]):
        ids = [token for _, token in group]
        stretches.append(Stretch(kind, len(ids), _shortened(ids, tokenizer, vocab_size)))
    if len(stretches) > STRETCHES:
        head, middle, tail = (
            stretches[: STRETCHES // 2],
            stretches[STRETCHES // 2 : -STRETCHES // 2],
            stretches[-STRETCHES // 2 :],
        )
        stretches = [*head, Stretch("left out", sum(s.tokens for s in middle), ""), *tail]
    return Shown(sample.id, len(sample.input_ids), tuple(stretches))


def _shortened(ids: list[int], tokenizer: Any, vocab_size: int) -> str:
    if len(ids) <= 2 * EDGE + 1:
        return _decoded(ids, tokenizer, vocab_size)
    head, tail = ids[:EDGE], ids[-EDGE:]
    return (
        f"{_decoded(head, tokenizer, vocab_size)} … {len(ids) - 2 * EDGE} tokens …"
        f" {_decoded(tail, tokenizer, vocab_size)}"
    )


def _decoded(ids: list[int], tokenizer: Any, vocab_size: int) -> str:
    parts = []
    for known, group in groupby(ids, key=lambda i: 0 <= i < vocab_size):
        run = list(group)
        if known:
            parts.append(escaped(tokenizer.decode(run, skip_special_tokens=False)))
        else:
            parts += [f"<no token {i}>" for i in run]
    return "".join(parts)


def escaped(text: str) -> str:
    """`text` on one line, with what does not show made visible: control and format characters,
    surrogates, other separators, and the backslash that they are written with."""
    return "".join(
        _escape(c) if c == "\\" or (c != " " and unicodedata.category(c)[0] in "CZ") else c
        for c in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _problems(report: DataReport) -> Iterator[Problem]:
    """What is to be mended, the worst first."""
    counts = report.counts
    if report.broken_total:
        what = f"{report.broken_total:,} broken place" + ("s" if report.broken_total > 1 else "")
        yield Problem(
            f"{what}, the first at {report.broken[0].place}",
            "mend or remove what is listed",
            fatal=True,
        )
    if not counts.samples and not report.broken_total:
        yield Problem(
            "no sample of two tokens or more came out",
            "check --dataset_name and --text_column",
            fatal=True,
        )
    if report.outside:
        yield Problem(
            f"{report.outside:,} ids outside the vocabulary [0, {report.vocab_size}), the first in"
            f" sample {report.outside_first}",
            "encode the data with the tokenizer of --model_name",
            fatal=True,
        )
    if not counts.samples:
        return
    if report.moved_labels:
        yield Problem(
            f"{report.moved_labels:,} labels are not the token they stand at",
            "leave labels unshifted, the loss moves them by one; ignore this if other targets are"
            " meant",
        )
    if (
        not report.packing
        and report.padding > PADDING_WORTH_SAYING
        and report.padding_packed < report.padding / 2
    ):
        yield Problem(
            f"{report.padding:.0%} of a batch is padding",
            f"use --packing ({report.padding_packed:.0%})",
        )
    cut_samples = counts.cut_prompts + counts.cut_completions
    if cut_samples > CUT_WORTH_SAYING * counts.samples:
        what = f"{counts.cut_prompts:,} prompts and {counts.cut_completions:,} completions"
        yield Problem(f"{what} of {counts.samples:,} samples are cut", "raise --max_length")
    skipped = counts.skipped.total()
    if skipped > SKIPPED_WORTH_SAYING * counts.records:
        yield Problem(
            f"{listed(counts.skipped)} of {counts.records:,} records are skipped",
            "remove them if that is not meant",
        )
    if report.double_starts:
        yield Problem(
            f"{report.double_starts:,} samples begin with two start tokens",
            "take the start token out of the text, the tokenizer adds it",
        )
    if report.copies > COPIES_WORTH_SAYING:
        yield Problem(
            f"{report.copies:.0%} of the samples are copies of others",
            "remove the copies, or they count several times",
        )
    if report.heldout == 0:
        yield Problem(
            "no sample is held out (one in twenty is)",
            "bring more data, or the figures will be of training text",
        )


def listed(skipped: Mapping[str, int]) -> str:
    """Counts by reason, in words."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
