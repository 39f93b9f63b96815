"""Datasets by name, and the registry of readers (filled in npt/data/__init__.py)."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.errors import DataError
from npt.extras import require

BUILTIN, PROSE, HUB = "builtin", "builtin-prose", "the hub"
OWN_HELDOUT = (BUILTIN, PROSE)
"""Built-in texts, which have a held-out split for evaluation."""

Record = Mapping[str, Any]
"""A text, a prompt with its completion, a conversation, or token ids."""

PIECE = "npt:piece"
"""The column of a piece of a longer text: whether it is the first, and whether it is the last."""


class FileError(DataError):
    """A file or record that cannot be read. A reader raises it, or yields it in place of the record
    and continues. `problem` follows the file, line and column (from 1) in the message.
    """

    def __init__(
        self, path: Path, problem: str, line: int | None = None, column: int | None = None
    ):
        where = "" if line is None else f", line {line}"
        where += "" if column is None else f", column {column}"
        super().__init__(f"{path}{where}{problem}")


Read = Callable[[Any, DataConfig], Iterable[Record | FileError]]


class Reader(NamedTuple):
    """A reader of one kind of data.

    Attributes:
        read: function (path or name, config) -> records.
        needs: optional package that it needs (npt/extras.py).
    """

    read: Read
    needs: str | None = None


READERS: dict[str, Reader] = {}


def register_reader(kind: str, read: Read, *, needs: str | None = None) -> None:
    """Register a reader for a file suffix (".tsv") or for a name passed to --dataset_name.

    `read(path or name, config)` returns the records. With `config.streaming` it is called for every
    pass; otherwise it is called once, and records that are not a sequence are kept in memory.
    `needs` is an optional package of npt/extras.py."""
    READERS[kind] = Reader(read, needs)


class Repeatable:
    """Records that every pass reads from their source again."""

    def __init__(self, start: Callable[[], Iterable[Record]]):
        self._start = start

    def __iter__(self) -> Iterator[Record]:
        return iter(self._start())


def is_sequence(records: Any) -> bool:
    """Return whether records have a length and can be indexed, as a list or `datasets` object."""
    return hasattr(records, "__len__") and hasattr(records, "__getitem__")


def is_local(name: str) -> bool:
    """Return whether a dataset's name is a local path, a glob or has a known suffix."""
    path, is_glob = os.path.expanduser(name), any(c in name for c in "*?[")
    is_path = Path(path).suffix in READERS or os.path.isabs(path) or os.path.exists(path)
    return name not in READERS and (is_path or is_glob)


def reader_of(name: str | Path) -> Reader:
    """Return the reader of a file or a registered name; for any other name the hub's."""
    return READERS[name.suffix] if isinstance(name, Path) else READERS.get(name, READERS[HUB])


def local_files(name: str) -> list[Path]:
    """Return the files of a path, a folder (without hidden files) or a glob, sorted. No file, an
    empty one or an unknown kind is a DataError."""
    path = Path(os.path.expanduser(name))
    suffixes = ", ".join(kind for kind in READERS if kind.startswith("."))
    try:
        if path.is_dir():
            below = (p for p in path.rglob("*") if "/." not in f"/{p.relative_to(path).as_posix()}")
            files = sorted(p for p in below if p.suffix in READERS and p.is_file())
        elif path.exists():
            files = [path]
        else:
            matches = (Path(p) for p in glob.glob(str(path), recursive=True))
            files = sorted(p for p in matches if p.is_file())
        if not files:
            raise DataError(
                f"there is no file at {path} ({suffixes}); check --dataset_name ('builtin' needs no"
                " file)"
            )
        for file in files:
            if file.suffix not in READERS or not file.is_file():
                raise DataError(f"{file} is not a {suffixes} file; convert it to one of these")
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty; remove it from --dataset_name")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check --dataset_name") from error
    return files


def check_source(config: DataConfig) -> None:
    """Check files, split and configuration before a large base is loaded. Raise DataError, or
    ConfigError if a package is not installed."""
    name, split, part = config.dataset_name, config.dataset_split, config.dataset_config
    local = is_local(name)
    for one in local_files(name) if local else (name,):
        needs = reader_of(one).needs
        if needs is not None:
            require(needs, str(one) if local else f"the dataset {name!r} of the Hub")
    if (local or name in READERS) and part is not None:
        raise DataError(
            f"--dataset_config {part} has no effect on {name}, which is not on the Hub; remove it"
        )
    if name in OWN_HELDOUT and split not in ("train", "heldout"):
        raise DataError(f"the built-in text has no split {split!r}; choose from train, heldout")
    if local and split != "train":
        raise DataError(
            f"--dataset_split {split} has no effect on local files, which are one split; remove it"
        )


def open_source(config: DataConfig) -> Iterable[Record]:
    """Return the records of a dataset: a sequence, or with `config.streaming` an iterable that
    every pass reads again. Faults raise DataError, now or in iteration."""
    check_source(config)
    name = config.dataset_name
    if is_local(name):
        files = local_files(name)
        if config.streaming:
            return Repeatable(lambda: read_stream(files, config))
        sequence = read_sequence(files, config)
        if len(sequence) == 0:
            raise DataError(f"{name} has no records; check --dataset_name")
        return sequence
    read: Any = reader_of(name).read
    records = read(name, config)
    if iter(records) is not records:
        return records
    return Repeatable(lambda: read(name, config)) if config.streaming else list(records)


def read_stream(files: Iterable[Path], config: DataConfig) -> Iterator[Record]:
    """Yield the records of files in order, without keeping them; raise the first fault."""
    for file in files:
        yield from sound(reader_of(file).read(file, config))


def sound(records: Iterable[Record | FileError]) -> Iterator[Record]:
    """Yield the records of a reader; raise the first fault."""
    for record in records:
        if isinstance(record, FileError):
            raise record
        yield record


def read_sequence(files: Sequence[Path], config: DataConfig) -> Sequence[Record]:
    """Return the records of files as one sequence, for any order and several threads."""
    parts: list[Any] = []
    for file in files:
        records = reader_of(file).read(file, config)
        parts.append(records if is_sequence(records) else list(sound(records)))
    if len(parts) == 1:
        return parts[0]
    from torch.utils.data import ConcatDataset  # npt --help needs no torch

    joined: Any = ConcatDataset(parts)
    return joined


def own_heldout(config: DataConfig) -> Iterable[Record] | None:
    """Return a source's own held-out records: only built-in texts have any."""
    if config.dataset_name not in OWN_HELDOUT:
        return None
    return open_source(replace(config, dataset_split="heldout", streaming=True))
