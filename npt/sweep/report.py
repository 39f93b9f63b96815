"""`report.html` of a study, and its pictures, from its folder alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from npt.errors import ConfigError
from npt.files import new_folder, write_bytes, write_text
from npt.sweep.analysis import RATE, parts_of, stability_map
from npt.sweep.page import Study, page
from npt.sweep.study import SPEC, design_in, refresh
from npt.sweep.table import read_table

REPORT, FIGURES = "report.html", "figures"


def write_study_report(folder: Path, output: Path | None = None) -> dict[str, Any]:
    """Write the page about a study, and the pictures as PNG into its folder.

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
        notes = {part.name: part.note for part in design.parts}
    study = Study(folder.resolve().name if not (folder / SPEC).is_file() else design.name, rows, notes)
    place = folder / REPORT if output is None else output
    content = page(study)
    with new_folder(folder / FIGURES) as temporary:
        for name, picture in study.pictures.items():
            write_bytes(temporary / f"{name}.png", picture)
    write_text(place, content)
    outcomes = Counter(row["outcome"] or "not run" for row in rows)
    found = {"report": str(place), "name": study.name, "trials": len(rows), "outcomes": dict(outcomes), "pictures": sorted(study.pictures)}
    return found | {"maps": _maps(study), "limits": _limits(study)}


def _maps(study: Study) -> dict[str, list[dict[str, Any]]]:
    """By part what each line of its map comes to."""
    found = {}
    for part in parts_of(study.rows):
        drawn = stability_map(study.rows, part, study.columns)
        if drawn is None:
            continue
        lines = []
        for line, (good, bad), own in zip(drawn.lines, drawn.edges, drawn.groups, strict=True):
            best = min((row for row in own if row["outcome"] == "stable" and row["kl"]), key=lambda row: row["kl"], default=None)
            reached = {"best_kl": None, "at_rate": None} if best is None else {"best_kl": best["kl"], "at_rate": best[RATE]}
            lines.append({"setting": line, "trains_up_to": good, "fails_at": bad, **reached})
        found[part] = lines
    return found


def _limits(study: Study) -> list[dict[str, Any]]:
    sought = [row for row in study.rows if row["limit_low"] is not None or row["limit_high"] is not None]
    return [{"setting": study.name_of(row), "seed": row["seed"], "low": row["limit_low"], "high": row["limit_high"]} for row in sought]
