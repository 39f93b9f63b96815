"""The report on a data set before any base is loaded: counts, ids, a few decoded samples, and what
to mend. One pass in constant memory.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from npt.config import DataConfig
from npt.data.batch import IGNORE_INDEX, Sample
from npt.data.encoding import Counts
from npt.data.packing import pack
from npt.data.report import listed_columns
from npt.data.samples import SHUFFLE_BLOCK, cut
from npt.data.source import OWN_HELDOUT, Record, check_source
from npt.errors import printable
from npt.tools.data_doctor.reading import Broken, Origin, Reading
from npt.tools.data_doctor.statistics import Copies, Lengths, Reservoir

SHOWN = 3  # samples that are decoded
EDGE = 24  # tokens shown of either end of a longer stretch
STRETCHES = 8  # stretches shown of a sample, at most
_RECORDS_AT_ONCE = 32


@dataclass(frozen=True)
class Problem:
    """Something to mend, and how. fatal: training would stop at it or refuse batches."""

    problem: str
    remedy: str
    fatal: bool = False

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of one kind, decoded. kind: target, masked, or left out."""

    kind: str
    tokens: int
    text: str


@dataclass(frozen=True)
class Shown:
    """A sample for reading, with its loss mask."""

    id: str
    tokens: int
    stretches: tuple[Stretch, ...]


@dataclass
class DataReport:
    """The figures of a data set.

    complete: False if `max_records` ended the pass. shortest, median, longest: tokens of a sample.
    padding, padding_packed: expected share of a batch, without and with packing. heldout: samples;
    None if the source has held-out records of its own. moved_labels: targets whose label is another
    token. answers, ended: samples with labels, and those of them with one of `end_tokens` among
    their targets. pad_token: that of the tokenizer, with its id. outside: ids and labels outside
    the vocabulary. copies: share of samples that repeat another one, counted or (copies_exact
    False) estimated.
    """

    name: str
    batch_size: int
    packing: bool
    vocab_size: int
    heldout: int | None
    complete: bool = True
    counts: Counts = field(default_factory=Counts)
    blank_lines: int = 0
    broken: tuple[Broken, ...] = ()
    broken_total: int = 0
    shortest: int = 0
    median: int = 0
    longest: int = 0
    padding: float = 0.0
    padding_packed: float = 0.0
    targets: int = 0
    moved_labels: int = 0
    answers: int = 0
    ended: int = 0
    end_tokens: tuple[str, ...] = ()
    pad_token: tuple[str, int] | None = None
    id_min: int | None = None
    id_max: int | None = None
    outside: int = 0
    outside_first: str | None = None
    double_starts: int = 0
    copies: float = 0.0
    copies_exact: bool = True
    shown: tuple[Shown, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def trainable(self) -> bool:
        """True if training would stop at no problem."""
        return not any(problem.fatal for problem in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        values = asdict(self) | self.counts.as_dict() | {"trainable": self.trainable}
        del values["counts"]
        return values

    def add(self, sample: Sample, start: int | None, ends: Collection[int]) -> None:
        """Count a sample's ids and labels; `start` and `ends` are start and end tokens."""
        ids, size = sample.input_ids, self.vocab_size
        low, high = min(ids), max(ids)
        self.id_min = low if self.id_min is None else min(self.id_min, low)
        self.id_max = high if self.id_max is None else max(self.id_max, high)
        self.double_starts += start is not None and ids[:2] == (start, start)
        if self.heldout is not None:
            self.heldout += sample.heldout
        outside = sum(not 0 <= i < size for i in ids) if low < 0 or high >= size else 0
        if sample.labels is None:
            self.targets += len(ids)
        else:
            pairs = zip(ids, sample.labels, strict=True)
            targets = [(token, label) for token, label in pairs if label != IGNORE_INDEX]
            moved = [label for token, label in targets if label != token]
            self.answers += 1
            self.ended += any(label in ends for _, label in targets)
            self.targets += len(targets)
            self.moved_labels += len(moved)
            outside += sum(not 0 <= label < size for label in moved)
        self.outside += outside
        if outside and self.outside_first is None:
            self.outside_first = sample.id


def examine(
    config: DataConfig, tokenizer: Any, vocab_size: int, *, batch_size: int = 4, seed: int = 0,
    max_records: int | None = None, ends: int | Sequence[int] | None = None,
) -> DataReport:  # fmt: skip
    """Read a data set once, as training would, and report on it; faults are noted and passed over.
    `num_samples` is not applied. max_records: look at the first ones only. ends: further end
    tokens than the tokenizer's, as a base's configuration has them. Raise DataError if nothing of
    it can be opened.
    """
    check_source(config)
    name, own = config.dataset_name, config.dataset_name in OWN_HELDOUT
    report = DataReport(name, batch_size, config.packing, vocab_size, None if own else 0)
    reading, lengths, packed, copies = Reading(config), Lengths(), Lengths(), Copies()
    shown, block = Reservoir[Sample](SHOWN, seed), Reservoir[Sample](SHUFFLE_BLOCK, seed)
    start = getattr(tokenizer, "bos_token_id", None)
    further = ends if isinstance(ends, Sequence) else (ends,)
    all_ends = {i for i in (tokenizer.eos_token_id, *further) if i is not None}
    report.end_tokens = tuple(map(str, tokenizer.convert_ids_to_tokens(sorted(all_ends))))
    if tokenizer.pad_token_id is not None:
        report.pad_token = str(tokenizer.pad_token), tokenizer.pad_token_id
    records = iter(reading)
    chosen = records if max_records is None else islice(records, max_records)
    while chunk := list(islice(chosen, _RECORDS_AT_ONCE)):
        for sample in _samples(chunk, tokenizer, config, report.counts, reading):
            report.add(sample, start, all_ends)
            lengths.add(len(sample.input_ids))
            copies.add(sample.input_ids)
            shown.add(sample)
            block.add(sample)
    report.complete = next(records, None) is None
    for row in pack(block.kept, config.max_length):
        packed.add(len(row.input_ids))
    report.blank_lines, report.broken_total = reading.blank_lines, reading.broken_total
    report.broken = tuple(sorted(reading.broken, key=lambda b: (b.where, b.line or 0)))
    report.shortest, report.median, report.longest = map(lengths.at, (0.0, 0.5, 1.0))
    report.padding, report.padding_packed = lengths.padding(batch_size), packed.padding(batch_size)
    report.copies, report.copies_exact = copies.share, copies.exact
    report.shown = tuple(show(sample, tokenizer, vocab_size) for sample in shown.kept)
    report.problems = tuple(_problems(report))
    return report


def _samples(
    chunk: list[tuple[Record, Origin]], tokenizer: Any, config: DataConfig, counts: Counts,
    reading: Reading,
) -> Iterator[Sample]:  # fmt: skip
    """Yield the samples of some records, counted; a record that cannot be encoded is noted."""
    own = Counts()
    try:
        samples = list(cut((record for record, _ in chunk), tokenizer, config, own))
    except Exception as error:  # a tokenizer or a template may raise anything
        if len(chunk) == 1:
            reading.note_record(*chunk[0], error)
            return
        for pair in chunk:
            yield from _samples([pair], tokenizer, config, counts, reading)
        return
    for name, value in vars(own).items():
        setattr(counts, name, getattr(counts, name) + value)
    yield from samples


def show(sample: Sample, tokenizer: Any, vocab_size: int) -> Shown:
    """Decode a sample stretch by stretch; long stretches and long samples lose their middle."""
    labels = sample.labels if sample.labels is not None else sample.input_ids
    kinds = ["masked" if label == IGNORE_INDEX else "target" for label in labels]
    stretches = []
    for kind, group in groupby(zip(kinds, sample.input_ids, strict=True), key=lambda pair: pair[0]):
        ids, text = [token for _, token in group], ""
        if len(ids) > 2 * EDGE + 1:
            text = _decoded(ids[:EDGE], tokenizer, vocab_size)
            text += f" … {len(ids) - 2 * EDGE} tokens … "
        text += _decoded(ids[-EDGE:] if text else ids, tokenizer, vocab_size)
        stretches.append(Stretch(kind, len(ids), text))
    half = STRETCHES // 2
    if len(stretches) > STRETCHES:
        tokens = sum(stretch.tokens for stretch in stretches[half:-half])
        stretches[half:-half] = [Stretch("left out", tokens, "")]
    return Shown(sample.id, len(sample.input_ids), tuple(stretches))


def _decoded(ids: list[int], tokenizer: Any, vocab_size: int) -> str:
    """Return the text of ids; those outside the vocabulary by number."""
    parts = []
    for known, group in groupby(ids, key=lambda i: 0 <= i < vocab_size):
        if known:
            parts.append(escaped(tokenizer.decode(list(group), skip_special_tokens=False)))
        else:
            parts += [f"<no token {i}>" for i in group]
    return "".join(parts)


def escaped(text: str) -> str:
    """Return a text on one line, with escapes for the backslash and what does not show."""
    return "".join(
        c.encode("unicode_escape").decode("ascii")
        if c == "\\" or (c != " " and unicodedata.category(c)[0] in "CZ")
        else c
        for c in text
    )


def listed(skipped: Mapping[str, int]) -> str:
    """Return counts by reason, in words."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))


def _problems(report: DataReport) -> Iterator[Problem]:
    """Yield the problems, the worst first."""
    counts = report.counts
    if report.broken_total:
        places = "broken place" if report.broken_total == 1 else "broken places"
        first = f"{report.broken_total:,} {places}, the first at {report.broken[0].place}"
        yield Problem(first, "mend or remove what is listed", fatal=True)
    elif not counts.samples:
        what = "no sample of two tokens or more came out"
        yield Problem(what, "check --dataset_name and --text_column", fatal=True)
    if report.outside:
        what = f"{report.outside:,} ids outside the vocabulary [0, {report.vocab_size})"
        yield Problem(
            f"{what}, the first in sample {report.outside_first}",
            "encode the data with the tokenizer of --model_name",
            fatal=True,
        )
    if not counts.samples:
        return
    if report.pad_token is not None and not 0 <= report.pad_token[1] < report.vocab_size:
        token, pad = report.pad_token
        yield Problem(
            f"the pad token {token!r} has the id {pad}, outside the vocabulary [0,"
            f" {report.vocab_size})",
            "npt pads with an id that every base has; for other trainers call"
            " model.resize_token_embeddings(len(tokenizer)) or set another pad_token",
        )
    if report.moved_labels:
        yield Problem(
            f"{report.moved_labels:,} labels are not the token at their place",
            "leave labels unshifted, the loss moves them by one; ignore this if other targets are"
            " meant",
        )
    halved = report.padding_packed < report.padding / 2
    if not report.packing and report.padding > 0.5 and halved:
        what = f"{report.padding:.0%} of a batch is padding"
        yield Problem(what, f"use --packing ({report.padding_packed:.0%})")
    if counts.cut_prompts + counts.cut_completions > 0.01 * counts.samples:
        what = f"{counts.cut_prompts:,} prompts and {counts.cut_completions:,} completions"
        yield Problem(f"{what} of {counts.samples:,} samples are cut", "raise --max_length")
    if counts.skipped.total() > 0.01 * counts.records:
        what = f"{listed(counts.skipped)} of {counts.records:,} records are skipped"
        yield Problem(what, "remove them if that is not meant")
    if report.answers and not report.ended:
        ends = ", ".join(map(repr, report.end_tokens)) or "the tokenizer has none"
        yield Problem(
            f"none of the {report.answers:,} answers has an end token ({ends})",
            "let the chat template, or the data, write one after an answer, or the student never"
            " learns to stop",
        )
    if report.double_starts:
        what = f"{report.double_starts:,} samples begin with two start tokens"
        yield Problem(what, "take the start token out of the text, the tokenizer adds it")
    if report.copies > 0.05:
        what = f"{report.copies:.0%} of the samples are copies of others"
        yield Problem(what, "remove the copies, or they count several times")
    if report.heldout == 0:
        what = "no sample is held out (one in twenty is)"
        yield Problem(what, "bring more data, or the figures will be of training text")


OPEN, CLOSE = "⟦", "⟧"
"""Brackets of masked tokens: without colour they tell them from targets."""

_UNSEEN = "Special tokens by name, line ends and other unseen characters as escapes."
LEGEND = (
    (f"{OPEN}masked{CLOSE}", "dim"),
    (" tokens are no targets (label -100), ", ""),
    ("the rest", "green"),
    (f" are; … is what is left out. {_UNSEEN}", ""),
)


def print_report(report: DataReport, console: Console) -> None:
    """Print the report, on a console of any encoding."""
    some = "" if report.complete else f", its first {report.counts.records:,} records"
    _print(console, (report.name, "bold"), (some, ""))
    table = Table(show_header=False)
    for name, value in _rows(report).items():
        table.add_row(Text(name), Text(printable(value, one_line=True)))
    console.print(table)
    if report.broken:
        more = report.broken_total - len(report.broken)
        console.print()
        for line in (*map(str, report.broken), *([f"and {more:,} more"] if more else [])):
            _print(console, (line, ""))
    for number, shown in enumerate(report.shown):
        console.print()
        if number == 0:
            _print(console, *LEGEND)
        parts = [(shown.id, "bold"), (f", {shown.tokens:,} tokens: ", "")]
        for stretch in shown.stretches:
            # brackets of the text itself, as escapes
            text = stretch.text.replace(OPEN, "\\u27e6").replace(CLOSE, "\\u27e7")
            if stretch.kind == "masked":
                parts.append((f"{OPEN}{text}{CLOSE}", "dim"))
            elif stretch.kind == "target":
                parts.append((text, "green"))
            else:
                parts.append((f" … {stretch.tokens:,} tokens … ", ""))
        _print(console, *parts)
    console.print()
    for problem in report.problems:
        kind = ("error: ", "bold red") if problem.fatal else ("hint: ", "yellow")
        _print(console, kind, (str(problem), ""))
    if not report.problems:
        _print(console, ("no problem found", "green"))


def _rows(report: DataReport) -> dict[str, str]:
    counts = report.counts

    def share(part: int, whole: int) -> str:
        return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"

    blank = f"; blank lines: {report.blank_lines:,}" if report.blank_lines else ""
    heldout = "held out: files of its own"
    if report.heldout is not None:
        heldout = f"{share(report.heldout, counts.samples)} held out"
    padding = (f"{report.padding:.1%}", "without"), (f"{report.padding_packed:.1%}", "with")
    (now, _), (other, word) = padding[:: -1 if report.packing else 1]
    ids = "none" if report.id_min is None else f"{report.id_min:,} to {report.id_max:,}"
    lengths = f"{report.shortest:,} to {report.longest:,}, median {report.median:,}"
    rows = {
        "records": f"{counts.records:,}{blank}",
        "broken": f"{report.broken_total:,}",
        "samples": f"{counts.samples:,}, {heldout}",
        "tokens": f"{counts.tokens:,}, {share(report.targets, counts.tokens)} targets",
        "tokens of a sample": lengths,
        f"padding, batches of {report.batch_size}": f"{now}, {other} {word} --packing",
        "cut": f"{counts.cut_prompts:,} prompts, {counts.cut_completions:,} completions",
        "skipped": listed(counts.skipped) or "0",
        "of conversations": listed(counts.noted),
        "columns not used": listed_columns(counts.unused),
        "ids": f"{ids} of a vocabulary of {report.vocab_size:,}, {report.outside:,} outside",
        "copies": f"{report.copies:.1%} of the samples"
        + ("" if report.copies_exact else " (estimated)"),
    }
    return {name: value for name, value in rows.items() if value}


def _print(console: Console, *parts: tuple[str, str]) -> None:
    """Print texts with their styles; what the console's encoding lacks as escapes, unwrapped."""
    text = Text()
    for piece, style in parts:
        piece = printable(piece, one_line=True)
        plain = piece.encode(console.encoding, "backslashreplace").decode(console.encoding)
        text.append(plain, style=style or None)
    console.print(text, soft_wrap=True)
