"""`report.html` of a study, and its pictures, from its folder alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import new_folder, write_text
from npt.stored import read_json
from npt.tools.sweep.analysis import RATE, level_text, parts_of, sought, stability_map
from npt.tools.sweep.figures import standalone
from npt.tools.sweep.page import Study, page
from npt.tools.sweep.spec import Trial
from npt.tools.sweep.study import SPEC, STUDY, design_in, refresh
from npt.tools.sweep.table import read_table

_RECIPE = {
    "base": ("model_name", "use_quantization", "quant_type", "compute_dtype"),
    "adapters": ("layers", "adapter_rank", "targets", "modulation", "mult_form", "additive_scale"),
    "training": (
        "init", "strategy", "loss", "learning_rate", "warmup_steps", "max_grad_norm", "batch_size",
        "max_steps", "seed",
    ),
    "data": ("dataset_name", "num_samples", "max_length", "eval_samples"),
}  # fmt: skip
"""Settings at the head of a page."""

REPORT, FIGURES = "report.html", "figures"


def write_study_report(folder: Path, output: Path | None = None) -> dict[str, Any]:
    """Write the page about a study that has ended, was killed or is under way, and the pictures as
    SVG into its folder. Return its results in a few numbers. Raise ConfigError if there is no table
    yet, or the folder cannot be read.
    """
    refresh(folder)
    rows = read_table(folder)
    if not rows:
        raise ConfigError(f"{folder} has no trial in its table; run npt sweep again")
    if (folder / SPEC).is_file():
        design = design_in(folder)
        study = Study(design.name, rows, design.parts, _recipe(folder, design.trials))
    else:
        study = Study(folder.resolve().name, rows, {}, _recipe(folder, ()))
    place = folder / REPORT if output is None else output
    content = page(study)
    with new_folder(folder / FIGURES) as temporary:
        for name, picture in study.pictures.items():
            write_text(temporary / f"{name}.svg", standalone(picture))
    write_text(place, content)
    limits = [
        {
            "setting": study.name_of(row),
            "seed": row["seed"],
            "low": row["limit_low"],
            "high": row["limit_high"],
        }
        for row in rows
        if sought(row)
    ]
    return {
        "report": str(place),
        "name": study.name,
        "trials": len(rows),
        "outcomes": dict(Counter(row["outcome"] or "not run" for row in rows)),
        "pictures": sorted(study.pictures),
        "maps": _maps(study),
        "limits": limits,
    }


def _recipe(folder: Path, trials: Sequence[Trial]) -> dict[str, str]:
    """Return what all trials have in common, and the versions that ran them."""
    of_all = [trial.settings.values() for trial in trials]
    found = {}
    for what, names in _RECIPE.items() if of_all else ():
        first = of_all[0]
        same = [n for n in names if all(values.get(n) == first.get(n) for values in of_all)]
        words = [f"{name} {level_text(first[name])}" for name in same if first[name] is not None]
        varied = ", ".join(name for name in names if name not in same)
        said = (", ".join(words), f"varied: {varied}" if varied else "")
        found[what] = "; ".join(filter(None, said))
    versions = read_json(folder / STUDY, ConfigError).get("versions")
    if isinstance(versions, dict):
        found["versions"] = ", ".join(f"{name} {value}" for name, value in versions.items())
    return {what: said for what, said in found.items() if said}


def _maps(study: Study) -> dict[str, list[dict[str, Any]]]:
    """Return by part what each line of its map reached."""
    found = {}
    for part in parts_of(study.rows):
        drawn = stability_map(study.rows, part, study.columns)
        if drawn is not None:
            found[part] = [
                {
                    "setting": line.name,
                    "trains_up_to": line.good,
                    "fails_at": line.bad,
                    "best_kl": line.best and line.best["kl"],
                    "at_rate": line.best and line.best[RATE],
                }
                for line in drawn.lines
            ]
    return found
