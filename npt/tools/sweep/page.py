"""The page about a study: what trains and where that ends, what it gains, and which settings
matter.

It runs no script; its charts are in it, and lie next to it as SVG. A table has every chart's
numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from npt.evaluation.formatting import FIGURES
from npt.report.pages import render
from npt.report.words import clean, figure, number
from npt.tools.sweep import figures
from npt.tools.sweep.analysis import (
    RATE,
    Map,
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
from npt.tools.sweep.table import MEASURES

LINES = 40
"""Settings that a map draws: more are read in its table."""

PLACES = ("key", "parts", "arms")

_SHOWN = (
    "outcome", "reason", "bad_layer", "bad_stage", "kl", "perplexity_ratio", "top1", "loss_first",
    "loss_end", "refused", "grad_growth", "residual_ratio", "saturated", "dead", "m_min", "m_max",
    "additive_to_residual", "additive_to_product", "sharpness_start", "sharpness_end", "parameters",
    "seconds",
)  # fmt: skip

Row = Mapping[str, Any]


@dataclass
class Study:
    """A study as it is reported. notes: of each part. recipe: what every trial has in common, by
    what it is of, in words. pictures: SVG by name, filled as the page is made."""

    name: str
    rows: Sequence[Row]
    notes: Mapping[str, str] = field(default_factory=dict)
    recipe: Mapping[str, str] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The settings that the table has."""
        return [
            name
            for name in (self.rows[0] if self.rows else {})
            if name not in PLACES and name not in MEASURES
        ]

    def factors(self, rows: Sequence[Row]) -> list[str]:
        """What these rows differ in: the arms, where they are named, and the settings that no arm
        decides.
        """
        return factors(rows, self.columns)

    def name_of(self, row: Row) -> str:
        """A trial in a few words."""
        part, arm = places(row)[0]
        own = of_part(self.rows, part)
        words = [arm] if arm else []
        words += [
            f"{'lr' if n == RATE else n} {level_text(row[n])}"
            for n in self.factors(own)
            if n != "arms"
        ]
        return ", ".join(words) or part


def page(study: Study) -> str:
    """Return the HTML page, and fill the study's pictures."""
    sections: dict[str, tuple[str, Any]] = {
        "stability": ("What trains", _maps(study)),
        "limits": ("The largest value that trains", _limits(study)),
        "faults": ("A batch of other activations", _faults(study)),
        "fidelity": ("Fidelity, parameters and time", _fidelity(study)),
        "effects": ("Which settings matter", _effects(study)),
        "seeds": ("Spread of the seeds", _seeds(study)),
        "trials": ("Trials", _trials(study)),
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


_OUTCOMES = ("stable", "worse", "diverged", "failed")

Table = tuple[Sequence[str], Sequence[Sequence[Any]], str]
"""Heads, rows and caption."""


def _facts(study: Study) -> list[tuple[str, str]]:
    done = finished(study.rows)
    counts = {name: sum(row["outcome"] == name for row in study.rows) for name in _OUTCOMES}
    facts = [(name, f"{count:,}") for name, count in counts.items() if count or name != "failed"]
    facts.append(("runs", f"{sum(row['runs'] or 0 for row in done):,}"))
    facts.append(("refusals", f"{sum(row['refused'] or 0 for row in done):,}"))
    seconds = sum(row["seconds"] or 0 for row in done)
    taken = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
    return [*facts, ("computing", taken)]


def _keep(study: Study, name: str, drawn: Markup) -> Markup:
    """Return the chart for its place on the page, and keep it for a file."""
    study.pictures[name] = drawn
    return drawn


def _maps(study: Study) -> list[dict[str, Any]]:
    pieces = []
    for place, part in enumerate(parts_of(study.rows), 1):
        found = stability_map(study.rows, part, study.columns)
        if found is None:
            continue
        edges = list(zip(found.lines, found.edges, strict=True))
        rows = [
            (
                line,
                number(good),
                number(bad),
                *(_cell(found, i, j) for j in range(len(found.heads))),
            )
            for i, (line, (good, bad)) in enumerate(edges)
        ]
        heads = ("~setting", "*trains up to", "*fails at", *(f"*{head}" for head in found.heads))
        caption = f"{part}: median KL, and failed trials of all, by learning rate"
        picture = figures.map_figure(found.top(LINES))
        pieces.append(
            {
                "part": part,
                "note": study.notes.get(part, ""),
                "worst": ", ".join(line for line, (good, _) in edges if good is None),
                "shown": LINES if len(edges) > LINES else 0,
                "lines": len(edges),
                "picture": _keep(study, f"map-{place}-{_file(part)}", picture),
                "table": (heads, rows, caption),
                "measures": _measures(found),
            }
        )
    return pieces


def _measures(found: Map) -> Table:
    """Return what each line of a map reached, there and at its worst."""
    rows = []
    for line, own in zip(found.lines, found.groups, strict=True):
        stable = [row for row in own if row["outcome"] == "stable" and row["kl"]]
        best = min(stable, key=lambda row: row["kl"], default=dict.fromkeys(_AT_BEST))
        broken = sum(row["kl"] is None or bool(row["refused"]) for row in own)

        def known(name: str, own: Sequence[Row] = own) -> list[float]:
            return [row[name] for row in own if row[name] is not None]

        rows.append(
            (
                line,
                _kl(best["kl"]),
                *(number(best[name]) for name in _AT_BEST[1:]),
                number(min(known("m_min"), default=None)),
                number(max(known("dead"), default=None)),
                sum(known("refused")),
                f"{broken} of {len(own)}",
                number(next(iter(known("sharpness_start")), None)),
            )
        )
    heads = (
        "~setting", "*best KL", "*at rate", "*saturated there", "*additive to residual there",
        "*residual ratio there", "*smallest multiplier at any rate", "*largest share at 0",
        "*refusals", "*runs with numbers not finite", "*sharpness at the start",
    )  # fmt: skip
    return heads, rows, f"{found.part}: at the best rate, and over all"


_AT_BEST = ("kl", RATE, "saturated", "additive_to_residual", "residual_ratio")


def _cell(found: Map, i: int, j: int) -> str:
    cell = found.cells.get((i, j))
    if cell is None:
        return ""
    failed = round(cell.failed * cell.count)
    return number(cell.kl, 3) + (f" ({failed}/{cell.count} failed)" if failed else "")


def _limits(study: Study) -> dict[str, Any] | None:
    rows = [row for row in finished(study.rows) if sought(row)]
    if not rows:
        return None
    names = _named(study, rows)
    limits = [(n, row["limit_low"], row["limit_high"]) for n, row in zip(names, rows, strict=True)]
    setting = next(  # its column holds the lower limit
        (
            name
            for name in study.columns
            if name != "seed" and all(row[name] == row["limit_low"] for row in rows)
        ),
        "value",
    )
    cells = [
        (name, number(low), number(high), _kl(row["kl"]), row["runs"])
        for (name, low, high), row in zip(limits, rows, strict=True)
    ]
    heads = ("~setting", "*trains up to", "*not at", "*KL there", "*runs")
    picture = _keep(study, "limits", figures.limits_figure(limits, setting))
    return {"picture": picture, "table": (heads, cells, "Limits")}


def _faults(study: Study) -> dict[str, Any] | None:
    rows = [row for row in finished(study.rows) if row.get("fault_refused") is not None]
    if not rows:
        return None
    names = _named(study, rows)
    cells = [
        (
            name,
            "refused" if row["fault_refused"] else "applied",
            _finite(row["fault_loss"]),
            _finite(row["fault_harm"]),
            number(row["loss_before_fault"]),
            number(row["loss_worst_behind"]),
            number(row["loss_after_fault"]),
            "never" if row["recovered_after"] is None else row["recovered_after"],
            row["outcome"],
            _kl(row["kl"]),
            "" if row["bad_layer"] is None else f"layer {row['bad_layer']}, {row['bad_stage']}",
        )
        for name, row in zip(names, rows, strict=True)
    ]
    heads = (
        "~setting", "~the batch was", "*its loss", "*harm, times", "*loss before", "*worst after",
        "*loss in the end", "*steps to recover", "~outcome", "*KL", "~first bad number",
    )  # fmt: skip
    return {
        "picture": _keep(study, "faults", figures.faults_figure(rows, names)),
        "refused": sum(bool(row["fault_refused"]) for row in rows),
        "count": len(rows),
        "table": (heads, cells, "Faults"),
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
    cells = [
        (n, study.name_of(rows[i]), _parts(rows[i]), f"{rows[i]['parameters']:,}",
         number(costs[1][i]), *(figure(rows[i], key) for key in ("kl", "perplexity_ratio", "top1")))
        for i, n in numbers.items()
    ]  # fmt: skip
    heads = (
        "*", "~trial", "~part", "*parameters", "*seconds", "*KL", "*perplexity ratio", "*top-1"
    )  # fmt: skip
    caption = "No trial is better than these in both: KL and parameters, or KL and seconds"
    floor = next((row["floor_kl"] for row in rows if row["floor_kl"] is not None), None)
    picture = _keep(study, "pareto", figures.pareto_figure(rows, numbers))
    return {"picture": picture, "floor": number(floor), "table": (heads, cells, caption)}


def _effects(study: Study) -> dict[str, Any] | None:
    pieces, shares = [], []
    for place, part in enumerate(parts_of(study.rows), 1):
        rows = [row for row in of_part(study.rows, part) if not sought(row)]
        names = study.factors(rows)
        found = [
            analysis
            for response, called, share in (
                (log_kl, "log10 KL, stable trials", False),
                (failure, "chance that a trial fails", True),
            )
            if (analysis := analyse(rows, names, response, called, share=share)) is not None
        ]
        if not found:
            continue
        picture = figures.effects_figure(found)
        cells = [
            (a.response, e.setting, e.level, number(e.mean), number(e.low), number(e.high), e.count)
            for a in found
            for e in a.effects
        ]
        heads = ("~response", "~setting", "~level", "*mean", "*95% from", "*to", "*trials")
        kept = _keep(study, f"effects-{place}-{_file(part)}", picture)
        table = (heads, cells, f"Main effects, {part}")
        pieces.append({"part": part, "picture": kept, "table": table})
        shares += [(f"{part}: {analysis.response}", analysis) for analysis in found]
    return {**_shares(study, shares), "parts": pieces} if shares else None


def _shares(study: Study, shares: list[tuple[str, Analysis]]) -> dict[str, Any]:
    cells = [
        (name, what, f"{100 * share:.1f}%")
        for name, a in shares
        for what, share in [
            *sorted(a.shares.items(), key=lambda item: -item[1]),
            (f"settings {a.rest}", a.together),
            *([("seeds", a.seeds)] if a.seeds is not None else []),
        ]
    ]
    table = (("~part and response", "~setting", "*share"), cells, "Shares of variance")
    return {"picture": _keep(study, "variance", figures.shares_figure(shares)), "table": table}


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
    cells, calm = [], []
    for rows in several:
        kls = [row["kl"] for row in rows]
        mean, spread = statistics.fmean(kls), statistics.stdev(kls)
        outcomes = list(dict.fromkeys(row["outcome"] for row in rows))
        share = f"{100 * spread / mean:.1f}%" if mean else "–"
        cells.append((_parts(rows[0]), study.name_of(rows[0]), len(rows), number(mean),
                      number(spread), share, ", ".join(outcomes)))  # fmt: skip
        if outcomes == ["stable"] and any(kls):
            calm.append(spread / mean)
    heads = (
        "~part", "~trial", "*seeds", "*mean KL", "*standard deviation", "*of the mean", "~outcomes"
    )  # fmt: skip
    median = f"{100 * statistics.median(calm):.1f}%" if calm else ""
    return {"median": median, "table": (heads, cells, "Spread of the seeds")}


def _trials(study: Study) -> Table:
    names = ("outcome", "reason", "bad_stage")
    heads = ["~part", "~trial", "*seed", *(f"{'~' if n in names else '*'}{n}" for n in _SHOWN)]
    rows = [
        (_parts(row), study.name_of(row), row["seed"], *(_value(n, row.get(n)) for n in _SHOWN))
        for row in study.rows
    ]
    return heads, rows, "Trials"


def _named(study: Study, rows: Sequence[Row]) -> list[str]:
    """Return what each of the rows is called, with its seed and part if they have several."""
    seeds, parts = (len({row[name] for row in rows}) > 1 for name in ("seed", "parts"))
    return [
        (f"{places(row)[0][0]}: " if parts else "")
        + study.name_of(row)
        + (f", seed {row['seed']}" if seeds else "")
        for row in rows
    ]


def _parts(row: Row) -> str:
    return ", ".join(dict.fromkeys(part for part, _ in places(row)))


def _finite(value: float | None) -> str:
    """Return a figure that every such row has; a table holds no number that is not finite."""
    return "not finite" if value is None else number(value)


def _kl(value: float | None) -> str:
    return number(value) if value is None else FIGURES["kl"].write(value)


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in FIGURES:
        return FIGURES[name].write(value)
    if isinstance(value, float):
        return number(value)
    return f"{value:,}" if type(value) is int else str(value)


def _file(name: str) -> str:
    return "".join(
        letter if (letter.isalnum() and letter.isascii()) or letter in "-_" else "-"
        for letter in name
    )[:60]
