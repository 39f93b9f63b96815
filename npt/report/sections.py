"""The measurements on a run's page: fidelity, training, refusals and layers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
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

Table = tuple[list[str], list[list[str]], str]
"""Headings, a star before each one of numbers; rows; and the caption."""

Models = Mapping[str, Mapping[str, Any]]


def training(record: RunRecord) -> dict[str, Any]:
    """Return charts over the steps, with their headings, and what has a single value as a table,
    since one dot is no chart.
    """
    pictures: list[tuple[str, charts.Chart]] = []
    single: list[list[str]] = []

    def draw(heading: str, unit: str, series: Sequence[charts.Series], **more: Any) -> None:
        _, places, values = series[0]
        if len(places) > 1:
            pictures.append((heading, charts.lines(heading, unit, series, **more)))
        else:
            single.append([heading, f"{places[0]:,.0f}", number(values[0])])

    steps = record.steps
    columns = record.columns
    if "loss" in columns:
        series = [("loss", steps, columns["loss"])]
        if "loss_nmse" in columns:
            series.append(("NMSE part", steps, columns["loss_nmse"]))
        # a refusal of unknown step has no place on the axis
        refused = [event["step"] for event in record.of("refusal") if event["step"]]
        draw("Loss per token", "loss", series, marks=refused)
    for key, heading, unit, log in _CHARTS:
        if key in columns:
            draw(heading, unit, [(unit, steps, columns[key])], log=log)
    measured = {event["step"]: event["student"] for event in record.of("evaluation")}
    if measured:
        kls = [as_number(student, "kl") for student in measured.values()]
        draw("Held-out KL", "nats per token", [("KL", list(measured), kls)])
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
        index = event.get("micro_batch")
        where = "whole window" if index is None else f"micro-batch {index}"
        if process := event.get("rank"):
            where += f" on process {process}"
        samples = event.get("sample_ids") or []
        ids = ", ".join(map(str, samples[:8]))
        detail = str(event.get("detail", "–"))[:200]
        rows.append([str(event["step"]), str(event.get("kind", "–")), where, detail, ids])
    return rows


def change(record: RunRecord) -> tuple[Verdict, str] | None:
    """Return what training changed, as a verdict and a sentence; None if that is not known."""
    initial = record.fidelity.get("initial")
    student = record.fidelity.get("student")
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
    tables = [_table("Fidelity to the teacher", "model", models, MODELS)]
    if positions := record.fidelity.get("positions"):
        tables.append(_table("Student by position in the text", "position", positions, {}))
    if costs := record.fidelity.get("attribution"):
        caption = "Cost of quantisation and of conversion"
        tables.append(_table(caption, "from, to", costs, COMPARISON_NAMES))
    if divergence := record.fidelity.get("divergence"):
        caption = "Greedy continuations: tokens before they diverge"
        tables.append(_table(caption, "models", {"student and teacher": divergence}, {}))
    return {
        "headline": _headline(models),
        "tables": tables,
        "training_text": record.fidelity.get("heldout") is False,
    }


def _headline(models: Models) -> str:
    """Return the share of its floor's KL that the student closes, and that it closed before
    training; "" if the floor has none.
    """
    student = models.get("student", {})
    start = as_number(models.get("floor", {}), "kl")
    kl = as_number(student, "kl")
    if math.isnan(kl) or not 1e-6 < start < math.inf:
        return ""
    if not math.isfinite(kl):
        return "The student's KL to its teacher is not finite."
    words = "is worse than its floor (without context)"  # a share below zero says no more
    if kl <= start:
        share = _GONE.write(1 - kl / start)
        words = f"closes {share} of the KL between its floor (without context) and its teacher"
        before = as_number(models.get("initial", {}), "kl")
        if math.isfinite(before):
            words += f" ({_GONE.write(1 - before / start)} before training)"
    at_floor = FIGURES["kl"].write(start)
    return f"The student {words}: {figure(student, 'kl')} nats, against {at_floor} at the floor."


def _table(caption: str, head: str, models: Models, names: Mapping[str, str]) -> Table:
    """Return a table of all figures that any model has, with their standard errors."""
    found = dict.fromkeys(chain.from_iterable(models.values()))
    errors = {f"{key}_se" for key in found}  # shown with their figures
    heads = [head]
    rows = [[names.get(name, name)] for name in models]
    for key in dict.fromkeys((*FIRST, *found)):
        if key not in found or key in errors or not re.fullmatch(r"\w{1,40}", key):
            continue
        name = FIGURES[key].short if key in FIGURES else key.replace("_", " ")
        heads.append(f"*{name}")
        for row, values in zip(rows, models.values(), strict=True):
            row.append(figure(values, key))
    return heads, rows, caption


def layers(record: RunRecord) -> dict[str, Any] | None:
    """Return the layers' NMSE on held-out text, or None if it was not measured."""
    measured: Models = record.fidelity.get("layers", {})
    heads = ["*layer"]
    columns = {}
    # a figure that any layer has is a column
    for kind, fed in (("nmse", ""), ("free_running", ", free-running")):
        for model, name in MODELS.items():
            key = f"{kind}_{model}"
            if any(key in values for values in measured.values()):
                heads.append(f"*{name}{fed}")
                columns[key] = [as_number(values, key) for values in measured.values()]
    if not columns:
        return None
    students = columns.get("nmse_student", [])
    # those that are not finite count as bad, and would hide the hardest of the others
    finite = [value for value in students if math.isfinite(value)]
    hardest = None
    if finite:
        worst = max(finite)
        hardest = (list(measured)[students.index(worst)], number(worst))
    # the student's line comes first: the picture is described by it
    drawn: list[charts.Series] = []
    for model, name in (("student", "student"), ("initial", "before"), ("floor", "floor")):
        if (values := columns.get(f"nmse_{model}")) is not None:
            drawn.append((name, list(map(int, measured)), values))
    picture = None
    if len(measured) > 1:
        picture = charts.lines("NMSE by layer", "NMSE", drawn, x="layer")
    cells = [map(number, column) for column in columns.values()]
    rows = [list(row) for row in zip(measured, *cells, strict=True)]
    return {
        "picture": picture,
        "hardest": hardest,
        "bad": sum(map(math.isinf, students)),
        "table": (heads, rows),
    }


MODULATION = {
    "at_bounds": "*at a bound",
    "multiplier_change": "*mean |m−1|",
    "code_norm": "*code norm",
    "active": "*active numbers",
    "shift_norm": "*shift norm",
}
"""What a converted layer does to its tokens, by key of `metrics.jsonl`, in order of weight."""

SATURATED = 0.1
"""A share of a layer's multipliers at a bound that spoils training."""

SATURATING = 0.01
"""A share that may come to it."""


def modulation(record: RunRecord) -> dict[str, Any] | None:
    """Return the modulation of each layer at the first and the last logged step, and whether
    multipliers saturate; None if no step logs it.
    """
    rows = []
    shares = {}
    keys = [key for key in MODULATION if record.layers(key)]
    for index in record.layers(*keys):
        cells = [str(index)]
        for key in keys:
            ends = record.first_and_last(f"layers.{index}.{key}")
            if ends is not None and key == "at_bounds":
                shares[index] = ends[1]
            cells.append(_arrow(ends, percent=key == "at_bounds"))
        rows.append(cells)
    if not rows:
        return None
    kind, words = _saturation(shares)
    heads = ["*layer", *(MODULATION[key] for key in keys)]
    return {"table": (heads, rows), "kind": kind, "words": words}


def _arrow(ends: tuple[float, float] | None, percent: bool) -> str:
    if ends is None:
        return "–"
    first, last = ends
    if percent:
        return f"{number(100 * first, 2)}% → {number(100 * last, 2)}%"
    return f"{number(first, 2)} → {number(last, 2)}"


def _saturation(shares: Mapping[int, float]) -> tuple[str, str]:
    """Return a CSS class and whether saturation is a problem, by the layer with most of it."""
    if not shares:
        return "", ""
    layer = max(shares, key=lambda index: shares[index])
    share = shares[layer]
    if share == 0:
        return "", "No multiplier is at a bound at the last logged step: none is saturated."
    many = f"{number(100 * share, 2)}% of the multipliers of layer {layer}"
    if share < SATURATING:
        return "", f"Saturation is no problem: at most {many} are at a bound."
    words = f"{many} are at a bound, where they have almost no gradient"
    if share < SATURATED:
        return "", f"{words}. It becomes a problem if this share grows."
    return "alarm", f"{words}: lower --learning_rate or raise --additive_scale."
