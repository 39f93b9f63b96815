"""A study's folder, and its workers.

spec.yaml        the specification, as it was given
study.json       name, storage (without its password), versions
study.db         the storage, unless another one was named
trials.parquet   the table, and trials.csv; made anew while the study goes on
report.html      and figures/: what `npt report` makes of the table
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import PARTIAL, write_bytes, write_json
from npt.stored import read_json
from npt.tools.sweep.spec import Design, read_design
from npt.tools.sweep.storage import Progress, Storage
from npt.tools.sweep.table import PARQUET, read_table, rows_of, write_table

SPEC, STUDY, DATABASE = "spec.yaml", "study.json", "study.db"

TABLE_SECONDS = 20.0
"""Between two tables of a study that is under way."""


def is_study(folder: Path) -> bool:
    """Whether `npt sweep` made the folder."""
    return (folder / STUDY).is_file()


def storage_url(folder: Path, storage: str | None) -> str:
    """Where the study's trials are kept: a file in its folder, unless a storage is named."""
    return storage if storage is not None else f"sqlite:///{(folder / DATABASE).resolve()}"


def check_folder(folder: Path, spec: Path, design: Design, storage: str | None) -> None:
    """Refuse a folder that this study cannot be in, and change nothing.

    Raises:
        ConfigError: it is another study's, something else's, or cannot be read.
    """
    try:
        if not is_study(folder):
            if folder.exists() and not all(_own(item, spec, storage) for item in folder.iterdir()):
                raise ConfigError(
                    f"--study {folder} holds something other than a study; choose another folder"
                )
            return
    except OSError as error:
        raise ConfigError(
            f"--study {folder} cannot be read: {error.strerror}; choose another folder"
        ) from error
    before = read_json(folder / STUDY, ConfigError).get("name")
    if before != design.name:
        raise ConfigError(
            f"--study {folder} is of the study {before!r}, {spec} describes {design.name!r}; choose"
            " another folder"
        )


def _own(item: Path, spec: Path, storage: str | None) -> bool:
    """Whether a study that was killed as it began may have left this in its folder."""
    if item.name == SPEC:
        return item.read_bytes() == spec.read_bytes()
    database = DATABASE if storage is None else storage.partition("?")[0].rpartition("/")[2]
    names = (
        "wandb",
        *(f"{database}{ending}" for ending in ("", ".lock", "-journal", "-wal", "-shm")),
    )
    return item.name in names or (
        item.name.startswith((f".{SPEC}.", f".{STUDY}.")) and item.name.endswith(PARTIAL)
    )


def open_folder(
    folder: Path, spec: Path, design: Design, storage: str | None, versions: dict[str, str]
) -> None:
    """Make the folder, or go on in it; `check_folder` has found it fit.

    Raises:
        ConfigError: it cannot be written.
    """
    record = {
        "name": design.name,
        "trials": len(design.trials),
        "storage": _shown(storage),
        "versions": versions,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # first: from here on the folder is known for a study's, whenever this is killed
        write_json(folder / STUDY, record)
        write_bytes(folder / SPEC, spec.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--study {folder} cannot be written: {error.strerror}; choose another folder"
        ) from error


def _shown(storage: str | None) -> str | None:
    if storage is None:
        return None
    import sqlalchemy

    return sqlalchemy.make_url(storage).render_as_string(hide_password=True)


def refresh(folder: Path) -> None:
    """The table anew from a storage that lies in the folder: a study that was killed is reported as
    far as it came. Where it lies elsewhere, or there is nothing to read it with, the table stays as
    it was last written."""
    if (
        (folder / DATABASE).is_file()
        and (folder / SPEC).is_file()
        and find_spec("optuna") is not None
    ):
        design = design_in(folder)
        rows = rows_of(design, Storage(storage_url(folder, None), design.name).rows())
        # not what a later version calls otherwise
        if not (folder / PARQUET).is_file() or _ended(rows) >= _ended(read_table(folder)):
            write_table(folder, rows)


def _ended(rows: Sequence[dict[str, Any]]) -> int:
    return sum(row["outcome"] is not None for row in rows)


def design_in(folder: Path) -> Design:
    """The design of a study's folder; its name is the one on record, for where the specification
    gives none.
    """
    name = read_json(folder / STUDY, ConfigError).get("name")
    return replace(read_design(str(folder / SPEC)), name=str(name))


class Crew:
    """Worker processes of one study on this machine, and an eye on how far it is.

    Args:
        command: of a worker process.
        count: of workers.
        threads: that each computes on.
    """

    def __init__(self, command: Sequence[str], count: int, threads: int):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        # In groups of their own: an interrupt from the terminal reaches this process alone, which
        # then ends them all in one way.
        self._processes = [
            subprocess.Popen([*command], env=environment, process_group=0) for _ in range(count)
        ]

    def wait(self, each: Callable[[], None]) -> int:
        """Until all have ended; `each` is called about once a second.

        Returns:
            0, or the status of a worker that failed where none did its work to the end.
        """
        try:
            while any(process.poll() is None for process in self._processes):
                time.sleep(1.0)
                each()
        except BaseException:
            self._end()
            raise
        codes = [process.returncode for process in self._processes]
        return 0 if 0 in codes else next(code if code > 0 else 128 - code for code in codes)

    def _end(self) -> None:
        """Let every worker give its trial back."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            process.wait()


class Display:
    """How far a study is, and how long it will take at the pace so far."""

    def __init__(
        self,
        storage: Storage,
        design: Design,
        folder: Path,
        say: Callable[[str], None],
        seconds: float = 15.0,
    ):
        self._storage, self._design, self._folder, self._say, self._every = (
            storage,
            design,
            folder,
            say,
            seconds,
        )
        self._started, self._said, self._tabled = time.monotonic(), 0.0, time.monotonic()
        self._before: int | None = None
        self._last = -1

    def look(self) -> None:
        """Say how far it is, if there is something new and the last time is a while ago; a table
        likewise.
        """
        now = time.monotonic()
        if now - self._said >= self._every:
            self._said = now
            progress = self._storage.progress(self._design.by_key)
            if self._before is None:
                self._before = progress.finished
            if progress.finished != self._last:
                self._last = progress.finished
                self._say(self._line(progress, now))
        if now - self._tabled >= TABLE_SECONDS:
            self._tabled = now
            self.table()

    def table(self) -> list[dict[str, Any]]:
        """Write the table."""
        rows = rows_of(self._design, self._storage.rows())
        write_table(self._folder, rows)
        return rows

    def _line(self, progress: Progress, now: float) -> str:
        done = progress.finished - (self._before or 0)
        line = (
            f"{progress.finished} of {len(self._design.trials)} trials, {progress.running}"
            " under way"
        )
        if not done or not progress.open:
            return line
        left = int((now - self._started) / done * progress.open)
        return f"{line}, {left // 60}:{left % 60:02d} left"
