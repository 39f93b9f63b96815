"""How the student got where it is: loss and refusals, gradient norm, learning rate, speed and the
layers' NMSE over the steps.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from npt.report.buckets import Axis, buckets, coarser
from npt.report.charts import Mark, heat_map, lanes, legend, line_chart, step_text
from npt.report.events import Event
from npt.report.lines import number as as_number
from npt.report.markup import both_ends, clean, cut, details, lacking, number, table, text
from npt.report.run import RunRecord

HEAT_COLUMNS = 120
"""Columns of the heat map."""

MARKED = 120_000
"""Letters for what all marks together say; of more marks each says less, and the table beside them
tells the rest.
"""

READ_OFF = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens per second",
}
"""What the script reads off at a step."""

_UNITS = {"grad_norm": "norm", "lr": "rate", "tokens_per_second": "tokens/s"}

_REFUSALS = ("data", "loss", "gradient", "norm", "spike", "update")
_LANES = {
    "evaluation": ("evaluated", "diamond"),
    "stage": ("next stage", "bar"),
    "save": ("saved", "square"),
    "resume": ("resumed", "bar"),
}
_UNDONE = " (undone: the run was taken up further back)"

Row = tuple[str, str]
"""A lane's name and the shape of its marks."""


class Training:
    """The charts of a run, which share their steps."""

    def __init__(self, record: RunRecord):
        self.record = record
        kinds = ("refusal", *_LANES)
        known = [
            *record.metrics.steps,
            *(event.step for event in record.events.all if event.step and event.kind in kinds),
        ]
        self.axis, self.heat_axis = Axis.of(known), Axis.of(known, HEAT_COLUMNS)
        self.plain = {
            key: values
            for key, values in record.metrics.columns.items()
            if not key.startswith("layers.")
        }
        self.columns = {
            key: buckets(self.axis, record.metrics.steps, values)
            for key, values in self.plain.items()
        }
        self.layers = record.metrics.layers
        self.by_layer = {
            i: buckets(self.axis, record.metrics.steps, record.metrics.columns[f"layers.{i}.nmse"])
            for i in self.layers
        }
        self.marks = self._marks()
        self.room = max(60, min(600, MARKED // max(1, sum(map(len, self.marks.values())))))

    def section(self) -> str:
        """Every chart, the refusals with their reasons, and the numbers as tables."""
        missing, metrics = self.record.missing, self.record.metrics
        if not metrics.steps:
            pictures = self._lanes()
            drawn = _figure("Refusals and events", pictures) if pictures else ""
            return "\n".join(
                [
                    lacking(
                        missing, "metrics.jsonl", "no step is on record: there is nothing to draw"
                    ),
                    drawn,
                    self._refusals(),
                ]
            )
        return "\n".join(
            [
                self._readout(),
                self._loss(),
                self._refusals(),
                self._chart("grad_norm", "Gradient norm, before clipping"),
                self._chart("lr", "Learning rate", log=False),
                self._chart("tokens_per_second", "Tokens per second", log=False),
                self._evaluations(),
                self._heat(),
                self._table(),
            ]
        )

    def _readout(self) -> str:
        """Where the script shows the numbers of a step, and what the charts are of."""
        axis, again = self.axis, self.record.metrics.again
        logged = len(self.record.metrics.steps)
        said = f"{logged:,} logged step{'s' if logged > 1 else ''}"
        if axis.shared:
            said += (
                f", {axis.first:,} to {axis.last:,}, on {axis.columns} columns: a line shows their"
                " means, the band around it all values"
            )
        if again:
            said += f"; {again:,} lines of steps that were made again are left out"
        return (
            f'<p class="soft">{said}.</p>\n<div id="readout" hidden><label>Step <input type="range"'
            ' id="step" min="0" value="0" step="1"></label><output id="at" for="step"></output><dl'
            ' id="values" class="values"></dl></div>'
        )

    def _loss(self) -> str:
        found = {key: self.columns[key] for key in ("loss_nmse", "loss") if self.columns.get(key)}
        if found.get("loss_nmse") == found.get("loss"):
            found.pop("loss_nmse", None)
        series = [
            ("first" if key == "loss" else "second", columns) for key, columns in found.items()
        ]
        note = (
            '<p class="key"><i class="first"></i> loss <i class="second"></i> its NMSE part'
            " (dashed)</p>"
            if len(series) > 1
            else ""
        )
        picture = (
            line_chart(self.axis, series, self._words("loss", "Loss"), unit="loss per valid token")
            if series
            else '<p class="missing">No loss is on record.</p>'
        )
        return _figure("Loss per valid token, and what was refused", picture + self._lanes(), note)

    def _chart(self, key: str, heading: str, log: bool | None = None) -> str:
        found = self.columns.get(key)
        if not found:
            return (
                f'<h3>{heading}</h3>\n<p class="missing"><code>metrics.jsonl</code> has no'
                f" {key}.</p>"
            )
        return _figure(
            heading,
            line_chart(
                self.axis, [("first", found)], self._words(key, heading), log, _UNITS.get(key, "")
            ),
        )

    def _evaluations(self) -> str:
        """Held-out KL under way, where it was measured."""
        found: dict[int, float] = {}
        for event in self.record.events.of("evaluation"):
            student = event.details.get("student")
            if event.step and isinstance(student, dict):
                kl = as_number(student.get("kl"))
                found[event.step] = math.inf if kl is None or math.isnan(kl) else kl
        if not found:
            return ""
        steps = sorted(found)
        columns = buckets(self.axis, steps, [found[step] for step in steps])
        label = (
            f"KL between teacher and student on held-out text, measured {len(found)} times"
            " under way"
        )
        return _figure(
            "Held-out KL under way, nats",
            line_chart(self.axis, [("first", columns)], label, unit="nats per token"),
        )

    def _words(self, key: str, name: str) -> str:
        """A chart for readers who do not see it."""
        column = self.plain.get(key, ())
        values = [value for value in column if math.isfinite(value)]
        bad = sum(math.isinf(value) for value in column)
        said = f"{name}: no finite value"
        if values:
            low, high = min(values), max(values)
            said = (
                f"{name}: {number(values[0])} at first, {number(values[-1])} at last, between"
                f" {number(low)} and {number(high)}"
            )
        return text(said + (f", {bad:,} times not finite" if bad else ""))

    def _marks(self) -> dict[Row, dict[int, list[tuple[str, bool]]]]:
        """What happened, by lane and column: in words, and whether it was undone."""
        rows: dict[Row, dict[int, list[tuple[str, bool]]]] = {}
        for event in self.record.events.all:
            step = event.step
            if event.kind == "resume" and step is not None:
                step = max(step, self.axis.first)
            if step is None or not self.axis.first <= step <= self.axis.last:
                continue
            if event.kind == "refusal":
                kind = event.details.get("kind")
                row, said = (
                    (kind if kind in _REFUSALS else "other", "refusal"),
                    f"step {step:,}, {_where(event)}: {_reason(event)}",
                )
            elif event.kind in _LANES:
                row, said = _LANES[event.kind], f"step {event.step:,}: {_LANES[event.kind][0]}"
            else:
                continue
            rows.setdefault(row, {}).setdefault(self.axis.column(step), []).append(
                (said + _UNDONE * event.undone, event.undone)
            )
        order = (*_REFUSALS, "other", *(name for name, _ in _LANES.values()))
        return dict(sorted(rows.items(), key=lambda row: order.index(row[0][0])))

    def _lanes(self) -> str:
        if not self.marks:
            return ""
        drawn = []
        for (name, shape), columns in self.marks.items():
            marks = {
                i: Mark(text(_several(found), self.room), all(undone for _, undone in found))
                for i, found in columns.items()
            }
            drawn.append((name, shape, marks))
        counts = ", ".join(
            f"{name} {sum(map(len, columns.values())):,}"
            for (name, _), columns in self.marks.items()
        )
        return lanes(
            self.axis, drawn, f"At their steps, refusals by kind and other events: {counts}"
        )

    def _refusals(self) -> str:
        if "events.jsonl" in self.record.missing:
            return lacking(self.record.missing, "events.jsonl", "")
        events = self.record.events.of("refusal", None)
        if not events:
            return "<p>Nothing was refused.</p>"
        kinds = self.record.refused()
        kept = sum(kinds.values())
        said = f'<span class="alarm">{kept:,} refused</span>' + (
            ", of which nothing is left in the adapters: " if kept else "."
        )
        said += ", ".join(
            f"{count:,} for {text(kind, 30)}" for kind, count in sorted(kinds.items())
        ) + "." * bool(kept)
        if kept < len(events):
            said += (
                " Undone when the run was taken up further back, with hollow marks:"
                f" {len(events) - kept:,}."
            )
        rows = [
            (
                f"{event.step:,}" if event.step is not None else "–",
                text(event.details.get("kind", "–"), 30) + (" (undone)" if event.undone else ""),
                text(_where(event), 60),
                text(_reason(event)),
                text(_samples(event), 120),
            )
            for event in both_ends(events)
        ]
        listed = table(
            ("*step", "kind", "where", "~reason", "~samples"), rows, cut(events, "Refusals")
        )
        return f"<p>{said}</p>\n" + details(
            "Each refusal with its reason", listed, len(events) <= 12
        )

    def _heat(self) -> str:
        metrics, layers = self.record.metrics, self.layers
        if not layers:
            return (
                '<h3>NMSE by layer</h3>\n<p class="missing"><code>metrics.jsonl</code> has no NMSE'
                " by layer.</p>"
            )
        cells = {i: coarser(self.axis, self.heat_axis, found) for i, found in self.by_layer.items()}
        last = {i: value for i in layers if (value := metrics.last(f"layers.{i}.nmse")) is not None}
        label = f"NMSE of {len(layers)} layers over the steps"
        if last:
            worst = max(last, key=lambda i: last[i])
            label += f"; at the end layer {worst} is the worst with {number(last[worst])}"
        picture, scale = heat_map(self.heat_axis, layers, cells, label, metrics.steps[-1])
        note = "A line for each layer, by its index, the first on top; NMSE by colour; " + (
            "a column shows the largest value of its steps."
            if self.heat_axis.shared
            else "a value stands until the next one."
        )
        steps = _sampled(metrics.steps, 10)
        rows = [
            (str(i), *(number(self._at(f"layers.{i}.nmse", step), 3) for step in steps))
            for i in layers
        ]
        listed = table(
            ("*layer", *(f"*{step:,}" for step in steps)), rows, "NMSE by layer at some steps"
        )
        return (
            _figure("NMSE by layer", picture, f"<p>{note}</p>{legend(scale)}")
            + "\n"
            + details("NMSE by layer as a table", listed)
        )

    def _table(self) -> str:
        """Every chart's numbers at some steps, the extremes of loss and gradient norm among them."""
        metrics = self.record.metrics
        chosen = set(_sampled(metrics.steps, 40))
        for key in ("loss", "grad_norm"):
            found = [
                (value, step)
                for value, step in zip(self.plain.get(key, ()), metrics.steps, strict=False)
                if math.isfinite(value)
            ]
            chosen |= {min(found)[1], max(found)[1]} if found else set()
        rows = [
            (f"{step:,}", *(number(self._at(key, step)) for key in self.plain))
            for step in sorted(chosen)
        ]
        caption = f"Logged figures at {len(rows):,} of {len(metrics.steps):,} steps"
        return details(
            "All of these figures as a table",
            table(("*step", *(f"*{text(key)}" for key in self.plain)), rows, caption),
        )

    def _at(self, key: str, step: int) -> float:
        return self.record.metrics.columns[key][bisect_left(self.record.metrics.steps, step)]

    def data(self) -> str:
        """What the script reads off, as JSON that cannot end the element it stands in."""
        series: list[dict[str, Any]] = []
        for key, name in READ_OFF.items():
            found = self.columns.get(key)
            if found:
                low, high = (
                    [_short(x) for x in ends]
                    for ends in zip(*((b.low, b.high) for b in found.values()), strict=True)
                )
                series.append({"name": name, "at": list(found), "low": low, "high": high})
        worst = self._worst()
        if worst:
            heights = [_short(height) for height, _ in worst.values()]
            named = [f"layer {layer}" for _, layer in worst.values()]
            series.append(
                {
                    "name": "worst layer's NMSE",
                    "at": list(worst),
                    "low": heights,
                    "high": heights,
                    "of": named,
                }
            )
        told: dict[int, list[str]] = {}
        for columns in self.marks.values():
            for column, found_ in columns.items():
                told.setdefault(column, []).append(clean(_several(found_), self.room))
        known = sorted({*told, *(column for one in series for column in one["at"])})
        value = {
            "columns": self.axis.columns,
            "known": known,
            "labels": [step_text(self.axis, column) for column in known],
            "series": series,
            "told": told,
        }
        return (
            json.dumps(value, separators=(",", ":"), allow_nan=False)
            .replace("<", "\\u003c")
            .replace("&", "\\u0026")
        )

    def _worst(self) -> dict[int, tuple[float, int]]:
        """By column, the largest NMSE of any layer, and of which."""
        worst: dict[int, tuple[float, int]] = {}
        for layer, columns in self.by_layer.items():
            for column, bucket in columns.items():
                height = math.inf if bucket.bad else bucket.high
                if column not in worst or height > worst[column][0]:
                    worst[column] = height, layer
        return dict(sorted(worst.items()))


def _figure(heading: str, picture: str, note: str = "") -> str:
    return f"<figure>\n<figcaption><h3>{heading}</h3>{note}</figcaption>\n{picture}\n</figure>"


def _sampled(steps: Sequence[int], count: int) -> list[int]:
    """Some of the steps, evenly, the first and the last among them."""
    if len(steps) <= count:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _several(found: Sequence[tuple[str, bool]]) -> str:
    more = f"; and {len(found) - 3:,} more" if len(found) > 3 else ""
    return "; ".join(said for said, _ in found[:3]) + more


def _reason(event: Event) -> str:
    """Why it was refused; of many more than can be shown that is not kept."""
    return clean(event.details.get("detail", "its reason is in events.jsonl"), 200)


def _where(event: Event) -> str:
    index, rank = event.details.get("micro_batch"), event.details.get("rank")
    where = "the whole window" if index is None else f"micro-batch {clean(index, 20)}"
    return f"{where} on rank {clean(rank, 20)}" if rank else where


def _samples(event: Event) -> str:
    samples = event.details.get("sample_ids")
    return ", ".join(map(str, samples[:8])) if isinstance(samples, list) else ""
