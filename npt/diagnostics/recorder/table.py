"""A record on a terminal: the faults, then one line for each layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from npt.diagnostics.recorder.grid import Line, labels, place
from npt.diagnostics.recorder.ranking import FACTOR, explosions, gradients, growths, worst
from npt.diagnostics.recorder.record import Record, Row

_EXAMPLES = 3
"""Lines of lists of the largest."""

_LISTED = 8
"""Lines at most of each list of faults."""

_WIDTH = 16
"""Characters of a name in the table of layers; of a longer one the end is shown."""


def print_record(record: Record, console: Console | None = None, *, factor: float = FACTOR) -> None:
    """Print a record: the worst first, then a line for each layer and each module outside of them.

    Columns of the lines: RMS of the output, RMS of a layer's addition over RMS of its input, the
    largest element and its tensor, the largest gradient norm and its tensor; if there are any, the
    largest share of saturated multipliers, and the number of tensors that are not finite.

    Args:
        console: default standard output; 80 columns are enough.
        factor: growth of the RMS that counts as an explosion.
    """
    console = console if console is not None else Console()
    said = f"step {record.step}, micro-batch {record.micro_batch}: {worst(record, factor)}"
    console.print(Text(said))
    if record.bad:
        title = "not finite, in the order of the pass"
        lines = [_counts(row) for row in record.bad]
        console.print(_list(title, ("", "NaN", "+Inf", "-Inf", "of"), lines))
    exploded = explosions(record, factor)
    grown = exploded or growths(record)[:_EXAMPLES]
    if grown:
        title = f"RMS grew more than {factor:g} times" if exploded else "RMS grew most"
        lines = []
        for g in grown:
            sizes = _number(g.before.rms), _number(g.after.rms)
            lines.append((g.after.name, g.before.name, *sizes, f"x {g.growth:.3g}"))
        console.print(_list(title, ("", "from", "RMS", "to", "growth"), lines))
    ranked = gradients(record)[:_EXAMPLES]
    if ranked:
        lines = [(row.name, *map(_number, (row.norm, row.absmax, row.rms))) for row in ranked]
        console.print(_list("largest gradients", ("", "norm", "largest", "RMS"), lines))
    if record.rows:
        console.print(_layers(record))


def _counts(row: Row) -> tuple[str, ...]:
    title = row.name if row.direction == "forward" else f"gradient of {row.name}"
    counts = (str(n or "") for n in (row.nan, row.pos_inf, row.neg_inf))
    return (title, *counts, str(row.count))


def _layers(record: Record) -> Table:
    gradient = any(row.direction == "gradient" for row in record.rows)
    saturated = any(row.saturation for row in record.rows)
    headings = ["", "out", "update", "largest", "in", *["gradient", "of"] * gradient]
    headings += ["saturated"] * saturated + ["bad"] * bool(record.bad)
    table = _table("by layer")
    for heading in headings:
        text = heading in ("", "in", "of")
        table.add_column(heading, justify="left" if text else "right", no_wrap=True)
    places: dict[Line, list[Row]] = {}
    for row in record.rows:
        places.setdefault(place(row)[0], []).append(row)
    for label, rows in zip(labels(list(places), "whole model"), places.values(), strict=True):
        forward = [row for row in rows if row.direction == "forward"]
        backward = [row for row in rows if row.direction == "gradient"]
        floats = [row for row in forward if row.absmax is not None and "float" in row.dtype]
        largest = max(floats, key=lambda row: row.absmax or 0.0, default=None)
        out = _output(forward)
        cells = [_tail(label)]
        cells += ["", ""] if out is None else [_number(out.rms), _number(out.update_ratio)]
        cells += ["", ""] if largest is None else [_number(largest.absmax), _short(largest)]
        if gradient:
            steepest = max(backward, key=lambda row: row.norm or 0.0, default=None)
            cells += ["", ""] if steepest is None else [_number(steepest.norm), _short(steepest)]
        if saturated:
            shares = [row.saturation for row in forward if row.saturation is not None]
            cells.append(f"{max(shares):.1%}" if shares else "")
        if record.bad:
            cells.append(str(sum(not row.finite for row in rows) or ""))
        table.add_row(*cells)
    return table


def _output(forward: Sequence[Row]) -> Row | None:
    """Return the last residual sum of a place, else its last output."""
    sums = [row for row in forward if row.update_ratio is not None and row.stage != "t"]
    outputs = [row for row in forward if row.stage.startswith("out")]
    return next(reversed(sums or outputs), None)


def _list(title: str, headings: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> Table:
    table = _table(title)
    for number, heading in enumerate(headings):
        if number == 0 or heading == "from":
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right", no_wrap=True, overflow="fold")
    for line in lines[:_LISTED]:
        table.add_row(*line)
    if len(lines) > _LISTED:
        table.add_row(f"and {len(lines) - _LISTED} more")
    return table


def _table(title: str) -> Table:
    return Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )


def _short(row: Row) -> str:
    return _tail(place(row)[1])


def _tail(text: str) -> str:
    return text if len(text) <= _WIDTH else f"\N{HORIZONTAL ELLIPSIS}{text[1 - _WIDTH :]}"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3g}"
