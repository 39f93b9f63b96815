"""The page about a study: what trains and where that ends, Optuna's plots, and every trial."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from npt.evaluation.formatting import FIGURES
from npt.files import write_text
from npt.report.pages import render
from npt.report.words import clean, number
from npt.tools.sweep.analysis import (
    OUTCOMES,
    RATE,
    Edge,
    Row,
    edges,
    factors,
    of_part,
    parts_of,
    row_name,
    sought,
)
from npt.tools.sweep.plots import plots_of
from npt.tools.sweep.study import read_study
from npt.tools.sweep.table import read_table

_SHOWN = (
    "outcome", "reason", "bad_layer", "bad_stage", "kl", "perplexity_ratio", "top1", "loss_first",
    "loss_end", "refused", "grad_growth", "residual_ratio", "saturated", "dead", "m_min", "m_max",
    "additive_to_residual", "additive_to_product", "limit_low", "limit_high", "fault_refused",
    "fault_harm", "parameters", "seconds",
)  # fmt: skip


@dataclass(frozen=True)
class Study:
    """A study as it is reported. notes: of each part. versions: that ran it."""

    name: str
    rows: Sequence[Row]
    notes: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, list[Row]]:
        """The rows of each part."""
        return {part: of_part(self.rows, part) for part in parts_of(self.rows)}

    @property
    def edges(self) -> dict[str, list[Edge]]:
        """The edges of each part that has some."""
        found = {part: edges(rows) for part, rows in self.parts.items()}
        return {part: lines for part, lines in found.items() if lines}

    @property
    def limits(self) -> list[tuple[str, Row]]:
        """The trials that sought a limit, with their names."""
        return [
            (f"{part}: {row_name(row, [n for n in factors(rows) if n != RATE])}", row)
            for part, rows in self.parts.items()
            for row in rows
            if sought(row)
        ]


def page(study: Study) -> str:
    """Return the HTML page."""
    sections: dict[str, tuple[str, Any]] = {
        "stability": ("What trains", _stability(study)),
        "limits": ("The largest value that trains", study.limits),
        "plots": ("Optuna's plots", _plots(study)),
        "trials": ("Trials", {"names": _SHOWN, "rows": _trials(study)}),
        "reading": ("How to read this", True),
    }
    counts = {name: sum(row["outcome"] == name for row in study.rows) for name in OUTCOMES}
    return render(
        "study.html.j2",
        title=f"{clean(study.name, 80)}: report of a study",
        sections={name: heading for name, (heading, found) in sections.items() if found},
        count=len(study.rows),
        open=len(study.rows) - sum(counts.values()),
        facts=[(name, f"{count:,}") for name, count in counts.items()],
        recipe=[("versions", ", ".join(f"{k} {v}" for k, v in study.versions.items()))],
        **{name: found for name, (_, found) in sections.items()},
    )


def _stability(study: Study) -> list[dict[str, Any]]:
    return [
        {
            "part": part,
            "note": study.notes.get(part, ""),
            "lines": lines,
            "worst": ", ".join(line.name for line in lines if line.good is None),
        }
        for part, lines in study.edges.items()
    ]


def _plots(study: Study) -> list[tuple[str, Markup]]:
    """Return what each plot shows, and its address."""
    return [
        (said, Markup(f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"))
        for part, rows in study.parts.items()
        for said, svg in plots_of(part, rows)
    ]


def _trials(study: Study) -> list[tuple[Any, ...]]:
    return [
        (part, row_name(row, names), row["seed"], *(_value(name, row[name]) for name in _SHOWN))
        for part, rows in study.parts.items()
        for names in [factors(rows)]
        for row in rows
    ]


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in FIGURES:
        return FIGURES[name].write(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if type(value) is int else str(value)


def write_study_report(folder: Path, output: Path) -> dict[str, Any]:
    """Write the page about a study that has ended, was killed or is under way, from its table.
    Return its results in a few numbers. Raise ConfigError if there is no table yet, or the folder
    cannot be read.
    """
    record, rows = read_study(folder), read_table(folder)
    study = Study(record["name"], rows, record["parts"], record.get("versions") or {})
    write_text(output, page(study))
    return {
        "report": str(output),
        "name": study.name,
        "trials": len(rows),
        "outcomes": dict(Counter(row["outcome"] or "not run" for row in rows)),
        "edges": {
            part: [
                {
                    "setting": line.name,
                    "trains_up_to": line.good,
                    "fails_at": line.bad,
                    "best_kl": line.best and line.best["kl"],
                    "at_rate": line.best and line.best[RATE],
                }
                for line in lines
            ]
            for part, lines in study.edges.items()
        },
        "limits": [
            {
                "setting": name,
                "seed": row["seed"],
                "low": row["limit_low"],
                "high": row["limit_high"],
            }
            for name, row in study.limits
        ],
    }
