"""Reading on behind what is broken: every place of a local file that training would stop at, with
its line and column.

Training ends at the first line that is not what it should be, and a file of a million lines would
be mended one run at a time.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.local import local_files, parse_line, read_sequence, read_stream
from npt.data.source import Record, is_local, open_source
from npt.errors import DataError, first_line

NAMED = 20
"""Broken places that are named; further ones are counted."""

_FIELD_LIMIT = 2**31 - 1
"""Of a CSV field: a document, not the 128 KiB that the csv module stops at."""

_PLACE = re.compile(r"(?:, line (\d+))?(?:, column (\d+))?(?:[:,] | )?(.*)")
"""What follows the file's name in a message of `npt.data.local`."""

_TOKENS = ("input_ids", "labels", "attention_mask")


@dataclass(frozen=True)
class Broken:
    """A place that cannot be read or trained on.

    line, column: from 1; None where the kind of file has none. The column counts characters, bytes
    where the line is not UTF-8, and fields of a CSV row.
    """

    where: str
    line: int | None
    column: int | None
    problem: str

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"

    @property
    def place(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        column = "" if self.column is None else f", column {self.column}"
        return f"{self.where}{line}{column}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Origin(NamedTuple):
    """Where a record was read: `where` names the file or data set, `raw` is its line where it has
    one, `row` its number there.
    """

    where: str
    row: int
    line: int | None = None
    raw: bytes = b""


class Reading:
    """The records of a data set, all that can be read, and what could not.

    Iterating yields each record with its origin and fills the other members.

    broken: the first NAMED broken places. broken_total: all of them. blank_lines: of .jsonl files.
    """

    def __init__(self, config: DataConfig):
        self._config = config
        self.broken: list[Broken] = []
        self.broken_total = self.blank_lines = 0

    def note(self, broken: Broken) -> None:
        """Count a broken place, and name it while there is room."""
        self.broken_total += 1
        if len(self.broken) < NAMED:
            self.broken.append(broken)

    def note_record(self, record: Record, origin: Origin, error: Exception) -> None:
        """The same for a record that was read, but cannot be encoded."""
        if len(self.broken) < NAMED:
            self.note(_broken_record(record, origin, error))
        else:
            self.broken_total += 1  # to find its place would take another look at the file

    def __iter__(self) -> Iterator[tuple[Record, Origin]]:
        name = self._config.dataset_name
        if not is_local(name):
            yield from (
                (record, Origin(name, row)) for row, record in enumerate(open_source(self._config))
            )
            return
        for path in local_files(name):
            yield from self._lines(path) if path.suffix == ".jsonl" else self._file(path)

    def _lines(self, path: Path) -> Iterator[tuple[Record, Origin]]:
        try:
            with path.open("rb") as lines:
                row = 0
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        self.blank_lines += 1
                        continue
                    try:
                        record = parse_line(path, number, line)
                    except DataError as error:
                        self.note(_broken_line(path, number, error))
                    else:
                        yield record, Origin(str(path), row, number, line)
                    row += 1
        except OSError as error:
            self.note(Broken(str(path), None, None, f"cannot be read: {error.strerror}"))

    def _file(self, path: Path) -> Iterator[tuple[Record, Origin]]:
        """A file that is read as a whole or by a library, up to the first error in it."""
        if path.suffix == ".csv":
            before = self.broken_total
            for broken in _odd_rows(path):
                self.note(broken)
            if self.broken_total > before:
                return
        records: Iterator[Record] | None = None
        for row in itertools.count():
            try:
                if records is None:
                    records = (
                        read_stream([path])
                        if self._config.streaming
                        else iter(read_sequence([path]))
                    )
                record = next(records)
            except StopIteration:
                return
            except Exception as error:  # pandas, pyarrow and datasets each raise their own
                for broken in _broken_places(path, error):
                    self.note(broken)
                return
            yield record, Origin(str(path), row)


def _broken_record(record: Record, origin: Origin, error: Exception) -> Broken:
    problem = first_line(error)
    line, column = origin.line, None
    if origin.line is not None:
        column = _column_of_field(record, origin.raw, problem)
    elif origin.where.endswith(".csv"):
        line = _csv_line(Path(origin.where), origin.row)
    return Broken(origin.where, line, column, problem)


def _broken_line(path: Path, number: int, error: DataError) -> Broken:
    """The place in a line that `parse_line` refused: where its cause says, or the start."""
    cause, column = error.__cause__, 1
    if isinstance(cause, json.JSONDecodeError):
        # a line that ends too early is broken at its end, not behind it
        column = min(cause.pos, len(cause.doc.rstrip())) + 1
    elif isinstance(cause, UnicodeDecodeError):
        column = cause.start + 1
    return Broken(str(path), number, column, _told(path, error)[-1])


def _broken_places(path: Path, error: Exception) -> Iterator[Broken]:
    """Where in the file the reason for an error of its reader lies: every such place where they can
    be told.
    """
    if path.suffix in (".txt", ".json", ".csv") and next(_not_utf8(path), None) is not None:
        yield from _not_utf8(path)
    else:
        yield Broken(str(path), *_told(path, error))


def _told(path: Path, error: Exception) -> tuple[int | None, int | None, str]:
    """Line, column and problem, as far as a reader's message has them."""
    message = first_line(error)
    found = _PLACE.fullmatch(message.removeprefix(str(path)))
    assert found is not None  # every part of the pattern may be empty
    line, column, problem = found.groups()
    return (int(line) if line else None, int(column) if column else None, problem)


def _not_utf8(path: Path) -> Iterator[Broken]:
    with contextlib.suppress(OSError), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                yield Broken(str(path), number, error.start + 1, f"not UTF-8 ({error.reason})")


def _odd_rows(path: Path) -> Iterator[Broken]:
    """Rows with more fields than the header has names, and the one from which on nothing can be
    read.
    """
    names = None
    for line, row in _csv_rows(path):
        if isinstance(row, csv.Error):
            yield Broken(str(path), line, None, f"not CSV ({row})")
        elif names is None:
            names = len(row)
        elif len(row) > names:
            yield Broken(
                str(path), line, names + 1, f"{len(row)} fields, but the header names {names}"
            )


def _csv_line(path: Path, row: int) -> int | None:
    """The line that record `row` (from 0) of a CSV file starts on."""
    # the header is no record
    return next((line for line, _ in itertools.islice(_csv_rows(path), row + 1, None)), None)


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str] | csv.Error]]:
    """Rows that are not blank, each with the line it starts on, as far as the file can be read; an
    error instead of the last.
    """
    before = csv.field_size_limit(_FIELD_LIMIT)
    start = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            for row in rows:
                if row:
                    yield start, row
                start = rows.line_num + 1
    except csv.Error as error:
        yield start, error
    except (OSError, UnicodeDecodeError):
        return
    finally:
        csv.field_size_limit(before)


def _column_of_field(record: Record, raw: bytes, problem: str) -> int:
    """The column at which the line names the field that a problem speaks of; 1 where it names none."""
    said = problem.split(" (it has: ")[0]
    for name in record:
        if repr(name) in said or (name in _TOKENS and name in said):
            return (
                raw.decode("utf-8", "replace").find(json.dumps(name, ensure_ascii=False)) + 1 or 1
            )
    return 1
