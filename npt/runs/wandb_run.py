"""A run of Weights & Biases: its options, and what only it takes (tables, files, versions).

The environment comes after the flags and before our own choices: the library reads `WANDB_PROJECT`,
`WANDB_ENTITY`, `WANDB_NAME`, `WANDB_RUN_ID`, `WANDB_RUN_GROUP`, `WANDB_TAGS`, `WANDB_RESUME` and
`WANDB_MODE` itself. In a run of `wandb agent` project, id and the sweep's settings are left alone.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from npt.adapters.files.run_layout import ADAPTER, BEST
from npt.config import TrainConfig
from npt.errors import CheckpointError
from npt.evaluation.evaluate import Fidelity
from npt.evaluation.metrics import Figures
from npt.runs.run_folder import REPORT, RUN
from npt.stored import read_json

PROJECT = "npt"
_PICTURES = ("trace/health.html", "trace/health.png")


def known_run(folder: Path) -> str | None:
    """Return the id of this folder's run in Weights & Biases, or None."""
    try:
        known = read_json(folder / RUN, CheckpointError).get("wandb_run")
    except CheckpointError:
        return None
    valid = isinstance(known, str) and re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}", known)
    return known if valid else None


def project_of(config: TrainConfig) -> str | None:
    """Return the project to ask for; None for the environment's."""
    if "WANDB_SWEEP_ID" in os.environ:
        return None
    return config.project or (None if "WANDB_PROJECT" in os.environ else PROJECT)


def options_of(config: TrainConfig, folder: Path, run: str | None) -> dict[str, Any]:
    """Return arguments of `wandb.init`; `run` is the id of a run to continue."""
    of_agent = "WANDB_SWEEP_ID" in os.environ
    options: dict[str, Any] = {"dir": str(folder)}
    if config.run_name or not (of_agent or "WANDB_NAME" in os.environ):
        options["name"] = config.run_name or folder.name
    if config.wandb_group:
        options["group"] = config.wandb_group
    if config.wandb_tags:
        options["tags"] = list(config.wandb_tags)
    if config.wandb_entity and not of_agent:
        options["entity"] = config.wandb_entity
    if not of_agent and "WANDB_RESUME" not in os.environ:
        options["resume"] = "allow"
    if not of_agent and "WANDB_RUN_ID" not in os.environ:
        options["id"] = run or secrets.token_hex(4)
    return options


def store_settings(run: Any, values: Mapping[str, Any]) -> None:
    """Put settings into the run's config, except those that a sweep has chosen and locked."""
    locked = set(run.config.keys()) if "WANDB_SWEEP_ID" in os.environ else set()
    free = {name: value for name, value in values.items() if name not in locked}
    run.config.update(free, allow_val_change=True)


def log_samples(run: Any, rows: Sequence[tuple[str, str, str]], step: int) -> None:
    """Log rows of prompt, student's and teacher's text as a table."""
    import wandb

    columns: list[str | int] = ["step", "prompt", "student", "teacher"]
    run.log({"samples": wandb.Table(columns, [[step, *row] for row in rows])}, step=step)


def log_histograms(
    run: Any, found: Mapping[str, Sequence[int]], edges: Sequence[float], step: int
) -> None:
    """Log counts between edges, by name."""
    import wandb

    bins = {name: (numpy.array(counts), numpy.array(edges)) for name, counts in found.items()}
    run.log({name: wandb.Histogram(np_histogram=each) for name, each in bins.items()}, step=step)


def log_files(run: Any, folder: Path, record: Mapping[str, Any]) -> None:
    """Log pages and pictures as a `report`, and the adapters as `last` and `best`."""
    import wandb

    pages = [folder / name for name in (REPORT, *_PICTURES) if (folder / name).is_file()]
    if pages:
        report = wandb.Artifact(f"npt-report-{run.id}", "report")
        for page in pages:
            report.add_file(str(page), name=page.name)
        run.log_artifact(report)
    for path, fidelity, aliases in _adapters(folder):
        adapter = wandb.Artifact(
            f"npt-adapter-{run.id}", "model", metadata={**record, "fidelity": fidelity}
        )
        adapter.add_dir(str(path))
        run.log_artifact(adapter, aliases=aliases)


def best_of(folder: Path) -> tuple[int, Figures] | None:
    """Return step and figures of the best adapters that a run kept, or None."""
    try:
        found = read_json(folder / BEST / "fidelity.json", CheckpointError)
        return int(found["step"]), Fidelity.from_dict(found).aim
    except (CheckpointError, ValueError, KeyError, TypeError):
        return None


def _adapters(folder: Path) -> list[tuple[Path, dict[str, Any], list[str]]]:
    """Return folders of adapters, their figures and aliases; one folder if the last is the best."""
    best, last = _read(folder / BEST / "fidelity.json"), _read(folder / "fidelity.json")
    has_best, has_last = (folder / BEST / ADAPTER).is_dir(), (folder / ADAPTER).is_dir()
    if has_last and (not has_best or best.get("student") == last.get("student")):
        return [(folder / ADAPTER, last, ["best", "last"])]
    found = [(folder / BEST / ADAPTER, best, ["best"])] if has_best else []
    return found + ([(folder / ADAPTER, last, ["last"])] if has_last else [])


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, CheckpointError)
    except CheckpointError:
        return {}
    names = ("step", "student", "initial", "floor", "teacher")
    return {name: found[name] for name in names if found.get(name) is not None}
