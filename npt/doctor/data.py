"""Check a dataset before a base is loaded: counts, ids, three decoded samples, and all faults (at
the first of which training would stop), in one pass and constant memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from typing import Any

from rich.console import Console

from npt.batch import IGNORE_INDEX, Sample
from npt.config import DataConfig
from npt.console import say
from npt.data.encoding import Encoder, RecordCounts, unused_columns
from npt.data.first_look import Copies, data_warnings
from npt.data.source import (
    OWN_HELDOUT,
    FileError,
    Record,
    check_source,
    is_local,
    local_files,
    open_source,
    passed_over,
    reader_of,
)
from npt.data.templates import TemplateLimitError
from npt.errors import first_line

NAMED = 20  # kinds of faults that are listed; further ones are only counted
PLACES = 5  # records or lines that are listed of each kind
SHOWN = 3  # samples that are decoded
EDGE = 24  # tokens shown of each end of a long span

_PLACE = re.compile(r"\b(?:line|entry) \d+")
"""The place in the message of a FileError."""

# brackets around masked tokens
OPEN = "⟦"
CLOSE = "⟧"


@dataclass
class Fault:
    """Faults that differ in their place only.

    Attributes:
        message: of the first one.
        places: the records or lines of the first PLACES.
    """

    message: str
    count: int = 0
    places: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.count == 1:
            return self.message
        more = ", ..." if self.count > len(self.places) else ""
        return f"{self.message} ({self.count:,} such faults: {', '.join(self.places)}{more})"


@dataclass
class DataReport:
    """The figures of a dataset.

    Attributes:
        tokenizer: whose tokenizer was used; empty if it was not said.
        heldout: number of held-out samples; None if the source has a held-out split.
        complete: whether the pass read all records.
        faults: the first NAMED kinds of faults, by message without numbers.
        targets: number of tokens with a label.
        passed_over: a line that names files of the folder that are not read.
        outside: number of ids and labels outside the vocabulary; the first is in `outside_first`.
        copies: share of samples that repeat another one; estimated if they are many.
    """

    name: str
    vocab_size: int
    heldout: int | None
    complete: bool = True
    passed_over: str | None = None
    counts: RecordCounts = field(default_factory=RecordCounts)
    tokenizer: str = ""
    faults: dict[str, Fault] = field(default_factory=dict)
    broken_total: int = 0
    shortest: int = 0
    longest: int = 0
    targets: int = 0
    id_min: int | None = None
    id_max: int | None = None
    outside: int = 0
    outside_first: str | None = None
    shown: tuple[str, ...] = ()
    copies: float = 0.0

    @property
    def warnings(self) -> list[str]:
        """Messages about data that can be trained on, but perhaps not as intended."""
        none_held_out = self.complete and self.counts.samples > 0 and self.heldout == 0
        return list(data_warnings(self.copies, not none_held_out))

    @property
    def broken(self) -> list[str]:
        """A line about each kind of fault."""
        return [str(fault) for fault in self.faults.values()]

    @property
    def problems(self) -> list[str]:
        """Messages of the faults at which training would stop."""
        problems = []
        if self.broken_total:
            problems.append(
                f"faults in the data: {self.broken_total:,}; fix or remove those listed"
            )
        elif not self.counts.samples:
            problems.append(
                "no sample has two tokens or more: check --dataset_name and --text_column"
            )
        if self.outside:
            problems.append(
                f"{self.outside:,} ids outside the vocabulary [0, {self.vocab_size}), the first in"
                f" sample {self.outside_first}: encode the data with the tokenizer of --model_name"
            )
        return problems

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        values = {
            **asdict(self),
            **self.counts.as_dict(),
            "broken": self.broken,
            "warnings": self.warnings,
            "problems": self.problems,
            "trainable": not self.problems,
        }
        del values["counts"], values["faults"]
        return values

    def note(self, name: str, error: Exception, record: str | None = None) -> None:
        """Count a fault of a file or dataset, and of one of its records, by its kind."""
        self.broken_total += 1
        message = first_line(error)
        if isinstance(error, FileError):
            at = _PLACE.search(message)
            place = name if at is None else at[0]
            kind = message
        else:
            place = name if record is None else record
            kind = message.replace(f"record {place}", "record")
            message = f"{name}: {message}"
        # without numbers, so that faults which differ in their place only are one
        kind = re.sub(r"\d+", "0", kind)
        if kind not in self.faults:
            if len(self.faults) == NAMED:
                return
            self.faults[kind] = Fault(message)
        fault = self.faults[kind]
        fault.count += 1
        if len(fault.places) < PLACES:
            fault.places.append(place)

    def add(self, sample: Sample) -> None:
        """Count a sample's ids and labels."""
        ids = sample.input_ids
        labels = [i for i in sample.labels or ids if i != IGNORE_INDEX]
        self.shortest = min(self.shortest or len(ids), len(ids))
        self.longest = max(self.longest, len(ids))
        least = min(ids)
        if self.id_min is None or least < self.id_min:
            self.id_min = least
        greatest = max(ids)
        if self.id_max is None or greatest > self.id_max:
            self.id_max = greatest
        self.targets += len(labels)
        if self.heldout is not None:
            self.heldout += sample.heldout
        # a label is mostly the id at its place, which counts once
        numbers = [*sample.read, *set(labels).difference(ids)]
        outside = sum(not 0 <= number < self.vocab_size for number in numbers)
        self.outside += outside
        if outside and self.outside_first is None:
            self.outside_first = sample.id


def examine(
    config: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    *,
    max_records: int | None = None,
    tokenizer_name: str = "",
) -> DataReport:
    """Read a dataset once, as training would, note its faults and return a report, which gives the
    tokenizer's name.

    `num_samples` is ignored. DataError if the dataset cannot be opened.
    """
    check_source(config)
    name = config.dataset_name
    heldout = None if name in OWN_HELDOUT else 0
    report = DataReport(name, vocab_size, heldout, tokenizer=tokenizer_name)
    report.passed_over = passed_over(config)
    encoder = Encoder(tokenizer, config, report.counts)
    copies = Copies()
    records = enumerate(readable(config, report))
    for number, (record, name) in islice(records, max_records):
        try:
            samples = encoder.samples(number, record)
        except TemplateLimitError:  # it would take as long for every record
            raise
        except Exception as error:  # tokenizers and templates raise errors of any kind
            place = number
            if isinstance(record, Mapping) and record.get("id") is not None:
                place = record["id"]
            report.note(name, error, str(place))
            continue
        for sample in samples:
            report.add(sample)
            copies.add(sample)
            if len(report.shown) < SHOWN:
                # as the teacher reads it, with its context
                report.shown += (show(sample.taught or sample, tokenizer, vocab_size),)
    report.complete = next(records, None) is None
    report.copies = copies.share
    return report


def readable(config: DataConfig, report: DataReport) -> Iterator[tuple[Record, str]]:
    """Yield each readable record with its file or dataset; note faults in the report."""
    if not is_local(config.dataset_name):
        yield from ((record, config.dataset_name) for record in open_source(config))
        return
    streaming = replace(config, streaming=True)
    for path in local_files(config.dataset_name, config.dataset_split):
        try:
            reader = reader_of(path)
            for record in reader.read(path, streaming):
                if isinstance(record, FileError):
                    report.note(str(path), record)
                else:
                    yield record, str(path)
        except Exception as error:  # pyarrow and datasets have errors of their own
            report.note(str(path), error)


def show(sample: Sample, tokenizer: Any, vocab_size: int) -> str:
    """Decode a sample, with masked tokens in brackets, without the middle of long spans and without
    ids outside the vocabulary.
    """

    def decoded(ids: list[int]) -> str:
        inside = [i for i in ids if 0 <= i < vocab_size]
        return str(tokenizer.decode(inside, skip_special_tokens=False))

    labels = sample.labels if sample.labels is not None else sample.input_ids
    pairs = zip(labels, sample.input_ids, strict=True)
    shown = ""
    for target, group in groupby(pairs, key=lambda pair: pair[0] != IGNORE_INDEX):
        ids = [token for _, token in group]
        text = decoded(ids)
        if len(ids) > 2 * EDGE + 1:
            between = f" … {len(ids) - 2 * EDGE} tokens … "
            text = decoded(ids[:EDGE]) + between + decoded(ids[-EDGE:])
        shown += text if target else f"{OPEN}{text}{CLOSE}"
    return f"{sample.id}, {len(sample.input_ids):,} tokens: {shown}"


def print_report(report: DataReport, console: Console) -> None:
    """Print the report on a console of any encoding."""
    some = "" if report.complete else f", first {report.counts.records:,} records"
    head = [report.name + some]
    head += [f"  {name:<18} {value}" for name, value in _rows(report).items() if value]
    broken = report.broken
    more = report.broken_total - sum(fault.count for fault in report.faults.values())
    if more:
        broken.append(f"and {more:,} more")
    shown: list[str] = []
    if report.shown:
        shown = [f"samples; {OPEN}masked{CLOSE} tokens (label -100) are not trained on:"]
        shown += report.shown
    found = [f"error: {each}" for each in report.problems]
    found += [f"warning: {each}" for each in report.warnings]
    passed_over = [] if report.passed_over is None else [report.passed_over]
    lines = head
    for part in (passed_over, broken, shown, found or ["no problem found"]):
        if part:
            lines += ["", *part]
    # escape characters that the console cannot encode
    code = console.encoding
    say(console, *(line.encode(code, "backslashreplace").decode(code) for line in lines))


def _rows(report: DataReport) -> dict[str, str]:
    counts = report.counts

    def share(part: int, whole: int) -> str:
        return f"{part:,} ({part / whole:.1%})" if whole else f"{part:,}"

    heldout = "with a separate held-out split"
    if report.heldout is not None:
        heldout = f"{share(report.heldout, counts.samples)} held out"
    cut = f"{counts.cut_prompts:,} prompts, {counts.cut_completions:,} completions"
    if counts.cut_contexts:
        cut += f", {counts.cut_contexts:,} contexts"
    skipped = [f"{count:,} {reason}" for reason, count in sorted(counts.skipped.items())]
    ids = "none"
    if report.id_min is not None:
        ids = f"{report.id_min:,} to {report.id_max:,}"
    return {
        "tokenizer": report.tokenizer,
        "records": f"{counts.records:,}",
        "faults": f"{report.broken_total:,}",
        "samples": f"{counts.samples:,}, {heldout}",
        "tokens": f"{counts.tokens:,}; trained on {share(report.targets, counts.tokens)}",
        "tokens per sample": f"{report.shortest:,} to {report.longest:,}",
        "cut": cut,
        "skipped": ", ".join(skipped) or "0",
        "columns not used": unused_columns(counts),
        "copies": f"{report.copies:.1%} of the samples",
        "ids": f"{ids} in a vocabulary of {report.vocab_size:,}, {report.outside:,} outside",
    }
