"""The layers' NMSE on held-out text, against floor and start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from npt.report.charts import Point, Scale, dots
from npt.report.lines import number as as_number
from npt.report.markup import details, lacking, number, table, text
from npt.report.run import RunRecord

LAYERS = 512
"""Layers that are shown."""

_KINDS = {"floor": "floor (attention dropped)", "initial": "before training", "student": "student"}

Row = tuple[str, dict[str, float]]


def layers_section(record: RunRecord) -> str:
    """A line for each layer, and the numbers."""
    rows = rows_of(record.fidelity)
    if not rows:
        return lacking(
            record.missing, "fidelity.json", "the layers' NMSE on held-out text was not measured"
        )
    kinds = [kind for kind in _KINDS if any(kind in values for _, values in rows)]
    listed = _table(record.fidelity, rows, kinds)
    points = [(name, _points(record.fidelity, name, values)) for name, values in rows]
    ends = [
        end
        for _, own in points
        for p in own.values()
        for end in (p.value - p.error, p.value, p.value + p.error)
        if end > 0
    ]
    scale = Scale.of(ends, log=True)
    if scale is None:
        return f'<p class="missing">No layer has an NMSE that can be drawn.</p>\n{listed}'
    said = "NMSE of each layer's output, given the teacher's input, on a logarithmic scale."
    students = [
        (value, name)
        for name, values in rows
        if math.isfinite(value := values.get("student", math.nan))
    ]
    said += (
        f" The hardest is layer {max(students)[1]} with {number(max(students)[0])}."
        if students
        else " There is no student's yet."
    )
    bad = sum(not math.isfinite(values.get("student", 0.0)) for _, values in rows)
    said += f" In {bad} of {len(rows)} layers the student's is not finite." if bad else ""
    key = "".join(f'<i class="{kind}"></i> {_KINDS[kind]} ' for kind in kinds)
    key += (
        "— the line through a mark: one standard error"
        if any(p.error for _, own in points for p in own.values())
        else ""
    )
    picture = dots(points, scale, "NMSE by layer, logarithmic", text(f"{len(rows)} layers. {said}"))
    return f'<p>{text(said)}</p>\n<p class="key">{key}</p>\n<figure>{picture}</figure>\n' + details(
        "As a table", listed
    )


def _points(
    fidelity: Mapping[str, Any], name: str, values: Mapping[str, float]
) -> dict[str, Point]:
    """What of a layer can be drawn; a zero has no place on a logarithmic scale."""
    layer = fidelity["layers"][name]
    errors = {kind: as_number(layer.get(f"nmse_{kind}_se")) for kind in values}
    finite = {kind: value for kind, value in values.items() if math.isfinite(value) and value > 0}
    return {
        kind: Point(value, error if (error := errors[kind]) and math.isfinite(error) else 0.0)
        for kind, value in finite.items()
    }


def _table(fidelity: Mapping[str, Any], rows: list[Row], kinds: list[str]) -> str:
    """Every layer's NMSE, and behind it that of the model's own stream where it was measured."""
    free = dict(rows_of(fidelity, "free_running"))
    own = [kind for kind in _KINDS if any(kind in values for values in free.values())]
    heads = [
        "*layer",
        *(f"*{_KINDS[kind]}" for kind in kinds),
        *(f"*{_KINDS[kind]}, on its own" for kind in own),
    ]
    cells = [
        (
            text(name, 12),
            *(number(values.get(k)) for k in kinds),
            *(number(free.get(name, {}).get(k)) for k in own),
        )
        for name, values in rows
    ]
    return table(
        heads, cells, "NMSE by layer" + ("; on its own: fed by the layers before it" if own else "")
    )


def rows_of(fidelity: Mapping[str, Any], what: str = "nmse") -> list[Row]:
    """Each converted layer's name and NMSE, of floor, initial and student what is there; infinite
    where it was not finite.
    """
    layers = fidelity.get("layers")
    rows = []
    for name, values in list(layers.items())[:LAYERS] if isinstance(layers, dict) else ():
        there = [kind for kind in _KINDS if isinstance(values, dict) and f"{what}_{kind}" in values]
        found = {kind: as_number(values[f"{what}_{kind}"]) for kind in there}
        if found:
            rows.append(
                (
                    str(name),
                    {
                        kind: math.inf if value is None or math.isnan(value) else value
                        for kind, value in found.items()
                    },
                )
            )
    return rows
