"""The run folder: what a run leaves behind, each file complete at any moment."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import time
from pathlib import Path
from typing import Any

from transformers import LlamaForCausalLM

from npt.adapters.io import save_adapter
from npt.errors import ConfigError
from npt.files import to_json, write_json

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
    """`run.json`, `metrics.jsonl`, `events.jsonl`, `checkpoints/`, `fidelity.json` below one folder.

    Args:
        path: made if missing; has to be empty otherwise.

    Raises:
        ConfigError: the folder holds something, or cannot be written.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        check_free(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
            self._events = (self.path / "events.jsonl").open("a", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"--output_dir {self.path} cannot be written: {error.strerror}; choose another folder") from error

    def write(self, name: str, value: Any) -> None:
        """A JSON file below the folder, replaced atomically."""
        write_json(self.path / name, value)

    def metrics(self, values: dict[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        self._metrics.write(to_json(values) + "\n")

    def event(self, event: str, /, **details: Any) -> None:
        """One line of `events.jsonl`: what happened, and when (seconds since the epoch)."""
        self._events.write(to_json({"event": event, "time": round(time.time(), 3), **details}) + "\n")

    def try_event(self, event: str, /, **details: Any) -> None:
        """As `event`, for what is said otherwise as well: a disk that is full must not hide why a run ends."""
        with contextlib.suppress(OSError):
            self.event(event, **details)

    def save_checkpoint(self, model: LlamaForCausalLM, step: int, base_hash: str, keep: int | None) -> Path:
        """The adapters as `checkpoints/step-XXXXXXXX/adapter`; older checkpoints beyond `keep` go after this one stands."""
        folder = self.path / "checkpoints" / f"step-{step:08d}"
        save_adapter(model, folder / "adapter", base_hash=base_hash)
        if keep is not None:
            for old in self.checkpoints()[:-keep]:
                shutil.rmtree(old)
        return folder

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        folder = self.path / "checkpoints"
        return sorted(p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name)) if folder.is_dir() else []

    def discard(self) -> None:
        """Remove the folder: the run it was made for never started."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        for file in (self._metrics, self._events):
            with contextlib.suppress(OSError):  # a line that the disk had no room for; its writing has failed already
                file.close()


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
