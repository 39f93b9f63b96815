"""The course of a run: loss and refusals, gradient norm, learning rate, speed and the layers' NMSE
over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from npt.report import charts
from npt.report.charts import BAD, GOOD, INK, LINE, SOFT, Picture, Series, Span
from npt.report.run import RunRecord
from npt.report.words import as_number, clean, number

HEAT_COLUMNS = 120  # columns of the heat map
REFUSALS = 200  # the last ones, which are listed one by one

_CHARTS = (
    ("grad_norm", "Gradient norm, before clipping", "norm", None),
    ("lr", "Learning rate", "rate", False),
    ("tokens_per_second", "Tokens per second", "tokens/s", False),
)

_LANES = {
    "evaluation": ("evaluated", "D", LINE),
    "stage": ("next stage", "|", INK),
    "save": ("saved", "s", SOFT),
    "resume": ("resumed", "|", GOOD),
}


def training(record: RunRecord) -> dict[str, Any]:
    """Return the charts of a run, which share their steps, and their numbers."""
    lanes = _lanes(record)
    steps = [*record.steps, *(step for _, _, each, _ in lanes for step in each)]
    span = (min(steps), max(steps)) if steps else (1, 1)
    plain, pictures = record.plain, []
    if plain or lanes:
        heading = "Loss per valid token, and what was refused"
        pictures.append((heading, _loss(record, plain, lanes, span)))
    pictures += [
        (heading, _chart(heading, span, Series(unit, record.steps, plain[key]), unit, log))
        for key, heading, unit, log in _CHARTS
        if key in plain
    ]
    if measured := {e["step"]: as_number(e["student"], "kl") for e in record.of("evaluation")}:
        heading = f"Held-out KL, measured {len(measured)} times"
        series = Series("KL", sorted(measured), [measured[step] for step in sorted(measured)])
        pictures.append((heading, _chart(heading, span, series, "nats per token")))
    if record.layers:
        pictures.append(("NMSE by layer", _heat(record, span)))
    return {
        "pictures": pictures,
        "refusals": _refusals(record),
        "undone": sum(e["event"] == "refusal" and e["undone"] for e in record.events),
        "table": _table(record, plain) if record.steps else None,
    }


def _words(name: str, values: Sequence[float]) -> str:
    """Return a chart in words, for readers who do not see it."""
    finite = [value for value in values if math.isfinite(value)]
    bad = sum(math.isinf(value) for value in values)
    words = f"{name}: no finite value"
    if finite:
        words = (
            f"{name}: {number(finite[0])} at first, {number(finite[-1])} at last, between"
            f" {number(min(finite))} and {number(max(finite))}"
        )
    return words + (f", {bad:,} times not finite" if bad else "")


def _chart(heading: str, span: Span, series: Series, unit: str, log: bool | None = None) -> Picture:
    with charts.picture(180, _words(heading, series.values)) as made:
        charts.paint_lines(made.axes(20, 120), span, [series], unit, log)
    return made


Lane = tuple[str, dict[str, Any], list[int], int]
"""A name, how its marks look, their steps, and how many the name has in all."""


def _lanes(record: RunRecord) -> list[Lane]:
    """Return events by lane: refusals by kind first; what was undone has hollow marks."""
    lanes: dict[tuple[bool, str, bool], tuple[str, str, list[int]]] = {}
    first = min(record.steps, default=1)
    for event in record.events:
        refused = event["event"] == "refusal"
        if event["step"] is None or not (refused or event["event"] in _LANES):
            continue
        look = (clean(event.get("kind", "unknown"), 12), "v", BAD)
        name, marker, colour = look if refused else _LANES[event["event"]]
        lane = lanes.setdefault((not refused, name, event["undone"]), (marker, colour, []))
        lane[2].append(max(event["step"], first))
    return [
        (
            name,
            {
                "marker": marker, "color": colour, "linestyle": "none", "markersize": 6,
                "markerfacecolor": charts.PAPER if undone else colour, "clip_on": False,
            },
            steps,
            sum(len(each[2]) for (_, other, _), each in lanes.items() if other == name),
        )
        for (_, name, undone), (marker, colour, steps) in sorted(lanes.items())
    ]  # fmt: skip


def _loss(
    record: RunRecord, plain: dict[str, list[float]], lanes: list[Lane], span: Span
) -> Picture:
    """Return the loss and its NMSE part, and under them the events at their steps."""
    series = [
        Series(name, record.steps, plain[key])
        for key, name in (("loss", "loss"), ("loss_nmse", "its NMSE part"))
        if key in plain and (key == "loss" or plain[key] != plain.get("loss"))
    ]
    counts = {name: f"{name} {total:,}" for name, _, _, total in lanes}
    label = _words("Loss", plain.get("loss", []))
    label += f". At their steps: {', '.join(counts.values())}" if lanes else ""
    below = 20 * len(counts)
    with charts.picture(20 + 130 + below + 44, label) as made:
        axes = made.axes(20, 120)
        charts.paint_lines(axes, span, series, "loss per valid token")
        if lanes:
            charts.paint_steps(axes, span, named=False)
            axes = made.axes(20 + 130, below)
            for name, look, steps, _ in lanes:
                axes.plot(steps, [name] * len(steps), **look)
            axes.set_ylim(len(counts) - 0.5, -0.5)
            charts.paint_steps(axes, span)
    return made


def _heat(record: RunRecord, span: Span) -> Picture:
    """Return the layers' NMSE by colour. A column shows the largest value of its steps, and a value
    holds until the next one; an infinity is one that was not finite.
    """
    layers, wide = record.layers, span[1] - span[0] + 1
    count = min(HEAT_COLUMNS, wide)
    place = (np.asarray(record.steps) - span[0]) * count // wide
    cells = np.full((len(layers), count), np.nan)
    for line, layer in zip(cells, layers, strict=True):
        np.fmax.at(line, place, np.asarray(record.columns[f"layers.{layer}.nmse"]))
    known = np.where(np.isnan(cells), 0, np.arange(count))
    cells = np.take_along_axis(cells, np.maximum.accumulate(known, axis=1), axis=1)
    cells[:, place[-1] + 1 :] = np.nan  # nothing is known of later steps
    ends = {i: last[1] for i in layers if (last := record.last(f"layers.{i}.nmse"))}
    label = f"NMSE of {len(layers)} layers over the steps"
    if ends:
        worst = max(ends, key=lambda i: ends[i])
        label += f"; at the end layer {worst} is the worst with {number(ends[worst])}"
    extent = (span[0] - 0.5, span[1] + 0.5)
    return charts.heat(cells, [str(i) for i in layers], extent, label, "step; red: not finite")


def _refusals(record: RunRecord) -> list[list[str]]:
    """Return the last refusals, each with its place and reason."""
    rows = []
    for event in [e for e in record.events if e["event"] == "refusal"][-REFUSALS:]:
        index, process, samples = (event.get(key) for key in ("micro_batch", "rank", "sample_ids"))
        rows.append(
            [
                "–" if event["step"] is None else f"{event['step']:,}",
                f"{event.get('kind', '–')}{' (undone)' * event['undone']}",
                ("the whole window" if index is None else f"micro-batch {index}")
                + (f" on process {process}" if process else ""),
                str(event.get("detail", "–"))[:200],
                ", ".join(map(str, samples[:8])) if isinstance(samples, list) else "",
            ]
        )
    return rows


def _table(record: RunRecord, plain: dict[str, list[float]]) -> tuple[list[str], list[list[str]]]:
    """Return the logged figures at some steps, with the extremes of loss and gradient norm."""
    last = len(record.steps) - 1
    chosen = {round(i * last / 39) for i in range(40)}
    for key in ("loss", "grad_norm"):
        finite = {i: value for i, value in enumerate(plain.get(key, ())) if math.isfinite(value)}
        if finite:
            chosen |= {min(finite, key=lambda i: finite[i]), max(finite, key=lambda i: finite[i])}
    rows = [
        [f"{record.steps[i]:,}", *(number(column[i]) for column in plain.values())]
        for i in sorted(chosen)
    ]
    return ["*step", *(f"*{key}" for key in plain)], rows
