"""The run folder. Each of its files is complete at any moment."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from npt.adapters.files.adapter_files import save_adapter
from npt.adapters.files.run_layout import ADAPTER, BEST, CHECKPOINTS, checkpoints, step_name
from npt.base.identity import BaseIdentity
from npt.errors import CheckpointError, ConfigError
from npt.files import (
    about_output,
    check_folder,
    clean,
    lock_folder,
    new_folder,
    remove_folder,
    to_json,
    write_json,
    write_text,
)
from npt.manifest import verify_checkpoint

RUN = "run.json"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
REPORT = "report.html"
TRACKED = frozenset({"wandb", "npt"})
"""Folders of trackers, which may exist before the run folder."""

_STARTED_WITH = frozenset({RUN, METRICS, EVENTS, REPORT}) | TRACKED
"""Names that a run killed before it wrote `run.json` may leave."""

BROKEN = "broken"
SUPERSEDED = "superseded"
"""Suffixes of checkpoints that are kept but never resumed from: BROKEN failed verification,
SUPERSEDED is newer than the checkpoint that the run resumed from."""

Json = dict[str, Any]


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Raise ConfigError if the output folder cannot be written within the context."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write --output_dir {folder}: {error.strerror}; choose another folder"
        ) from error


class RunFolder:
    """The folder of one run: records, logs, checkpoints, the best and the final adapters.

    One process writes it at a time. Log lines that do not fit on the disk are lost and counted. A
    folder that is removed or renamed during the run is made anew.

    Args:
        path: folder to make; must be missing or empty unless the run resumes.
        resume_at: step at which the run in this folder resumes; later metrics are removed.

    Raises:
        ConfigError: the folder is in use or cannot be written.
    """

    def __init__(self, path: str | Path, resume_at: int | None = None):
        self.path = Path(path)
        self.lines_lost = 0
        self._fresh = resume_at is None
        self._closed = False
        self._record: Any = None
        if resume_at is None:
            check_free(self.path)
        with writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            if resume_at is not None:
                if (self.path / ADAPTER).is_dir():  # the final adapter of the run before
                    remove_folder(self.path / ADAPTER)
                _cut_log(self.path / METRICS, resume_at)
                _cut_log(self.path / EVENTS, None)
            self._logs = _opened_logs(self.path)

    def write(self, name: str, value: Any) -> None:
        if name == RUN:
            self._record = value
        write_json(self.path / name, value)

    def metrics(self, values: dict[str, Any]) -> None:
        self._write(METRICS, values)

    def event(self, event: str, /, **details: Any) -> None:
        """Append the event and its time, in seconds since the epoch, to `events.jsonl`."""
        self._write(EVENTS, {"event": event, "time": round(time.time(), 3), **details})

    def _write(self, log: str, values: dict[str, Any]) -> None:
        """Append a whole line or none; a full disk must not end the run or hide why it ends."""
        if self._closed:
            return
        try:
            self._renew_if_gone()
        except OSError:
            self.lines_lost += 1
            return
        handle = self._logs[log]
        line = f"{to_json(values)}\n".encode()
        size = os.fstat(handle).st_size
        try:
            whole = os.write(handle, line) == len(line)
        except OSError:
            whole = False
        if not whole:
            self.lines_lost += 1
            with contextlib.suppress(OSError):
                os.ftruncate(handle, size)

    def _renew_if_gone(self) -> None:
        """Make the folder anew if it was removed or renamed during the run.

        Raises:
            OSError: it cannot be made, or another run writes a folder of this name by now.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self._lock)):
                return
        self.path.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(self.path)
        if lock is None:
            raise OSError(errno.EBUSY, "another run is writing a folder of this name", self.path)
        for handle in (*self._logs.values(), self._lock):
            os.close(handle)
        self._logs = _opened_logs(self.path)
        self._lock = lock
        if self._record is not None:
            write_json(self.path / RUN, self._record)
        gone = "was removed or renamed during the run; what it held before is not here"
        self.event("warning", message=f"{self.path} {gone}")

    def save_checkpoint(self, step: int, write: Callable[[Path], None], keep: int | None) -> Path:
        """Let `write` make a checkpoint, verify it, and remove the oldest ones beyond `keep`.

        Raises:
            CheckpointError: verification failed; the checkpoint is set aside.
            OSError: the folder was replaced by another run's.
        """
        self._renew_if_gone()
        folder = self.path / CHECKPOINTS / step_name(step)
        write(folder)
        try:
            verify_checkpoint(folder)
        except CheckpointError:
            self.set_aside(folder, BROKEN)
            raise
        if keep is not None:
            others = [path for path in self.checkpoints() if path != folder]
            excess = max(0, len(others) + 1 - keep)
            for old in others[:excess]:
                with contextlib.suppress(OSError):  # one checkpoint too many does no harm
                    remove_folder(old)
        return folder

    def save_best(self, model: PreTrainedModel, base: BaseIdentity, figures: Json) -> Path:
        """Write the adapters, the best so far, and their figures to `best`."""
        folder = self.path / BEST
        with new_folder(folder) as temporary:
            save_adapter(model, temporary / ADAPTER, base=base)
            write_json(temporary / "fidelity.json", figures)
        return folder

    def save_final(self, model: PreTrainedModel, base: BaseIdentity, fidelity: Json) -> Path:
        """Write the final adapter to `adapter`, with its fidelity in the model card."""
        return save_adapter(model, self.path / ADAPTER, base=base, fidelity=fidelity)

    @property
    def has_best(self) -> bool:
        return (self.path / BEST).is_dir()

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint folders, oldest first; none if they cannot be listed."""
        try:
            return checkpoints(self.path / CHECKPOINTS)
        except OSError:
            return []

    def set_aside(self, checkpoint: Path, why: str) -> Path:
        """Try to rename a checkpoint so that no run resumes from it; return its folder. `why` is
        BROKEN or SUPERSEDED."""
        aside = checkpoint.with_name(f"{checkpoint.name}.{why}")
        number = 1
        while aside.exists():
            number += 1
            aside = checkpoint.with_name(f"{checkpoint.name}.{why}-{number}")
        try:
            os.replace(checkpoint, aside)
        except OSError:
            return checkpoint
        return aside

    def set_aside_after(
        self, step: int, broken: Mapping[Path, str], warn: Callable[[str], None]
    ) -> None:
        """Set aside checkpoints that fail verification, and those after `step`."""
        for path, problem in broken.items():
            warn(f"{problem}; set aside as {self.set_aside(path, BROKEN).name}")
        for path in self.checkpoints():
            if int(path.name.removeprefix("step-")) > step:
                aside = self.set_aside(path, SUPERSEDED).name
                warn(f"the run continues from step {step}; {path.name} is set aside as {aside}")

    def discard(self) -> None:
        """Close, and remove the folder if it was made for this run, which did not start."""
        self.close()
        if self._fresh:
            shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Release the folder."""
        if not self._closed:
            self._closed = True
            for handle in (*self._logs.values(), self._lock):
                with contextlib.suppress(OSError):
                    os.close(handle)


class NullRunFolder(RunFolder):
    """The run folder of every process except process 0: it writes nothing."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lines_lost = 0
        self._closed = True
        self._fresh = False

    def write(self, name: str, value: Any) -> None: ...

    def checkpoints(self) -> list[Path]:
        return []

    def save_best(self, model: PreTrainedModel, base: BaseIdentity, figures: Json) -> Path:
        return self.path / BEST

    def save_final(self, model: PreTrainedModel, base: BaseIdentity, fidelity: Json) -> Path:
        return self.path / ADAPTER


def _opened_logs(path: Path) -> dict[str, int]:
    """Return handles that append to the logs in a run folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return {name: os.open(path / name, flags, 0o666) for name in (METRICS, EVENTS)}


def _locked(path: Path) -> int:
    """Return the handle of a lock on the folder; ConfigError if another process holds it."""
    handle = lock_folder(path)
    if handle is None:
        raise ConfigError(
            f"another process is writing --output_dir {path}; wait for it to end or choose another"
            " folder"
        )
    return handle


def _cut_log(path: Path, last_step: int | None) -> None:
    if not path.exists():
        return
    if not path.is_file():  # opening a pipe would wait
        raise ConfigError(f"{path} is not a regular file: remove it")
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        # drop damaged lines
        with contextlib.suppress(AttributeError, RecursionError, TypeError, ValueError):
            step = json.loads(line).get("step", 0)
            if last_step is None or step <= last_step:
                lines.append(line + "\n")
    write_text(path, "".join(lines))


def default_folder() -> Path:
    """Return a run folder named after the current time."""
    return Path("outputs") / time.strftime("npt-%Y%m%d-%H%M%S")


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run, even one killed early."""
    names = {item.name for item in path.iterdir() if not item.name.startswith(".")}
    if RUN in names or CHECKPOINTS in names:
        return True
    return bool(names) and names <= _STARTED_WITH


def tidy(path: Path) -> None:
    """Remove half-written files; ConfigError if another process is writing the run folder."""
    lock = _locked(path)
    try:
        for folder in (path, path / CHECKPOINTS):
            if folder.is_dir():
                clean(folder)
    finally:
        os.close(lock)


def check_free(path: Path) -> None:
    """Raise ConfigError if the folder is not empty or not writable."""
    with about_output(path, "--output_dir"):
        if path.is_dir() and any(item.name not in TRACKED for item in path.iterdir()):
            if is_run(path):
                raise ConfigError(
                    "holds a run already; continue it with --resume auto, choose another folder or"
                    " remove it"
                )
            raise ConfigError("holds other files; choose another folder or remove it")
    check_folder(path, "--output_dir", in_place=True)
