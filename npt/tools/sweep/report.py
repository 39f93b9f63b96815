"""`report.html` of a study, and its pictures, from its folder alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import new_folder, write_text
from npt.stored import read_json
from npt.tools.sweep.analysis import RATE, level_text, parts_of, stability_map
from npt.tools.sweep.figures import standalone
from npt.tools.sweep.page import Study, page
from npt.tools.sweep.spec import Trial
from npt.tools.sweep.study import SPEC, STUDY, design_in, refresh
from npt.tools.sweep.table import read_table

_RECIPE = {
    "base": ("model_name", "use_quantization", "quant_type", "compute_dtype"),
    "adapters": ("layers", "adapter_rank", "targets", "modulation", "mult_form", "additive_scale"),
    "training": (
        "init",
        "strategy",
        "loss",
        "learning_rate",
        "warmup_steps",
        "max_grad_norm",
        "batch_size",
        "max_steps",
        "seed",
    ),
    "data": ("dataset_name", "num_samples", "max_length", "eval_samples"),
}
"""What is said of the trials at the head of a page."""

REPORT, FIGURES = "report.html", "figures"


def write_study_report(folder: Path, output: Path | None = None) -> dict[str, Any]:
    """Write the page about a study, and the pictures as SVG into its folder.

    Args:
        folder: of a study that has ended, was killed, or is under way.
        output: where to write the page; default `report.html` in the folder.

    Returns:
        What it came to, in a few numbers.

    Raises:
        ConfigError: there is no table yet, or the folder cannot be read.
        OSError: the page cannot be written.
    """
    refresh(folder)
    rows = read_table(folder)
    if not rows:
        raise ConfigError(f"{folder} has no trial in its table; run npt sweep again")
    notes = {}
    if (folder / SPEC).is_file():
        design = design_in(folder)
        notes = design.parts
    name = folder.resolve().name if not (folder / SPEC).is_file() else design.name
    study = Study(name, rows, notes, _recipe(folder, design.trials if notes else ()))
    place = folder / REPORT if output is None else output
    content = page(study)
    with new_folder(folder / FIGURES) as temporary:
        for name, picture in study.pictures.items():
            write_text(temporary / f"{name}.svg", standalone(picture))
    write_text(place, content)
    outcomes = Counter(row["outcome"] or "not run" for row in rows)
    found = {
        "report": str(place),
        "name": study.name,
        "trials": len(rows),
        "outcomes": dict(outcomes),
        "pictures": sorted(study.pictures),
    }
    return found | {"maps": _maps(study), "limits": _limits(study)}


def _recipe(folder: Path, trials: Sequence[Trial]) -> dict[str, str]:
    """What every trial has in common, and the versions that ran them."""
    of_all = [trial.settings.values() for trial in trials]
    found = {}
    for what, names in _RECIPE.items():
        same = [
            name
            for name in names
            if of_all and all(values.get(name) == of_all[0].get(name) for values in of_all)
        ]
        varied = [name for name in names if name not in same] if of_all else []
        words = [
            f"{name} {level_text(of_all[0][name])}"
            for name in same
            if of_all[0].get(name) is not None
        ]
        found[what] = "; ".join(
            filter(None, (", ".join(words), f"varied: {', '.join(varied)}" if varied else ""))
        )
    versions = read_json(folder / STUDY, ConfigError).get("versions")
    found["versions"] = (
        ", ".join(f"{name} {value}" for name, value in versions.items())
        if isinstance(versions, dict)
        else ""
    )
    return {what: said for what, said in found.items() if said}


def _maps(study: Study) -> dict[str, list[dict[str, Any]]]:
    """By part what each line of its map comes to."""
    found = {}
    for part in parts_of(study.rows):
        drawn = stability_map(study.rows, part, study.columns)
        if drawn is None:
            continue
        lines = []
        for line, (good, bad), own in zip(drawn.lines, drawn.edges, drawn.groups, strict=True):
            best = min(
                (row for row in own if row["outcome"] == "stable" and row["kl"]),
                key=lambda row: row["kl"],
                default=None,
            )
            reached = (
                {"best_kl": None, "at_rate": None}
                if best is None
                else {"best_kl": best["kl"], "at_rate": best[RATE]}
            )
            lines.append({"setting": line, "trains_up_to": good, "fails_at": bad, **reached})
        found[part] = lines
    return found


def _limits(study: Study) -> list[dict[str, Any]]:
    sought = [
        row for row in study.rows if row["limit_low"] is not None or row["limit_high"] is not None
    ]
    return [
        {
            "setting": study.name_of(row),
            "seed": row["seed"],
            "low": row["limit_low"],
            "high": row["limit_high"],
        }
        for row in sought
    ]
