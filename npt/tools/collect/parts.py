"""The output of long work in numbered parts: one file for each batch, each written atomically.

A process that is killed loses one batch at most. The output is the parts' lines one after another,
so it has the same bytes however often the work was interrupted.

    failures.jsonl
    failures.jsonl.parts/   settings.json, 00000000.part, 00000001.part, ...
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import clean, lock_folder, to_json, write_bytes, write_json
from npt.stored import read_json

# none of the endings that data are read from, so that a folder of outputs can be trained on
SUFFIX = ".part"

_SETTINGS = "settings.json"


class Parts:
    """The parts of one output, a .jsonl file, locked while they are open. A part is its progress, a
    line of JSON, and then the lines of its records. settings: all that the records depend on, by
    flag. progress: what was committed last; empty at the start.

    Raises:
        ConfigError: the output is of other work, was changed, is being written or cannot be.
    """

    def __init__(self, output: str | Path, settings: Mapping[str, Any]):
        self.output = Path(output)
        self.folder = parts_folder(self.output)
        check_output(self.output)
        with _failures_named(self.output, "choose another file"):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(self.folder)
        if lock is None:
            raise ConfigError(
                f"--output {self.output} is being written to by another process; wait for it or"
                " choose another file"
            )
        self._lock = lock
        try:
            with _failures_named(self.output, "choose another file"):
                clean(self.folder)
                self._check_settings(json.loads(to_json(dict(settings))))
                parts = self._read()
        except BaseException:
            os.close(self._lock)
            raise
        self._count = len(parts)
        last = parts[-1].partition(b"\n")[0] if parts else b"{}"
        self.progress: dict[str, Any] = json.loads(last)

    def commit(self, records: Sequence[Mapping[str, Any]], progress: dict[str, Any]) -> None:
        """Write one more part; raise ConfigError if the disk is full or gone: others stay."""
        lines = "".join(to_json(value) + "\n" for value in (progress, *records))
        with _failures_named(self.output, "make room and run the same command again"):
            write_bytes(self.folder / _name(self._count), lines.encode("utf-8"))
        self._count, self.progress = self._count + 1, progress

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *error: object) -> None:
        """Write the output, from the parts that were committed, and unlock."""
        try:
            with _failures_named(self.output, "make room and run the same command again"):
                write_bytes(self.output, _records(self._read()))
        finally:
            os.close(self._lock)

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / _SETTINGS
        if not path.exists():
            write_json(path, settings)
        before = read_json(path, ConfigError)
        for name, value in settings.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"--output {self.output} was begun with {name} {_short(before.get(name))}, this"
                    f" call has {_short(value)}; choose another file, or the settings of before"
                )

    def _read(self) -> list[bytes]:
        """Return the content of every part, of which the output must be the beginning."""
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))
        for number, path in enumerate(paths):
            if path.name != _name(number):
                raise ConfigError(f"{self.folder} lacks {_name(number)}; put it back")
        parts = [path.read_bytes() for path in paths]
        found = self.output.read_bytes() if self.output.exists() else b""
        if not _records(parts).startswith(found):
            raise ConfigError(
                f"--output {self.output} was changed since it was written; move it elsewhere, and"
                f" it is written anew from {self.folder.name}"
            )
        return parts


def check_output(output: Path) -> None:
    """Refuse a folder, and an output that holds something without its parts, with a ConfigError."""
    with _failures_named(output, "choose another file"):
        if output.is_dir():
            raise ConfigError(f"--output {output} is a folder; name a file")
        parts = parts_folder(output)
        if output.exists() and output.stat().st_size and not parts.is_dir():
            raise ConfigError(
                f"--output {output} exists, but the folder {parts.name} that it is written from"
                " does not; choose another file"
            )


def begun_settings(output: Path) -> dict[str, Any]:
    """Return the settings that an output was begun with; empty if it was not."""
    path = parts_folder(output) / _SETTINGS
    return dict(read_json(path, ConfigError)) if path.exists() else {}


def parts_folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts")


def _name(number: int) -> str:
    return f"{number:08d}{SUFFIX}"


def _records(parts: Sequence[bytes]) -> bytes:
    return b"".join(part.partition(b"\n")[2] for part in parts)


@contextmanager
def _failures_named(output: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--output {output} cannot be used: {error.strerror or error}; {remedy}"
        ) from error


def _short(value: Any) -> str:
    """Return a hash by its first characters, anything else as it is."""
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
