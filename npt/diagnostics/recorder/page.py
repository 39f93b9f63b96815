"""The page about recorded tensor health: findings first, then every recorded step as a map.

It loads nothing, to be mailed. Its tables show the RMS; the script shows other quantities and all
of a cell's statistics, from compact JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from markupsafe import Markup

from npt.diagnostics.recorder.grid import (
    LOGARITHMIC,
    Cell,
    Layout,
    Mark,
    Quantity,
    cells,
    first_bad,
    layout,
    maximum,
    place,
    scale,
    span,
    spread,
    step_labels,
    value,
)
from npt.diagnostics.recorder.notable import Growth, growths, near_overflow, non_finite
from npt.diagnostics.recorder.record import DIRECTIONS, Direction, Record, Row
from npt.report.pages import render
from npt.report.words import clean

CELLS = 140_000
"""Cells that a page holds; of more steps than fit, some are shown. One takes about 60 bytes."""

LISTED = 200
"""Non-finite tensors that are listed one by one."""

PASSES = 12
"""Passes, forward or backward, whose first non-finite tensor comes first."""

COLOURS = 24
"""Steps of the colour scale."""

_WHITE_INK = 10
"""Steps, from the darkest on, on which white has a larger contrast than black."""

_LABELS: dict[Quantity, str] = {
    "rms": "RMS of the finite elements",
    "absmax": "largest size of a finite element",
    "maximum_share": "largest size, share of the dtype's maximum",
    "finite_share": "finite share, %",
    "saturation": "saturation of multipliers, %",
    "update_ratio": "update over residual stream, RMS",
}


def page(records: Sequence[Record]) -> str:
    """Return one HTML page about records with at least one row each, in ascending order."""
    bad = non_finite(records)
    layouts = {d: layout(records, d) for d in DIRECTIONS}
    layouts = {d: where for d, where in layouts.items() if where.lines}
    area = sum(len(where.lines) * len(where.columns) for where in layouts.values())
    chosen = spread(len(records), max(3, CELLS // area), bad[0].record if bad else None)
    heat = _Map(records, chosen, layouts)
    return render(
        "recorder.html.j2",
        script="recorder.js",
        css=_palette(),
        title=f"Tensor health, {span(records)}",
        sections={"findings": "Findings", "heat": "Heat map"},
        recorded=len(records),
        shown=len(chosen),
        total=sum(len(record.rows) for record in records),
        maps=heat.maps(),
        quantities=heat.quantities,
        json=heat.data(),
        **_findings(records, heat),
    )


def _palette() -> str:
    """Return the style of the colour scale, viridis."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shades = (to_hex(colormaps["viridis"]((i + 0.5) / COLOURS)) for i in range(COLOURS))
    return "\n".join(
        f".c{i} {{ background: {shade}; color: {'#ffffff' if i < _WHITE_INK else '#000000'} }}"
        for i, shade in enumerate(shades)
    )


class _Map:
    """The steps that the page shows: what they hold, their place in the page, and their numbers."""

    def __init__(
        self, records: Sequence[Record], chosen: Sequence[int], layouts: dict[Direction, Layout]
    ):
        labels = step_labels(records)
        self.place_of = {i: k for k, i in enumerate(chosen)}
        self.records = [records[i] for i in chosen]
        self.labels = [labels[i] for i in chosen]
        self.layouts = layouts
        self.cells = {d: [cells(record, d) for record in self.records] for d in layouts}
        self.scales: dict[Direction, dict[Quantity, tuple[float, float]]] = {}
        for direction, steps in self.cells.items():
            rows = [cell.row for found in steps for cell in found.values()]
            numbers = {q: [x for row in rows if (x := value(row, q)) is not None] for q in _LABELS}
            self.scales[direction] = {q: scale(found, q) for q, found in numbers.items() if found}
        self.broken = [len(record.bad) for record in self.records]
        self.opened = next((k for k, n in enumerate(self.broken) if n), len(self.broken) - 1)
        self.quantities = [
            {"key": q, "label": _LABELS[q], "log": q in LOGARITHMIC}
            for q in _LABELS
            if any(q in of for of in self.scales.values())
        ]

    def link(self, record: int, row: Row) -> Markup | str:
        """Return the row's name as a link to its cell, or alone if the step is not shown."""
        name = clean(row.name or "model")
        if record not in self.place_of:
            return name
        k, where = self.place_of[record], self.layouts[row.direction]
        line, column = place(row)
        at = f"{where.lines.index(line)} {where.columns.index(column)}"
        return Markup('<a href="#{0}-{1}" data-at="{2}">{3}</a>').format(row.direction, k, at, name)

    def maps(self) -> Iterator[dict[str, Any]]:
        """Yield each step and direction as a table of the RMS: attribute and text by cell."""
        for k, label in enumerate(self.labels):
            for direction, where in self.layouts.items():
                found, first = self.cells[direction][k], first_bad(self.records[k], direction)
                yield {
                    "id": f"{direction}-{k}",
                    "title": f"{label}, {direction}",
                    "broken": self.broken[k],
                    "open": k == self.opened,
                    "heads": where.columns,
                    "lines": [
                        (name, [self._cell(found.get((line, column)), direction,
                                           (line, column) == first) for column in where.columns])
                        for line, name in zip(where.lines, where.labels, strict=True)
                    ],
                }  # fmt: skip

    def _cell(self, cell: Cell | None, direction: Direction, first: bool) -> tuple[Markup, Markup]:
        kind, said = "", ""
        number = None if cell is None else value(cell.row, "rms")
        if cell is not None and cell.mark >= Mark.INF:
            kind, said = f"b{' f' * first}", "NaN" if cell.mark == Mark.NAN else "Inf"
        elif number == 0:
            kind, said = "z", "0"
        elif number is not None:
            low, high = self.scales[direction]["rms"]
            part = (math.log10(number) - low) / (high - low) if math.isfinite(number) else 1.0
            kind = f"c{max(0, min(COLOURS - 1, int(part * COLOURS)))}"
            said = _brief(number)
        elif cell is not None:
            said = "–"
        mark = f' class="{kind}"' if " " in kind else f" class={kind}" if kind else ""
        return Markup(mark), Markup(said)

    def data(self) -> Markup:
        """Return what the script needs, as JSON that cannot end the element that holds it."""
        kinds: dict[tuple[tuple[int, ...], str, int], int] = {}
        directions = []
        for direction, where in self.layouts.items():
            names = zip(where.labels, where.lines, strict=True)
            firsts = [first_bad(record, direction) for record in self.records]
            head = {
                "lines": [[label, line.name or label] for label, line in names],
                "columns": where.columns,
                "first": [
                    None if at is None else [where.lines.index(at[0]), where.columns.index(at[1])]
                    for at in firsts
                ],
                "scales": self.scales[direction],
            }
            places = list(itertools.product(where.lines, where.columns))
            steps = (
                ",".join(_numbers(found.get(place), kinds) for place in places)
                for found in self.cells[direction]
            )
            grids = ",\n".join(f"[{step}]" for step in steps)
            directions.append(f'"{direction}": {json.dumps(head)[:-1]}, "cells": [{grids}]}}')
        shared = {
            "steps": self.labels,
            "broken": self.broken,
            "open": self.opened,
            "colours": COLOURS,
            "quantities": self.quantities,
            "kinds": [
                [str(list(shape)), dtype, count, maximum(dtype)] for shape, dtype, count in kinds
            ],
        }
        text = f'{json.dumps(shared)[:-1]}, "directions": {{{", ".join(directions)}}}}}'
        return Markup(text.replace("<", "\\u003c"))


def _numbers(cell: Cell | None, kinds: dict[tuple[tuple[int, ...], str, int], int]) -> str:
    """Return a cell as the script reads it; what most cells lack comes last and is left out."""
    if cell is None:
        return "0"
    row = cell.row
    kind = kinds.setdefault((row.shape, row.dtype, row.count), len(kinds))
    tail: list[tuple[Any, Any]] = [(row.nan, 0), (row.pos_inf, 0), (row.neg_inf, 0)]
    tail += [(row.saturation, None), (row.update_ratio, None), (cell.calls, 1)]
    while tail and tail[-1][0] == tail[-1][1]:
        tail.pop()
    numbers = [kind, row.rms, row.absmax, row.min, row.max, row.mean, row.std]
    return f"[{','.join(map(_number, [*numbers, *(x for x, _ in tail)]))}]"


def _number(x: float | None) -> str:
    """Return three digits of it, as short as JSON allows; 1e999 is read as an infinity."""
    if x is None or math.isnan(x):
        return "null"
    if isinstance(x, int):
        return str(int(x))
    if math.isinf(x):
        return "1e999" if x > 0 else "-1e999"
    return _short_power(f"{x:.3g}")


def _short_power(written: str) -> str:
    return re.sub(r"e\+?(-?)0*", r"e\1", written)


def _brief(x: float) -> str:
    """Return a positive number in at most five letters, for a cell."""
    if math.isinf(x):
        return "over"
    if not 0.00995 <= x < 9999.5:
        return _short_power(f"{x:.0e}")
    return str(round(x)) if x >= 99.5 else f"{x:.2g}"


def _findings(records: Sequence[Record], heat: _Map) -> dict[str, Any]:
    """Return the rows of the tables of findings."""
    labels, bad = step_labels(records), non_finite(records)

    def where(found: Any) -> tuple[Any, ...]:
        row = found.row
        return labels[found.record], row.direction, heat.link(found.record, row)

    def counted(found: Any) -> tuple[Any, ...]:
        row = found.row
        return *where(found), *(f"{n:,}" for n in (row.nan, row.pos_inf, row.neg_inf, row.count))

    def grown(found: Growth) -> tuple[Any, ...]:
        since = f"layer {found.before}" if found.since == "layer" else labels[found.before]
        sizes = f"{found.rms_before:.3g} at {since}", f"{found.row.rms:.3g}"
        return *where(found), f"× {found.factor:.3g}", *sizes

    firsts: dict[tuple[int, Direction], Any] = {}
    for each in bad:
        firsts.setdefault((each.record, each.row.direction), each)
    return {
        "bad": len(bad),
        "passes": (min(PASSES, len(firsts)), len(firsts)),
        "firsts": [counted(x) for x in list(firsts.values())[:PASSES]],
        "listed": [counted(x) for x in bad[:LISTED]],
        "overflow": [
            (*where(x), f"{x.row.absmax:.3g}", x.row.dtype, f"{x.share:.2g}")
            for x in near_overflow(records)
        ],
        "growths": [grown(x) for x in growths(records)],
    }
