"""A study's folder, and its workers.

spec.yaml        the specification, as it was given
study.json       name, parts with their notes, storage (without its password), versions
study.db         the storage, unless another one was named
trials.csv       the table; written anew while the study runs
running/         run folders of the trials under way, one folder a worker
report.html      the page that `npt report` makes of the table
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import write_bytes, write_json
from npt.stored import read_json
from npt.tools.sweep.spec import Design, read_design
from npt.tools.sweep.storage import Storage
from npt.tools.sweep.table import rows_of, write_table

SPEC, STUDY, DATABASE, RUNNING = "spec.yaml", "study.json", "study.db", "running"

_FIRST_FILES = (DATABASE, f".{STUDY}.", f".{SPEC}.")
"""How names begin that a study leaves which is killed before `study.json` is written."""

TABLE_SECONDS = 15.0  # between two tables of a study that is under way


def is_study(folder: Path) -> bool:
    """Return whether `npt sweep` made the folder."""
    return (folder / STUDY).is_file()


def read_study(folder: Path) -> dict[str, Any]:
    """Return what `study.json` says.

    Raises:
        ConfigError: it is of an earlier version, whose trials had other measures.
    """
    record = read_json(folder / STUDY, ConfigError)
    if not isinstance(record.get("name"), str) or not isinstance(record.get("parts"), dict):
        raise ConfigError(
            f"{folder} holds a study of an earlier version of NPT, of which only its table can"
            " still be read; choose another folder for a new one"
        )
    return record


def storage_url(folder: Path, storage: str | None) -> str:
    """Return the database of the study's trials: in its folder, unless a storage is named."""
    return storage if storage is not None else f"sqlite:///{(folder / DATABASE).resolve()}"


def check_folder(folder: Path, spec: Path, design: Design) -> None:
    """Refuse a folder of another study or of something else with a ConfigError, and change
    nothing.
    """
    try:
        if not is_study(folder):
            names = [path.name for path in folder.iterdir()] if folder.exists() else []
            if not all(name.startswith(_FIRST_FILES) for name in names):
                raise ConfigError(
                    f"--study {folder} holds something other than a study; choose another folder"
                )
            return
    except OSError as error:
        raise ConfigError(
            f"--study {folder} cannot be read: {error.strerror}; choose another folder"
        ) from error
    name = read_study(folder)["name"]
    if name != design.name:
        raise ConfigError(
            f"--study {folder} is of the study {name!r}, {spec} describes {design.name!r}; choose"
            " another folder"
        )


def open_folder(
    folder: Path, spec: Path, design: Design, storage: str | None, versions: dict[str, str]
) -> None:
    """Make the folder, or continue in it after `check_folder`; raise ConfigError if it cannot be
    written.
    """
    if storage is not None:
        import sqlalchemy

        storage = sqlalchemy.make_url(storage).render_as_string(hide_password=True)
    record = {"name": design.name, "parts": dict(design.parts), "storage": storage}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # first: from now on the folder is known for a study's, whenever this is killed
        write_json(folder / STUDY, record | {"versions": versions})
        write_bytes(folder / SPEC, spec.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--study {folder} cannot be written: {error.strerror}; choose another folder"
        ) from error


def design_in(folder: Path) -> Design:
    """Return the design of a study's folder, with the name on record: the file may give none."""
    return replace(read_design(str(folder / SPEC)), name=read_study(folder)["name"])


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """Make this worker's folder for run folders, and remove those of workers that were killed on
    this machine.
    """
    host, running = socket.gethostname(), folder / RUNNING
    for left in running.glob(f"{host}-*"):
        try:
            os.kill(int(left.name.rpartition("-")[2]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (ValueError, PermissionError):  # no worker's, or a process of somebody else
            continue
    scratch = running / f"{host}-{os.getpid()}"
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.suppress(OSError):  # other workers have theirs
            running.rmdir()


def run_workers(command: Sequence[str], count: int, threads: int, each: Callable[[], None]) -> int:
    """Run so many worker processes of a study on this machine, each on so many threads, until all
    have ended; `each` is called about once a second. Return 0, or the status of a worker that
    failed if none did its work to the end.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    # In groups of their own: an interrupt from the terminal reaches this process alone, which then
    # ends them all in one way.
    processes = [
        subprocess.Popen([*command], env=environment, process_group=0) for _ in range(count)
    ]
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(1.0)
            each()
    except BaseException:  # let every worker give its trial back
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
        raise
    codes = [process.returncode for process in processes]
    return 0 if 0 in codes else next(code if code > 0 else 128 - code for code in codes)


class StudyDisplay:
    """Lines on how far a study is, and its table, at most once in so many seconds."""

    def __init__(
        self, storage: Storage, design: Design, folder: Path, say: Callable[[str], None],
        seconds: float = TABLE_SECONDS,
    ):  # fmt: skip
        self._storage, self._design, self._folder = storage, design, folder
        self._say, self._every = say, seconds
        self._updated, self._line = 0.0, ""

    def update(self) -> None:
        """Say how far the study is, if that has changed, and write the table."""
        if time.monotonic() - self._updated < self._every:
            return
        self._updated = time.monotonic()
        progress = self._storage.progress(self._design.by_key)
        total = len(self._design.trials)
        line = f"{progress.finished} of {total} trials, {progress.running} under way"
        if line != self._line:
            self._line = line
            self._say(line)
            self.table()

    def table(self) -> list[dict[str, Any]]:
        """Write the table and return its rows."""
        rows = rows_of(self._design, self._storage.rows())
        write_table(self._folder, rows)
        return rows
