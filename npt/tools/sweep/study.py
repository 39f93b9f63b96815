"""The folder of a study, and its workers.

spec.yaml        the study's YAML file
study.json       name, storage (without its password), versions
study.db         the storage, unless --storage names another one
trials.csv       the table, updated while the study runs
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

SPEC = "spec.yaml"
STUDY = "study.json"
DATABASE = "study.db"

POLL_SECONDS = 1.0
"""Interval to check whether workers have ended."""

LOOK_SECONDS = 15.0
"""Interval to report progress."""


def study_name(folder: Path) -> Any:
    """Return the name of the study that a folder holds."""
    return read_json(folder / STUDY, ConfigError).get("name")


def open_storage(folder: Path, url: str | None, design: Design) -> Storage:
    """Open the study's database: by its address, or by default a file in the study's folder."""
    if url is None:
        url = f"sqlite:///{(folder / DATABASE).resolve()}"
    return Storage(url, design.name)


def check_folder(folder: Path, spec: Path, design: Design) -> None:
    """Raise ConfigError if the folder holds another study or anything else."""
    if not (folder / STUDY).is_file():
        # `glob` would hide that it is a file or cannot be read
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        # a study killed before it wrote `study.json` may leave these
        own = (DATABASE, f".{STUDY}.", f".{SPEC}.")
        if not all(name.startswith(own) for name in names):
            raise ConfigError(
                f"--study {folder} holds something other than a study; choose another folder"
            )
        return
    name = study_name(folder)
    if name != design.name:
        raise ConfigError(
            f"--study {folder} holds the study {name!r}, but {spec} describes {design.name!r};"
            " choose another folder"
        )


def open_folder(
    folder: Path, spec: Path, design: Design, storage: str | None, versions: dict[str, str]
) -> None:
    """Make or update the study's folder; call `check_folder` first."""
    if storage is not None:
        storage = sqlalchemy.make_url(storage).render_as_string(hide_password=True)
    record = {"name": design.name, "storage": storage}
    folder.mkdir(parents=True, exist_ok=True)
    # written first, so that the folder is recognised even if this process is killed
    write_json(folder / STUDY, record | {"versions": versions})
    write_bytes(folder / SPEC, spec.read_bytes())


def design_in(folder: Path) -> Design:
    """Return the design in a study's folder, with the recorded name: the file may give none."""
    return replace(read_design(str(folder / SPEC)), name=study_name(folder))


def run_workers(command: Sequence[str], count: int, threads: int, look: Callable[[], None]) -> int:
    """Run `count` workers of a study, each on `threads` threads, until all have ended. `look` is
    called every LOOK_SECONDS. Return 0 if any worker succeeded, else the status of one that failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    # In their own process groups: Ctrl-C reaches only this process, which then ends the workers.
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
            process.terminate()
        for process in processes:
            process.wait()
        raise
    codes = [process.returncode for process in processes]
    if 0 in codes:
        return 0
    return codes[0] if codes[0] > 0 else 128 - codes[0]  # below 0: of a signal


def progress_line(storage: Storage, design: Design) -> str:
    """Return how many trials of a study are finished and running."""
    progress = storage.progress(design.by_key)
    count = len(design.trials)
    return f"{progress.finished} of {count} trials finished, {progress.running} running"


def update_table(storage: Storage, design: Design, folder: Path) -> list[dict[str, Any]]:
    """Write the table and return its rows."""
    rows = rows_of(design, storage.rows())
    write_table(folder, rows)
    return rows
