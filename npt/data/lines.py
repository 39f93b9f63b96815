"""Files of lines, read where they lie: only the place of each record is held in memory."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from npt.config import DataConfig
from npt.data.source import FileError, Record, not_utf8, unreadable
from npt.errors import kind_of


class LineFormat(NamedTuple):
    """A format of lines. rows(path, file, line): byte, line and content of each row from the file's
    position on, None for a blank one. record(path, line, row, header): its record. header: whether
    the first row is no record."""

    rows: Callable[[Path, BinaryIO, int], Iterator[tuple[int, int, Any]]]
    record: Callable[[Path, int, Any, Any], Record]
    header: bool = False

    def read(self, path: Path, config: DataConfig) -> Iterable[Record]:
        return LineStream(path, self) if config.streaming else IndexedLines(path, self)


class IndexedLines(Sequence[Record]):
    """The records of a file by number, found by an index of 16 bytes each. Every access opens the
    file: threads may read at once, and a folder of a thousand files leaves none open."""

    def __init__(self, path: Path, form: LineFormat):
        self.path, self._form = path, form
        self._offsets, self._lines = array("q"), array("q")
        try:
            with path.open("rb") as file:
                self._state = _state(file)
                rows = form.rows(path, file, 1)
                self._header: Any = next(rows, (0, 1, []))[2] if form.header else None
                for offset, line, row in rows:
                    if row is not None:
                        self._offsets.append(offset)
                        self._lines.append(line)
        except OSError as error:
            raise unreadable(path, error) from error

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        offset, line = self._offsets[index], self._lines[index]
        try:
            with self.path.open("rb") as file:
                if _state(file) != self._state:
                    said = " has changed since it was first read; start again, on a copy if it is"
                    raise FileError(self.path, f"{said} still being written")
                file.seek(offset)
                row = next(self._form.rows(self.path, file, line))[2]
        except OSError as error:
            raise unreadable(self.path, error) from error
        return self._form.record(self.path, line, row, self._header)


class LineStream(Iterator[Record]):
    """One pass over a file: a record that cannot be read raises, and the next call reads on.
    line: of the latest record. blank_lines: passed so far."""

    def __init__(self, path: Path, form: LineFormat):
        self.path, self._form, self.line, self.blank_lines = path, form, 0, 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise unreadable(path, error) from error
        self._rows = form.rows(path, self._file, 1)
        self._header: Any = next(self._rows, (0, 1, []))[2] if form.header else None

    def __next__(self) -> Record:
        try:
            while (found := next(self._rows))[2] is None:
                self.blank_lines += 1
        except BaseException:
            self._file.close()
            raise
        _, self.line, row = found
        return self._form.record(self.path, self.line, row, self._header)


def _state(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _json_rows(path: Path, file: BinaryIO, line: int) -> Iterator[tuple[int, int, bytes | None]]:
    offset = 0
    for number, raw in enumerate(file, start=line):
        yield offset, number, raw if raw.strip() else None
        offset += len(raw)


def _json_record(path: Path, line: int, raw: bytes, _: None) -> Record:
    """Return the object on a line, named by its line unless it names itself."""
    try:
        record = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise not_utf8(path, line, error) from error
    except (ValueError, RecursionError) as error:
        column, what = None, str(error)
        if isinstance(error, json.JSONDecodeError):
            # a line that ends too early is broken at its end, not after it
            column, what = min(error.pos, len(error.doc.rstrip())) + 1, error.msg
        said = f": not JSON ({what}); each line must be one JSON object"
        raise FileError(path, said, line, column, at=1) from error
    if not isinstance(record, dict):
        said = f': {kind_of(record)}, not an object like {{"text": ...}}'
        raise FileError(path, said, line, at=1)
    return {"id": f"{path.name}:{line}", **record}


JSON_LINES = LineFormat(_json_rows, _json_record)
