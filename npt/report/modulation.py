"""The adapters' effect on the tokens: histograms of the multipliers, the share at their bounds, and
the size of the additive terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from npt.evaluation.formatting import percent
from npt.report import charts
from npt.report.logs import LAYERS, as_count, as_mapping, as_number
from npt.report.run import RunRecord
from npt.report.words import ALARM, clean, number

BINS = 200

WORTH_SAYING = 0.05
"""Share of multipliers at their bounds that is worth saying: they have next to no gradient left."""

_TARGETS = ("stream", "gate", "up", "down")

Cells = Mapping[tuple[str, str], Mapping[str, Any]]
"""What was measured, by layer and target."""


def modulation(record: RunRecord) -> dict[str, Any] | None:
    """Return the part on `modulation.json`; None if it holds no layer."""
    measured = record.modulation
    found = list(as_mapping(measured.get("layers")).items())[:LAYERS]
    layers = {clean(name, 12): layer for name, layer in found if isinstance(layer, dict)}
    if not layers:
        return None
    by_target = {name: as_mapping(layer.get("targets")) for name, layer in layers.items()}
    targets = [t for t in _TARGETS if any(t in by for by in by_target.values())]
    cells = {(name, t): as_mapping(by.get(t)) for name, by in by_target.items() for t in targets}
    bound = as_number(measured.get("mult_bound"))
    heads = ["*layer", "*stream RMS"]
    for target in targets:
        if target != "stream":
            heads += [f"*{target}: mean m", "*deviation", "*at bounds", "*s / product"]
        heads += {"stream": ["*stream: s / stream"], "down": ["*s / stream"]}.get(target, [])
    rows = []
    for name, layer in layers.items():
        bad = "stream_rms" in layer and layer["stream_rms"] is None
        row = [name, _NOT_FINITE if bad else number(as_number(layer.get("stream_rms")), 3)]
        for target in targets:
            cell = cells[name, target]
            if target != "stream":
                row += _cells(cell)
            in_stream = target in ("stream", "down")
            row += [_size(cell.get("add_rms"), layer, "stream_rms")] * in_stream
        rows.append(row)
    return {
        "pictures": _pictures(cells, targets, 0.5 if bound is None else bound),
        "table": (heads, rows),
        "range": "its range" if bound is None else f"({number(1 - bound)}, {number(1 + bound)})",
        "tokens": as_count(measured.get("tokens")) or 0,
        "kind": "held-out" if measured.get("heldout") is not False else "training",
        "step": as_count(measured.get("step")),
        **_summary(cells),
    }


_NOT_FINITE = ALARM.format("not finite")


def _pictures(cells: Cells, targets: list[str], bound: float) -> dict[str, Markup]:
    """Return by target the histograms of all layers."""
    pictures = {}
    for target in targets:
        found = {
            name: [n for x in cell["counts"][:BINS] if (n := as_count(x)) is not None]
            for (name, of), cell in cells.items()
            if of == target and isinstance(cell.get("counts"), list)
        }
        if any(map(any, found.values())):
            label = f"{target}: how the multipliers of {len(found)} layers lie around 1"
            pictures[target] = _histograms(found, (1 - bound, 1 + bound), label)
    return pictures


def _histograms(
    by_line: Mapping[str, Sequence[int]], ends: tuple[float, float], label: str
) -> Markup:
    """Return a histogram for each line over a range: heights by the root of the share, so that what
    is rare is still seen; a dotted line is at 1.
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


def _cells(cell: Mapping[str, Any]) -> list[str]:
    """Return mean and deviation of the multipliers, the share at their bounds, and the size of the
    additive term.
    """
    saturated, bad = as_number(cell.get("saturated")), as_number(cell.get("bad"))
    if bad is not None and bad >= 1:
        return [ALARM.format("none finite"), *[_NOT_FINITE] * 3]
    share: str = "–" if saturated is None else percent(saturated, 2)
    if saturated is not None and saturated >= WORTH_SAYING:
        share = ALARM.format(share)
    if bad:
        share = Markup("{} {}").format(share, ALARM.format(f"and {percent(bad)} not finite"))
    mean, deviation = (number(as_number(cell.get(name)), 3) for name in ("mean", "std"))
    return [mean, deviation, share, _size(cell.get("add_rms"), cell, "product_rms")]


def _quotient(one: Any, other: Any) -> float | None:
    one, other = as_number(one), as_number(other)
    return one / other if one is not None and other else None


def _size(added: Any, of: Mapping[str, Any], key: str) -> str:
    """Return the size of an additive term over another. A file has None for a term that a form
    lacks and for one that is not finite; the divisor always exists.
    """
    bad = key in of and of[key] is None
    return _NOT_FINITE if bad else number(_quotient(added, of.get(key)), 3)


def _summary(cells: Cells) -> dict[str, Any]:
    """Return the extremes, each with its layer and target."""

    def largest(values: Mapping[tuple[str, str], float | None]) -> tuple[float, str] | None:
        found = {place: value for place, value in values.items() if value is not None}
        place = max(found, key=lambda place: found[place], default=None)
        return None if place is None else (found[place], f"layer {place[0]}, {place[1]}")

    bad = {place: share for place, x in cells.items() if (share := as_number(x.get("bad")))}
    finite = {place: x for place, x in cells.items() if bad.get(place, 0.0) < 1}
    saturated = largest({p: as_number(x.get("saturated")) for p, x in finite.items()})
    ratios = {p: _quotient(x.get("add_rms"), x.get("product_rms")) for p, x in cells.items()}
    return {
        "bad": (len(bad), largest(bad)),
        "places": len(cells),
        "saturated": saturated,
        "additive_only": len(finite) == len(cells) and saturated is None,
        "ratio": largest(ratios),
        "worth_saying": WORTH_SAYING,
    }
