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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from npt.config import DataConfig
from npt.data.content import PIECE
from npt.data.lines import LineFormat
from npt.data.source import READERS, FileError, Record, not_utf8, unreadable
from npt.errors import DataError, first_line, kind_of

TEXT_PIECE = 1 << 16
"""Characters of a record of a text file; a longer file is cut at line ends into one document."""

SPLITS = ("train", "heldout")
_HELDOUT_ONE_IN = 20
_EXCLUDED = {"test", "tests", "idle_test", "__pycache__", "_vendor", "ensurepip"}
_EXCLUDED |= {"site-packages", "dist-packages"}

csv.field_size_limit(2**31 - 1)  # 128 KiB otherwise, in every reader of the process


def _csv_rows(path: Path, file: BinaryIO, line: int) -> Iterator[tuple[int, int, list[str]]]:
    """Yield rows (RFC 4180) that are not blank; fields are text."""
    at = [0, line]  # byte and line at which the next row starts

    def decoded() -> Iterator[str]:
        for raw in file:
            try:
                text = raw.decode("utf-8-sig" if at[1] == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(path, at[1], error) from error
            at[:] = at[0] + len(raw), at[1] + 1
            yield text

    rows = csv.reader(decoded(), strict=True)
    while True:
        offset, number = at
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise FileError(path, f": not CSV ({error}); mend it there", number) from error
        if row is None:
            return
        if row:
            yield offset, number, row


def _csv_record(path: Path, line: int, row: list[str], names: list[str]) -> Record:
    """Return a row by the header's names; a shorter one lacks the last of them."""
    if len(row) > len(names):
        said = f": {len(row)} fields, but the header names {len(names)}"
        said += '; put a field that holds commas between "'
        raise FileError(path, said, line, at=len(names) + 1)
    return {"id": f"{path.name}:{line}", **dict(zip(names, row, strict=False))}


CSV = LineFormat(_csv_rows, _csv_record, header=True)


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
        raise next(lines_not_utf8(path)) from error
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path, config: DataConfig) -> list[Record]:
    """Return the objects of a JSON list."""
    try:
        values = json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise next(lines_not_utf8(path)) from error
    except (ValueError, RecursionError) as error:
        found = error if isinstance(error, json.JSONDecodeError) else None
        said = f": not JSON ({found.msg if found else error}); mend it there, or name the file"
        said += " .jsonl if each of its lines is an object"
        place = (found.lineno, found.colno) if found else (None, None)
        raise FileError(path, said, *place) from error
    if not isinstance(values, list):
        said = f' holds {kind_of(values)}; it must be a list of objects like {{"text": ...}}'
        raise FileError(path, said)
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            said = f', entry {number}: {kind_of(value)}, not an object like {{"text": ...}}'
            raise FileError(path, said)
    return [{"id": f"{path.name}:{number}", **value} for number, value in enumerate(values)]


def lines_not_utf8(path: Path) -> Iterator[FileError]:
    """Yield the faults of lines in another encoding."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                fault = not_utf8(path, number, error)
                fault.__cause__ = error
                yield fault


def read_parquet(path: Path, config: DataConfig) -> Iterable[Record]:
    """Return the rows of a Parquet file, memory-mapped unless they are streamed."""
    # its log repeats what is raised here
    logging.getLogger("datasets.packaged_modules.parquet.parquet").setLevel(logging.CRITICAL)

    def fault(error: Exception) -> DataError:
        what = first_line(error.__cause__ or error)[:300]
        return FileError(path, f" cannot be read as Parquet: {what}; mend the file")

    with _raising(fault):
        records = _load("parquet", config, data_files=glob.escape(str(path)), split="train")
    return _Stream(records, fault) if config.streaming else records


def read_hub(name: str, config: DataConfig) -> Iterable[Record]:
    """Return a data set of the hub."""
    split, files = config.dataset_split, ", ".join(kind for kind in READERS if kind[0] == ".")
    remedy = f"check the name and the network, or give --dataset_name a local file ({files})"

    def at_start(error: Exception) -> DataError:
        said = f"cannot load the data set {name!r} (split {split!r}): {first_line(error)[:300]}"
        return DataError(f"{said}; {remedy}")

    def later(error: Exception) -> DataError:
        said = f"the data set {name!r} broke off: {first_line(error)[:300]}"
        return DataError(f"{said}; check the network, or download it and pass the files")

    with _raising(at_start):
        records = _load(name, config, name=config.dataset_config, split=split)
    return _Stream(records, later) if config.streaming else records


def _load(path: str, config: DataConfig, **options: Any) -> Any:
    import datasets

    return datasets.load_dataset(path, streaming=config.streaming, **options)


Fault = Callable[[Exception], DataError]


@contextmanager
def _raising(fault: Fault) -> Iterator[None]:
    """Raise errors of `datasets`, of dozens of classes, as a fault of ours."""
    try:
        yield
    except Exception as error:
        raise fault(error) from error


class _Stream:
    """A stream of `datasets`, whose later errors become faults of ours."""

    def __init__(self, records: Any, fault: Fault):
        self._records, self._fault = records, fault

    def __iter__(self) -> Iterator[Record]:
        with _raising(self._fault):
            yield from self._records

    def skip(self, count: int) -> _Stream:
        """Return the records after the first `count`, without reading those."""
        return _Stream(self._records.skip(count), self._fault)


def read_builtin(name: str, config: DataConfig) -> Iterator[Record]:
    """Yield the files of a split of the built-in text."""
    for path, text in builtin_files(config.dataset_split):
        yield {"text": text, "id": path}


def is_heldout(name: str, one_in: int = _HELDOUT_ONE_IN) -> bool:
    """Return whether training never sees a document, by its name: of a file of the library, its
    POSIX path below it."""
    digest = hashlib.sha256(name.encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % one_in == 0


def check_split(split: str) -> None:
    """Refuse a split that the built-in texts do not have."""
    if split not in SPLITS:
        raise DataError(f"built-in text has no split {split!r}; choose one of {', '.join(SPLITS)}")


def library() -> Path:
    """Return the folder of this machine's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def builtin_files(split: str, root: Path | None = None) -> Iterator[tuple[str, str]]:
    """Yield (relative POSIX path, text) of one split, in path order."""
    check_split(split)
    root = library() if root is None else root
    found = False
    for found_file in source_files(root, lambda path: is_heldout(path) == (split == "heldout")):
        found = True
        yield found_file
    if not found:
        raise DataError(
            f"no Python source below {root}; pass --dataset_name FILE instead of the built-in text"
        )


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
