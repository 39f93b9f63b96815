"""The page: findings first, then every recorded step as a heat map that can be searched, in one
file that needs nothing else.

The page goes into tickets and over mail, so it loads nothing, and module names, which are
somebody's data, reach it as text only. Its numbers stand in it once, as compact JSON; without
JavaScript plain tables take the map's place.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
from npt.diagnostics.recorder.notable import NonFinite, growths, near_overflow, non_finite
from npt.diagnostics.recorder.record import Direction, Record, Row

CELLS = 140_000
"""Cells that a page holds; of more steps than fit, some are shown. One takes about 60 bytes."""

LISTED = 200
"""Non-finite tensors that are listed one by one."""

PASSES = 12
"""Passes, forward or backward, whose first non-finite tensor stands on top."""

_VIRIDIS = (
    "#46085c", "#48186a", "#482576", "#46337f", "#424086", "#3e4c8a", "#38588c", "#33638d",
    "#2e6d8e", "#2a778e", "#26828e", "#228b8d", "#1f958b", "#1fa088", "#23a983", "#2eb37c",
    "#3fbc73", "#52c569", "#69cd5b", "#84d44b", "#9dd93b", "#bade28", "#d8e219", "#f1e51d",
)  # fmt: skip
"""Background of each step of the scale: matplotlib's viridis, here because a page does not need
matplotlib.
"""

_WHITE_INK = 10
"""Steps, from the darkest on, on which white has a larger contrast than black."""

_COLOURS = len(_VIRIDIS)
_DIRECTIONS: tuple[Direction, ...] = ("forward", "gradient")
_LABELS: dict[Quantity, str] = {
    "rms": "RMS of the finite elements",
    "absmax": "largest size of a finite element",
    "maximum_share": "largest size, share of the dtype's maximum",
    "finite_share": "finite share, %",
    "saturation": "saturation of multipliers, %",
    "update_ratio": "update over residual stream, RMS",
}


def page(records: Sequence[Record]) -> str:
    """One HTML page about the records.

    Args:
        records: at least one, with at least one row each, in ascending order of their steps.
    """
    bad = non_finite(records)
    first = bad[0].record if bad else None
    layouts = {d: layout(records, d) for d in _DIRECTIONS}
    layouts = {d: where for d, where in layouts.items() if where.lines}
    area = sum(len(where.lines) * len(where.columns) for where in layouts.values())
    chosen = spread(len(records), max(3, CELLS // area), first)
    heat = _Map(records, chosen, layouts)
    count = f"{len(records)} recorded step{'s' if len(records) > 1 else ''}"
    parts = {
        "title": f"Tensor health, {span(records)}",
        "lead": (
            f"The tensors of a model at {count}: a line for each decoder layer from the first to"
            " the last, and one for each module outside of them; a column for each checkpoint in"
            " the order of the forward pass. Look for the framed red cell, the first tensor of its"
            " pass that is not finite: forward, a fault spreads from it to the right and down; a"
            " gradient's spreads to the left and up."
        ),
        "findings": _findings(records, heat),
        "shown": (
            ""
            if len(chosen) == len(records)
            else (
                f'<p class="soft">{len(chosen)} of {len(records)} steps are shown here; the'
                " findings above are of all of them.</p>"
            )
        ),
        "palette": "\n".join(
            f".c{i} {{ background: {back}; color: {'#ffffff' if i < _WHITE_INK else '#000000'} }}"
            for i, back in enumerate(_VIRIDIS)
        ),
        "tables": "\n".join(heat.tables()),
        "data": heat.data(),
    }
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


class _Map:
    """The steps that the page shows as heat maps: what they hold, their place in the page, and
    their numbers.
    """

    def __init__(
        self, records: Sequence[Record], chosen: Sequence[int], layouts: dict[Direction, Layout]
    ):
        labels = step_labels(records)
        self.place_of = {i: k for k, i in enumerate(chosen)}
        self.records = [records[i] for i in chosen]
        self.labels = [labels[i] for i in chosen]
        self.layouts = layouts
        self.cells = {d: [cells(record, d) for record in self.records] for d in layouts}
        self.scales = {
            d: {
                q: scale(numbers, q)
                for q in _LABELS
                if (numbers := [x for c in found if (x := value(c.row, q)) is not None])
            }
            for d, found in (
                (d, [cell for one in steps for cell in one.values()])
                for d, steps in self.cells.items()
            )
        }

    def link(self, record: int, row: Row, text: str) -> str:
        """`text` as a link to the row's cell, or as it is where the step is not shown."""
        if record not in self.place_of:
            return _text(text)
        k, where = self.place_of[record], self.layouts[row.direction]
        line, column = place(row)
        at = f"{k} {row.direction} {where.lines.index(line)} {where.columns.index(column)}"
        return f'<a href="#{row.direction}-{k}" data-at="{at}">{_text(text)}</a>'

    def tables(self) -> Iterator[str]:
        """Each step and direction as a table of the RMS, for readers without JavaScript."""
        for k, label in enumerate(self.labels):
            for direction, where in self.layouts.items():
                title = f"{label}, {direction}"
                yield (
                    f'<h3 id="{direction}-{k}">{title}</h3>\n<div class="scroll" role="region"'
                    f' aria-label="{title}" tabindex="0">'
                )
                heads = "".join(
                    f"<th scope=col><span>{_text(column)}</span>" for column in where.columns
                )
                yield f'<table class="grid"><thead><tr><th scope=col>layer{heads}<tbody>'
                found, first = self.cells[direction][k], first_bad(self.records[k], direction)
                for line, name in zip(where.lines, where.labels, strict=True):
                    row = (
                        self._cell(found.get((line, column)), direction, (line, column) == first)
                        for column in where.columns
                    )
                    yield f"<tr><th scope=row>{_text(name)}{''.join(row)}"
                yield "</table></div>"

    def _cell(self, cell: Cell | None, direction: Direction, first: bool) -> str:
        if cell is None:
            return "<td>"
        number = value(cell.row, "rms")
        if cell.mark >= Mark.INF:
            return (
                f'<td class="b{" f" if first else ""}">{"NaN" if cell.mark == Mark.NAN else "Inf"}'
            )
        if number is None:
            return "<td>–"
        if number == 0:
            return "<td class=z>0"
        low, high = self.scales[direction]["rms"]
        part = (math.log10(number) - low) / (high - low) if math.isfinite(number) else 1.0
        return f"<td class=c{max(0, min(_COLOURS - 1, int(part * _COLOURS)))}>{_brief(number)}"

    def data(self) -> str:
        """Everything the script needs, as JSON that cannot end the element it stands in."""
        kinds: dict[tuple[tuple[int, ...], str, int], int] = {}
        directions = []
        for direction, where in self.layouts.items():
            positions = (
                {line: i for i, line in enumerate(where.lines)},
                {column: j for j, column in enumerate(where.columns)},
            )
            firsts = [first_bad(record, direction) for record in self.records]
            head = {
                "lines": [
                    [label, line.name or label]
                    for label, line in zip(where.labels, where.lines, strict=True)
                ],
                "columns": where.columns,
                "first": [
                    None if at is None else [positions[0][at[0]], positions[1][at[1]]]
                    for at in firsts
                ],
                "scales": self.scales[direction],
            }
            steps = (
                ",".join(
                    _numbers(found.get((line, column)), kinds)
                    for line in where.lines
                    for column in where.columns
                )
                for found in self.cells[direction]
            )
            grids = ",\n".join(f"[{step}]" for step in steps)
            directions.append(f'"{direction}": {json.dumps(head)[:-1]}, "cells": [{grids}]}}')
        broken = [sum(not row.finite for row in record.rows) for record in self.records]
        shared = {
            "steps": self.labels,
            "broken": broken,
            "open": next((k for k, count in enumerate(broken) if count), len(broken) - 1),
            "colours": _COLOURS,
            "quantities": [
                {"key": q, "label": _LABELS[q], "log": q in LOGARITHMIC}
                for q in _LABELS
                if any(q in of for of in self.scales.values())
            ],
            "kinds": [
                [str(list(shape)), dtype, count, maximum(dtype)] for shape, dtype, count in kinds
            ],
        }
        return (json.dumps(shared)[:-1] + f', "directions": {{{", ".join(directions)}}}}}').replace(
            "<", "\\u003c"
        )


def _numbers(cell: Cell | None, kinds: dict[tuple[tuple[int, ...], str, int], int]) -> str:
    """A cell as the script reads it; what most cells lack stands last and is left out."""
    if cell is None:
        return "0"
    row = cell.row
    kind = kinds.setdefault((row.shape, row.dtype, row.count), len(kinds))
    tail: list[tuple[Any, Any]] = [(row.nan, 0), (row.pos_inf, 0), (row.neg_inf, 0)]
    tail += [(row.saturation, None), (row.update_ratio, None), (cell.calls, 1)]
    while tail and tail[-1][0] == tail[-1][1]:
        tail.pop()
    numbers = [
        kind,
        row.rms,
        row.absmax,
        row.min,
        row.max,
        row.mean,
        row.std,
        *(x for x, _ in tail),
    ]
    return f"[{','.join(map(_number, numbers))}]"


def _number(x: float | None) -> str:
    """Three digits of it, as short as JSON allows. An infinity is a number too large for the
    reader, which makes it one again.
    """
    if x is None or math.isnan(x):
        return "null"
    if isinstance(x, int):
        return str(int(x))
    if math.isinf(x):
        return "1e999" if x > 0 else "-1e999"
    return re.sub(r"e([+-])0*", lambda e: "e-" if e[1] == "-" else "e", f"{x:.3g}")


def _brief(x: float) -> str:
    """A positive number in at most five letters, for a cell."""
    if math.isinf(x):
        return "over"
    if not 0.00995 <= x < 9999.5:
        return re.sub(r"e([+-])0*", lambda e: "e-" if e[1] == "-" else "e", f"{x:.0e}")
    return str(round(x)) if x >= 99.5 else f"{x:.2g}"


def _text(name: str) -> str:
    """Somebody's text as HTML: escaped, and without the halves of characters that no encoding has."""
    return html.escape(name.encode("utf-8", "backslashreplace").decode("utf-8"))


def _findings(records: Sequence[Record], heat: _Map) -> str:
    labels = step_labels(records)
    return "\n".join(
        (
            _bad(records, labels, heat),
            _overflow(records, labels, heat),
            _growth(records, labels, heat),
        )
    )


def _bad(records: Sequence[Record], labels: Sequence[str], heat: _Map) -> str:
    found = non_finite(records)
    total = sum(len(record.rows) for record in records)
    if not found:
        return (
            f"<h3>Non-finite tensors</h3>\n<p>None: all {total:,} recorded tensors are finite.</p>"
        )

    def lines(wanted: Iterable[NonFinite]) -> str:
        rows = [
            (
                labels[x.record],
                x.row.direction,
                heat.link(x.record, x.row, x.row.name or "model"),
                *(f"{n:,}" for n in (x.row.nan, x.row.pos_inf, x.row.neg_inf, x.row.count)),
            )
            for x in wanted
        ]
        return _table(
            ("step", "direction", "module and stage", "*NaN", "*+Inf", "*-Inf", "*of elements"),
            rows,
        )

    firsts: dict[tuple[int, Direction], NonFinite] = {}
    for each in found:
        firsts.setdefault((each.record, each.row.direction), each)
    cut = f"{PASSES} of {len(firsts)} passes shown" if len(firsts) > PASSES else "each pass"
    listed = (
        f"The first {LISTED} of {len(found):,}" if len(found) > LISTED else f"All {len(found):,}"
    )
    return (
        f'<h3>Non-finite tensors</h3>\n<p><span class="alarm">{len(found):,}</span> of {total:,}'
        " recorded tensors. The first of"
        f" {cut}:</p>\n{lines(list(firsts.values())[:PASSES])}\n<details><summary>{listed}, in the"
        f" order in which they appeared</summary>{lines(found[:LISTED])}</details>"
    )


def _overflow(records: Sequence[Record], labels: Sequence[str], heat: _Map) -> str:
    rows = [
        (
            labels[x.record],
            x.row.direction,
            heat.link(x.record, x.row, x.row.name or "model"),
            f"{x.row.absmax:.3g}",
            _text(x.row.dtype),
            f"{x.share:.2g}",
        )
        for x in near_overflow(records)
    ]
    head = ("step", "direction", "module and stage", "*largest size", "dtype", "*of its maximum")
    return f"<h3>Nearest to overflow</h3>\n{_table(head, rows)}" if rows else ""


def _growth(records: Sequence[Record], labels: Sequence[str], heat: _Map) -> str:
    rows = [
        (
            labels[x.record],
            x.row.direction,
            heat.link(x.record, x.row, x.row.name or "model"),
            f"× {x.factor:.3g}",
            (
                f"{x.rms_before:.3g} at"
                f" {f'layer {x.before}' if x.since == 'layer' else labels[x.before]}"
            ),
            f"{x.row.rms:.3g}",
        )
        for x in growths(records)
    ]
    head = ("step", "direction", "module and stage", "*factor", "from", "*to")
    return (
        "<h3>Largest growth of the RMS, from layer to layer or step to"
        f" step</h3>\n{_table(head, rows)}"
        if rows
        else ""
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already. A star before a heading aligns its column's numbers."""
    kinds = ["n" if name.startswith("*") else "name" if "module" in name else "" for name in head]

    def line(tag: str, texts: Sequence[str]) -> str:
        marked = (
            f'<{tag} class="{kind}">{text}</{tag[:2]}>'
            for kind, text in zip(kinds, texts, strict=True)
        )
        return f"<tr>{''.join(marked)}</tr>"

    heads, body = (
        line("th scope=col", [name.lstrip("*") for name in head]),
        "\n".join(line("td", row) for row in rows),
    )
    return (
        '<div class="scroll" role="region" aria-label="table" tabindex="0"><table class="list">'
        f"<thead>{heads}</thead>\n<tbody>{body}</tbody></table></div>"
    )
