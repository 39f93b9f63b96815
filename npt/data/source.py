"""Datasets by name, and the registry of readers (filled in npt/data/__init__.py)."""

from __future__ import annotations

import glob
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from npt.config import DataConfig
from npt.data.folder import Folder, is_saved, look_through, saved_split
from npt.errors import DataError, first_line, kind_of
from npt.extras import require

BUILTIN = "builtin"
PROSE = "builtin-prose"
HUB = "the hub"
SAVED = "saved"
"""Kind of a folder that `save_to_disk` of `datasets` wrote."""

OWN_HELDOUT = (BUILTIN, PROSE)
"""Built-in texts, which have a held-out split for evaluation."""

COMPRESSIONS = {".gz": None, ".bz2": None, ".xz": None, ".zst": "datasets", ".lz4": "datasets"}
"""Second suffixes of compressed text files, with the package that each needs: pyarrow, which comes
with datasets, reads what Python's own library cannot."""

NAMED = 5  # files that are named as not read; further ones are only counted

Record = Mapping[str, Any]
"""A text, a prompt with its completion, a conversation, or token ids."""

Given = Iterable[Record] | Callable[[], Iterable[Record]] | str | os.PathLike[str]
"""Data from a caller in Python; `records_from` makes records of them. A DataFrame is one too."""

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


class Skipped(Exception):
    """The reason why a record yields no sample. It is counted and is not an error."""


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
    """Register a reader for a file suffix (".toml") or for a name passed to --dataset_name.

    `read(path or name, config)` returns the records. With `config.streaming` it is called for every
    pass; otherwise it is called once, and records that are not a sequence are kept in memory.
    `needs` is an optional package of npt/extras.py. The case of a suffix does not matter."""
    READERS[kind.lower() if kind.startswith(".") else kind] = Reader(read, needs)


class Repeatable:
    """Records that every pass reads from their source again."""

    def __init__(self, start: Callable[[], Iterable[Record]]):
        self._start = start

    def __iter__(self) -> Iterator[Record]:
        return iter(self._start())


def is_sequence(records: Any) -> bool:
    """Return whether records have a length and can be indexed, as a list or `datasets` object."""
    return hasattr(records, "__len__") and hasattr(records, "__getitem__")


def kind_of_path(path: Path) -> str | None:
    """Return the kind in READERS of a saved dataset or a file: its suffix in lower case, with the
    one before that of a compression. None: the kind is unknown."""
    if is_saved(path):
        return SAVED
    suffixes = [suffix.lower() for suffix in path.suffixes]
    for kind in ("".join(suffixes[-2:]), "".join(suffixes[-1:])):
        if kind in READERS:
            return kind
    return None


def suffixes() -> str:
    """Return the suffixes of files that can be read, for messages and without compressed ones."""
    return ", ".join(kind for kind in READERS if kind.rfind(".") == 0)


def is_local(name: str) -> bool:
    """Return whether a dataset's name is a local path, a glob or has a known suffix."""
    path = Path(os.path.expanduser(name))
    is_path = path.is_absolute() or os.path.exists(path) or kind_of_path(path) is not None
    return name not in READERS and (is_path or glob.has_magic(name))


def reader_of(name: str | Path) -> Reader:
    """Return the reader of a path or a registered name; for any other name the hub's."""
    kind = kind_of_path(name) if isinstance(name, Path) else name
    return READERS.get(kind or HUB, READERS[HUB])


def local_files(name: str, split: str = "train") -> list[Path]:
    """Return the files of a path, of a folder's split or of a glob, sorted; a dataset saved by
    `datasets` is its folder. No file, an empty one or an unknown kind is a DataError."""
    return _found(name, split).read


def passed_over(config: DataConfig) -> str | None:
    """Return a line that names files of the dataset's folder that are not read; None if all are."""
    name = config.dataset_name
    if not is_local(name):
        return None
    passed = _found(name, config.dataset_split).passed
    if not passed:
        return None
    more = f" and {len(passed) - NAMED:,} more" if len(passed) > NAMED else ""
    return f"not read in {name}: {', '.join(passed[:NAMED])}{more}"


def _found(name: str, split: str) -> Folder:
    path = Path(os.path.expanduser(name))
    passed: list[str] = []
    try:
        if is_saved(path):
            return saved_split(path, split)
        if path.is_dir():
            files, passed = look_through(path, split, lambda p: kind_of_path(p) is not None)
        elif split != "train":
            raise DataError(
                f"--dataset_split {split} has no effect on local files, which are one split; remove"
                " it"
            )
        elif path.exists():
            # first, since a name may hold the characters of a pattern
            files = [path]
        else:
            matches = (Path(p) for p in glob.glob(str(path), recursive=True))
            files = sorted(p for p in matches if p.is_file())
        if not files:
            raise DataError(
                f"there is no file at {path} ({suffixes()}); check --dataset_name ('builtin' needs"
                " no file)"
            )
        for file in files:
            if kind_of_path(file) is None or not file.is_file():
                raise DataError(
                    f"{file} is not a {suffixes()} file (texts may be compressed:"
                    f" {', '.join(COMPRESSIONS)}); convert it to one of these"
                )
            if file.stat().st_size == 0:
                raise DataError(f"{file} is empty; remove it from --dataset_name")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}; check --dataset_name") from error
    return Folder(files, passed)


def check_source(config: DataConfig) -> None:
    """Check files, split and configuration before a large base is loaded. Raise DataError, or
    ConfigError if a package is not installed."""
    name = config.dataset_name
    split = config.dataset_split
    local = is_local(name)
    for one in local_files(name, split) if local else (name,):
        needs = reader_of(one).needs
        if needs is not None:
            require(needs, str(one) if local else f"the dataset {name!r} of the Hub")
    if (local or name in READERS) and config.dataset_config is not None:
        raise DataError(
            f"--dataset_config {config.dataset_config} has no effect on {name}, which is not on the"
            " Hub; remove it"
        )
    if name in OWN_HELDOUT and split not in ("train", "heldout"):
        raise DataError(f"the built-in text has no split {split!r}; choose from train, heldout")


def open_source(config: DataConfig) -> Iterable[Record]:
    """Return the records of a dataset: a sequence, or with `config.streaming` an iterable that
    every pass reads again. Faults raise DataError, now or in iteration."""
    check_source(config)
    name = config.dataset_name
    if is_local(name):
        files = local_files(name, config.dataset_split)
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


def records_from(data: Any, config: DataConfig, what: str) -> Any:
    """Return an iterable of what a caller gives as data: records of a path, rows of a DataFrame,
    a function's records at every pass, or the data themselves.

    Raises DataError for data of another kind, and ConfigError if a package is not installed. Both
    name the data as `what`.
    """
    wanted = (
        'pass a list of records like {"text": ...}, a `datasets` object, a DataFrame, a generator'
        " function or the path of a file"
    )
    if isinstance(data, str | os.PathLike):
        name = os.fspath(data)
        if not is_local(name):
            raise DataError(f"{what} is {name!r}, which is not a file or folder; {wanted}")
        return open_source(replace(config, dataset_name=name, dataset_config=None))
    if isinstance(data, Mapping):
        names = ", ".join(map(str, data))
        raise DataError(f"{what} is {kind_of(data)} with {names}; pass one of its entries")
    if hasattr(data, "iterrows"):  # of pandas; an iteration would give its columns
        return _rows_of(data, what)
    iterable = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    if callable(data) and not iterable:
        return Repeatable(partial(_called, data, what))
    if not iterable or isinstance(data, bytes):
        raise DataError(f"{what} is {kind_of(data)}; {wanted}")
    return data


def _rows_of(frame: Any, what: str) -> Any:
    require("datasets", f"a DataFrame as {what}")
    import datasets

    try:
        return datasets.Dataset.from_pandas(frame, preserve_index=False)
    except Exception as error:  # pyarrow has many
        raise DataError(
            f"{what} is a DataFrame that `datasets` cannot read: {first_line(error)[:200]}; give"
            " each column values of one type"
        ) from error


def _called(function: Callable[[], Any], what: str) -> Iterable[Record]:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise DataError(
            f"{what} is a function that cannot be called without arguments ({error}); bind them"
            " with functools.partial"
        ) from error
    records = function()
    if not hasattr(records, "__iter__"):
        raise DataError(f"{what} is a function that returns {kind_of(records)}; yield records")
    return records


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
