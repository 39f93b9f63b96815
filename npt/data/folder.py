"""A folder of data: its files, their splits, and what a dataset saved by `datasets` is made of."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from npt.errors import DataError
from npt.stored import read_json

_NOT_DATA = frozenset(
    ("config.json", "dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json")
)
"""Files about a dataset, which `datasets` ignores too."""

_SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
"""Words in the names of files and folders that tell a split."""
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*")
"""A file that the Hub calls by its split: data/train_sft-00000-of-00002.parquet."""


class Folder(NamedTuple):
    """The data files of one split of a folder, sorted, and the names of all other files, with their
    splits."""

    read: list[Path]
    passed: list[str]


def look_through(folder: Path, split: str, is_data: Callable[[Path], bool]) -> Folder:
    """Sort out the files of a folder and its folders, without hidden ones.

    Only if the names tell several splits, or another split than the default is asked for, are the
    files of one split read alone. Raises DataError if it is not there.
    """
    names = _visible(folder)
    data = [path for path in names if is_data(path) and path.name not in _NOT_DATA]
    split_of = {path: _split_of(path, folder) for path in data}
    splits = set(filter(None, split_of.values()))
    if len(splits) > 1 or split != "train":
        check_split(folder, split, splits)
        data = [path for path in data if split_of[path] == split]
    passed = []
    for path in sorted(names.keys() - set(data)):
        other = split_of.get(path)
        passed.append(names[path] if other is None else f"{names[path]} (split {other})")
    return Folder(data, passed)


def _visible(folder: Path) -> dict[Path, str]:
    """Return the files of a folder and its folders, without hidden ones, sorted; each with its name
    in the folder."""
    names = {path: path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*"))}
    return {path: name for path, name in names.items() if "/." not in f"/{name}" and path.is_file()}


def _split_of(path: Path, folder: Path) -> str | None:
    """Return the split that a file's name tells, else that of a folder above it, as the Hub and
    `datasets` read names; None if there is none."""
    shard = _SHARD.fullmatch(path.name)
    if shard is not None and path.parent.name == "data":
        return shard[1]
    for part in reversed(path.relative_to(folder).parts):
        for split, words in _SPLITS.items():
            # as a whole word, since 'latest' is no test split
            if re.search(rf"(?<![a-z])(?:{words})(?![a-z])", part.lower()):
                return split
    return None


def check_split(folder: Path, split: str, splits: set[str]) -> None:
    """Raise DataError if a split is not one of those of the folder."""
    if not splits:
        raise DataError(
            f"--dataset_split {split} has no effect on {folder}, whose files are one split; remove"
            " it"
        )
    if split not in splits:
        raise DataError(
            f"{folder} has no split {split!r}; choose --dataset_split from"
            f" {', '.join(sorted(splits))}"
        )


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk` of a Dataset or DatasetDict."""

    def here(name: str) -> bool:
        return os.path.isfile(folder / name)  # Path.is_file raises for a name that is too long

    return here("dataset_dict.json") or (here("state.json") and here("dataset_info.json"))


def saved_split(folder: Path, split: str) -> Folder:
    """Return the folder of one split of a saved DatasetDict; a saved Dataset is itself one."""
    listed = folder / "dataset_dict.json"
    if not listed.is_file():
        if split != "train":
            check_split(folder, split, set())
        return Folder([folder], [])
    splits = read_json(listed, DataError).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise DataError(f"{listed} lists no splits; restore it from the original")
    check_split(folder, split, set(splits))
    others = [f"{name}/ (split {name})" for name in splits if name != split]
    return Folder([folder / split], others)
