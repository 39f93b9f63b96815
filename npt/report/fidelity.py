"""The student between its floor and its teacher."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from npt.evaluation.formatting import FIGURES, percent
from npt.report.charts import Stop, track
from npt.report.lines import number as as_number
from npt.report.markup import details, figure, lacking, table, text
from npt.report.run import RunRecord

MODELS = {
    "floor": "floor (attention dropped)",
    "initial": "student before training",
    "student": "student",
    "teacher": "teacher (the base)",
}

_DRAWN = ("kl", "reverse_kl", "top1", "top5", "acceptance", "perplexity_ratio")
"""What there is a way from floor to teacher of."""

_COMPARISONS = {
    "unquantized_to_4bit": "unquantised to 4-bit",
    "4bit_to_npt": "4-bit to NPT",
    "unquantized_to_npt": "unquantised to NPT",
}


def fidelity_section(record: RunRecord) -> str:
    """The picture, what it says in a sentence, and the table."""
    models = {
        name: values
        for name in MODELS
        if isinstance(values := record.fidelity.get(name), dict) and values
    }
    if not models:
        return lacking(
            record.missing, "fidelity.json", "it holds no figures of teacher, floor or student"
        )
    said = []
    if record.fidelity_of:
        said.append(
            '<p class="missing">There is no <code>fidelity.json</code> yet:'
            f" {text(record.fidelity_of)}.</p>"
        )
    elif "fidelity.json" in record.stale:
        said.append(
            '<p class="missing"><code>fidelity.json</code>:'
            f" {text(record.stale['fidelity.json'])}.</p>"
        )
    if record.fidelity.get("heldout") is False:
        said.append(
            '<p class="missing">There was too little text to hold any out: these figures are of'
            " TRAINING text.</p>"
        )
    rows, headline = [], ""
    for key in _DRAWN:
        drawn = _drawn(models, key)
        if drawn:
            picture, way = drawn
            rows.append(
                f'<div class="row"><dt>{text(FIGURES[key].name)}</dt><dd>{picture}</dd><dd'
                f' class="told">{_figures(models, key)}</dd></div>'
            )
            headline = headline or way
    key = (
        '<p class="key"><i class="floor"></i> floor <i class="initial"></i> before training <i'
        ' class="student"></i> student, with its standard error <i class="teacher"></i> teacher.'
        " Every scale is linear, from the floor to the teacher.</p>"
    )
    pictures = (
        f'{key}<dl class="tracks">{"".join(rows)}</dl>'
        if rows
        else '<p class="missing">There is nothing to draw between floor and teacher.</p>'
    )
    tokens = next(
        (count for values in models.values() if (count := as_number(values.get("tokens")))), None
    )
    note = (
        f'<p class="soft">On {tokens:,.0f} tokens; ± is one standard error.</p>' if tokens else ""
    )
    named = {label: models[name] for name, label in MODELS.items() if name in models}
    listed = _table(named, "Fidelity to the teacher")
    tables = [
        details("All of these figures as a table", listed) if rows else listed,
        *_asked_for(record.fidelity),
    ]
    return "\n".join(
        [*said, f'<p class="headline">{headline}</p>' if headline else "", pictures, note, *tables]
    )


def _asked_for(fidelity: Mapping[str, Any]) -> Iterator[str]:
    """What only some evaluations measure: where the student's distance comes from, and where its
    greedy texts part.
    """
    attribution = fidelity.get("attribution")
    parts = (
        {name: values for name, values in attribution.items() if isinstance(values, dict)}
        if isinstance(attribution, dict)
        else {}
    )
    if parts:
        yield _table(
            {
                _COMPARISONS.get(name, str(name)[:60]): values
                for name, values in list(parts.items())[:10]
            },
            "What costs how much",
        )
    divergence = fidelity.get("divergence")
    if isinstance(divergence, dict) and divergence:
        yield _table(
            {"student and teacher": divergence},
            "Greedy texts behind the same prompts, until they part",
        )


def share(models: Mapping[str, Mapping[str, Any]], key: str) -> float | None:
    """How much of the way from floor to teacher the student has gone, 1 being all of it; None where
    there is no such way.
    """
    floor, student = (as_number(models.get(name, {}).get(key)) for name in ("floor", "student"))
    teacher = _teacher(models, key)
    if (
        floor is None
        or student is None
        or not _is_way(key, floor, teacher)
        or not math.isfinite(student)
    ):
        return None
    return (student - floor) / (teacher - floor)


def _teacher(models: Mapping[str, Mapping[str, Any]], key: str) -> float:
    found, ideal = as_number(models.get("teacher", {}).get(key)), FIGURES[key].ideal
    assert ideal is not None
    return ideal if found is None or not math.isfinite(found) else found


def _is_way(key: str, floor: float, teacher: float) -> bool:
    """Whether the floor is worse than the teacher, by more than rounding."""
    if not math.isfinite(floor):
        return False
    worse = floor < teacher if FIGURES[key].percent else floor > teacher
    return worse and abs(floor - teacher) > 1e-6


def _drawn(models: Mapping[str, Mapping[str, Any]], key: str) -> tuple[str, str] | None:
    shown, floor = FIGURES[key], as_number(models.get("floor", {}).get(key))
    teacher = _teacher(models, key)
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
        stops.append(
            Stop(
                kind,
                place,
                place - room,
                place + room,
                text(f"{MODELS[kind]}: {_written(key, value, error)}"),
            )
        )
    gone = share(models, key)
    student, error = (as_number(models.get("student", {}).get(part)) for part in (key, f"{key}_se"))
    said, way = "not measured", ""
    if gone is not None:
        said = f"{_share(gone)} of the way from floor to teacher"
        way = (
            f"The student has gone <strong>{text(_share(gone))}</strong> of the way from its floor"
            f" to its teacher in {text(shown.name)}: {_written(key, student, error)}, from"
            f" {shown.write(floor)} at the floor to {shown.write(teacher)}."
        )
    elif "student" in models and models["student"].get(key, 0) is None:
        said = "not finite"
        way = f"The student's {text(shown.name)} is not finite."
    return track(stops, text(f"{shown.name}: the student is {said}")), way


def _share(part: float) -> str:
    return percent(part) if 0 <= part <= 1 else f"{100 * part:.1f}%".replace("-", "−")


def _written(key: str, value: float | None, error: float | None) -> str:
    assert value is not None
    return FIGURES[key].write(value, math.nan if error is None else error)


def _figures(models: Mapping[str, Mapping[str, Any]], key: str) -> str:
    names = {"student": "student", "initial": "start", "floor": "floor"}
    return " · ".join(
        f"{name} {figure(models[kind], key)}" for kind, name in names.items() if kind in models
    )


def _table(named: Mapping[str, Mapping[str, Any]], caption: str) -> str:
    """Every figure that any of them has, by name; one beside `<name>_se` bears that error."""
    keys = [
        key
        for values in named.values()
        for key in values
        if isinstance(key, str) and re.fullmatch(r"\w{1,40}", key)
    ]
    keys = [
        key
        for key in dict.fromkeys(keys)
        if not key.endswith("_se") or key.removesuffix("_se") not in keys
    ][:40]
    rows = [
        (text(name, 60), *(figure(values, key) for key in keys)) for name, values in named.items()
    ]
    return table(
        (
            "of",
            *(
                f"*{text(FIGURES[key].short if key in FIGURES else key.replace('_', ' '))}"
                for key in keys
            ),
        ),
        rows,
        caption,
    )
