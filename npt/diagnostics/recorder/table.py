"""A record on a terminal: what is wrong, then one line for each layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from npt.diagnostics.recorder.ranking import (
    FACTOR,
    explosions,
    gradients,
    growths,
    not_finite,
    worst,
)
from npt.diagnostics.recorder.record import Record, Row

_EXAMPLES = 3
"""Lines of what is merely largest."""

_WIDTH = 16
"""Characters of a name in the table of layers; of a longer one the end is shown."""


@dataclass
class _Place:
    """A decoder layer, or a module outside of the layers, and the rows that belong there. prefix:
    its dotted name.
    """

    prefix: str
    rows: list[Row] = field(default_factory=list)

    def short(self, row: Row) -> str:
        """The row's name within this place."""
        inside = row.module[len(self.prefix) :].lstrip(".")
        return _tail(f"{inside} {row.stage}".strip())


def record_tables(record: Record, factor: float = FACTOR, listed: int = 8) -> list[RenderableType]:
    """What `print_record` prints.

    Args:
        factor: growth of the RMS that counts as an explosion.
        listed: lines at most of each list of what is wrong.
    """
    parts: list[RenderableType] = [
        Text(f"step {record.step}, micro-batch {record.micro_batch}: {worst(record, factor)}")
    ]
    bad = not_finite(record)
    if bad:
        lines = [
            (
                _title(row),
                *(str(n or "") for n in (row.nan, row.pos_inf, row.neg_inf)),
                str(row.count),
            )
            for row in bad
        ]
        parts.append(
            _list(
                "not finite, in the order of the pass",
                ("", "NaN", "+Inf", "-Inf", "of"),
                lines,
                listed,
            )
        )
    exploded = explosions(record, factor)
    grown = exploded or growths(record)[:_EXAMPLES]
    if grown:
        lines = [
            (
                g.after.name,
                g.before.name,
                _number(g.before.rms),
                _number(g.after.rms),
                f"x {g.growth:.3g}",
            )
            for g in grown
        ]
        title = f"RMS grew more than {factor:g} times" if exploded else "RMS grew most"
        parts.append(_list(title, ("", "from", "RMS", "to", "growth"), lines, listed))
    ranked = gradients(record)[:_EXAMPLES]
    if ranked:
        lines = [
            (row.name, _number(row.norm), _number(row.absmax), _number(row.rms)) for row in ranked
        ]
        parts.append(_list("largest gradients", ("", "norm", "largest", "RMS"), lines, listed))
    if record.rows:
        parts.append(_layers(record))
    return parts


def print_record(record: Record, console: Console | None = None, *, factor: float = FACTOR) -> None:
    """Print a record: the worst first, then a line for each layer and each module outside of them.

    Columns of the lines: RMS of what comes out, RMS of what a layer adds over RMS of what it adds
    to, the largest element and the tensor that it stands in, the largest gradient norm and the
    tensor that it is of; where there are any, the largest share of saturated multipliers, and how
    many tensors are not finite.

    Args:
        console: default standard output; 80 columns are enough.
        factor: growth of the RMS that counts as an explosion.
    """
    console = console if console is not None else Console()
    for part in record_tables(record, factor):
        console.print(part)


def _layers(record: Record) -> Table:
    gradient = any(row.direction == "gradient" for row in record.rows)
    saturated = any(row.saturation for row in record.rows)
    bad = any(not row.finite for row in record.rows)
    texts = ("", "in") + ("of",) * gradient
    headings = [
        "",
        "out",
        "update",
        "largest",
        "in",
        *["gradient", "of"] * gradient,
        *["saturated"] * saturated,
        *["bad"] * bad,
    ]
    table = _table("by layer")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in texts else "right", no_wrap=True)
    for label, place in _places(record):
        forward = [row for row in place.rows if row.direction == "forward"]
        backward = [row for row in place.rows if row.direction == "gradient"]
        largest = max(
            (row for row in forward if row.absmax is not None and "float" in row.dtype),
            key=lambda row: row.absmax or 0.0,
            default=None,
        )
        out = next(
            (row for row in reversed(forward) if row.update_ratio is not None and row.stage != "t"),
            None,
        )
        out = out or next((row for row in reversed(forward) if row.stage.startswith("out")), None)
        cells = [
            label,
            *(["", ""] if out is None else [_number(out.rms), _number(out.update_ratio)]),
        ]
        cells += ["", ""] if largest is None else [_number(largest.absmax), place.short(largest)]
        if gradient:
            steepest = max(backward, key=lambda row: row.norm or 0.0, default=None)
            cells += (
                ["", ""] if steepest is None else [_number(steepest.norm), place.short(steepest)]
            )
        if saturated:
            shares = [row.saturation for row in forward if row.saturation is not None]
            cells.append(f"{max(shares):.1%}" if shares else "")
        if bad:
            cells.append(str(sum(not row.finite for row in place.rows) or ""))
        table.add_row(*cells)
    return table


def _places(record: Record) -> list[tuple[str, _Place]]:
    """Label and place of each layer, and of each module outside of them, in the order in which the
    forward pass reached them.
    """
    found: dict[str, _Place] = {}
    for row in record.rows:
        prefix = _prefix(row)
        found.setdefault(prefix, _Place(prefix)).rows.append(row)
    stacks = {
        prefix.rpartition(".")[0]
        for prefix, place in found.items()
        if place.rows[0].layer is not None
    }
    tails = Counter(prefix.rpartition(".")[2] for prefix in found)
    labels = []
    for prefix, place in found.items():
        tail = prefix.rpartition(".")[2]
        alone = len(stacks) == 1 if place.rows[0].layer is not None else tails[tail] == 1
        labels.append((_tail(tail if alone else prefix) or "whole model", place))
    return labels


def _prefix(row: Row) -> str:
    """The name of the layer that a row belongs to, or of its module outside of layers."""
    if row.layer is None:
        return row.module
    parts = row.module.split(".")
    return ".".join(parts[: parts.index(str(row.layer)) + 1])


def _list(
    title: str, headings: tuple[str, ...], lines: Sequence[tuple[str, ...]], listed: int
) -> Table:
    table = _table(title)
    for number, heading in enumerate(headings):
        text = number == 0 or heading == "from"
        table.add_column(
            heading, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    for line in lines[:listed]:
        table.add_row(*line)
    if len(lines) > listed:
        table.add_row(f"and {len(lines) - listed} more")
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


def _title(row: Row) -> str:
    return row.name if row.direction == "forward" else f"gradient of {row.name}"


def _tail(text: str) -> str:
    return text if len(text) <= _WIDTH else f"\N{HORIZONTAL ELLIPSIS}{text[1 - _WIDTH :]}"


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3g}"
