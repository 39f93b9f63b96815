"""Where records come from: the built-in text, local files, the hub. A record is a mapping with a text or with token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from npt.config import DataConfig
from npt.data.builtin import SPLITS, builtin_files
from npt.errors import DataError

BUILTIN = "builtin"
LOCAL_SUFFIXES = (".txt", ".jsonl")

Record = Mapping[str, Any]


def open_source(config: DataConfig) -> Iterable[Record]:
    """The records of `--dataset_name`: a list, or with `--streaming` something that is read anew at every pass.

    Raises:
        DataError: unknown or unreadable, empty, or a line that is not what it should be.
    """
    check_source(config)
    name = config.dataset_name
    source: Iterable[Record]
    if name == BUILTIN:
        source = _Reader(lambda: _builtin(config.dataset_split))
    elif _is_local(name):
        path = Path(name).expanduser()
        source = _Reader(lambda: _read_file(path))
    else:
        source = _hub(config)
    if config.streaming:
        return source
    records = list(source) if isinstance(source, _Reader) else source
    if isinstance(records, list) and not records:
        raise DataError(f"{name} holds no records; check --dataset_name")
    return records


def own_heldout(config: DataConfig) -> Iterable[Record] | None:
    """The held-out records that a source has of its own: those of the built-in text; None of any other."""
    return _Reader(lambda: _builtin("heldout")) if config.dataset_name == BUILTIN else None


def check_source(config: DataConfig) -> None:
    """Refuse what needs no reading to be refused, before a large base is loaded: a local file that is missing, empty or of an
    unknown kind, a split or configuration that the source does not have.

    Raises:
        DataError: as `open_source`.
    """
    local = _is_local(config.dataset_name)
    if local:
        _check_file(Path(config.dataset_name).expanduser())
    if (local or config.dataset_name == BUILTIN) and config.dataset_config is not None:
        raise DataError(f"--dataset_config {config.dataset_config} is for hub data sets; {config.dataset_name} has none")
    if config.dataset_name == BUILTIN and config.dataset_split not in SPLITS:
        raise DataError(f"the built-in text has no split {config.dataset_split!r}; choose from {', '.join(SPLITS)}")
    if local and config.dataset_split != "train":
        raise DataError(f"--dataset_split {config.dataset_split} is for hub data sets; a local file is one split")


def _is_local(name: str) -> bool:
    path = Path(name).expanduser()
    return name != BUILTIN and (path.suffix in LOCAL_SUFFIXES or path.is_absolute() or path.exists())


class _Reader:
    """Iterable more than once: each pass opens the source again."""

    def __init__(self, start: Any):
        self._start = start

    def __iter__(self) -> Iterator[Record]:
        return self._start()


def _builtin(split: str) -> Iterator[Record]:
    for path, text in builtin_files(split):
        yield {"text": text, "id": path}


def _check_file(path: Path) -> None:
    if not path.exists():
        raise DataError(f"there is no file {path}; check --dataset_name ('builtin' is the text that needs no file)")
    if path.suffix not in LOCAL_SUFFIXES or not path.is_file():
        raise DataError(f"{path} is not a {' or '.join(LOCAL_SUFFIXES)} file; other local formats are not supported yet")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty; there is nothing to train on")


def _read_file(path: Path) -> Iterator[Record]:
    """A .txt file is one document; a .jsonl file has one record a line, blank lines aside."""
    try:
        if path.suffix == ".txt":
            yield {"text": path.read_text(encoding="utf-8-sig"), "id": path.name}
            return
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise DataError(f"{path}, line {number}: not JSON ({error}); each line has to be one JSON object") from error
                if not isinstance(record, dict):
                    raise DataError(f'{path}, line {number}: a {type(record).__name__}, not an object like {{"text": ...}}')
                yield {"id": f"{path.name}:{number}", **record}
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}: {error.reason}); convert it first") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _hub(config: DataConfig) -> Iterable[Record]:
    import datasets

    try:
        return datasets.load_dataset(config.dataset_name, config.dataset_config, split=config.dataset_split, streaming=config.streaming)
    except Exception as error:  # the hub client raises dozens of classes, down to the HTTP library's own
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(
            f"cannot load the data set {config.dataset_name!r} (split {config.dataset_split!r}): {reason[:300]}; check the name and "
            "the network, or pass a local .txt or .jsonl file"
        ) from error
