"""A record on a terminal: the faults, then one line for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from npt.recorder.ranking import FACTOR, explosions, gradients, growths, worst
from npt.recorder.record import Record, Row, short_names

_LARGEST, _LISTED = 3, 8
"""Lines at most of a list of the largest, and of a list of faults."""


def print_record(record: Record, console: Console | None = None, *, factor: float = FACTOR) -> None:
    """Print a record: the worst first, then a line for each layer and each module outside of them.

    Columns of the lines: RMS of the output, RMS of a layer's addition over RMS of its input, the
    largest element, the largest gradient norm; if there are any, the largest share of saturated
    multipliers, and the number of tensors that are not finite.

    Args:
        console: default standard output; 80 columns are enough.
        factor: growth of the RMS that counts as an explosion.
    """
    console = console if console is not None else Console()
    message = f"step {record.step}, micro-batch {record.micro_batch}: {worst(record, factor)}"
    console.print(Text(message))
    if record.bad:
        title = "not finite, in the order of the pass"
        lines = [
            ("gradient of " * (r.direction == "gradient") + r.name,
             *(str(n or "") for n in (r.nan, r.pos_inf, r.neg_inf)), str(r.count))
            for r in record.bad
        ]  # fmt: skip
        console.print(_table(title, ("", "NaN", "+Inf", "-Inf", "of"), lines))
    exploded = explosions(record, factor)
    grown = exploded or growths(record)[:_LARGEST]
    if grown:
        title = f"RMS grew more than {factor:g} times" if exploded else "RMS grew most"
        lines = [
            (g.after.name, g.before.name, _number(g.after.rms), f"x {g.growth:.3g}") for g in grown
        ]
        console.print(_table(title, ("", "from", "RMS", "growth"), lines))
    steepest = gradients(record)[:_LARGEST]
    if steepest:
        lines = [(r.name, _number(r.norm), _number(r.absmax), _number(r.rms)) for r in steepest]
        console.print(_table("largest gradients", ("", "norm", "largest", "RMS"), lines))
    if record.rows:
        console.print(_layers(record))


def _layers(record: Record) -> Table:
    """Return a line for each layer and module; columns without any number are left out."""
    lines: dict[str, list[Row]] = {}
    for row in record.rows:
        lines.setdefault(row.cell[0], []).append(row)
    names, cells = short_names(lines), []
    for line, rows in lines.items():
        forward = [row for row in rows if row.direction == "forward"]
        sums = [row for row in forward if row.update_ratio is not None and row.stage != "t"]
        outputs = sums or [row for row in forward if row.stage.startswith("out")]
        out, update = (outputs[-1].rms, outputs[-1].update_ratio) if outputs else (None, None)
        saturated = _largest(row.saturation for row in forward)
        cells.append((
            names[line], _number(out), _number(update),
            _number(_largest(row.absmax for row in forward if "float" in row.dtype)),
            _number(_largest(row.norm for row in rows if row.direction == "gradient")),
            f"{saturated:.1%}" if saturated else "",
            str(sum(not row.finite for row in rows) or ""),
        ))  # fmt: skip
    headings = ("", "out", "update", "largest", "gradient", "saturated", "bad")
    shown = [i for i in range(len(headings)) if i < 4 or any(line[i] for line in cells)]
    picked = [tuple(line[i] for i in shown) for line in cells]
    return _table("by layer", [headings[i] for i in shown], picked, at_most=len(cells))


def _table(
    title: str, headings: Sequence[str], lines: Sequence[tuple[str, ...]], at_most: int = _LISTED
) -> Table:
    table = Table(
        title=f"\n{title}", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for number, heading in enumerate(headings):
        name = number == 0 or heading == "from"
        table.add_column(
            heading, justify="left" if name else "right", no_wrap=not name, overflow="fold"
        )
    for line in lines[:at_most]:
        table.add_row(*line)
    if len(lines) > at_most:
        table.add_row(f"and {len(lines) - at_most} more")
    return table


def _largest(numbers: Iterable[float | None]) -> float | None:
    return max((number for number in numbers if number is not None), default=None)


def _number(value: float | None) -> str:
    return "" if value is None or value != value else f"{value:.3g}"
