"""The measurements on a run's page: fidelity, training, refusals and layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npt.figures import (
    COMPARISON_NAMES,
    FIGURES,
    Change,
    Figure,
    Verdict,
    change_line,
    nan_for_null,
    unpaired,
    verdict,
)
from npt.report import charts
from npt.report.run import RunRecord
from npt.report.words import as_number, figure, number

MODELS = {
    "floor": "floor (without context)",
    "initial": "student before training",
    "student": "student",
    "teacher": "teacher (the base)",
}

_CHARTS = (
    ("grad_norm", "Gradient norm before clipping", "norm", None),
    ("lr", "Learning rate", "rate", False),
    ("tokens_per_second", "Tokens per second", "tokens/s", False),
)

_GONE = Figure("share of the floor's KL closed", "way", 1, percent=True, ideal=1.0)

REFUSALS = 200  # the most refusals listed, the last ones

FIRST = ("kl", "top1", "acceptance", "perplexity_ratio", "perplexity")
"""Figures in the order of their weight: a phone shows two or three columns."""

Table = tuple[list[str], list[list[str]]]
"""Headings, a star before each one of numbers, and rows."""

Models = Mapping[str, Mapping[str, Any]]


def training(record: RunRecord) -> dict[str, Any]:
    """Return charts over the steps, with their headings, and what has a single value as a table,
    since one dot is no chart.
    """
    steps, columns, pictures = record.steps, record.columns, []
    single: list[list[str]] = []

    def draw(heading: str, unit: str, series: Sequence[charts.Series], **more: Any) -> None:
        _, places, values = series[0]
        if len(places) > 1:
            pictures.append((heading, charts.lines(heading, unit, series, **more)))
        else:
            single.append([heading, f"{places[0]:,.0f}", number(values[0])])

    if "loss" in columns:
        losses = {"loss": "loss", "loss_nmse": "NMSE part"}
        series = [(name, steps, columns[key]) for key, name in losses.items() if key in columns]
        refused = [event["step"] for event in record.of("refusal") if event["step"]]
        draw("Loss per token", "loss", series, marks=refused)
    for key, heading, unit, log in _CHARTS:
        if key in columns:
            draw(heading, unit, [(unit, steps, columns[key])], log=log)
    if measured := {e["step"]: as_number(e["student"], "kl") for e in record.of("evaluation")}:
        draw("Held-out KL", "nats per token", [("KL", list(measured), list(measured.values()))])
    return {"pictures": pictures, "single": single}


def layers_by_step(record: RunRecord) -> charts.Chart | None:
    """Return the chart of the worst and the best layer's NMSE, or None if no step logs it."""
    indices = record.layers("nmse")
    if not indices or len(record.steps) < 2:
        return None
    nmse = np.array([record.columns[f"layers.{i}.nmse"] for i in indices])
    ends = {"worst layer": np.fmax.reduce(nmse), "best layer": np.fmin.reduce(nmse)}
    series = [(name, record.steps, list(end)) for name, end in ends.items()]
    return charts.lines("NMSE by step", "NMSE", series)


def refusals(record: RunRecord) -> list[list[str]]:
    """Return step, kind, place, reason and samples of each of the last refusals."""
    rows = []
    for event in record.of("refusal")[-REFUSALS:]:
        index, process, samples = (event.get(key) for key in ("micro_batch", "rank", "sample_ids"))
        where = "whole window" if index is None else f"micro-batch {index}"
        where += f" on process {process}" if process else ""
        ids = ", ".join(map(str, (samples or [])[:8]))
        detail = str(event.get("detail", "–"))[:200]
        rows.append([str(event["step"]), str(event.get("kind", "–")), where, detail, ids])
    return rows


def change(record: RunRecord) -> tuple[Verdict, str] | None:
    """Return what training changed, as a verdict and a sentence; None if that is not known."""
    initial, student = (record.fidelity.get(name) for name in ("initial", "student"))
    if found := record.fidelity.get("change"):
        changed = Change(**nan_for_null(found))
    elif initial and student and not record.fidelity.get("attribution"):
        changed = unpaired("kl", nan_for_null(initial), nan_for_null(student))
    else:
        return None
    text = "TRAINING text" if record.fidelity.get("heldout") is False else "held-out text"
    return verdict(changed.change, changed.change_se), change_line(changed, text)


def fidelity(record: RunRecord) -> dict[str, Any] | None:
    """Return the figures of the whole model, or None if there are none."""
    models = {name: values for name in MODELS if (values := record.fidelity.get(name))}
    if not models:
        return None
    tables = [(*_table("model", models, MODELS), "Fidelity to the teacher")]
    if positions := record.fidelity.get("positions"):
        caption = "Student by position in the text"
        tables.append((*_table("position", positions, {}), caption))
    if costs := record.fidelity.get("attribution"):
        caption = "Cost of quantisation and of conversion"
        tables.append((*_table("from, to", costs, COMPARISON_NAMES), caption))
    if divergence := record.fidelity.get("divergence"):
        caption = "Greedy continuations: tokens before they diverge"
        tables.append((*_table("models", {"student and teacher": divergence}, {}), caption))
    return {
        "headline": _headline(*(models.get(name, {}) for name in ("floor", "initial", "student"))),
        "tables": tables,
        "training_text": record.fidelity.get("heldout") is False,
    }


def _headline(
    floor: Mapping[str, Any], initial: Mapping[str, Any], student: Mapping[str, Any]
) -> str:
    """Return the share of its floor's KL that the student closes, and that it closed before
    training; "" if the floor has none.
    """
    start, kl = as_number(floor, "kl"), as_number(student, "kl")
    if math.isnan(kl) or not 1e-6 < start < math.inf:
        return ""
    if not math.isfinite(kl):
        return "The student's KL to its teacher is not finite."
    words = "is worse than its floor (without context)"  # a share below zero says no more
    if kl <= start:
        share = _GONE.write(1 - kl / start)
        words = f"closes {share} of the KL between its floor (without context) and its teacher"
        if math.isfinite(before := as_number(initial, "kl")):
            words += f" ({_GONE.write(1 - before / start)} before training)"
    at_floor = FIGURES["kl"].write(start)
    return f"The student {words}: {figure(student, 'kl')} nats, against {at_floor} at the floor."


def _table(head: str, models: Models, names: Mapping[str, str]) -> Table:
    """Return a table of all figures that any model has, with their standard errors."""
    found = dict.fromkeys(key for values in models.values() for key in values)
    keys = {key: None for key in FIRST if key in found} | found
    shown = [
        key
        for key in keys
        if re.fullmatch(r"\w{1,40}", key) and key.removesuffix("_se") not in keys.keys() - {key}
    ]
    heads = [FIGURES[key].short if key in FIGURES else key.replace("_", " ") for key in shown]
    rows = [
        [names.get(name, name), *(figure(values, key) for key in shown)]
        for name, values in models.items()
    ]
    return [head, *(f"*{name}" for name in heads)], rows


def layers(record: RunRecord) -> dict[str, Any] | None:
    """Return the layers' NMSE on held-out text, or None if it was not measured."""
    measured: Models = record.fidelity.get("layers", {})
    keys = {
        f"{kind}_{model}": MODELS[model] + fed
        for kind, fed in (("nmse", ""), ("free_running", ", free-running"))
        for model in MODELS
        if any(f"{kind}_{model}" in values for values in measured.values())
    }
    if not keys:
        return None
    columns = {key: [as_number(values, key) for values in measured.values()] for key in keys}
    students = dict(zip(measured, columns.get("nmse_student", ()), strict=False))
    finite = {name: value for name, value in students.items() if math.isfinite(value)}
    hardest = max(finite, key=lambda name: finite[name], default=None)
    order = {"nmse_student": "student", "nmse_initial": "before", "nmse_floor": "floor"}
    drawn: list[charts.Series] = [
        (name, list(map(int, measured)), columns[key])
        for key, name in order.items()
        if key in columns
    ]
    cells = zip(*(map(number, column) for column in columns.values()), strict=True)
    rows = [[name, *row] for name, row in zip(measured, cells, strict=True)]
    return {
        "picture": charts.lines("NMSE by layer", "NMSE", drawn, x="layer")
        if len(measured) > 1
        else None,
        "hardest": None if hardest is None else (hardest, number(finite[hardest])),
        "bad": sum(map(math.isinf, students.values())),
        "table": (["*layer", *(f"*{head}" for head in keys.values())], rows),
    }


MODULATION = {
    "at_bounds": "*at a bound",
    "multiplier_change": "*mean |m−1|",
    "code_norm": "*code norm",
    "active": "*active numbers",
    "shift_norm": "*shift norm",
}
"""What a converted layer does to its tokens, by key of `metrics.jsonl`, in order of weight."""

SATURATED, SATURATING = 0.1, 0.01
"""Shares of a layer's multipliers at a bound that spoil training, and that may come to it."""


def modulation(record: RunRecord) -> dict[str, Any] | None:
    """Return the modulation of each layer at the first and the last logged step, and whether
    multipliers saturate; None if no step logs it.
    """
    rows, shares = [], dict[int, float]()
    keys = [key for key in MODULATION if record.layers(key)]
    for index in record.layers(*keys):
        cells = [str(index)]
        for key in keys:
            ends = record.first_and_last(f"layers.{index}.{key}")
            if ends is not None and key == "at_bounds":
                shares[index] = ends[1]
            cells.append(_arrow(ends, percent=key == "at_bounds"))
        rows.append(cells)
    worst = max(shares, key=lambda index: shares[index], default=None)
    kind, words = "", ""
    if worst is not None:
        kind, words = _saturation(worst, shares[worst])
    table = ["*layer", *(MODULATION[key] for key in keys)], rows
    return {"table": table, "kind": kind, "words": words} if rows else None


def _arrow(ends: tuple[float, float] | None, percent: bool) -> str:
    if ends is None:
        return "–"
    scale, unit = (100, "%") if percent else (1, "")
    return " → ".join(f"{number(scale * value, 2)}{unit}" for value in ends)


def _saturation(layer: int, share: float) -> tuple[str, str]:
    """Return a CSS class and whether saturation is a problem, by the layer with most of it."""
    if share == 0:
        return "", "No multiplier is at a bound at the last logged step: none is saturated."
    many = f"{number(100 * share, 2)}% of the multipliers of layer {layer}"
    if share < SATURATING:
        return "", f"Saturation is no problem: at most {many} are at a bound."
    words = f"{many} are at a bound, where they have almost no gradient"
    if share < SATURATED:
        return "", f"{words}. It becomes a problem if this share grows."
    return "alarm", f"{words}: lower --learning_rate or raise --additive_scale."
