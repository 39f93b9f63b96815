"""The page about a study: what trains and where that ends, what it gains, and which settings
matter. Its charts are in it, and lie next to it as SVG; a table has every chart's numbers.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from markupsafe import Markup

from npt.errors import ConfigError
from npt.evaluation.formatting import FIGURES
from npt.files import new_folder, write_text
from npt.report.pages import render
from npt.report.words import clean, number
from npt.stored import read_json
from npt.tools.sweep import figures
from npt.tools.sweep.analysis import (
    RATE,
    Line,
    Map,
    Row,
    factors,
    failure,
    finished,
    frontier,
    level_text,
    log_kl,
    of_part,
    parts_of,
    places,
    sought,
    stability_map,
    training_seconds,
)
from npt.tools.sweep.effects import Analysis, analyse
from npt.tools.sweep.spec import Trial
from npt.tools.sweep.study import SPEC, STUDY, design_in, refresh
from npt.tools.sweep.table import MEASURES, read_table

LINES = 40  # settings that a map draws: more are read in its table

PLACES = ("key", "parts", "arms")

_SHOWN = (
    "outcome", "reason", "bad_layer", "bad_stage", "kl", "perplexity_ratio", "top1", "loss_first",
    "loss_end", "refused", "grad_growth", "residual_ratio", "saturated", "dead", "m_min", "m_max",
    "additive_to_residual", "additive_to_product", "parameters",
    "seconds",
)  # fmt: skip

_OUTCOMES = ("stable", "worse", "diverged", "failed")


@dataclass
class Study:
    """A study as it is reported. notes: of each part. recipe: what every trial has in common.
    pictures: SVG by name, filled as the page is made.
    """

    name: str
    rows: Sequence[Row]
    notes: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, str] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The settings that the table has."""
        return [name for name in self.rows[0] if name not in PLACES and name not in MEASURES]

    @cached_property
    def maps(self) -> list[Map]:
        """The maps of all parts that have one."""
        found = (stability_map(self.rows, part, self.columns) for part in parts_of(self.rows))
        return [each for each in found if each is not None]

    def name_of(self, row: Row) -> str:
        """Return a trial in a few words."""
        part, arm = places(row)[0]
        words = [arm] if arm else []
        words += [
            f"{'lr' if name == RATE else name} {level_text(row[name])}"
            for name in factors(of_part(self.rows, part), self.columns)
            if name != "arms"
        ]
        return ", ".join(words) or part

    def names_of(self, rows: Sequence[Row]) -> list[str]:
        """Return a name for each row, with its seed and part if they have several."""
        seeds, parts = (len({row[name] for row in rows}) > 1 for name in ("seed", "parts"))
        return [
            (f"{places(row)[0][0]}: " if parts else "")
            + self.name_of(row)
            + (f", seed {row['seed']}" if seeds else "")
            for row in rows
        ]

    def keep(self, name: str, drawn: Markup) -> Markup:
        """Keep a chart for a file, and return it for its place on the page."""
        self.pictures[name] = drawn
        return drawn


def page(study: Study) -> str:
    """Return the HTML page, and fill the study's pictures."""
    sections: dict[str, tuple[str, Any]] = {
        "stability": ("What trains", _maps(study)),
        "limits": ("The largest value that trains", _limits(study)),
        "faults": ("A batch of other activations", _faults(study)),
        "fidelity": ("Fidelity, parameters and time", _fidelity(study)),
        "effects": ("Which settings matter", _effects(study)),
        "seeds": ("Spread of the seeds", _seeds(study)),
        "trials": ("Trials", {"names": _SHOWN, "rows": _trials(study)}),
        "reading": ("How to read this", True),
    }
    done = [row for row in study.rows if row["outcome"] in _OUTCOMES]
    return render(
        "study.html.j2",
        title=f"{clean(study.name, 80)}: report of a study",
        sections={name: heading for name, (heading, found) in sections.items() if found},
        count=len(study.rows),
        open=len(study.rows) - len(done),
        facts=_facts(study),
        recipe=study.recipe.items(),
        **{name: found for name, (_, found) in sections.items()},
    )


def _facts(study: Study) -> list[tuple[str, str]]:
    done = finished(study.rows)
    counts = {name: sum(row["outcome"] == name for row in study.rows) for name in _OUTCOMES}
    facts = [(name, f"{count:,}") for name, count in counts.items() if count or name != "failed"]
    facts.append(("runs", f"{sum(row['runs'] or 0 for row in done):,}"))
    facts.append(("refusals", f"{sum(row['refused'] or 0 for row in done):,}"))
    seconds = sum(row["seconds"] or 0 for row in done)
    taken = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
    return [*facts, ("computing", taken)]


def _maps(study: Study) -> list[dict[str, Any]]:
    pieces = []
    for found in study.maps:
        drawn = replace(found, lines=found.lines[:LINES])
        name = f"map-{_file(study, found.part)}"
        pieces.append(
            {
                "part": found.part,
                "note": study.notes.get(found.part, ""),
                "heads": [f"*{head}" for head in found.heads],
                "lines": [(line, _measures(line)) for line in found.lines],
                "drawn": len(drawn.lines),
                "worst": ", ".join(line.name for line in found.lines if line.good is None),
                "picture": study.keep(name, figures.map_figure(drawn)),
            }
        )
    return pieces


def _measures(line: Line) -> dict[str, Any]:
    """Return the measures of a line at its best rate, and the worst at any rate."""

    def known(name: str) -> list[float]:
        return [row[name] for row in line.rows if row[name] is not None]

    names = ("kl", RATE, "saturated", "additive_to_residual", "residual_ratio")
    return {
        **{name: line.best and line.best[name] for name in names},
        "m_min": min(known("m_min"), default=None),
        "dead": max(known("dead"), default=None),
        "refused": sum(known("refused")),
        "broken": sum(row["kl"] is None or bool(row["refused"]) for row in line.rows),
    }


def _limits(study: Study) -> dict[str, Any] | None:
    rows = [row for row in finished(study.rows) if sought(row)]
    if not rows:
        return None
    settings = [name for name in study.columns if name != "seed"]
    of_all = [n for n in settings if all(row[n] == row["limit_low"] for row in rows)]
    names = study.names_of(rows)
    limits = [(n, row["limit_low"], row["limit_high"]) for n, row in zip(names, rows, strict=True)]
    # a sought setting's column holds the lower limit
    picture = figures.limits_figure(limits, next(iter(of_all), "value"))
    return {"picture": study.keep("limits", picture), "rows": list(zip(names, rows, strict=True))}


def _faults(study: Study) -> dict[str, Any] | None:
    rows = [row for row in finished(study.rows) if row.get("fault_refused") is not None]
    if not rows:
        return None
    names = study.names_of(rows)
    return {
        "picture": study.keep("faults", figures.faults_figure(rows, names)),
        "refused": sum(bool(row["fault_refused"]) for row in rows),
        "rows": list(zip(names, rows, strict=True)),
    }


def _fidelity(study: Study) -> dict[str, Any] | None:
    rows = [
        row
        for row in finished(study.rows)
        if row["outcome"] == "stable"
        and row["kl"]
        and math.isfinite(row["kl"])
        and row["fault_refused"] is None
        and row["parameters"]
        and not sought(row)
    ]
    if len(rows) < 2:
        return None
    costs = ([float(row["parameters"]) for row in rows], [training_seconds(row) for row in rows])
    kls = [float(row["kl"]) for row in rows]
    best = {i for cost in costs for i in frontier(list(zip(cost, kls, strict=True)))}
    numbers = {i: n for n, i in enumerate(sorted(best, key=lambda i: (kls[i], i)), 1)}
    return {
        "picture": study.keep("pareto", figures.pareto_figure(rows, numbers)),
        "floor": number(next((r["floor_kl"] for r in rows if r["floor_kl"] is not None), None)),
        "rows": [
            (n, study.name_of(rows[i]), _parts(rows[i]), costs[1][i], rows[i])
            for i, n in numbers.items()
        ],
    }


def _effects(study: Study) -> dict[str, Any] | None:
    pieces: list[dict[str, Any]] = []
    shares: list[tuple[str, Analysis]] = []
    for part in parts_of(study.rows):
        rows = [row for row in of_part(study.rows, part) if not sought(row)]
        names = factors(rows, study.columns)
        both = (
            analyse(rows, names, log_kl, "log10 KL, stable trials"),
            analyse(rows, names, failure, "chance that a trial fails", share=True),
        )
        found = [analysis for analysis in both if analysis is not None]
        if found:
            picture = figures.effects_figure(found)
            kept = study.keep(f"effects-{_file(study, part)}", picture)
            levels = [(a.response, effect) for a in found for effect in a.effects]
            pieces.append({"part": part, "picture": kept, "rows": levels})
            shares += [(f"{part}: {analysis.response}", analysis) for analysis in found]
    if not shares:
        return None
    picture = study.keep("variance", figures.shares_figure(shares))
    rows_ = []
    for name, a in shares:
        cut = sorted(a.shares.items(), key=lambda item: -item[1])
        cut += [(f"settings {a.rest}", a.together)]
        cut += [("seeds", a.seeds)] if a.seeds is not None else []
        rows_ += [(name, what, f"{100 * share:.1f}%") for what, share in cut]
    return {"picture": picture, "rows": rows_, "parts": pieces}


def _seeds(study: Study) -> dict[str, Any] | None:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    settings = [name for name in study.columns if name != "seed"]
    for row in finished(study.rows):
        if row["kl"] is not None and math.isfinite(row["kl"]) and not sought(row):
            of = (row["parts"], row["arms"], *(repr(row[name]) for name in settings))
            groups.setdefault(of, []).append(row)
    several = [rows for rows in groups.values() if len({row["seed"] for row in rows}) > 1]
    if not several:
        return None
    found, calm = [], []
    for rows in several:
        kls = [row["kl"] for row in rows]
        mean, spread = statistics.fmean(kls), statistics.stdev(kls)
        outcomes = list(dict.fromkeys(row["outcome"] for row in rows))
        share = f"{100 * spread / mean:.1f}%" if mean else "–"
        trial = (_parts(rows[0]), study.name_of(rows[0]), len(rows))
        found.append((*trial, number(mean), number(spread), share, ", ".join(outcomes)))
        if outcomes == ["stable"] and any(kls):
            calm.append(spread / mean)
    median = f"{100 * statistics.median(calm):.1f}%" if calm else ""
    return {"median": median, "rows": found}


def _trials(study: Study) -> list[tuple[Any, ...]]:
    return [
        (_parts(row), study.name_of(row), row["seed"], *(_value(n, row.get(n)) for n in _SHOWN))
        for row in study.rows
    ]


def _parts(row: Row) -> str:
    return ", ".join(dict.fromkeys(part for part, _ in places(row)))


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in FIGURES:
        return FIGURES[name].write(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if type(value) is int else str(value)


def _file(study: Study, part: str) -> str:
    """Return a part's number and its name as a file may be called."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", part)
    return f"{parts_of(study.rows).index(part) + 1}-{plain[:60]}"


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
    place = folder / "report.html" if output is None else output
    content = page(study)
    with new_folder(folder / "figures") as temporary:
        for name, picture in study.pictures.items():
            write_text(temporary / f"{name}.svg", figures.standalone(picture))
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
        "maps": {
            found.part: [
                {
                    "setting": line.name,
                    "trains_up_to": line.good,
                    "fails_at": line.bad,
                    "best_kl": line.best and line.best["kl"],
                    "at_rate": line.best and line.best[RATE],
                }
                for line in found.lines
            ]
            for found in study.maps
        },
        "limits": limits,
    }


def _recipe(folder: Path, trials: Sequence[Trial]) -> dict[str, str]:
    """Return the settings that all trials share, and the versions that ran them."""
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
