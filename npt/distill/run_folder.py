"""The run folder: what a run leaves behind, each file complete at any moment."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from transformers import LlamaForCausalLM

from npt.adapters.io import save_adapter
from npt.distill.checkpoint import checkpoints, verify_checkpoint
from npt.errors import ConfigError
from npt.files import new_folder, to_json, write_json, write_text

_PACKAGES = ("torch", "transformers", "bitsandbytes", "accelerate", "datasets", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those whose numerics a run depends on."""
    found = {"python": platform.python_version()}
    for package in ("npt", *_PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


class RunFolder:
    """`run.json`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, `best/`, `fidelity.json` below one folder.

    One process writes it at a time. A line that the disk has no room for is lost and counted; the run goes on.

    Args:
        path: made if missing; has to be empty otherwise.
        resume_at: the folder is that of a run which goes on from this step: what its logs say of later ones is taken out.

    Raises:
        ConfigError: the folder holds something, cannot be written, or another process is writing it.
    """

    def __init__(self, path: str | Path, resume_at: int | None = None):
        self.path = Path(path)
        self.lines_lost = 0
        if resume_at is None:
            check_free(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path)
            if resume_at is not None:
                _cut_log(self.path / "metrics.jsonl", lambda line: line.get("step", 0) <= resume_at)
                _cut_log(self.path / "events.jsonl", lambda line: True)
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
            self._events = (self.path / "events.jsonl").open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"--output_dir {self.path} cannot be written: {error.strerror}; choose another folder") from error

    def write(self, name: str, value: Any) -> None:
        """A JSON file below the folder, replaced atomically."""
        write_json(self.path / name, value)

    def metrics(self, values: dict[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        self._write(self._metrics, values)

    def event(self, event: str, /, **details: Any) -> None:
        """One line of `events.jsonl`: what happened, and when (seconds since the epoch)."""
        self._write(self._events, {"event": event, "time": round(time.time(), 3), **details})

    def _write(self, stream: TextIO, values: dict[str, Any]) -> None:
        try:
            stream.write(to_json(values) + "\n")
        except OSError:  # a full disk must neither end the run nor hide why it ends
            self.lines_lost += 1

    def save_checkpoint(self, step: int, write: Callable[[Path], None], keep: int | None) -> Path:
        """`checkpoints/step-XXXXXXXX` as `write` fills it; older ones beyond `keep` go after this one has verified.

        Raises:
            OSError: it could not be written.
            CheckpointError: what was written does not read back as it was.
        """
        folder = self.path / "checkpoints" / f"step-{step:08d}"
        write(folder)
        verify_checkpoint(folder)
        if keep is not None:
            for old in self.checkpoints()[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        return folder

    def save_best(self, model: LlamaForCausalLM, base_hash: str, figures: dict[str, Any]) -> Path:
        """`best`: the adapters, and the figures that make them the best so far. It takes no part in rotation."""
        folder = self.path / "best"
        with new_folder(folder) as temporary:
            save_adapter(model, temporary / "adapter", base_hash=base_hash)
            write_json(temporary / "fidelity.json", figures)
        return folder

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        return checkpoints(self.path / "checkpoints")

    def discard(self) -> None:
        """Remove the folder: the run it was made for never started."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        for file in (self._metrics, self._events):
            with contextlib.suppress(OSError):  # a line that the disk had no room for; its writing has failed already
                file.close()
        os.close(self._lock)


def _locked(path: Path) -> int:
    """An exclusive lock on the folder, which ends with the process however that ends."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"--output_dir {path} is being written by another process; wait for it, or choose another folder") from error
    return handle


def _cut_log(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Take out the lines of a log that are not to be kept, and one that was cut off in the middle of being written."""
    if not path.is_file():
        return
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            if keep(json.loads(line)):
                lines.append(line + "\n")
    write_text(path, "".join(lines))


def default_folder() -> Path:
    """A run folder named by the time, to the second."""
    return Path("outputs") / time.strftime("npt-%Y%m%d-%H%M%S")


def check_free(path: Path) -> None:
    """Refuse a folder that is in use or cannot be made, before anything expensive is done.

    Raises:
        ConfigError: it is a file, a folder that holds something, or lies where nothing can be written.
    """
    try:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"--output_dir {path} is a file; name a folder")
        if path.is_dir() and any(path.iterdir()):
            what = "another run" if (path / "run.json").exists() else "other files"
            raise ConfigError(f"--output_dir {path} holds {what}; choose another folder or remove it")
        above = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    except OSError as error:
        raise ConfigError(f"--output_dir {path} cannot be used: {error.strerror}; choose another folder") from error
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"--output_dir {path} cannot be made: {above} is not a folder that may be written to; choose another folder")
