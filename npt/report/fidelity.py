"""The student between its floor and its teacher."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from npt.report.charts import Stop, track
from npt.report.lines import number as as_number
from npt.report.markup import lacking, number, plus_minus, table, text
from npt.report.run import RunRecord

MODELS = {"floor": "floor (attention dropped)", "initial": "student before training", "student": "student", "teacher": "teacher (the base)"}

FIGURES: dict[str, tuple[str, float]] = {
    "kl": ("KL(teacher, model), nats", 0.0),
    "kl_reverse": ("KL(model, teacher), nats", 0.0),
    "reverse_kl": ("KL(model, teacher), nats", 0.0),
    "top1": ("top-1 agreement", 1.0),
    "top5": ("top-5 agreement", 1.0),
    "acceptance": ("speculative acceptance", 1.0),
    "perplexity_ratio": ("perplexity over the teacher's", 1.0),
}
"""What is drawn: its name, and what the teacher has against itself."""

_COMPARISONS = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}


def fidelity_section(record: RunRecord) -> str:
    """The picture, what it says in a sentence, and the table."""
    models = {name: values for name in MODELS if isinstance(values := record.fidelity.get(name), dict) and values}
    if not models:
        return lacking(record.missing, "fidelity.json", "it holds no figures of teacher, floor or student")
    said = []
    if record.fidelity_of:
        said.append(f'<p class="missing">There is no <code>fidelity.json</code> yet: {text(record.fidelity_of)}.</p>')
    elif "fidelity.json" in record.stale:
        said.append(f'<p class="missing"><code>fidelity.json</code>: {text(record.stale["fidelity.json"])}.</p>')
    if record.fidelity.get("heldout") is False:
        said.append('<p class="missing">There was too little text to hold any out: these figures are of TRAINING text.</p>')
    rows, headline = [], ""
    for key, (name, ideal) in FIGURES.items():
        drawn = _drawn(models, key, name, ideal)
        if drawn:
            picture, way = drawn
            rows.append(f'<div class="row"><dt>{name}</dt><dd>{picture}</dd><dd class="told">{_figures(models, key)}</dd></div>')
            headline = headline or way
    key = (
        '<p class="key"><i class="floor"></i> floor <i class="initial"></i> before training <i class="student"></i> student, '
        'with its standard error <i class="teacher"></i> teacher</p>'
    )
    pictures = (
        f'{key}<dl class="tracks">{"".join(rows)}</dl>'
        if rows
        else '<p class="missing">There is nothing to draw between floor and teacher.</p>'
    )
    tokens = next((count for values in models.values() if (count := as_number(values.get("tokens")))), None)
    note = f'<p class="soft">On {tokens:,.0f} tokens; ± is one standard error.</p>' if tokens else ""
    named = {label: models[name] for name, label in MODELS.items() if name in models}
    tables = [_table(named, "Fidelity to the teacher"), *_asked_for(record.fidelity)]
    return "\n".join([*said, f'<p class="headline">{headline}</p>' if headline else "", pictures, note, *tables])


def _asked_for(fidelity: Mapping[str, Any]) -> Iterator[str]:
    """What only some evaluations measure: where the student's distance comes from, and where its greedy texts part."""
    attribution = fidelity.get("attribution")
    parts = {name: values for name, values in attribution.items() if isinstance(values, dict)} if isinstance(attribution, dict) else {}
    if parts:
        yield _table({_COMPARISONS.get(name, str(name)[:60]): values for name, values in list(parts.items())[:10]}, "What costs how much")
    divergence = fidelity.get("divergence")
    if isinstance(divergence, dict) and divergence:
        yield _table({"student and teacher": divergence}, "Greedy texts behind the same prompts, until they part")


def share(models: Mapping[str, Mapping[str, Any]], key: str, ideal: float) -> float | None:
    """How much of the way from floor to teacher the student has gone, 1 being all of it; None where there is no such way."""
    floor, student = (as_number(models.get(name, {}).get(key)) for name in ("floor", "student"))
    teacher = _teacher(models, key, ideal)
    if floor is None or student is None or not _is_way(key, floor, teacher) or not math.isfinite(student):
        return None
    return (student - floor) / (teacher - floor)


def _teacher(models: Mapping[str, Mapping[str, Any]], key: str, ideal: float) -> float:
    found = as_number(models.get("teacher", {}).get(key))
    return ideal if found is None or not math.isfinite(found) else found


def _is_way(key: str, floor: float, teacher: float) -> bool:
    """Whether the floor is worse than the teacher, by more than rounding."""
    if not math.isfinite(floor):
        return False
    worse = floor < teacher if key in ("top1", "top5", "acceptance") else floor > teacher
    return worse and abs(floor - teacher) > 1e-6


def _drawn(models: Mapping[str, Mapping[str, Any]], key: str, name: str, ideal: float) -> tuple[str, str] | None:
    floor = as_number(models.get("floor", {}).get(key))
    teacher = _teacher(models, key, ideal)
    if floor is None or not _is_way(key, floor, teacher):
        return None
    stops = []
    for kind in ("floor", "teacher", "initial", "student"):
        value = teacher if kind == "teacher" else as_number(models.get(kind, {}).get(key))
        if value is None or not math.isfinite(value):
            continue
        error = as_number(models.get(kind, {}).get(f"{key}_se"))
        place = (value - floor) / (teacher - floor)
        room = 0.0 if error is None or not math.isfinite(error) else abs(error / (teacher - floor))
        stops.append(Stop(kind, place, place - room, place + room, text(f"{MODELS[kind]}: {plus_minus(value, error)}")))
    gone = share(models, key, ideal)
    student, error = (as_number(models.get("student", {}).get(part)) for part in (key, f"{key}_se"))
    said, way = "not measured", ""
    if gone is not None:
        said = f"{100 * gone:.1f}% of the way from floor to teacher"
        way = (
            f"The student has gone <strong>{_percent(gone)}</strong> of the way from its floor to its teacher in {text(name)}: "
            f"{plus_minus(student, error)}, from {number(floor)} at the floor to {number(teacher)}."
        )
    elif "student" in models and models["student"].get(key, 0) is None:
        said = "not finite"
        way = f"The student's {text(name)} is not finite."
    return track(stops, text(f"{name}: the student is {said}")), way


def _percent(part: float) -> str:
    """A share; one short of all of it never reads as all."""
    shown = f"{100 * part:.1f}%"
    return f"{100 * part:.3f}%" if shown == "100.0%" and part < 1 else shown


def _figures(models: Mapping[str, Mapping[str, Any]], key: str) -> str:
    names = {"student": "student", "initial": "start", "floor": "floor"}
    return " · ".join(f"{name} {_figure(models[kind], key)}" for kind, name in names.items() if kind in models)


def _figure(values: Mapping[str, Any], key: str) -> str:
    """A model's figure with its standard error."""
    if key in values and values[key] is None:
        return number(math.inf)
    return plus_minus(as_number(values.get(key)), as_number(values.get(f"{key}_se")))


def _table(named: Mapping[str, Mapping[str, Any]], caption: str) -> str:
    """Every figure that any of them has, by name; one beside `<name>_se` bears that error."""
    keys = [key for values in named.values() for key in values if isinstance(key, str) and re.fullmatch(r"\w{1,40}", key)]
    keys = [key for key in dict.fromkeys(keys) if not key.endswith("_se") or key.removesuffix("_se") not in keys][:40]
    rows = [(text(name, 60), *(_figure(values, key) for key in keys)) for name, values in named.items()]
    return table(("of", *(f"*{text(key.replace('_', ' '))}" for key in keys)), rows, caption)
