"""The course of a run: loss and refusals, gradient norm, learning rate, speed and the layers' NMSE
over the steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from npt.report import charts
from npt.report.charts import BAD, GOOD, INK, LINE, SOFT, picture
from npt.report.logs import Metrics, as_mapping, as_number
from npt.report.run import RunRecord
from npt.report.words import number

HEAT_COLUMNS = 120  # columns of the heat map

_CHARTS = (
    ("grad_norm", "Gradient norm, before clipping", "norm", None),
    ("lr", "Learning rate", "rate", False),
    ("tokens_per_second", "Tokens per second", "tokens/s", False),
)

_REFUSALS = ("data", "loss", "gradient", "norm", "spike", "update")
_LANES = {
    "evaluation": ("evaluated", "D", LINE),
    "stage": ("next stage", "|", INK),
    "save": ("saved", "s", SOFT),
    "resume": ("resumed", "|", GOOD),
}

Span = tuple[int, int]
Lanes = dict[str, tuple[str, str, dict[bool, list[int]]]]
"""By name: marker, colour, and the steps of what holds (False) and of what was undone (True)."""


def training(record: RunRecord) -> dict[str, Any]:
    """Return the charts of a run, which share their steps, and their numbers."""
    metrics = record.metrics
    known = [event.step for event in record.events.all if event.step and _has_lane(event.kind)]
    steps = [*metrics.steps, *known]
    span = (min(steps), max(steps)) if steps else (1, 1)
    plain = {k: list(v) for k, v in metrics.columns.items() if not k.startswith("layers.")}
    return {
        "logged": len(metrics.steps),
        "span": span,
        "shared": span[1] - span[0] + 1 > charts.COLUMNS,
        "again": metrics.again,
        "loss": _loss(record, span, plain),
        "charts": [
            (
                heading,
                key,
                _chart(heading, span, (unit, metrics.steps, plain[key]), unit, log)
                if key in plain
                else "",
            )
            for key, heading, unit, log in _CHARTS
        ],
        "evaluations": _evaluations(record, span),
        "heat": _heat(metrics, span) if metrics.layers else None,
        "table": _table(metrics, plain) if metrics.steps else None,
    }


def _words(name: str, values: Sequence[float]) -> str:
    """Return a chart in words, for readers who do not see it."""
    finite = [value for value in values if math.isfinite(value)]
    bad = sum(math.isinf(value) for value in values)
    said = f"{name}: no finite value"
    if finite:
        said = (
            f"{name}: {number(finite[0])} at first, {number(finite[-1])} at last, between"
            f" {number(min(finite))} and {number(max(finite))}"
        )
    return said + (f", {bad:,} times not finite" if bad else "")


def _chart(
    heading: str, span: Span, series: charts.Series, unit: str, log: bool | None = None
) -> Markup:
    with picture(180, _words(heading, series[2])) as made:
        charts.paint_lines(made.axes(20, 120), span, [series], unit, log)
    return made.svg


def _loss(record: RunRecord, span: Span, plain: dict[str, list[float]]) -> str:
    """Return the loss and its NMSE part, and under them the events at their steps."""
    series = [
        (name, record.metrics.steps, plain[key])
        for key, name in (("loss", "loss"), ("loss_nmse", "its NMSE part"))
        if key in plain and (key == "loss" or plain[key] != plain.get("loss"))
    ]
    lanes = _lanes(record)
    if not series and not lanes:
        return ""
    counts = ", ".join(f"{n} {sum(map(len, found.values())):,}" for n, (*_, found) in lanes.items())
    label = _words("Loss", plain.get("loss", [])) + (f". At their steps: {counts}" if lanes else "")
    top, below = (20 + 130 if series else 0), charts.ROW * len(lanes)
    with picture(top + below + 44, label) as made:
        if series:
            axes = made.axes(20, 120)
            charts.paint_lines(axes, span, series, "loss per valid token")
            if lanes:
                charts.paint_steps(axes, span, named=False)
        if lanes:
            _paint_lanes(made.axes(top, below), lanes, span)
    return made.svg


def _has_lane(kind: str) -> bool:
    return kind == "refusal" or kind in _LANES


def _lanes(record: RunRecord) -> Lanes:
    """Return events by lane: refusals by kind first."""
    found: Lanes = {}
    first = min(record.metrics.steps, default=1)
    for event in record.events.all:
        if event.step is None or not _has_lane(event.kind):
            continue
        kind = event.details.get("kind")
        refused = (kind if kind in _REFUSALS else "other", "v", BAD)
        name, marker, colour = _LANES.get(event.kind, refused)
        steps = found.setdefault(name, (marker, colour, {False: [], True: []}))[2]
        steps[event.undone].append(max(event.step, first) if event.kind == "resume" else event.step)
    order = (*_REFUSALS, "other", *(name for name, *_ in _LANES.values()))
    return dict(sorted(found.items(), key=lambda lane: order.index(lane[0])))


def _paint_lanes(axes: Any, lanes: Lanes, span: Span) -> None:
    for place, (name, (marker, colour, found)) in enumerate(lanes.items()):
        for undone, steps in found.items():
            shown = sorted(step for step in steps if span[0] <= step <= span[1])
            if not shown:
                continue
            at = charts.columns(shown, [1.0] * len(shown), *span)[0]
            (marks,) = axes.plot(
                at, [place] * len(at), marker, color=colour, clip_on=False, markersize=6,
                markerfacecolor=charts.PAPER if undone else colour,
            )  # fmt: skip
            charts.tell(marks, f"{name}{', undone' * undone}: {charts.steps_text(shown)}")
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    charts.paint_steps(axes, span)


def _evaluations(record: RunRecord, span: Span) -> str:
    """Return held-out KL under way, if it was measured."""
    found: dict[int, float] = {}
    for event in record.events.of("evaluation"):
        student = event.details.get("student")
        if event.step and isinstance(student, dict):
            kl = as_number(as_mapping(student).get("kl"))
            found[event.step] = math.inf if kl is None or math.isnan(kl) else kl
    if not found:
        return ""
    steps = sorted(found)
    heading = f"Held-out KL, measured {len(found)} times"
    return _chart(heading, span, ("KL", steps, [found[s] for s in steps]), "nats per token")


def _heat(metrics: Metrics, span: Span) -> dict[str, Any]:
    """Return the layers' NMSE by colour, a line for each layer, and as a table."""
    layers, steps = metrics.layers, np.asarray(metrics.steps)
    wide = span[1] - span[0] + 1
    count = min(HEAT_COLUMNS, wide)
    place = (steps - span[0]) * count // wide
    cells = np.full((len(layers), count), np.nan)
    for line, layer in enumerate(layers):
        # fmax: the largest value of a column's steps; an infinity is one that was not finite
        np.fmax.at(cells[line], place, np.asarray(metrics.columns[f"layers.{layer}.nmse"]))
    known = np.where(np.isnan(cells), 0, np.arange(count))
    shown = np.take_along_axis(cells, np.maximum.accumulate(known, axis=1), axis=1)
    shown[:, place[-1] + 1 :] = np.nan  # nothing is known of later steps
    ends = {i: last[1] for i in layers if (last := metrics.last(f"layers.{i}.nmse"))}
    label = f"NMSE of {len(layers)} layers over the steps"
    if ends:
        worst = max(ends, key=lambda i: ends[i])
        label += f"; at the end layer {worst} is the worst with {number(ends[worst])}"
    height = charts.layer_height(len(layers)) * len(layers)
    with picture(height + 84, label) as made:
        axes = made.axes(0, height)
        low, high = charts.paint_heat(axes, shown, (span[0] - 0.5, span[1] + 0.5))
        charts.paint_layers(axes, [str(i) for i in layers])
        charts.paint_steps(axes, span)
        charts.paint_ramp(made, height + 52, low, high, "logarithmic; red: not finite")
    some = _sampled(metrics.steps, 10)
    rows = [
        [str(i), *(number(_at(metrics, f"layers.{i}.nmse", step), 3) for step in some)]
        for i in layers
    ]
    heads = ["*layer", *(f"*{step:,}" for step in some)]
    return {"picture": made.svg, "shared": count < wide, "table": (heads, rows)}


def _table(metrics: Metrics, plain: dict[str, list[float]]) -> tuple[list[str], list[list[str]]]:
    """Return every chart's numbers at some steps, the extremes of loss and gradient norm among
    them.
    """
    chosen = set(_sampled(metrics.steps, 40))
    for key in ("loss", "grad_norm"):
        cells = zip(plain.get(key, ()), metrics.steps, strict=False)
        found = [cell for cell in cells if math.isfinite(cell[0])]
        chosen |= {min(found)[1], max(found)[1]} if found else set()
    rows = [[f"{s:,}", *(number(_at(metrics, key, s)) for key in plain)] for s in sorted(chosen)]
    return ["*step", *(f"*{key}" for key in plain)], rows


def _at(metrics: Metrics, key: str, step: int) -> float:
    return metrics.columns[key][bisect_left(metrics.steps, step)]


def _sampled(steps: Sequence[int], count: int) -> list[int]:
    """Return some of the steps, evenly, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]
