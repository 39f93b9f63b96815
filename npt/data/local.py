"""Records in local files: text, JSON, JSON lines, CSV, Parquet; one file, a glob, or a folder of
them.

What can be is read where it lies: of a .jsonl or .csv file only where its records start is held
(sixteen bytes each), Parquet is memory-mapped by `datasets`; a text file is held as a whole unless
it is streamed, a .json file always. What is not as it should be is named with its file and line.
"""

from __future__ import annotations

import bisect
import csv
import glob
import json
import logging
import os
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from npt.errors import DataError, first_line, kind_of

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")

TEXT_PIECE = 1 << 16
"""Characters of a text file that make a record: a longer file is cut behind a line's end, and is
one document all the same.
"""

PIECE = "npt:piece"
"""Key of such a record: whether it is its document's first piece, and whether it is the last."""

Record = Mapping[str, Any]

# of 128 KiB otherwise, in every reader of the process; a document may be longer
csv.field_size_limit(2**31 - 1)


def local_files(name: str) -> list[Path]:
    """The files that a path, a folder or a glob stands for, in order of their names. Of a folder
    hidden ones are left out.

    Raises:
        DataError: there is none, or one is of an unknown kind or empty.
    """
    path = Path(os.path.expanduser(name))
    try:
        files = _found(path)
        for file in files:
            if file.suffix not in SUFFIXES or not file.is_file():
                raise DataError(
                    f"{file} is not a {', '.join(SUFFIXES)} file; convert it to one of them"
                )
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty; leave it out")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check --dataset_name") from error
    return files


def _found(path: Path) -> list[Path]:
    if path.is_dir():
        below = (
            p
            for p in path.rglob("*")
            if not any(part.startswith(".") for part in p.relative_to(path).parts)
        )
        files = sorted(p for p in below if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise DataError(f"{path} holds no {', '.join(SUFFIXES)} file; check --dataset_name")
        return files
    files = (
        [path]
        if path.exists()
        else sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
    )
    if not files:
        raise DataError(
            f"there is no file {path}; check --dataset_name ('builtin' is the text that needs no"
            " file)"
        )
    return files


def read_sequence(files: Sequence[Path]) -> Sequence[Record]:
    """The records of the files, one file behind the other, for reading in any order and from any
    thread.
    """
    parts = [_sequence(file) for file in files]
    return parts[0] if len(parts) == 1 else Joined(parts)


def read_stream(files: Iterable[Path]) -> Iterator[Record]:
    """The same records in file order, read once and kept nowhere."""
    for file in files:
        if file.suffix == ".txt":
            yield from _pieces(file)
        elif file.suffix == ".json":
            yield from _array(file)
        elif file.suffix == ".parquet":
            yield from _parquet_stream(file)
        else:
            yield from _LINES[file.suffix].stream(file)


def _sequence(path: Path) -> Sequence[Record]:
    if path.suffix == ".txt":
        return list(_pieces(path))
    if path.suffix == ".json":
        return _array(path)
    if path.suffix == ".parquet":
        records: Sequence[Record] = _parquet(path, streaming=False)
        return records
    return _LINES[path.suffix](path)


class Joined(Sequence[Record]):
    """Sequences one behind the other."""

    def __init__(self, parts: Sequence[Sequence[Record]]):
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        part = bisect.bisect_right(self._ends, index)
        if index < 0 or part == len(self._parts):
            raise IndexError(index)
        return self._parts[part][index - (self._ends[part] - len(self._parts[part]))]


class _Lines(Sequence[Record]):
    """The records of a file of lines, found by where they start.

    Every access opens the file anew: it may be read by several threads at once, and a folder of a
    thousand files leaves none open.

    Raises:
        DataError: the file cannot be read, at an access also if it is not the file any more that
            the records were found in.
    """

    def __init__(self, path: Path):
        self.path = path
        self._offsets, self._numbers = array("q"), array("q")
        with _opened(path) as file:
            self._state = _state(file)
            for offset, number in self._starts(file):
                self._offsets.append(offset)
                self._numbers.append(number)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        offset, number = self._offsets[index], self._numbers[index]
        with _opened(self.path) as file:
            if _state(file) != self._state:
                raise DataError(
                    f"{self.path} has changed since it was first read; start again, on a copy if it"
                    " is still being written"
                )
            file.seek(offset)
            return self._record(file, number)

    @abstractmethod
    def _starts(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Of each record, the byte it starts at and the number of its line, from 1."""

    @abstractmethod
    def _record(self, file: BinaryIO, number: int) -> Record:
        """The record that starts at the file's position."""

    @classmethod
    @abstractmethod
    def stream(cls, path: Path) -> Iterator[Record]:
        """The records in order, without looking for them first."""


class JsonLines(_Lines):
    """A .jsonl file: an object a line; blank lines are none."""

    def _starts(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        offset = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield offset, number
            offset += len(line)

    def _record(self, file: BinaryIO, number: int) -> Record:
        return parse_line(self.path, number, file.readline())

    @classmethod
    def stream(cls, path: Path) -> Iterator[Record]:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield parse_line(path, number, line)


class CsvRows(_Lines):
    """A .csv file (RFC 4180, fields between commas): a header of names, then rows, whose fields are
    text whatever they look like.

    A row with fewer fields than names lacks the last ones; blank lines are none.
    """

    def _starts(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        rows = _csv_rows(_Decoded(self.path, file))
        self._names = next(rows, (0, 1, []))[2]
        return ((offset, number) for offset, number, _ in rows)

    def _record(self, file: BinaryIO, number: int) -> Record:
        _, _, row = next(_csv_rows(_Decoded(self.path, file, number)))
        return _csv_record(self.path, number, self._names, row)

    @classmethod
    def stream(cls, path: Path) -> Iterator[Record]:
        with _opened(path) as file:
            rows = _csv_rows(_Decoded(path, file))
            names = next(rows, (0, 1, []))[2]
            for _, number, row in rows:
                yield _csv_record(path, number, names, row)


_LINES: dict[str, type[_Lines]] = {".jsonl": JsonLines, ".csv": CsvRows}


class _Decoded:
    """The lines of an open file as text, which knows where the next one starts.

    Args:
        path: for messages.
        file: at the start of a line.
        number: of that line.
    """

    def __init__(self, path: Path, file: BinaryIO, number: int = 1):
        self.path, self.number, self.offset = path, number, 0
        self._file = file

    def __iter__(self) -> _Decoded:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        text = _decoded(self.path, self.number, line)
        self.offset += len(line)
        self.number += 1
        return text


def _csv_rows(lines: _Decoded) -> Iterator[tuple[int, int, list[str]]]:
    """Of each row that is not blank, the byte and the line it starts at, and its fields."""
    rows = csv.reader(lines, strict=True)
    while True:
        offset, number = lines.offset, lines.number
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise DataError(
                f"{lines.path}, line {number}: not CSV ({error}); mend it there"
            ) from error
        if row is None:
            return
        if row:
            yield offset, number, row


def _csv_record(path: Path, number: int, names: list[str], row: list[str]) -> Record:
    if len(row) > len(names):
        problem = f"{len(row)} fields, but the header names {len(names)}"
        raise DataError(
            f'{path}, line {number}: {problem}; put a field that holds commas between "'
        )
    return {"id": f"{path.name}:{number}", **dict(zip(names, row, strict=False))}


def parse_line(path: Path, number: int, line: bytes) -> Record:
    """The record on line `number` (from 1) of a .jsonl file, named by its line unless it names
    itself.

    Raises:
        DataError: not UTF-8, not JSON or no object; what was found is its cause.
    """
    text = _decoded(path, number, line).rstrip("\r\n")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        column, what = (
            (f", column {error.colno}", error.msg)
            if isinstance(error, json.JSONDecodeError)
            else ("", str(error))
        )
        raise DataError(
            f"{path}, line {number}{column}: not JSON ({what}); each line has to be one JSON object"
        ) from error
    if not isinstance(record, dict):
        raise DataError(
            f'{path}, line {number}: {kind_of(record)}, not an object like {{"text": ...}}'
        )
    return {"id": f"{path.name}:{number}", **record}


def _pieces(path: Path) -> Iterator[Record]:
    """A text file as records of about TEXT_PIECE characters."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            number, piece = 0, _piece(file)
            while piece:
                following = _piece(file)
                if number == 0 and not following:
                    yield {"text": piece, "id": path.name}
                else:
                    yield {
                        "text": piece,
                        "id": f"{path.name}#{number}",
                        PIECE: (number == 0, not following),
                    }
                number, piece = number + 1, following
    except UnicodeDecodeError:
        _locate_other_encoding(path)
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _piece(file: TextIO) -> str:
    text = file.read(TEXT_PIECE)
    return text + file.readline() if text else ""


def _array(path: Path) -> Sequence[Record]:
    with _opened(path) as file:
        content = file.read()
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        _locate_other_encoding(path)
        raise
    except (ValueError, RecursionError) as error:
        where, what = ("", str(error))
        if isinstance(error, json.JSONDecodeError):
            where, what = f", line {error.lineno}, column {error.colno}", error.msg
        remedy = "mend it there, or name the file .jsonl if each of its lines is an object"
        raise DataError(f"{path}{where}: not JSON ({what}); {remedy}") from error
    if not isinstance(values, list):
        raise DataError(
            f'{path} holds {kind_of(values)}; it has to be a list of objects like {{"text": ...}}'
        )
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(
                f'{path}, entry {number}: {kind_of(value)}, not an object like {{"text": ...}}'
            )
    return [{"id": f"{path.name}:{number}", **value} for number, value in enumerate(values)]


def _parquet(path: Path, streaming: bool) -> Any:
    import datasets

    # what it logs is raised and said here
    logging.getLogger("datasets.packaged_modules.parquet.parquet").setLevel(logging.CRITICAL)
    try:
        return datasets.load_dataset(
            "parquet", data_files=glob.escape(str(path)), split="train", streaming=streaming
        )
    except Exception as error:  # pyarrow and datasets each raise their own
        raise _parquet_fault(path, error) from error


def _parquet_stream(path: Path) -> Iterator[Record]:
    records = _parquet(path, streaming=True)
    try:
        yield from records
    except Exception as error:
        raise _parquet_fault(path, error) from error


def _parquet_fault(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path} cannot be read as Parquet: {first_line(error.__cause__ or error)[:300]}; mend the"
        " file"
    )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _state(file: BinaryIO) -> tuple[int, int]:
    """What tells whether a file was written to: its size and the time of the last change."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns


def _decoded(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: not UTF-8 (byte {error.start}: {error.reason}); convert the"
            " file first"
        ) from error


def _locate_other_encoding(path: Path) -> None:
    """Raise at the first line that is not UTF-8."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            _decoded(path, number, line)
