"""The file of a collection, which the same command continues after an interruption.

    failures.jsonl              a line per record, written batch by batch
    failures.jsonl.progress     settings and figures after the last whole batch; removed at the end

A batch counts once `.progress`, which is replaced atomically, says so. What the file holds beyond
that is removed. So the file has the same bytes however often the work was interrupted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import lock_folder, to_json, write_json
from npt.stored import RESTORE, check_entries, read_json

SUFFIX = ".progress"
"""Not a suffix of data, so that a folder of outputs can be trained on."""

_ENTRIES = {"settings": (dict,), "bytes": (int,), "figures": (dict,)}


@dataclass(frozen=True)
class Compared:
    """The prompts that were compared: figures, and sums over the teacher's tokens.

    Attributes:
        prompts: number of prompts compared.
        disagreements: number of prompts on which the student differs; each is a record.
        tokens: number of tokens in the teacher's continuations of all prompts.
        prompts_sha256: of the prompts' tokens, to notice other data.
    """

    prompts: int = 0
    disagreements: int = 0
    tokens: int = 0
    top1_sum: float = 0.0
    kl_sum: float = 0.0
    acceptance_sum: float = 0.0
    prompts_sha256: str = ""


_FIGURES = {name: (type(value),) for name, value in asdict(Compared()).items()}


class Output:
    """The file of a collection, locked while it is open.

    Args:
        settings: everything that the records depend on, by flag.

    Attributes:
        figures: those after the last whole batch.

    Raises:
        ConfigError: the file is another collection's, was changed, is in use or cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        check_output(path)
        self.path = path
        self._settings = dict(settings)
        with self._writing("choose another file"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self._lock: int | None = None
        try:
            self._lock = lock_folder(path)
            if self._lock is None:
                raise ConfigError(
                    f"--output {path} is being written by another process: wait for it or choose"
                    " another file"
                )
            self.figures, self._bytes = self._begun()
            self.commit([], self.figures)
        except BaseException:
            self._close()
            raise

    def commit(self, records: Iterable[Mapping[str, Any]], figures: Compared) -> None:
        """Append the records of a batch. If that fails, the file ends with the batch before.

        Raises:
            ConfigError: the disk is full or gone.
        """
        text = "".join(to_json(record) + "\n" for record in records)
        lines = text.encode()
        left = memoryview(lines)
        with self._writing("free disk space and repeat the command, which goes on from here"):
            try:
                os.ftruncate(self._handle, self._bytes)
                while left:
                    written = os.write(self._handle, left)
                    left = left[written:]
                os.fsync(self._handle)
                size = self._bytes + len(lines)
                progress = {"settings": self._settings, "bytes": size, "figures": asdict(figures)}
                write_json(progress_of(self.path), progress)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, self._bytes)
                raise
        self._bytes = size
        self.figures = figures

    def finish(self) -> None:
        """Remove the progress: the file is complete."""
        progress_of(self.path).unlink()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        os.close(self._handle)
        if self._lock is not None:
            os.close(self._lock)

    def _begun(self) -> tuple[Compared, int]:
        """Return the figures and the size of an earlier call's file, and check its settings."""
        begun = read_progress(self.path)
        figures = Compared(**begun.get("figures", {}))
        if not figures.prompts:
            return figures, 0
        for name, value in self._settings.items():
            before = begun["settings"].get(name)
            if before != value:
                raise ConfigError(
                    f"--output {self.path} was begun with {name} {before}, and this command has"
                    f" {value}: repeat the earlier command or choose another file"
                )
        size = self.path.stat().st_size
        if size < begun["bytes"]:
            raise ConfigError(
                f"--output {self.path} has {size} bytes, fewer than the {begun['bytes']} that were"
                f" written: restore it, or remove it and {progress_of(self.path).name}"
            )
        return figures, begun["bytes"]

    @contextmanager
    def _writing(self, remedy: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write --output {self.path}: {error.strerror}; {remedy}"
            ) from error


def progress_of(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def read_progress(path: Path) -> dict[str, Any]:
    """Return what an interrupted collection has left beside its file; empty if nothing.

    Raises:
        ConfigError: it is damaged.
    """
    progress = progress_of(path)
    if not progress.exists():
        return {}
    begun = read_json(progress, ConfigError)
    check_entries(progress, "", begun, _ENTRIES, ConfigError)
    figures = begun["figures"]
    check_entries(progress, "figures.", figures, _FIGURES, ConfigError)
    if begun["bytes"] < 0 or figures["prompts"] < 0:
        raise ConfigError(f"{progress} has a count below 0; {RESTORE}")
    return begun


def check_output(path: Path) -> None:
    """Refuse what is no file, a file that no interrupted collection has left, and a folder that
    cannot be written to, with a ConfigError.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"--output {path} exists and is not a file; choose another file")
    written = path.exists() and path.stat().st_size
    if written and not progress_of(path).exists():
        raise ConfigError(f"--output {path} exists; choose another file or remove it")
    folder = next(filter(Path.exists, path.absolute().parents))
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"--output {path}: {folder} is not a folder that can be written to; choose another file"
        )
