"""The page about a study: what trains and where that ends, what it gains, and which settings
matter, in one file that needs nothing else.

It loads nothing and runs no script; its pictures are in it, and lie beside it as SVG. Every
picture's numbers stand in a table as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npt.evaluation.formatting import FIGURES
from npt.report.charts import PALETTE
from npt.report.frame import frame
from npt.report.markup import details, figure, number, table, text
from npt.report.recipe import recipe_list
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
    "outcome", "reason", "bad_layer", "bad_stage", "kl", "perplexity_ratio", "top1", "loss_first", "loss_end", "refused", "grad_growth",
    "residual_ratio", "saturated", "dead", "m_min", "m_max", "additive_to_residual", "additive_to_product", "sharpness_start",
    "sharpness_end", "parameters", "seconds",
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
    """Return the HTML page."""
    sections = [
        ("stability", "What trains", _stability(study)),
        ("limits", "The largest value that trains", _limits(study)),
        ("faults", "A batch of other activations", _faults(study)),
        ("fidelity", "Fidelity, parameters and time", _fidelity(study)),
        ("effects", "Which settings matter", _effects(study)),
        ("seeds", "Spread of the seeds", _seeds(study)),
        ("trials", "Trials", _trials(study)),
        ("reading", "How to read this", _READING),
    ]
    shown = [(name, heading, content) for name, heading, content in sections if content]
    title = f"{text(study.name, 80)}: report of a study"
    head = _head(study)
    palette = "".join(f".c{i} {{ fill: {colour} }}\n" for i, colour in enumerate(PALETTE))
    return frame(title, head, shown, style=figures.STYLE + palette)


_READING = """<p>A trial is <strong>stable</strong> when it came to its end and neither the loss of its first window was larger there than
at the beginning, nor the KL on held-out text by more than a per cent; <strong>worse</strong> when one of them was;
<strong>diverged</strong> when it was stopped, for a loss many times its first or for refusals in a row, or when the student that came
out gives numbers that are not finite. Refused micro-batches
leave nothing behind in any trial, so what is seen here is what the form of the adapter does, not what a NaN would have done.</p>
<p>Trials are short, and on one base: they say which settings train and which do not, and which of two is better early on. They do not
say how good a setting becomes in a long run, and a limit found here moves with the base, the batch and the number of steps.</p>
<p>Effects on the KL are those of an additive model; the chance that a trial fails is that of a logistic regression, averaged over the
other settings, with its 95% interval: it lies between 0 and 1, and where every trial of a level failed, or none, it is as if half a trial
of each kind had been added. Where the share <em>together</em> is large, settings work on one another, and an effect alone says little:
read the map.</p>"""


def _head(study: Study) -> str:
    done = finished(study.rows)
    counts = {
        name: sum(row["outcome"] == name for row in study.rows)
        for name in ("stable", "worse", "diverged", "failed")
    }
    open_ = len(study.rows) - sum(counts.values())
    kind, words = (
        ("good", f"{len(study.rows)} trials, all of them ended")
        if not open_
        else ("warn", f"{open_} of {len(study.rows)} trials have not ended")
    )
    facts = [(name, f"{count:,}") for name, count in counts.items() if count or name != "failed"]
    facts += [
        ("runs", f"{sum(row['runs'] or 0 for row in done):,}"),
        ("refusals", f"{sum(row['refused'] or 0 for row in done):,}"),
    ]
    seconds = sum(row["seconds"] or 0 for row in done)
    facts.append(("computing", f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"))
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return (
        f'<p class="status {kind}"><strong>{words}</strong></p>\n<dl'
        f' class="facts">{cells}</dl>\n{recipe_list(study.recipe.items())}'
    )


def _picture(study: Study, name: str, drawn: str) -> str:
    study.pictures[name] = drawn
    wide = (
        ' class="scroll" role="region" aria-label="A wide picture" tabindex="0"'
        if 'class="drawn wide"' in drawn
        else ""
    )
    return f"<figure><div{wide}>{drawn}</div></figure>" if wide else f"<figure>{drawn}</figure>"


def _stability(study: Study) -> str:
    pieces = []
    for place, part in enumerate(parts_of(study.rows), 1):
        found = stability_map(study.rows, part, study.columns)
        if found is not None:
            pieces.append(_map(study, found, place))
    return "\n".join(pieces)


def _map(study: Study, found: Map, place: int) -> str:
    worst = [line for line, (good, _) in zip(found.lines, found.edges, strict=True) if good is None]
    rows = [
        (
            text(line),
            number(good),
            number(bad),
            *(_cell(found, i, j) for j in range(len(found.heads))),
        )
        for i, (line, (good, bad)) in enumerate(zip(found.lines, found.edges, strict=True))
    ]
    heads = ("~setting", "*trains up to", "*fails at", *(f"*{head}" for head in found.heads))
    note = study.notes.get(found.part, "")
    said = f"<p>{text(note)}</p>" if note else ""
    said += (
        f'<p class="alarm">Trains at no rate of these: {text(", ".join(worst))}.</p>'
        if worst
        else ""
    )
    said += (
        f"<p>The first {LINES} of {len(found.lines)} settings are drawn.</p>"
        if len(found.lines) > LINES
        else ""
    )
    listed = table(
        heads, rows, f"{found.part}: median KL, and failed trials of all, by learning rate"
    )
    picture = _picture(
        study, f"map-{place}-{_file(found.part)}", figures.map_figure(found.top(LINES))
    )
    parts = (details("As a table", listed), details("Measures by setting", _measures(found)))
    return "\n".join((f"<h3>{text(found.part)}</h3>{said}", picture, *parts))


def _measures(found: Map) -> str:
    """What each line of a map reached, and how it stood there and at its worst."""
    rows = []
    for line, own in zip(found.lines, found.groups, strict=True):
        best = min(
            (row for row in own if row["outcome"] == "stable" and row["kl"]),
            key=lambda row: row["kl"],
            default=None,
        )
        at_best = [
            None if best is None else best[name]
            for name in ("kl", RATE, "saturated", "additive_to_residual", "residual_ratio")
        ]
        smallest = min((row["m_min"] for row in own if row["m_min"] is not None), default=None)
        dead = max((row["dead"] for row in own if row["dead"] is not None), default=None)
        refused = sum(row["refused"] or 0 for row in own)
        broken = sum(row["kl"] is None or bool(row["refused"]) for row in own)
        start = next(
            (row["sharpness_start"] for row in own if row["sharpness_start"] is not None), None
        )
        rows.append(
            (
                text(line),
                _kl(at_best[0]),
                *(number(value) for value in (*at_best[1:], smallest, dead)),
                str(refused),
                f"{broken} of {len(own)}",
                number(start),
            )
        )
    heads = (
        "~setting",
        "*best KL",
        "*at rate",
        "*saturated there",
        "*additive to residual there",
        "*residual ratio there",
    )
    worst = (
        "*smallest multiplier at any rate",
        "*largest share at 0",
        "*refusals",
        "*runs with numbers not finite",
        "*sharpness at the start",
    )
    return table((*heads, *worst), rows, f"{found.part}: at the best rate, and over all")


def _cell(found: Map, i: int, j: int) -> str:
    cell = found.cells.get((i, j))
    if cell is None:
        return ""
    failed = round(cell.failed * cell.count)
    return number(cell.kl, 3) + (f" ({failed}/{cell.count} failed)" if failed else "")


def _limits(study: Study) -> str:
    rows = [row for row in finished(study.rows) if sought(row)]
    if not rows:
        return ""
    names = _named(study, rows)
    limits = [
        (name, row["limit_low"], row["limit_high"]) for name, row in zip(names, rows, strict=True)
    ]
    drawn = figures.limits_figure(limits, _bisected(study))
    cells = [
        (
            text(name),
            number(row["limit_low"]),
            number(row["limit_high"]),
            _kl(row["kl"]),
            str(row["runs"]),
        )
        for name, row in zip(names, rows, strict=True)
    ]
    said = (
        "<p>Found by halving the bracket by its logarithm: the largest value at which a run ended"
        " stable, and one at which it did not.</p>"
    )
    listed = table(("~setting", "*trains up to", "*not at", "*KL there", "*runs"), cells, "Limits")
    return f"{said}\n{_picture(study, 'limits', drawn)}\n{details('As a table', listed)}"


def _bisected(study: Study) -> str:
    """The setting that was sought: its column holds the lower limit."""
    rows = [row for row in finished(study.rows) if sought(row)]
    return next(
        (
            name
            for name in study.columns
            if name != "seed" and all(row[name] == row["limit_low"] for row in rows)
        ),
        "value",
    )


def _faults(study: Study) -> str:
    rows = [row for row in finished(study.rows) if row.get("fault_refused") is not None]
    if not rows:
        return ""
    names = _named(study, rows)
    picture = _picture(study, "faults", figures.faults_figure(rows, names))
    cells = [
        (
            text(name),
            "refused" if row["fault_refused"] else "applied",
            _finite(row["fault_loss"]),
            _finite(row["fault_harm"]),
            number(row["loss_before_fault"]),
            number(row["loss_worst_behind"]),
            number(row["loss_after_fault"]),
            "never" if row["recovered_after"] is None else str(row["recovered_after"]),
            text(row["outcome"]),
            _kl(row["kl"]),
            text(
                f"layer {row['bad_layer']}, {row['bad_stage']}"
                if row["bad_layer"] is not None
                else ""
            ),
        )
        for name, row in zip(names, rows, strict=True)
    ]
    heads = (
        *(
            "~setting",
            "~the batch was",
            "*its loss",
            "*harm, times",
            "*loss before",
            "*worst behind",
            "*loss in the end",
        ),
        *("*steps to recover", "~outcome", "*KL", "~first bad number"),
    )
    refused = sum(bool(row["fault_refused"]) for row in rows)
    said = (
        f"<p>In one step the first batch had activations of another size. {refused} of {len(rows)}"
        " such batches were refused. "
    )
    said += (
        "Harm is the loss of one and the same window right behind that step over what it was right"
        " before.</p>"
    )
    return f"{said}\n{picture}\n{table(heads, cells, 'Faults')}"


def _fidelity(study: Study) -> str:
    rows = [
        row
        for row in finished(study.rows)
        if row["outcome"] == "stable" and row["kl"] and row["fault_refused"] is None
    ]
    rows = [
        row for row in rows if row["parameters"] and math.isfinite(row["kl"]) and not sought(row)
    ]
    if len(rows) < 2:
        return ""
    costs = ([float(row["parameters"]) for row in rows], [training_seconds(row) for row in rows])
    best = {
        i
        for cost in costs
        for i in frontier([(x, float(row["kl"])) for x, row in zip(cost, rows, strict=True)])
    }
    numbers = {
        i: place for place, i in enumerate(sorted(best, key=lambda i: (rows[i]["kl"], i)), 1)
    }
    picture = _picture(study, "pareto", figures.pareto_figure(rows, numbers))
    cells = [
        (str(place), text(study.name_of(rows[i])), text(_parts(rows[i])), f"{rows[i]['parameters']:,}", number(costs[1][i]),
         figure(rows[i], "kl"), figure(rows[i], "perplexity_ratio"), figure(rows[i], "top1"))
        for i, place in numbers.items()
    ]  # fmt: skip
    heads = (
        "*",
        "~trial",
        "~part",
        "*parameters",
        "*seconds",
        "*KL",
        "*perplexity ratio",
        "*top-1",
    )
    floor = next((row["floor_kl"] for row in rows if row["floor_kl"] is not None), None)
    said = (
        f"<p>Stable trials. With attention merely dropped KL is {number(floor)}. Seconds are those"
        " of start "
    )
    said += (
        "and training. Only the sigmoid form is computed fused, so the other forms take longer for"
        " that alone. The table has the "
    )
    said += "numbers of the picture.</p>"
    return f"{said}\n{picture}\n{table(heads, cells, 'No trial is better than these in both: KL and parameters, or KL and seconds')}"


def _effects(study: Study) -> str:
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
        picture = _picture(study, f"effects-{place}-{_file(part)}", figures.effects_figure(found))
        cells = [
            (
                text(a.response),
                text(e.setting),
                text(e.level),
                number(e.mean),
                number(e.low),
                number(e.high),
                str(e.count),
            )
            for a in found
            for e in a.effects
        ]
        heads = ("~response", "~setting", "~level", "*mean", "*95% from", "*to", "*trials")
        pieces.append(
            f"<h3>{text(part)}</h3>\n{picture}\n{details('As a table', table(heads, cells, f'Main effects, {part}'))}"
        )
        shares += [(f"{part}: {analysis.response}", analysis) for analysis in found]
    if not shares:
        return ""
    return _shares(study, shares) + "\n" + "\n".join(pieces)


def _shares(study: Study, shares: list[tuple[str, Analysis]]) -> str:
    picture = _picture(study, "variance", figures.shares_figure(shares))
    cells = [
        (text(name), text(what), f"{100 * share:.1f}%")
        for name, a in shares
        for what, share in [
            *sorted(a.shares.items(), key=lambda item: -item[1]),
            (f"settings {a.rest}", a.together),
            *([("seeds", a.seeds)] if a.seeds is not None else []),
        ]
    ]
    said = (
        "<p>What each setting explains alone, in per cent of the variance. What two explain only"
        " between them, where trials are "
    )
    said += (
        "missing or failed, is in neither share or in both: such a bar ends before or behind 1.</p>"
    )
    return f"{said}\n{picture}\n{details('As a table', table(('~part and response', '~setting', '*share'), cells, 'Shares of variance'))}"


def _seeds(study: Study) -> str:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in finished(study.rows):
        if row["kl"] is not None and math.isfinite(row["kl"]) and not sought(row):
            groups.setdefault(
                (
                    row["parts"],
                    row["arms"],
                    *(repr(row[name]) for name in study.columns if name != "seed"),
                ),
                [],
            ).append(row)
    several = [rows for rows in groups.values() if len({row["seed"] for row in rows}) > 1]
    if not several:
        return ""
    cells = []
    for rows in several:
        kls = [row["kl"] for row in rows]
        mean, spread = statistics.fmean(kls), statistics.stdev(kls)
        outcomes = ", ".join(dict.fromkeys(row["outcome"] for row in rows))
        cells.append((text(_parts(rows[0])), text(study.name_of(rows[0])), str(len(rows)), number(mean), number(spread),
                      f"{100 * spread / mean:.1f}%" if mean else "–", text(outcomes)))  # fmt: skip
    calm = [
        statistics.stdev([row["kl"] for row in rows])
        / statistics.fmean([row["kl"] for row in rows])
        for rows in several
        if all(row["outcome"] == "stable" for row in rows) and any(row["kl"] for row in rows)
    ]
    said = (
        f"<p>Where every seed is stable, KL spreads by {100 * statistics.median(calm):.1f}% of"
        " itself (median).</p>"
        if calm
        else ""
    )
    heads = (
        "~part",
        "~trial",
        "*seeds",
        "*mean KL",
        "*standard deviation",
        "*of the mean",
        "~outcomes",
    )
    return said + details("Every group of seeds", table(heads, cells, "Spread of the seeds"))


def _trials(study: Study) -> str:
    heads = [
        "~part",
        "~trial",
        "*seed",
        *(f"{'~' if name in ('outcome', 'reason', 'bad_stage') else '*'}{name}" for name in _SHOWN),
    ]
    rows = [
        (
            text(_parts(row)),
            text(study.name_of(row)),
            text(row["seed"]),
            *(_value(name, row.get(name)) for name in _SHOWN),
        )
        for row in study.rows
    ]
    return details(
        f"All {len(rows)} trials; more columns are in trials.csv", table(heads, rows, "Trials")
    )


def _named(study: Study, rows: Sequence[Row]) -> list[str]:
    """What each of the rows is called, with its seed and its part where they have several."""
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
    """A figure that every such row has; a table holds no number that is not finite."""
    return "not finite" if value is None else number(value)


def _kl(value: float | None) -> str:
    return number(value) if value is None else FIGURES["kl"].write(value)


def _value(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in FIGURES:
        return FIGURES[name].write(value)
    return (
        number(value)
        if isinstance(value, float)
        else f"{value:,}"
        if type(value) is int
        else text(value)
    )


def _file(name: str) -> str:
    return "".join(
        letter if (letter.isalnum() and letter.isascii()) or letter in "-_" else "-"
        for letter in name
    )[:60]
