"""The student between its floor and its teacher: figures of the whole model, and NMSE by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from npt.evaluation.formatting import FIGURES, percent
from npt.report import charts
from npt.report.run import RunRecord
from npt.report.words import as_number, figure, number

MODELS = {
    "floor": "floor (attention dropped)",
    "initial": "student before training",
    "student": "student",
    "teacher": "teacher (the base)",
}

_DRAWN = ("kl", "reverse_kl", "top1", "top5", "acceptance", "perplexity_ratio")
"""Figures that have a way from floor to teacher."""

_BAR = {"fmt": "|", "markersize": 11, "markeredgewidth": 3}
_LOOKS: dict[str, dict[str, Any]] = {
    "floor": {"color": charts.SOFT, **_BAR},
    "initial": {"color": charts.SECOND, "fmt": "D", "markerfacecolor": charts.PAPER},
    "student": {"color": charts.LINE, "fmt": "o"},
    "teacher": {"color": charts.INK, **_BAR},
}

_COMPARISONS = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}

Models = Mapping[str, Mapping[str, Any]]
Way = Mapping[str, tuple[float, float]]
"""By model its share of the way from floor (0) to teacher (1) in a figure, and the error; NaN for a
model without it.
"""


def fidelity(record: RunRecord) -> dict[str, Any] | None:
    """Return the part on the whole model; None if there are no figures."""
    models = {name: values for name in MODELS if (values := record.fidelity.get(name))}
    if not models:
        return None
    ways = {key: way for key in _DRAWN if (way := _way(models, key))}
    tables = [(*_table(models, MODELS), "Fidelity to the teacher")]
    if costs := record.fidelity.get("attribution"):
        tables.append((*_table(costs, _COMPARISONS), "What costs how much"))
    return {
        "picture": _picture(ways) if ways else None,
        "headline": _headline(models, ways),
        "tables": tables,
        "training_text": record.fidelity.get("heldout") is False,
        "tokens": next((v["tokens"] for v in models.values() if v.get("tokens")), None),
    }


def _way(models: Models, key: str) -> Way | None:
    """Return the way of a figure; None if the floor is not worse than the teacher, by more than
    rounding.
    """
    floor, teacher = as_number(models.get("floor", {}), key), _teacher(models, key)
    if not math.isfinite(floor) or abs(floor - teacher) <= 1e-6:
        return None
    if (floor < teacher) != FIGURES[key].percent:
        return None
    shares = {}
    for name in MODELS:
        values = models.get(name, {})
        value = teacher if name == "teacher" else as_number(values, key)
        error = abs(as_number(values, f"{key}_se") / (teacher - floor))
        shares[name] = ((value - floor) / (teacher - floor), error)
    return shares


def _teacher(models: Models, key: str) -> float:
    value, ideal = as_number(models.get("teacher", {}), key), FIGURES[key].ideal
    assert ideal is not None
    return value if math.isfinite(value) else ideal


def _picture(ways: Mapping[str, Way]) -> charts.Picture:
    marks = []
    for name, look in _LOOKS.items():
        values, errors = zip(*(way[name] for way in ways.values()), strict=True)
        if any(map(math.isfinite, values)):
            shown = name if name != "initial" else "before training"
            per_cent = [100 * value for value in values], [100 * error for error in errors]
            marks.append(charts.Marks(shown, look, *per_cent))
    shares = {FIGURES[key].name: way["student"][0] for key, way in ways.items()}
    gone = "; ".join(
        f"{name}: the student has gone {_share(share)}"
        for name, share in shares.items()
        if math.isfinite(share)
    )
    label = f"The way from floor to teacher. {gone or 'No figure of the student is finite'}."
    names = [FIGURES[key].short for key in ways]
    return charts.rows(names, marks, "the way from floor to teacher, %", label)


def _headline(models: Models, ways: Mapping[str, Way]) -> str:
    """Return how far the student has got in the first figure that has a way."""
    key, student = next(iter(ways), ""), models.get("student", {})
    if key not in student:
        return ""
    written, share = FIGURES[key], ways[key]["student"][0]
    if not math.isfinite(share):
        return f"The student's {written.name} is not finite."
    return Markup(
        "The student has gone <strong>{}</strong> of the way from its floor to its teacher in {}:"
        " {}, from {} at the floor to {}."
    ).format(
        _share(share), written.name, figure(student, key),
        written.write(models["floor"][key]), written.write(_teacher(models, key)),
    )  # fmt: skip


def _share(part: float) -> str:
    return percent(part) if 0 <= part <= 1 else f"{100 * part:.1f}%".replace("-", "−")


def _table(models: Models, names: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Return every figure that any of them has; one with a `<name>_se` is written with it."""
    keys = dict.fromkeys(key for values in models.values() for key in values)
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
    return ["of", *(f"*{head}" for head in heads)], rows


def layers(record: RunRecord) -> dict[str, Any] | None:
    """Return the part on the layers' NMSE on held-out text; None if nothing was measured."""
    measured: Models = record.fidelity.get("layers", {})
    keys = {
        f"{kind}_{model}": MODELS[model] + fed
        for kind, fed in (("nmse", ""), ("free_running", ", on its own"))
        for model in MODELS
        if any(f"{kind}_{model}" in values for values in measured.values())
    }
    if not keys:
        return None
    students = {name: as_number(values, "nmse_student") for name, values in measured.items()}
    finite = {name: value for name, value in students.items() if math.isfinite(value)}
    hardest = max(finite, key=lambda name: finite[name], default=None)
    rows = [
        [name, *(number(as_number(values, key)) for key in keys)]
        for name, values in measured.items()
    ]
    return {
        "picture": _layer_picture(measured),
        "hardest": None if hardest is None else (hardest, number(finite[hardest])),
        "bad": sum(map(math.isinf, students.values())),
        "table": (["*layer", *(f"*{head}" for head in keys.values())], rows),
    }


def _layer_picture(measured: Models) -> charts.Picture | None:
    marks = [
        charts.Marks(
            "before training" if name == "initial" else name, look,
            [as_number(values, f"nmse_{name}") for values in measured.values()],
            [as_number(values, f"nmse_{name}_se") for values in measured.values()],
        )
        for name, look in _LOOKS.items()
    ]  # fmt: skip
    marks = [each for each in marks if any(0 < value < math.inf for value in each.values)]
    label = f"NMSE of {len(measured)} layers: {', '.join(each.name for each in marks)}."
    what = "NMSE by layer; line: standard error"
    return charts.rows(list(measured), marks, what, label, log=True) if marks else None
