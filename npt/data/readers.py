"""Readers: files of text, JSON, CSV, Parquet and Arrow, saved datasets, the Hub, built-in text.

The built-in text is the source code of this machine's Python standard library without its tests,
about 12 MB. A hash of a file's path decides whether the file is held out, so the split is the same
on every machine. The embedded model was not trained on the held-out files.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import logging
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from npt.batch import is_heldout
from npt.config import DataConfig
from npt.data.source import PIECE, FileError, Record, suffixes
from npt.errors import DataError, first_line, kind_of

TEXT_PIECE = 1 << 16
"""Characters per record of a text file. A longer file is read in pieces that form one document."""

_EXCLUDED = {
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "_vendor",
    "ensurepip",
    "site-packages",
    "dist-packages",
}

csv.field_size_limit(2**31 - 1)  # the default is 128 KiB, for every reader of the process


Entries = Iterator[Record | FileError]
"""Records, and a FileError in place of each record that cannot be read."""


@contextmanager
def _opened(path: Path, encoding: str | None = None, newline: str | None = None) -> Iterator[Any]:
    """Open a file that may be compressed, as bytes or with an encoding as text; raise FileError for
    all that can go wrong until it is closed."""
    try:
        with _bytes_of(path) as file:
            yield file if encoding is None else io.TextIOWrapper(file, encoding, newline=newline)
    except UnicodeDecodeError as error:
        with _bytes_of(path) as file:
            for line, raw in enumerate(file, start=1):
                if raw.decode(errors="ignore").encode() != raw:
                    raise _not_utf8(path, line, error) from error
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None)
        problem = f" cannot be read: {why}"
        if why is None:  # not from the system
            problem = f" is damaged: {first_line(error)}; restore it from the original"
        raise FileError(path, problem) from error


def _bytes_of(path: Path) -> Any:
    """Open a file as bytes, unpacked if its suffix is that of a compression."""
    suffix = path.suffix.lower()
    modules = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
    if suffix in modules:
        return import_module(modules[suffix]).open(path, "rb")
    codecs = {".zst": "zstd", ".lz4": "lz4"}
    if suffix in codecs:
        import pyarrow

        stream = pyarrow.input_stream(str(path), compression=codecs[suffix])
        return io.BufferedReader(stream)
    return path.open("rb")


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> FileError:
    return FileError(path, f": not UTF-8 ({error.reason}); convert the file to UTF-8", line)


def read_json_lines(path: Path, config: DataConfig) -> Entries:
    with _opened(path) as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                yield _json_record(path, line, raw)


def _json_record(path: Path, line: int, raw: bytes) -> Record | FileError:
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
        # so that a truncated line is reported at its end, not at the next line
        record = json.loads(text.rstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        return _not_utf8(path, line, error)
    except (ValueError, RecursionError) as error:
        message = f": not JSON ({_json_fault(error)}); each line must be one JSON object"
        return FileError(path, message, line, getattr(error, "colno", None))
    if not isinstance(record, dict):
        return FileError(path, f': {kind_of(record)}, not an object like {{"text": ...}}', line)
    return {"id": f"{path.name}:{line}", **record}


def _json_fault(error: Exception) -> str:
    """Return what is wrong, without Python's own remedy for a number of too many digits."""
    return str(getattr(error, "msg", error)).partition(";")[0]


def read_csv(path: Path, config: DataConfig) -> Entries:
    """Yield the rows of a CSV file (RFC 4180), or of one with tabs instead of commas, all fields as
    text; short rows lack last columns."""
    tabs = ".tsv" in map(str.lower, path.suffixes[-2:])
    kind, separators, mark = ("TSV", "tabs", "\t") if tabs else ("CSV", "commas", ",")
    with _opened(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True, delimiter=mark)
        names: list[str] = []
        line = 1  # of a row's first line; fields may span lines
        try:
            for row in rows:
                if not names:
                    names = row
                elif len(row) > len(names):
                    message = (
                        f": {len(row)} fields, but the header names {len(names)}; put double quotes"
                        f" around fields that contain {separators}"
                    )
                    yield FileError(path, message, line)
                elif row:
                    named = dict(zip(names, row, strict=False))
                    yield {"id": f"{path.name}:{line}", **named}
                line = rows.line_num + 1
        except csv.Error as error:
            yield FileError(path, f": not {kind} ({error}); correct the file", line)


def read_text(path: Path, config: DataConfig) -> Entries:
    """Yield a text file as records of about TEXT_PIECE characters, cut at line ends."""

    def next_piece() -> str:
        return str(file.read(TEXT_PIECE) + file.readline())

    with _opened(path, encoding="utf-8-sig") as file:
        number = 0
        piece = next_piece()
        while piece:
            after = next_piece()
            if number == 0 and not after:
                yield {"text": piece, "id": path.name}
            else:
                ends = {PIECE: (number == 0, not after)}
                yield {"text": piece, "id": f"{path.name}#{number}", **ends}
            number += 1
            piece = after


def read_json(path: Path, config: DataConfig) -> Entries:
    """Yield the objects of a list, or of lines, which many files with this suffix hold."""
    example = 'like {"text": ...}'
    with _opened(path, encoding="utf-8-sig") as file:
        text = file.read()
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = _json_fault(error)
        if what == "Extra data" and text.lstrip().startswith("{"):
            yield from read_json_lines(path, config)
            return
        line = getattr(error, "lineno", None)
        column = getattr(error, "colno", None)
        raise FileError(path, f": not JSON ({what}); correct the file", line, column) from error
    if not isinstance(entries, list):
        raise FileError(path, f" holds {kind_of(entries)}; it must be a list of objects {example}")
    for number, entry in enumerate(entries):
        if isinstance(entry, dict):
            yield {"id": f"{path.name}:{number}", **entry}
        else:
            yield FileError(path, f", entry {number}: {kind_of(entry)}, not an object {example}")


def read_table(path: Path, config: DataConfig) -> Iterable[Record]:
    """Return the rows of a Parquet or Arrow file, memory-mapped unless they are streamed."""
    import datasets

    kind = path.suffix[1:].lower()
    # this logger repeats the error that is raised here
    logging.getLogger(f"datasets.packaged_modules.{kind}.{kind}").setLevel(logging.CRITICAL)
    load = partial(
        datasets.load_dataset,
        kind,
        data_files=glob.escape(str(path)),
        split="train",
        streaming=config.streaming,
    )
    return _loaded(load, config, partial(_damaged, path, kind.capitalize()))


def read_saved(folder: Path, config: DataConfig) -> Iterable[Record]:
    """Return the rows of a dataset that `save_to_disk` wrote, memory-mapped."""
    import datasets

    def load() -> Any:
        records = datasets.load_from_disk(str(folder))
        return records.to_iterable_dataset() if config.streaming else records

    return _loaded(load, config, partial(_damaged, folder, "a saved dataset"))


def _damaged(path: Path, kind: str, error: Exception) -> DataError:
    what = first_line(error.__cause__ or error)[:300]
    return FileError(path, f" is damaged or not {kind}: {what}; restore it from the original")


def read_hub(name: str, config: DataConfig) -> Iterable[Record]:
    import datasets

    split = config.dataset_split

    def fault(error: Exception) -> DataError:
        return DataError(
            f"cannot read the dataset {name!r} (split {split!r}): {first_line(error)[:300]}; check"
            f" the name and the network, or give --dataset_name a local file ({suffixes()})"
        )

    load = partial(
        datasets.load_dataset,
        name,
        name=config.dataset_config,
        split=split,
        streaming=config.streaming,
    )
    return _loaded(load, config, fault)


Fault = Callable[[Exception], DataError]
"""Turns an error of `datasets`, which has dozens of classes, into a DataError."""


def _loaded(load: Callable[[], Any], config: DataConfig, fault: Fault) -> Iterable[Record]:
    try:
        records = load()
    except Exception as error:
        raise fault(error) from error
    return _Streamed(records, fault) if config.streaming else records


class _Streamed:
    """A stream of `datasets` whose errors become DataErrors."""

    def __init__(self, records: Any, fault: Fault):
        self._records = records
        self._fault = fault

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from self._records
        except Exception as error:
            raise self._fault(error) from error

    def skip(self, count: int) -> _Streamed:
        """Return the records after the first `count`, which are not read."""
        return _Streamed(self._records.skip(count), self._fault)


def read_builtin(name: str, config: DataConfig) -> Iterator[Record]:
    for path, text in builtin_files(config.dataset_split):
        yield {"text": text, "id": path}


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
            f"there is no Python source in {root}; pass --dataset_name FILE instead of the built-in"
            " text"
        )
    yield first
    yield from files


def source_files(root: Path, chosen: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield (relative POSIX path, text) of the library's chosen files, in path order, without tests
    and installed packages."""
    paths = []
    for folder, folders, names in os.walk(root):
        # installed packages may be many times as large as the library
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        below = Path(folder).relative_to(root)
        paths += [(below / name).as_posix() for name in names if name.endswith(".py")]
    for relative in sorted(filter(chosen, paths)):
        try:
            text = (root / relative).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few files of the library are in other encodings
        if text.strip():
            yield relative, text
