"""Data sets by name, and the registry of what can read them (its table: npt/data/__init__.py).

Files of lines (JSON lines, CSV) are read where they lie: only where each record starts is held.
"""

from __future__ import annotations

import glob
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from npt.config import DataConfig
from npt.errors import ConfigError, DataError, kind_of
from npt.extras import require

BUILTIN, HUB = "builtin", "the hub"
Record = Mapping[str, Any]
"""A text, a prompt and its completion, a conversation, or token ids."""


class FileError(DataError):
    """A file that cannot be read: `said` follows the place. line, column: from 1; at: the column,
    if the message does not name one."""

    def __init__(
        self, path: Path, said: str, line: int | None = None, column: int | None = None, at: Any = 0
    ):
        where = "" if line is None else f", line {line}"
        super().__init__(f"{path}{where}{'' if column is None else f', column {column}'}{said}")
        self.line, self.column, self.problem = line, column or at or None, said.lstrip(" :,")


def unreadable(path: Path, error: OSError) -> FileError:
    """Return what to raise of a file that the system does not read."""
    return FileError(path, f" cannot be read: {error.strerror}")


def not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> FileError:
    """Return what to raise of a line in another encoding."""
    said = f": not UTF-8 (byte {error.start}: {error.reason}); convert the file first"
    return FileError(path, said, line, at=error.start + 1)


Read = Callable[[Any, DataConfig], Iterable[Record]]


class Reader(NamedTuple):
    """How one kind of data is read, and the package that this needs."""

    read: Read
    needs: str | None = None


READERS: dict[str, Reader] = {}


def register_reader(kind: str, read: Read, *, needs: str | None = None) -> None:
    """Add a kind of data: the suffix of files (".tsv"), or a name for --dataset_name.

    `read(path or name, config)` gives the records. With `config.streaming` it is called again for
    every pass, else once, and records that are no sequence are kept in memory. `needs` is an
    optional package of npt/extras.py."""
    READERS[kind] = Reader(read, needs)


class Repeatable:
    """Records that are read again from their source at every pass."""

    def __init__(self, start: Callable[[], Iterable[Record]]):
        self._start = start

    def __iter__(self) -> Iterator[Record]:
        return iter(self._start())


def is_sequence(records: Any) -> bool:
    """Return whether records have a length and numbers: a list, a `datasets` object."""
    return hasattr(records, "__len__") and hasattr(records, "__getitem__")


def is_local(name: str) -> bool:
    """Return whether a data set's name means files here: a path, a glob, or a known suffix."""
    path, glob_ = os.path.expanduser(name), any(c in name for c in "*?[")
    found = Path(path).suffix in READERS or os.path.isabs(path) or os.path.exists(path)
    return name not in READERS and (found or glob_)


def reader_of(name: str | Path) -> Reader:
    """Return the reader of a file, or of a name that is no file's: the hub's, if none has it."""
    return READERS[name.suffix] if isinstance(name, Path) else READERS.get(name, READERS[HUB])


def local_files(name: str) -> list[Path]:
    """Return the files of a path, a folder (hidden ones left out) or a glob, sorted; none of them
    empty or of an unknown kind."""
    path = Path(os.path.expanduser(name))
    suffixes = ", ".join(kind for kind in READERS if kind.startswith("."))
    try:
        if path.is_dir():
            shown = (p for p in path.rglob("*") if "/." not in f"/{p.relative_to(path).as_posix()}")
            files = sorted(p for p in shown if p.suffix in READERS and p.is_file())
            if not files:
                raise DataError(f"{path} holds no {suffixes} file; check --dataset_name")
        elif path.exists():
            files = [path]
        else:
            found = (Path(p) for p in glob.glob(str(path), recursive=True))
            files = sorted(p for p in found if p.is_file())
        if not files:
            remedy = "check --dataset_name ('builtin' is the text that needs no file)"
            raise DataError(f"there is no file {path}; {remedy}")
        for file in files:
            if file.suffix not in READERS or not file.is_file():
                raise DataError(f"{file} is not a {suffixes} file; convert it to one of them")
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty; leave it out")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check --dataset_name") from error
    return files


def check_source(config: DataConfig) -> None:
    """Refuse, before a large base is loaded, what can be refused without reading: files, split and
    configuration (DataError), a package that is not installed or a mixture (ConfigError)."""
    name, split, part = config.dataset_name, config.dataset_split, config.dataset_config
    if config.dataset_mix is not None:
        remedy = "name one data set with --dataset_name"
        raise ConfigError(f"--dataset_mix {config.dataset_mix} is for training; {remedy}")
    local = is_local(name)
    for one in local_files(name) if local else (name,):
        needs = reader_of(one).needs
        if needs is not None:
            require(needs, str(one) if local else f"the data set {name!r} of the hub")
    if (local or name in READERS) and part is not None:
        raise DataError(f"--dataset_config {part} is for hub data sets; {name} has none")
    if name == BUILTIN and split not in ("train", "heldout"):
        raise DataError(f"the built-in text has no split {split!r}; choose from train, heldout")
    if local and split != "train":
        raise DataError(f"--dataset_split {split} is for hub data sets; a local file is one split")


def open_source(config: DataConfig) -> Iterable[Record]:
    """Return the records of a data set: a sequence, or if streamed something that is read again at
    every pass. What cannot be read is a DataError, now or when it is reached."""
    check_source(config)
    name = config.dataset_name
    if is_local(name):
        files = local_files(name)
        if config.streaming:
            return Repeatable(lambda: read_stream(files, config))
        found = read_sequence(files, config)
        if len(found) == 0:
            raise DataError(f"{name} holds no records; check --dataset_name")
        return found
    read = reader_of(name).read
    records = read(name, config)
    if iter(records) is not records:
        return records
    return Repeatable(lambda: read(name, config)) if config.streaming else list(records)


def read_stream(files: Iterable[Path], config: DataConfig) -> Iterator[Record]:
    """Yield the records of files in order, keeping none."""
    for file in files:
        yield from reader_of(file).read(file, config)


def read_sequence(files: Sequence[Path], config: DataConfig) -> Sequence[Record]:
    """Return the records of files as one sequence, readable in any order and by several threads."""
    found = [reader_of(file).read(file, config) for file in files]
    parts: list[Any] = [part if is_sequence(part) else list(part) for part in found]
    if len(parts) == 1:
        return parts[0]
    from torch.utils.data import ConcatDataset  # npt --help needs no torch

    joined: Any = ConcatDataset(parts)
    return joined


class LineFormat(NamedTuple):
    """A format of lines. rows(path, file, line): byte, line and content of each row from the file's
    position on, None for a blank one. record(path, line, row, header): its record. header: whether
    the first row is no record."""

    rows: Callable[[Path, BinaryIO, int], Iterator[tuple[int, int, Any]]]
    record: Callable[[Path, int, Any, Any], Record]
    header: bool = False

    def read(self, path: Path, config: DataConfig) -> Iterable[Record]:
        return LineStream(path, self) if config.streaming else IndexedLines(path, self)


class LineStream(Iterator[Record]):
    """One pass over a file of lines: a record that cannot be read raises, and the next call reads
    on. line, row: of the latest record. blank_lines: passed so far."""

    def __init__(self, path: Path, form: LineFormat):
        self.path, self._form, self.line, self.row, self.blank_lines = path, form, 0, None, 0
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
            self.close()
            raise
        _, self.line, self.row = found
        return self._form.record(self.path, self.line, self.row, self._header)

    def close(self) -> None:
        self._file.close()


class IndexedLines(Sequence[Record]):
    """The records of a file of lines by number, found by their 16 bytes of index. Every access
    opens the file: threads may read at once, and a folder of a thousand files leaves none open."""

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
        said = f": not JSON ({what}); each line has to be one JSON object"
        raise FileError(path, said, line, column, at=1) from error
    if not isinstance(record, dict):
        said = f': {kind_of(record)}, not an object like {{"text": ...}}'
        raise FileError(path, said, line, at=1)
    return {"id": f"{path.name}:{line}", **record}


JSON_LINES = LineFormat(_json_rows, _json_record)


def own_heldout(config: DataConfig) -> Iterable[Record] | None:
    """Return the held-out records that a source has of its own: only the built-in text has any."""
    if config.dataset_name != BUILTIN:
        return None
    return open_source(replace(config, dataset_split="heldout", streaming=True))
