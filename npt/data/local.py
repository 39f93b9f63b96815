"""Records in local files: text, JSON, JSON lines, CSV, Parquet; one file, a glob, or a folder of them.

Everything that can be is read where it lies: of a .jsonl file only the lines' offsets are held (eight bytes a line), CSV and
Parquet are memory-mapped by `datasets`. A line that is not what it should be is named with its file and number.
"""

from __future__ import annotations

import bisect
import glob
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from npt.errors import DataError

SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")

TEXT_PIECE = 1 << 20
"""Characters of a text file that make a record: a longer file is cut behind a line's end, and is one document all the same."""

Record = Mapping[str, Any]


def local_files(name: str) -> list[Path]:
    """The files that a path, a folder or a glob stands for, in order of their names.

    Raises:
        DataError: there is none, or one is of an unknown kind or empty.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not files:
            raise DataError(f"{path} holds no {', '.join(SUFFIXES)} file; check --dataset_name")
    elif path.exists():
        files = [path]
    else:
        files = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if Path(p).is_file())
        if not files:
            raise DataError(f"there is no file {path}; check --dataset_name ('builtin' is the text that needs no file)")
    for file in files:
        if file.suffix not in SUFFIXES or not file.is_file():
            raise DataError(f"{file} is not a {', '.join(SUFFIXES)} file; convert it to one of them")
        if file.stat().st_size == 0:
            raise DataError(f"{file} is empty; leave it out")
    return files


def read_sequence(files: Sequence[Path]) -> Sequence[Record]:
    """The records of the files, one file behind the other, for reading in any order."""
    parts = [_sequence(file) for file in files]
    return parts[0] if len(parts) == 1 else Joined(parts)


def read_stream(files: Iterable[Path]) -> Iterator[Record]:
    """The same records in file order, read once and kept nowhere."""
    for file in files:
        if file.suffix == ".jsonl":
            yield from _lines(file)
        elif file.suffix in (".csv", ".parquet"):
            yield from _tabular(file, streaming=True)
        else:
            yield from _sequence(file)


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


class JsonLines(Sequence[Record]):
    """The records of a .jsonl file, found by the offsets of its lines; blank lines are none."""

    def __init__(self, path: Path):
        self.path = path
        self._offsets, self._numbers = array("q"), array("q")
        try:
            with path.open("rb") as lines:
                offset = 0
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        self._offsets.append(offset)
                        self._numbers.append(number)
                    offset += len(line)
            self._file = path.open("rb")
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        self._file.seek(self._offsets[index])
        return parse_line(self.path, self._numbers[index], self._file.readline())


def _lines(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield parse_line(path, number, line)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def parse_line(path: Path, number: int, line: bytes) -> Record:
    """The record on line `number` (from 1) of a .jsonl file, named by its line unless it names itself.

    Raises:
        DataError: not UTF-8, not JSON or no object; what was found is its cause.
    """
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 (byte {error.start}: {error.reason}); convert the file first") from error
    except json.JSONDecodeError as error:
        problem = f"column {error.colno}: not JSON ({error.msg})"
        raise DataError(f"{path}, line {number}, {problem}; each line has to be one JSON object") from error
    if not isinstance(record, dict):
        raise DataError(f'{path}, line {number}: a {type(record).__name__}, not an object like {{"text": ...}}')
    return {"id": f"{path.name}:{number}", **record}


def _sequence(path: Path) -> Sequence[Record]:
    if path.suffix == ".jsonl":
        return JsonLines(path)
    if path.suffix == ".txt":
        return _pieces(path)
    if path.suffix == ".json":
        return _array(path)
    return _tabular(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it first") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _pieces(path: Path) -> list[Record]:
    """A text file as records of about TEXT_PIECE characters; only the last one is closed by an end token."""
    text = _read(path)
    records: list[Record] = []
    start = 0
    while start < len(text):
        end = text.find("\n", start + TEXT_PIECE) + 1 or len(text)
        name = path.name if not records and end == len(text) else f"{path.name}#{len(records)}"
        records.append({"text": text[start:end], "id": name, "continues": end < len(text)})
        start = end
    return records


def _array(path: Path) -> list[Record]:
    try:
        values = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: not JSON ({error.msg}); mend it there") from error
    if not isinstance(values, list):
        raise DataError(f'{path} holds a {type(values).__name__}; it has to be a list of objects like {{"text": ...}}')
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise DataError(f'{path}, entry {number}: a {type(value).__name__}, not an object like {{"text": ...}}')
    return [{"id": f"{path.name}:{number}", **value} for number, value in enumerate(values)]


def _tabular(path: Path, streaming: bool = False) -> Any:
    import datasets

    kind = path.suffix.removeprefix(".")
    try:
        return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=streaming)
    except Exception as error:  # pandas, pyarrow and datasets each raise their own
        reason = _first_line(error.__cause__ or error)
        raise DataError(f"{path} cannot be read as {kind.upper()}: {reason[:300]}; mend the file") from error


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
