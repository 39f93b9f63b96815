"""Reading a data set past its faults: training ends at the first one, and a file of a million lines
would be mended one run at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.readers import lines_not_utf8
from npt.data.source import FileError, Record, is_local, local_files, open_source, reader_of
from npt.errors import first_line

NAMED = 20  # faults that are named; further ones are counted


@dataclass(frozen=True)
class Broken:
    """A place that cannot be read or trained on. line, column: from 1; None if the kind of file has
    none. The column counts characters, bytes if the line is not UTF-8, and fields of a CSV row.
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


class Origin(NamedTuple):
    """The file or data set of a record, and its line."""

    where: str
    line: int | None = None


class Reading:
    """The readable records of a data set with their origins, and its faults. broken: the first
    NAMED. broken_total: all of them. blank_lines: of files of JSON lines.
    """

    def __init__(self, config: DataConfig):
        self._config = config
        self.broken: list[Broken] = []
        self.broken_total = self.blank_lines = 0

    def note(self, broken: Broken) -> None:
        """Count a fault, and name it while there is room."""
        self.broken_total += 1
        if len(self.broken) < NAMED:
            self.broken.append(broken)

    def note_record(self, origin: Origin, error: Exception) -> None:
        """Note a record that was read, but cannot be encoded."""
        self.note(Broken(origin.where, origin.line, None, first_line(error)))

    def __iter__(self) -> Iterator[tuple[Record, Origin]]:
        name = self._config.dataset_name
        if is_local(name):
            for path in local_files(name):
                yield from self._file(path)
        else:
            for record in open_source(self._config):
                yield record, Origin(name)

    def _file(self, path: Path) -> Iterator[tuple[Record, Origin]]:
        """Read a file as far as its reader continues after a fault."""
        records: Any = None
        while True:
            try:
                if records is None:
                    config = replace(self._config, streaming=True)
                    records = iter(reader_of(path).read(path, config))
                record = next(records)
            except StopIteration:
                break
            except Exception as error:  # pyarrow and datasets each raise their own
                self._note_file(path, error, getattr(records, "line", None))
                if records is None:
                    return
            else:
                yield record, Origin(str(path), getattr(records, "line", None))
        self.blank_lines += getattr(records, "blank_lines", 0)

    def _note_file(self, path: Path, error: Exception, line: int | None) -> None:
        """Note a fault; if the encoding ends the reading, every line with that fault."""
        if not isinstance(error, FileError):
            self.note(Broken(str(path), None, None, first_line(error)))
            return
        ended = isinstance(error.__cause__, UnicodeDecodeError) and error.line != line
        for fault in lines_not_utf8(path) if ended else (error,):
            self.note(Broken(str(path), fault.line, fault.column, fault.problem))
