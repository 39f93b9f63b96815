"""Readers: text, JSON, CSV and Parquet files, the hub, and the built-in text.

The built-in text is the source of this machine's Python standard library without its tests: some
12 MB that nothing downloads. A hash of its path decides whether a file is held out, alike on every
machine; the embedded model has never seen those files.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import json
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from npt.config import DataConfig
from npt.data.source import PIECE, READERS, FileError, Record, not_utf8, unreadable
from npt.errors import DataError, first_line, kind_of

TEXT_PIECE = 1 << 16
"""Characters of a record of a text file; a longer file is cut at line ends into one document."""

_HELDOUT_ONE_IN = 20
_EXCLUDED = {"test", "tests", "idle_test", "__pycache__", "_vendor", "ensurepip"}
_EXCLUDED |= {"site-packages", "dist-packages"}

csv.field_size_limit(2**31 - 1)  # 128 KiB otherwise, in every reader of the process


class Lines(Iterator[Record]):
    """One pass over a file of lines: a record that cannot be read raises, and the next call reads
    on.

    Attributes:
        path: of the file.
        line: of the latest record.
        blank_lines: passed so far.
    """

    def __init__(self, path: Path, rows: Callable[..., Any], record: Callable[..., Record]):
        self.path, self.line, self.blank_lines = path, 0, 0
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise unreadable(path, error) from error
        self._rows, self._record = rows(path, self._file), record

    def __next__(self) -> Record:
        try:
            while (row := next(self._rows))[1] is None:
                self.blank_lines += 1
        except BaseException:
            self._file.close()
            raise
        self.line = row[0]
        return {"id": f"{self.path.name}:{self.line}", **self._record(self.path, *row)}


def read_json_lines(path: Path, config: DataConfig) -> Lines:
    """Return the objects of a file of JSON lines."""
    return Lines(path, _json_rows, _json_record)


def _json_rows(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    for number, raw in enumerate(file, start=1):
        yield number, raw if raw.strip() else None


def _json_record(path: Path, line: int, raw: bytes) -> Record:
    try:
        record = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise not_utf8(path, line, error) from error
    except (ValueError, RecursionError) as error:
        column, what = None, str(error)
        if isinstance(error, json.JSONDecodeError):
            # a line that ends too early is broken at its end, not after it
            column, what = min(error.pos, len(error.doc.rstrip())) + 1, error.msg
        message = f": not JSON ({what}); each line must be one JSON object"
        raise FileError(path, message, line, column, at=1) from error
    if not isinstance(record, dict):
        message = f': {kind_of(record)}, not an object like {{"text": ...}}'
        raise FileError(path, message, line, at=1)
    return record


def read_csv(path: Path, config: DataConfig) -> Lines:
    """Return the rows of a CSV file (RFC 4180) by the header's names; fields are text."""
    return Lines(path, _csv_rows, _csv_record)


def _csv_rows(path: Path, file: BinaryIO) -> Iterator[tuple[int, tuple[list[str], list[str]]]]:
    """Yield line, names and fields of each row that is not blank."""
    read = 0

    def decoded() -> Iterator[str]:
        nonlocal read
        for raw in file:
            read += 1
            try:
                yield raw.decode("utf-8-sig" if read == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(path, read, error) from error

    rows = csv.reader(decoded(), strict=True)
    names: list[str] | None = None
    while True:
        number = read + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise FileError(path, f": not CSV ({error}); mend it there", number) from error
        if row is None:
            return
        if names is None:
            names = row
        elif row:
            yield number, (names, row)


def _csv_record(path: Path, line: int, row: tuple[list[str], list[str]]) -> Record:
    """Return a row by name; a shorter one lacks the last columns."""
    names, values = row
    if len(values) > len(names):
        message = (
            f": {len(values)} fields, but the header names {len(names)}; put a field that holds"
            ' commas between "'
        )
        raise FileError(path, message, line, at=len(names) + 1)
    return dict(zip(names, values, strict=False))


def read_text(path: Path, config: DataConfig) -> Iterator[Record]:
    """Yield a text file as records of about TEXT_PIECE characters."""

    def next_piece() -> str:
        text = file.read(TEXT_PIECE)
        return text + file.readline() if text else ""

    try:
        with path.open(encoding="utf-8-sig") as file:
            number, piece = 0, next_piece()
            while piece:
                after = next_piece()
                if number == 0 and not after:
                    yield {"text": piece, "id": path.name}
                else:
                    ends = {PIECE: (number == 0, not after)}
                    yield {"text": piece, "id": f"{path.name}#{number}", **ends}
                number, piece = number + 1, after
    except UnicodeDecodeError as error:
        raise _first_not_utf8(path) from error
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path, config: DataConfig) -> list[Record]:
    """Return the objects of a JSON list."""
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise _first_not_utf8(path) from error
    except (ValueError, RecursionError) as error:
        line = column = None
        what = str(error)
        if isinstance(error, json.JSONDecodeError):
            line, column, what = error.lineno, error.colno, error.msg
        message = (
            f": not JSON ({what}); mend it there, or name the file .jsonl if each of its lines is"
            " an object"
        )
        raise FileError(path, message, line, column) from error
    wanted = 'like {"text": ...}'
    if not isinstance(values, list):
        raise FileError(path, f" holds {kind_of(values)}; it must be a list of objects {wanted}")
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            message = f", entry {number}: {kind_of(value)}, not an object {wanted}"
            raise FileError(path, message)
    return [{"id": f"{path.name}:{number}", **value} for number, value in enumerate(values)]


def _first_not_utf8(path: Path) -> FileError:
    """Return the fault of the first line in another encoding."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return not_utf8(path, number, error)
    raise AssertionError(f"{path} is UTF-8")


def read_parquet(path: Path, config: DataConfig) -> Iterable[Record]:
    """Return the rows of a Parquet file, memory-mapped unless they are streamed."""
    # its log repeats what is raised here
    logging.getLogger("datasets.packaged_modules.parquet.parquet").setLevel(logging.CRITICAL)

    def fault(error: Exception) -> DataError:
        what = first_line(error.__cause__ or error)[:300]
        return FileError(path, f" cannot be read as Parquet: {what}; mend the file")

    files = glob.escape(str(path))
    return _loaded("parquet", config, fault, fault, data_files=files, split="train")


def read_hub(name: str, config: DataConfig) -> Iterable[Record]:
    """Return a data set of the hub."""
    split, files = config.dataset_split, ", ".join(kind for kind in READERS if kind[0] == ".")
    remedy = f"check the name and the network, or give --dataset_name a local file ({files})"

    def at_start(error: Exception) -> DataError:
        why = first_line(error)[:300]
        return DataError(f"cannot load the data set {name!r} (split {split!r}): {why}; {remedy}")

    def later(error: Exception) -> DataError:
        remedy = "check the network, or download it and pass the files"
        return DataError(f"the data set {name!r} broke off: {first_line(error)[:300]}; {remedy}")

    return _loaded(name, config, at_start, later, name=config.dataset_config, split=split)


Fault = Callable[[Exception], DataError]
"""`datasets` raises errors of dozens of classes."""


def _loaded(
    path: str, config: DataConfig, at_start: Fault, later: Fault, **options: Any
) -> Iterable[Record]:
    import datasets

    try:
        records = datasets.load_dataset(path, streaming=config.streaming, **options)
    except Exception as error:
        raise at_start(error) from error
    return _Streamed(records, later) if config.streaming else records


class _Streamed:
    """A stream of `datasets`, whose later errors become faults of ours."""

    def __init__(self, records: Any, fault: Fault):
        self._records, self._fault = records, fault

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from self._records
        except Exception as error:
            raise self._fault(error) from error

    def skip(self, count: int) -> _Streamed:
        """Return the records after the first `count`, without reading those."""
        return _Streamed(self._records.skip(count), self._fault)


def read_builtin(name: str, config: DataConfig) -> Iterator[Record]:
    """Yield the files of a split of the built-in text."""
    for path, text in builtin_files(config.dataset_split):
        yield {"text": text, "id": path}


def is_heldout(name: str, one_in: int = _HELDOUT_ONE_IN) -> bool:
    """Return whether training never sees a document, by its name: of a file of the library, its
    POSIX path below it."""
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % one_in == 0


def library() -> Path:
    """Return the folder of this machine's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def builtin_files(split: str, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative POSIX path, text) of one split, in path order."""
    root = library() if root is None else root
    files = source_files(root, lambda path: is_heldout(path) == (split == "heldout"))
    first = next(files, None)
    if first is None:
        raise DataError(
            f"no Python source below {root}; pass --dataset_name FILE instead of the built-in text"
        )
    yield first
    yield from files


def source_files(root: Path, chosen: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield (relative POSIX path, text) of the library's files of which `chosen(path)` is true,
    without its tests and without packages that are installed there, in path order."""
    paths = []
    for folder, folders, names in os.walk(root):
        # packages installed there may be many times the library
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        below = Path(folder).relative_to(root)
        paths += [(below / name).as_posix() for name in names if name.endswith(".py")]
    for relative in sorted(filter(chosen, paths)):
        try:
            text = (root / relative).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a handful of the library's files are in other encodings
        if text.strip():
            yield relative, text
