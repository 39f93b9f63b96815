"""A .jsonl file that only grows, and beside it the state that says how much of it stands.

Lines are appended, then the state is replaced: what a crash leaves behind the state's mark was not
committed, and is removed when the work is taken up again. So work that is a function of its
settings ends in the same bytes however often it was interrupted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from npt.errors import ConfigError
from npt.files import to_json, write_json

STATE_SUFFIX = ".state"
"""Of the state's file; not one that data are read from, so that a folder of both can be trained on.
"""


class Journal:
    """The file of one piece of work, locked while it is open.

    Args:
        path: the file; it and its folder are made if missing.
        settings: what the work is a function of, by the names that a user knows them by.
        marks: entries that every line of this work has, by which its own unfinished lines are told
            from others'.

    Attributes:
        progress: what was committed last; empty at the start.
        removed: bytes behind the last commit that were removed.

    Raises:
        ConfigError: the file is not this work's, was changed since, is being written to, or cannot
            be written.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any], marks: Mapping[str, Any]):
        self.path = Path(path)
        self._settings, self._marks = dict(settings), dict(marks)
        self.progress: dict[str, Any] = {}
        self.removed = 0
        self._size, self._hash = 0, hashlib.sha256()
        state = read_state(self.path)
        if state is not None:
            self._check_settings(state)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(
                self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            raise ConfigError(
                f"--output {self.path} cannot be written: {error.strerror}; choose another file"
            ) from error
        try:
            self._lock()
            state = read_state(self.path)  # once more: another process may have ended in between
            if state is not None:
                self._check_settings(state)
                self._resume(state)
            else:
                self._save({})
        except BaseException:
            self.close()
            raise

    def commit(self, records: Sequence[Mapping[str, Any]], progress: dict[str, Any]) -> None:
        """Append the records, each by one write, make them durable, and only then let the state
        speak of them.

        Raises:
            ConfigError: the disk is full or gone; what was committed before stands.
        """
        try:
            for record in records:
                line = (to_json(record) + "\n").encode("utf-8")
                if os.write(self._file, line) != len(line):
                    raise OSError(0, "the disk is full")
                self._hash.update(line)
                self._size += len(line)
            os.fsync(self._file)
            self._save(progress)
        except OSError as error:
            raise ConfigError(
                f"--output {self.path} cannot be written: {error.strerror}; make room and run the"
                " same command again"
            ) from error

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _save(self, progress: dict[str, Any]) -> None:
        value = {
            "settings": self._settings,
            "bytes": self._size,
            "sha256": self._hash.hexdigest(),
            "progress": progress,
        }
        write_json(_state_path(self.path), value)
        self.progress = progress

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--output {self.path} is being written to by another process; wait for it or"
                " choose another file"
            ) from error
        except OSError:
            pass  # a file system without locks

    def _check_settings(self, state: Mapping[str, Any]) -> None:
        for name, value in self._settings.items():
            before = state["settings"].get(name)
            if before != json.loads(to_json(value)):
                raise ConfigError(
                    f"--output {self.path} was begun with {name} {_short(before)}, this call has"
                    f" {_short(value)}; choose another file, or the settings of before"
                )

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Take up after the last commit: check what stands, remove what does not."""
        size = state["bytes"]
        with self.path.open("rb") as file:
            left = size
            while left and (piece := file.read(min(left, 1 << 20))):
                self._hash.update(piece)
                left -= len(piece)
            if left or self._hash.hexdigest() != state["sha256"]:
                raise ConfigError(
                    f"--output {self.path} was changed since it was written; choose another file,"
                    f" or remove it and {_state_path(self.path).name}"
                )
            for line in file:
                self._check_own(line)
                self.removed += len(line)
        if self.removed:
            os.ftruncate(self._file, size)
            os.fsync(self._file)
        self._size, self.progress = size, dict(state["progress"])

    def _check_own(self, line: bytes) -> None:
        """Only what this work may have written behind its last commit is removed: whole lines of
        its own, and a torn one.
        """
        try:
            torn = line[:1] == b"{" and not line.endswith(b"\n")
            record = self._marks if torn else json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or any(
            record.get(name) != value for name, value in self._marks.items()
        ):
            raise ConfigError(
                f"--output {self.path} holds lines that were added by something else:"
                f" {line[:40]!r}; move them to a file of their own"
            )


def read_state(path: Path) -> dict[str, Any] | None:
    """The state beside a journal's file; None where work on it has not begun.

    Raises:
        ConfigError: one of the two is missing or cannot be read.
    """
    state_path = _state_path(path)
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder; name a file")
    try:
        text = state_path.read_text(encoding="utf-8") if state_path.exists() else None
        held = path.stat().st_size if path.exists() else None
    except OSError as error:
        raise ConfigError(
            f"--output {path} cannot be used: {error.strerror}; choose another file"
        ) from error
    if text is None:
        if held:
            raise ConfigError(
                f"--output {path} exists, but {state_path.name} beside it does not; choose another"
                " file"
            )
        return None
    try:
        state = json.loads(text)
        size, _, _, _ = (state[key] for key in ("bytes", "sha256", "settings", "progress"))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{state_path} is not the state of a collection; choose another --output"
        ) from error
    if size and held is None:
        raise ConfigError(
            f"--output {path} is gone, but {state_path.name} speaks of {size} bytes in it; put it"
            " back or remove the state"
        )
    return state


def _state_path(path: Path) -> Path:
    return path.with_name(path.name + STATE_SUFFIX)


def _short(value: Any) -> str:
    """A hash by its first characters, anything else as it is."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
