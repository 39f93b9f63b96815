"""Where records come from: the built-in text, local files, the hub. A record is a mapping with a
text or with token ids.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from npt.config import DataConfig
from npt.data.builtin import SPLITS, builtin_files
from npt.data.local import SUFFIXES, local_files, read_sequence, read_stream
from npt.errors import ConfigError, DataError, first_line
from npt.extras import require

BUILTIN = "builtin"

Record = Mapping[str, Any]


def open_source(config: DataConfig) -> Iterable[Record]:
    """The records of `--dataset_name`: a sequence, or with `--streaming` something that is read
    anew at every pass.

    Raises:
        DataError: unknown or unreadable, empty, or a line that is not what it should be.
        ConfigError: as `check_source`.
    """
    check_source(config)
    name = config.dataset_name
    if name == BUILTIN:
        text = _Reader(lambda: _builtin(config.dataset_split))
        return text if config.streaming else list(text)
    if is_local(name):
        files = local_files(name)
        if config.streaming:
            return _Reader(lambda: read_stream(files))
        records = read_sequence(files)
        if len(records) == 0:
            raise DataError(f"{name} holds no records; check --dataset_name")
        return records
    return _hub(config)


def fitting_columns(config: DataConfig, records: Iterable[Record]) -> DataConfig:
    """The settings for one of several sources, which may be of another form: without prompt and
    completion columns where its first record has none of that name, and with the usual text column
    where it has that one alone.

    Args:
        config: the settings for all sources.
        records: of this one; iterable more than once.
    """
    usual = DataConfig.text_column
    if config.prompt_column is None and config.text_column == usual:
        return config
    first = next(iter(records), None)
    if not isinstance(first, Mapping):
        return config
    if config.prompt_column is not None and config.prompt_column not in first:
        config = replace(config, prompt_column=None, completion_column=None)
    if config.text_column not in first and usual in first:
        config = replace(config, text_column=usual)
    return config


def own_heldout(config: DataConfig) -> Iterable[Record] | None:
    """The held-out records that a source has of its own: those of the built-in text; None of any
    other.
    """
    return _Reader(lambda: _builtin("heldout")) if config.dataset_name == BUILTIN else None


def check_source(config: DataConfig) -> None:
    """Refuse what needs no reading to be refused, before a large base is loaded: a local file that
    is missing, empty or of an unknown kind, a split or configuration that the source does not have.

    Raises:
        DataError: as `open_source`.
        ConfigError: a source that only `datasets` can read, which is not installed; a mixture,
            which only training takes.
    """
    if config.dataset_mix is not None:
        raise ConfigError(
            f"--dataset_mix {config.dataset_mix} is for training; name one data set with"
            " --dataset_name"
        )
    local = is_local(config.dataset_name)
    if local:
        parquet = next(
            (file for file in local_files(config.dataset_name) if file.suffix == ".parquet"), None
        )
        if parquet is not None:
            require("datasets", str(parquet))
    elif config.dataset_name != BUILTIN:
        require("datasets", f"the data set {config.dataset_name!r} of the hub")
    if (local or config.dataset_name == BUILTIN) and config.dataset_config is not None:
        raise DataError(
            f"--dataset_config {config.dataset_config} is for hub data sets; {config.dataset_name}"
            " has none"
        )
    if config.dataset_name == BUILTIN and config.dataset_split not in SPLITS:
        raise DataError(
            f"the built-in text has no split {config.dataset_split!r}; choose from"
            f" {', '.join(SPLITS)}"
        )
    if local and config.dataset_split != "train":
        raise DataError(
            f"--dataset_split {config.dataset_split} is for hub data sets; a local file is one"
            " split"
        )


def is_local(name: str) -> bool:
    """Whether a data set's name means files on this machine: a path, a folder, a glob, or anything
    with a file's ending.
    """
    path = os.path.expanduser(name)
    ending = Path(path).suffix in SUFFIXES
    return name != BUILTIN and (
        ending or os.path.isabs(path) or os.path.exists(path) or any(c in name for c in "*?[")
    )


class _Reader:
    """Iterable more than once: each pass opens the source again."""

    def __init__(self, start: Callable[[], Iterator[Record]]):
        self._start = start

    def __iter__(self) -> Iterator[Record]:
        return self._start()


class _HubStream:
    """A stream of the hub, whose failures on the way (the network) are said in one line as well."""

    def __init__(self, records: Any, name: str):
        self._records, self._name = records, name

    def __iter__(self) -> Iterator[Record]:
        try:
            yield from self._records
        except Exception as error:
            raise DataError(
                f"the data set {self._name!r} broke off: {first_line(error)[:300]}; check the"
                " network, or download it and pass the files"
            ) from error

    def skip(self, count: int) -> _HubStream:
        """The records behind the first `count`, which are not handed out."""
        return _HubStream(self._records.skip(count), self._name)


def _builtin(split: str) -> Iterator[Record]:
    for path, text in builtin_files(split):
        yield {"text": text, "id": path}


def _hub(config: DataConfig) -> Iterable[Record]:
    import datasets

    try:
        records = datasets.load_dataset(
            config.dataset_name,
            config.dataset_config,
            split=config.dataset_split,
            streaming=config.streaming,
        )
    # the hub client raises dozens of classes, down to the HTTP library's own
    except Exception as error:
        raise DataError(
            f"cannot load the data set {config.dataset_name!r} (split {config.dataset_split!r}):"
            f" {first_line(error)[:300]}; check the name and the network, or give --dataset_name a"
            f" local file ({', '.join(SUFFIXES)})"
        ) from error
    return _HubStream(records, config.dataset_name) if config.streaming else records
