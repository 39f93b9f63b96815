"""A study's folder, and its workers.

spec.yaml        the specification, as it was given
study.json       name, storage (without its password), versions
study.db         the storage, unless another one was named
trials.csv       the table; written anew while the study runs
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy

from npt.errors import ConfigError
from npt.files import write_bytes, write_json
from npt.stored import read_json
from npt.tools.sweep.spec import Design, read_design
from npt.tools.sweep.storage import Storage
from npt.tools.sweep.table import rows_of, write_table

SPEC, STUDY, DATABASE = "spec.yaml", "study.json", "study.db"

POLL_SECONDS, LOOK_SECONDS = 1.0, 15.0
"""Between looks at whether workers have ended, and at how far their study is."""


def study_name(folder: Path) -> Any:
    """Return the name of the study that a folder holds."""
    return read_json(folder / STUDY, ConfigError).get("name")


def storage_url(folder: Path, storage: str | None) -> str:
    """Return the database of the study's trials: in its folder, unless a storage is named."""
    return storage if storage is not None else f"sqlite:///{(folder / DATABASE).resolve()}"


def check_folder(folder: Path, spec: Path, design: Design) -> None:
    """Refuse a folder of another study or of something else with a ConfigError, and change
    nothing.
    """
    if not (folder / STUDY).is_file():
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        # what a study leaves that is killed before `study.json` is written
        if not all(name.startswith((DATABASE, f".{STUDY}.", f".{SPEC}.")) for name in names):
            raise ConfigError(
                f"--study {folder} holds something other than a study; choose another folder"
            )
        return
    name = study_name(folder)
    if name != design.name:
        raise ConfigError(
            f"--study {folder} is of the study {name!r}, {spec} describes {design.name!r}; choose"
            " another folder"
        )


def open_folder(
    folder: Path, spec: Path, design: Design, storage: str | None, versions: dict[str, str]
) -> None:
    """Make the folder, or continue in it after `check_folder`."""
    if storage is not None:
        storage = sqlalchemy.make_url(storage).render_as_string(hide_password=True)
    record = {"name": design.name, "storage": storage}
    folder.mkdir(parents=True, exist_ok=True)
    # first: from now on the folder is known for a study's, whenever this is killed
    write_json(folder / STUDY, record | {"versions": versions})
    write_bytes(folder / SPEC, spec.read_bytes())


def design_in(folder: Path) -> Design:
    """Return the design of a study's folder, with the name on record: the file may give none."""
    return replace(read_design(str(folder / SPEC)), name=study_name(folder))


def run_workers(command: Sequence[str], count: int, threads: int, look: Callable[[], None]) -> int:
    """Run so many worker processes of a study on this machine, each on so many threads, until all
    have ended; `look` is called every LOOK_SECONDS. Return 0, or the status of a worker that failed
    if none did its work to the end.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    # In groups of their own: an interrupt from the terminal reaches this process alone, which then
    # ends them all in one way.
    processes = [
        subprocess.Popen([*command], env=environment, process_group=0) for _ in range(count)
    ]
    seconds = 0.0
    try:
        while any(process.poll() is None for process in processes):
            time.sleep(POLL_SECONDS)
            seconds += POLL_SECONDS
            if seconds >= LOOK_SECONDS:
                seconds = 0.0
                look()
    except BaseException:  # let every worker give its trial back
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
        raise
    codes = [process.returncode for process in processes]
    return 0 if 0 in codes else next(code if code > 0 else 128 - code for code in codes)


def progress_line(storage: Storage, design: Design) -> str:
    """Return how many of a study's trials are done and under way."""
    progress = storage.progress(design.by_key)
    return f"{progress.finished} of {len(design.trials)} trials, {progress.running} under way"


def update_table(storage: Storage, design: Design, folder: Path) -> list[dict[str, Any]]:
    """Write the table and return its rows."""
    rows = rows_of(design, storage.rows())
    write_table(folder, rows)
    return rows
