"""The journal of long work: its settings, then a line for each finished batch.

A process that is killed loses one batch at most. The output is the batches' records one after
another, so it has the same bytes however often the work was interrupted.

    failures.jsonl
    failures.jsonl.journal      {settings}, {"progress", "records"}, {"progress", "records"}, ...
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import lock_folder, to_json, write_bytes

# none of the endings that data are read from, so that a folder of outputs can be trained on
SUFFIX = ".journal"


class Journal:
    """The journal of one output, a .jsonl file, locked while it is open.

    Args:
        settings: all that the records depend on, by flag.

    Attributes:
        progress: what was committed last; empty at the start.

    Raises:
        ConfigError: the output is of other work, was changed or is being written.
        OSError: it cannot be written.
    """

    def __init__(self, output: str | Path, settings: Mapping[str, Any]):
        self.output, self._path = Path(output), journal_of(Path(output))
        check_output(self.output)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        lock = lock_folder(self._path)
        if lock is None:
            raise ConfigError(
                f"--output {self.output} is being written to by another process; wait for it or"
                " choose another file"
            )
        self._lock = lock
        try:
            begun, self._batches = read_journal(self.output)
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
            if not begun:
                self._append(settings)
            self._check(begun or settings, settings)
        except BaseException:
            os.close(self._lock)
            raise
        self.progress: dict[str, Any] = self._batches[-1]["progress"] if self._batches else {}

    def commit(self, records: Sequence[Mapping[str, Any]], progress: dict[str, Any]) -> None:
        """Add a batch; OSError if the disk is full or gone: earlier ones stay."""
        batch = {"progress": progress, "records": list(records)}
        self._append(batch)
        self._batches.append(batch)
        self.progress = progress

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        """Write the output, from the batches that were committed, and unlock."""
        try:
            write_bytes(self.output, self._records())
        finally:
            os.close(self._lock)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(to_json(dict(line)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def _records(self) -> bytes:
        records = (record for batch in self._batches for record in batch["records"])
        return "".join(to_json(record) + "\n" for record in records).encode("utf-8")

    def _check(self, begun: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Refuse other settings, and an output that is not the beginning of the records."""
        for name, value in settings.items():
            if begun.get(name) != value:
                raise ConfigError(
                    f"--output {self.output} was begun with {name} {begun.get(name)}, this call has"
                    f" {value}; choose another file, or the settings of before"
                )
        written = self.output.read_bytes() if self.output.exists() else b""
        if not self._records().startswith(written):
            raise ConfigError(
                f"--output {self.output} was changed since it was written; move it elsewhere, and"
                f" it is written anew from {self._path.name}"
            )


def check_output(output: Path) -> None:
    """Refuse a folder, and an output that has something but no journal, with a ConfigError."""
    if output.is_dir():
        raise ConfigError(f"--output {output} is a folder; name a file")
    if output.exists() and output.stat().st_size and not journal_of(output).exists():
        raise ConfigError(
            f"--output {output} exists, but the file {journal_of(output).name} that it is written"
            " from does not; choose another file"
        )


def read_journal(output: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the settings that an output was begun with, empty if it was not, and its batches.

    Raises:
        ConfigError: the journal is damaged; a last line that was not finished counts for nothing.
    """
    path = journal_of(output)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    try:
        begun, *rest = [dict(json.loads(line)) for line in lines] or [{}]
        batches = [
            {"progress": dict(batch["progress"]), "records": list(batch["records"])}
            for batch in rest
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(f"{path} is damaged; restore it, or choose another --output") from error
    return begun, batches


def journal_of(output: Path) -> Path:
    return output.with_name(output.name + SUFFIX)
