"""The student between its floor and its teacher: figures of the whole model, and NMSE by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from npt.evaluation.formatting import FIGURES, percent
from npt.report.charts import INK, LINE, SECOND, SOFT, Marks, rows_chart
from npt.report.logs import LAYERS, as_mapping, as_number
from npt.report.run import RunRecord
from npt.report.words import clean, figure, number

MODELS = {
    "floor": "floor (attention dropped)",
    "initial": "student before training",
    "student": "student",
    "teacher": "teacher (the base)",
}

_DRAWN = ("kl", "reverse_kl", "top1", "top5", "acceptance", "perplexity_ratio")
"""Figures that have a way from floor to teacher."""

_LOOKS = {
    "floor": ("floor", ("|", SOFT, False)),
    "initial": ("before training", ("D", SECOND, True)),
    "student": ("student", ("o", LINE, False)),
    "teacher": ("teacher", ("|", INK, False)),
}

_COMPARISONS = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}

Models = Mapping[str, Mapping[str, Any]]
Way = Mapping[str, tuple[float, float]]
"""By model its share of the way from floor (0) to teacher (1) in a figure, and the error."""


def fidelity(record: RunRecord) -> dict[str, Any] | None:
    """Return the part on the whole model; None if there are no figures."""
    found = {name: v for name in MODELS if (v := as_mapping(record.fidelity.get(name)))}
    if not found:
        return None
    ways = {key: way for key in _DRAWN if (way := _way(found, key)) is not None}
    parts = list(as_mapping(record.fidelity.get("attribution")).items())[:10]
    costs = {
        _COMPARISONS.get(name, str(name)[:60]): values
        for name, values in parts
        if isinstance(values, dict)
    }
    divergence = as_mapping(record.fidelity.get("divergence"))
    extra = [(*_table(costs), "What costs how much")] if costs else []
    if divergence:
        named = {"student and teacher": divergence}
        extra.append((*_table(named), "Greedy texts after the same prompts, until they part"))
    return {
        "picture": _picture(ways) if ways else "",
        "headline": _headline(found, ways),
        "table": _table({MODELS[name]: values for name, values in found.items()}),
        "extra": extra,
        "training_text": record.fidelity.get("heldout") is False,
        "tokens": next((n for v in found.values() if (n := as_number(v.get("tokens")))), None),
    }


def _way(models: Models, key: str) -> Way | None:
    """Return the way of a figure; None if the floor is not worse than the teacher, by more than
    rounding.
    """
    values = {kind: as_number(models.get(kind, {}).get(key)) for kind in MODELS}
    floor, teacher = values["floor"], _teacher(models, key)
    if floor is None or not math.isfinite(floor) or abs(floor - teacher) <= 1e-6:
        return None
    if (floor < teacher) != FIGURES[key].percent:
        return None
    places = {}
    for kind, value in {**values, "teacher": teacher}.items():
        error = as_number(models.get(kind, {}).get(f"{key}_se"))
        if value is not None and math.isfinite(value):
            room = abs(error / (teacher - floor)) if error and math.isfinite(error) else 0.0
            places[kind] = ((value - floor) / (teacher - floor), room)
    return places


def _teacher(models: Models, key: str) -> float:
    found, ideal = as_number(models.get("teacher", {}).get(key)), FIGURES[key].ideal
    assert ideal is not None
    return ideal if found is None or not math.isfinite(found) else found


def _picture(ways: Mapping[str, Way]) -> Markup:
    marks = []
    for kind, (name, look) in _LOOKS.items():
        found = [way.get(kind, (None, 0.0)) for way in ways.values()]
        if any(place is not None for place, _ in found):
            at = [None if place is None else 100 * place for place, _ in found]
            marks.append(Marks.around(name, look, at, [100 * error for _, error in found]))
    said = "; ".join(
        f"{FIGURES[key].name}: the student has gone {_share(way['student'][0])}"
        for key, way in ways.items()
        if "student" in way
    )
    label = f"The way from floor to teacher. {said or 'No figure of the student is finite'}."
    names = [FIGURES[key].name for key in ways]
    return rows_chart(names, marks, "the way from floor to teacher, %", label, log=False)


def _headline(models: Models, ways: Mapping[str, Way]) -> str:
    """Return how far the student has got in the first figure that has a way."""
    key, student = next(iter(ways), ""), models.get("student", {})
    if key not in student:
        return ""
    shown, way = FIGURES[key], ways[key]
    if "student" not in way:
        return f"The student's {shown.name} is not finite."
    return Markup(
        "The student has gone <strong>{}</strong> of the way from its floor to its teacher in {}:"
        " {}, from {} at the floor to {}."
    ).format(
        _share(way["student"][0]), shown.name, figure(student, key),
        shown.write(models["floor"][key]), shown.write(_teacher(models, key)),
    )  # fmt: skip


def _share(part: float) -> str:
    return percent(part) if 0 <= part <= 1 else f"{100 * part:.1f}%".replace("-", "−")


def _table(named: Models) -> tuple[list[str], list[list[str]]]:
    """Return every figure that any of them has; one with a `<name>_se` is written with it."""
    known = dict.fromkeys(key for values in named.values() for key in values)
    keys = [key for key in known if isinstance(key, str) and re.fullmatch(r"\w{1,40}", key)]
    keys = [key for key in keys if not (key.endswith("_se") and key[:-3] in keys)][:40]
    heads = [FIGURES[key].short if key in FIGURES else key.replace("_", " ") for key in keys]
    rows = [
        [clean(name, 60), *(figure(values, key) for key in keys)] for name, values in named.items()
    ]
    return ["of", *(f"*{head}" for head in heads)], rows


def layers(record: RunRecord) -> dict[str, Any] | None:
    """Return the part on the layers' NMSE on held-out text; None if nothing was measured."""
    rows = _layer_rows(record.fidelity, "nmse")
    if not rows:
        return None
    free = _layer_rows(record.fidelity, "free_running")
    kinds, own = (
        [kind for kind in MODELS if any(kind in values for values in found.values())]
        for found in (rows, free)
    )
    students = {name: values["student"] for name, values in rows.items() if "student" in values}
    finite = {name: value for name, value in students.items() if math.isfinite(value)}
    hardest = max(finite, key=lambda name: finite[name], default=None)
    heads = [f"*{MODELS[kind]}" for kind in kinds] + [f"*{MODELS[k]}, on its own" for k in own]
    cells = [
        [clean(name, 12), *(number(values.get(kind)) for kind in kinds),
         *(number(free.get(name, {}).get(kind)) for kind in own)]
        for name, values in rows.items()
    ]  # fmt: skip
    return {
        "picture": _layer_picture(record.fidelity["layers"], rows, kinds),
        "hardest": None if hardest is None else (hardest, number(finite[hardest])),
        "bad": len(students) - len(finite),
        "count": len(rows),
        "own": bool(own),
        "table": (["*layer", *heads], cells),
    }


def _layer_picture(
    layers: Mapping[str, Any], rows: Mapping[str, Mapping[str, float]], kinds: list[str]
) -> str:
    marks = []
    for kind in kinds:
        values = [found.get(kind) for found in rows.values()]
        errors = [as_number(layers[name].get(f"nmse_{kind}_se")) or 0.0 for name in rows]
        marks.append(Marks.around(*_LOOKS[kind], values, errors))
    if not any(x and 0 < x < math.inf for each in marks for x in each.values):
        return ""
    label = f"NMSE of {len(rows)} layers: {', '.join(MODELS[kind] for kind in kinds)}."
    return rows_chart(list(rows), marks, "NMSE by layer; line: standard error", label, log=True)


def _layer_rows(fidelity: Mapping[str, Any], what: str) -> dict[str, dict[str, float]]:
    """Return by layer a measure of each model; infinite for not finite."""
    rows = {}
    for name, values in list(as_mapping(fidelity.get("layers")).items())[:LAYERS]:
        measured = as_mapping(values)
        row = {}
        for kind in MODELS:
            if f"{what}_{kind}" in measured:
                value = as_number(measured[f"{what}_{kind}"])
                row[kind] = math.inf if value is None or math.isnan(value) else value
        if row:
            rows[str(name)] = row
    return rows
