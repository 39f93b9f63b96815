"""`npt sweep`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from npt.cli.arguments import add_number, add_switch, check_run, tell
from npt.console import make_console, silent_console
from npt.errors import NPTError
from npt.extras import require
from npt.presets import studies, study_file


def sweep(flags: dict[str, Any]) -> int:
    """Run a study: many short runs that vary settings.

    Workers share the trials and write the results to trials.csv. Repeat the
    command to continue a study, or run it in another terminal to add workers.
    """
    from npt.tools.sweep.spec import read_design

    console = silent_console() if flags["json"] else make_console()
    if flags["parent"] is not None:
        _work(flags, console)
        return 0
    spec = study_file(flags["spec"])
    design = read_design(str(spec))
    check_design(design)
    # before optuna is needed and a folder is made
    if flags["dry_run"]:
        console.say(
            *(f"{trial.key}  {trial}" for trial in design.trials),
            f"{len(design.trials)} trials in {len(design.parts)} parts; all settings are valid",
        )
        return 0
    require("optuna", "a study")
    from npt.tools.sweep.study import (
        check_folder,
        open_folder,
        open_storage,
        progress_line,
        run_workers,
        update_table,
    )
    from npt.versions import versions

    folder = Path("outputs") / design.name if flags["study"] is None else Path(flags["study"])
    check_folder(folder, spec, design)
    storage = open_storage(folder, flags["storage"], design)
    open_folder(folder, spec, design, flags["storage"], versions())
    lines = [""]

    def look() -> None:
        # only what is new: the workers are looked at all the time
        if (line := progress_line(storage, design)) != lines[-1]:
            lines.append(line)
            console.say(line)
            update_table(storage, design, folder)

    with storage.reached():
        new = storage.enqueue(design.trials)
        finished = storage.progress(design.by_key).finished
        console.say(
            f"study {design.name} in {folder}: {len(design.trials)} trials, {new} new,"
            f" {finished} finished"
        )
        update_table(storage, design, folder)
        count = flags["workers"]
        # workers that share cores spin against each other
        threads = max(1, (os.cpu_count() or 1) // count)
        command = [sys.executable, "-m", "npt", "sweep", str(spec), "--study", str(folder)]
        # a worker ends when its parent does
        command += ["--parent", str(os.getpid())]
        if flags["storage"] is not None:
            command += ["--storage", flags["storage"]]
        if flags["json"]:
            command.append("--json")
        status = run_workers(command, count, threads, look)
        rows = update_table(storage, design, folder)
    outcomes = [row["outcome"] or "not run" for row in rows]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    tell(
        flags,
        {"study": str(folder), "trials": rows},
        f"{counts}; results are in {folder / 'trials.csv'}",
    )
    return status


def check_design(design: Any) -> None:
    """Raise the error of the first invalid trial, with its part. No weights are read."""
    for trial in design.trials:
        try:
            check_run(trial.settings)
        except NPTError as error:
            raise type(error)(f"{trial.origins[0].arm_of_part}: {error}") from error


def _work(flags: dict[str, Any], console: Any) -> None:
    """Run trials as a worker, by the design in the folder: SPEC may have been edited since."""
    from npt.tools.sweep.run import Bases
    from npt.tools.sweep.study import design_in, open_storage
    from npt.tools.sweep.worker import work

    folder = Path(flags["study"])
    design = design_in(folder)
    storage = open_storage(folder, flags["storage"], design)
    with storage.reached():
        work(design, storage, Bases(), console.say, flags["parent"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = f"study to run: a YAML file, or one of {', '.join(studies())}"
    add("spec", metavar="SPEC", help=text)
    text = "folder of the study; continued if it exists (default: outputs/NAME)"
    add("--study", metavar="FOLDER", help=text)
    text = "database that workers share: sqlite:/// or a server (default: a file in the folder)"
    add("--storage", metavar="URL", help=text)
    add_number(parser, "workers", "worker processes on this machine", 1)
    add_switch(parser, "dry_run", "check the study and list its trials without running them")
    add("--parent", type=int, help=argparse.SUPPRESS)
