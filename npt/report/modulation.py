"""The adapters' effect on the tokens: how the multipliers are distributed, the share at their
bounds, and the size of the additive terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import Markup

from npt.evaluation.formatting import percent
from npt.report import charts
from npt.report.run import RunRecord
from npt.report.words import as_number, number

WORTH_SAYING = 0.05
"""Share of multipliers at their bounds that is worth saying: they have next to no gradient left."""

_TARGETS = ("stream", "gate", "up", "down")
_ALARM = Markup('<span class="alarm">{}</span>')
_NOT_FINITE = _ALARM.format("not finite")

Cells = Mapping[tuple[str, str], Mapping[str, Any]]
"""What was measured, by layer and target."""


def modulation(record: RunRecord) -> dict[str, Any] | None:
    """Return the part on `modulation.json`; None if it holds no layer."""
    measured = record.modulation
    layers: Mapping[str, Any] = measured.get("layers", {})
    if not layers:
        return None
    targets = [t for t in _TARGETS if any(t in layer["targets"] for layer in layers.values())]
    cells = {
        (name, target): cell
        for name, layer in layers.items()
        for target, cell in layer["targets"].items()
        if target in targets
    }
    heads = ["*layer", "*stream RMS"]
    for target in targets:
        if target != "stream":
            heads += [f"*{target}: mean m", "*deviation", "*at bounds", "*s / product"]
        heads += {"stream": ["*stream: s / stream"], "down": ["*s / stream"]}.get(target, [])
    rows = []
    for name, layer in layers.items():
        stream = as_number(layer, "stream_rms")
        row = [name, _NOT_FINITE if math.isinf(stream) else number(stream, 3)]
        for target in targets:
            cell = layer["targets"].get(target, {})
            row += _cells(cell) if target != "stream" else []
            row += [_size(cell, stream)] * (target in ("stream", "down"))
        rows.append(row)
    bound = float(measured.get("mult_bound", 0.5))
    return {
        "pictures": _pictures(cells, targets, bound),
        "table": (heads, rows),
        "range": f"({number(1 - bound)}, {number(1 + bound)})",
        "tokens": measured.get("tokens", 0),
        "kind": "held-out" if measured.get("heldout") is not False else "training",
        "step": measured.get("step"),
        **_summary(cells),
    }


def _pictures(cells: Cells, targets: list[str], bound: float) -> dict[str, charts.Picture]:
    """Return by target the distribution of each layer's multipliers over their range."""
    pictures = {}
    for target in targets:
        counts = {
            name: cell["counts"]
            for (name, of), cell in cells.items()
            if of == target and cell.get("counts")
        }
        if any(map(any, counts.values())):
            shares = np.array([np.divide(c, max(1, sum(c))) for c in counts.values()])
            label = f"{target}: how the multipliers of {len(counts)} layers lie around 1"
            extent = (1 - bound, 1 + bound)
            pictures[target] = charts.heat(
                np.where(shares > 0, shares, math.nan), list(counts), extent, label, "multiplier m"
            )
    return pictures


def _cells(cell: Mapping[str, Any]) -> list[str]:
    """Return mean and deviation of the multipliers, the share at their bounds, and the size of the
    additive term. A form without multipliers has null for all of theirs.
    """
    bad = cell.get("bad") or 0.0
    if bad >= 1:
        return [_ALARM.format("none finite"), *[_NOT_FINITE] * 3]
    saturated = cell.get("saturated")
    share: str = "–" if saturated is None else percent(saturated, 2)
    if saturated is not None and saturated >= WORTH_SAYING:
        share = _ALARM.format(share)
    if bad:
        share = Markup("{} {}").format(share, _ALARM.format(f"and {percent(bad)} not finite"))
    size = _size(cell, as_number(cell, "product_rms"))
    return [number(cell.get("mean"), 3), number(cell.get("std"), 3), share, size]


def _quotient(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _size(cell: Mapping[str, Any], whole: float) -> str:
    """Return the size of an additive term over another. A file has null for a term that a form
    lacks and for one that is not finite; the divisor always exists.
    """
    if math.isinf(whole):
        return _NOT_FINITE
    return number(_quotient(cell.get("add_rms"), whole), 3)


def _summary(cells: Cells) -> dict[str, Any]:
    """Return the extremes, each with its layer and target."""

    def largest(values: Mapping[tuple[str, str], float | None]) -> tuple[float, str] | None:
        numbers = {place: value for place, value in values.items() if value is not None}
        place = max(numbers, key=lambda place: numbers[place], default=None)
        return None if place is None else (numbers[place], f"layer {place[0]}, {place[1]}")

    bad = {place: cell["bad"] for place, cell in cells.items() if cell.get("bad")}
    finite = {place: cell for place, cell in cells.items() if bad.get(place, 0.0) < 1}
    saturated = largest({place: cell.get("saturated") for place, cell in finite.items()})
    return {
        "bad": (len(bad), largest(bad)),
        "places": len(cells),
        "saturated": saturated,
        "additive_only": len(finite) == len(cells) and saturated is None,
        "ratio": largest(
            {p: _quotient(c.get("add_rms"), c.get("product_rms")) for p, c in cells.items()}
        ),
        "worth_saying": WORTH_SAYING,
    }
