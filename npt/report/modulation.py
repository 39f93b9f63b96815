"""The adapters' effect on the tokens: histograms of the multipliers, the share at their bounds, and
the size of the additive terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from npt.evaluation.formatting import percent
from npt.report import charts
from npt.report.lines import count
from npt.report.lines import number as as_number
from npt.report.run import RunRecord, mapping
from npt.report.words import clean, number

LAYERS, BINS = 512, 200

WORTH_SAYING = 0.05
"""Share of multipliers at their bounds from which it is said: they have next to no gradient left.
"""

_TARGETS = ("gate", "up", "down")
_ALARM = Markup('<span class="alarm">{}</span>')


def modulation(record: RunRecord) -> dict[str, Any] | None:
    """Return what the page says of `modulation.json`; None if it holds no layer."""
    measured = record.modulation
    layers = {
        clean(name, 12): layer
        for name, layer in list(mapping(measured.get("layers")).items())[:LAYERS]
        if isinstance(layer, dict)
    }
    if not layers:
        return None
    targets = [t for t in _TARGETS if any(t in mapping(x.get("targets")) for x in layers.values())]
    cells = {
        (name, target): mapping(mapping(layer.get("targets")).get(target))
        for name, layer in layers.items()
        for target in targets
    }
    bound = as_number(measured.get("mult_bound"))
    heads, rows = ["*layer", "*stream RMS"], []
    for target in targets:
        heads += [f"*{target}: mean m", "*deviation", "*at bounds", "*s / product"]
        heads += ["*s / stream"] * (target == "down")
    for name, layer in layers.items():
        row = [name, _size(layer.get("stream_rms", math.nan), {"one": 1.0}, "one")]
        if "stream_rms" in layer and layer["stream_rms"] is None:
            row[1] = _ALARM.format("not finite")
        for target in targets:
            cell = cells[name, target]
            row += _cells(cell)
            row += [_size(cell.get("add_rms"), layer, "stream_rms")] * (target == "down")
        rows.append(row)
    return {
        "pictures": _pictures(cells, targets, 0.5 if bound is None else bound),
        "table": (heads, rows),
        "range": "its range" if bound is None else f"({number(1 - bound)}, {number(1 + bound)})",
        "tokens": count(measured.get("tokens")) or 0,
        "kind": "held-out" if measured.get("heldout") is not False else "training",
        "step": count(measured.get("step")),
        **_summary(cells),
    }


def _pictures(
    cells: Mapping[tuple[str, str], Mapping[str, Any]], targets: list[str], bound: float
) -> dict[str, Markup]:
    """Return by target the histograms of all layers."""
    pictures = {}
    for target in targets:
        found = {}
        for (name, of), cell in cells.items():
            counts = cell.get("counts")
            if of == target and isinstance(counts, list):
                found[name] = [n for x in counts[:BINS] if (n := count(x)) is not None]
        if any(map(any, found.values())):
            label = f"{target}: how the multipliers of {len(found)} layers lie around 1"
            pictures[target] = _histograms(found, (1 - bound, 1 + bound), label)
    return pictures


def _histograms(
    by_line: Mapping[str, Sequence[int]], ends: tuple[float, float], label: str
) -> Markup:
    """Return a histogram for each line, its counts over equal parts of a range drawn by the root of
    their share, so that what is rare is still seen; a dashed line is at 1.
    """
    names = list(by_line)
    room = charts.layer_height(len(names))
    with charts.picture(room * len(names) + 24, label) as made:
        axes = made.axes(0, room * len(names))
        for line, counts in enumerate(by_line.values()):
            shares = np.sqrt(np.maximum(0, np.asarray(counts, np.float64)))
            if not shares.any():
                continue
            edges = np.linspace(*ends, len(shares) + 1)
            heights = line + 0.45 - 0.9 * shares / shares.max()
            axes.stairs(heights, edges, baseline=line + 0.45, fill=True, color=charts.LINE)
        axes.axvline(1.0, color=charts.SECOND, linestyle=":", linewidth=1, zorder=3)
        axes.set_xlim(*ends)
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        charts.paint_layers(axes, names)
    return made.svg


def _cells(cell: Mapping[str, Any]) -> list[Any]:
    """Return mean and deviation of the multipliers, the share at their bounds, and the size of the
    additive term.
    """
    saturated, bad = as_number(cell.get("saturated")), as_number(cell.get("bad"))
    if bad is not None and bad >= 1:
        return [_ALARM.format(said) for said in ("none finite", *["not finite"] * 3)]
    share: Any = "–" if saturated is None else percent(saturated, 2)
    if saturated is not None and saturated >= WORTH_SAYING:
        share = _ALARM.format(share)
    if bad:
        share = Markup("{} {}").format(share, _ALARM.format(f"and {percent(bad)} not finite"))
    mean, deviation = (number(as_number(cell.get(name)), 3) for name in ("mean", "std"))
    return [mean, deviation, share, _size(cell.get("add_rms"), cell, "product_rms")]


def _quotient(one: Any, other: Any) -> float | None:
    one, other = as_number(one), as_number(other)
    return one / other if one is not None and other else None


def _size(added: Any, of: Mapping[str, Any], key: str) -> str:
    """Return the size of an additive term over another. A file has None for a term that a form
    lacks and for one that is not finite; the divisor always exists.
    """
    if key in of and of[key] is None:
        return _ALARM.format("not finite")
    return number(_quotient(added, of.get(key)), 3)


def _summary(cells: Mapping[tuple[str, str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the extremes, each with its layer and target."""

    def largest(values: Mapping[tuple[str, str], float | None]) -> tuple[float, str] | None:
        found = {place: value for place, value in values.items() if value is not None}
        place = max(found, key=lambda place: found[place], default=None)
        return None if place is None else (found[place], f"layer {place[0]}, {place[1]}")

    bad = {place: share for place, x in cells.items() if (share := as_number(x.get("bad")))}
    none = {place for place, share in bad.items() if share >= 1}
    saturated = {p: as_number(x.get("saturated")) for p, x in cells.items() if p not in none}
    ratios = {p: _quotient(x.get("add_rms"), x.get("product_rms")) for p, x in cells.items()}
    return {
        "bad": (len(bad), largest(bad)),
        "places": len(cells),
        "saturated": largest(saturated),
        "additive_only": not none and largest(saturated) is None,
        "ratio": largest(ratios),
        "worth_saying": WORTH_SAYING,
    }
