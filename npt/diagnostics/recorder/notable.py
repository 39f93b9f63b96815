"""The tensors of several records that deserve a look first: non-finite ones, those nearest to
overflow, and those that grew most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from npt.diagnostics.recorder.grid import Cell, Line, cells, place, value
from npt.diagnostics.recorder.record import DIRECTIONS, Direction, Record, Row


@dataclass(frozen=True)
class Found:
    """A tensor. record: index among the records. share: its largest element over its dtype's
    largest number.
    """

    record: int
    row: Row
    share: float = 0.0


@dataclass(frozen=True)
class Growth:
    """A tensor whose RMS is `factor` times that of the same checkpoint one layer, or one recorded
    step, earlier in the pass. before: index of that layer, or of that record.
    """

    record: int
    row: Row
    factor: float
    since: Literal["layer", "step"]
    before: int
    rms_before: float


def non_finite(records: Sequence[Record]) -> list[Found]:
    """Return all of them, in the order in which they appeared."""
    return [Found(i, row) for i, record in enumerate(records) for row in record.bad]


def near_overflow(records: Sequence[Record], at_most: int = 5) -> list[Found]:
    """Return those nearest to their dtype's largest number, each tensor once, at its worst."""
    found: dict[tuple[Direction, Line, str], Found] = {}
    for i, record in enumerate(records):
        for row in record.rows:
            share = value(row, "maximum_share")
            at = (row.direction, *place(row))
            if share is not None and (at not in found or share > found[at].share):
                found[at] = Found(i, row, share)
    return sorted(found.values(), key=lambda x: -x.share)[:at_most]


def growths(records: Sequence[Record], at_most: int = 5) -> list[Growth]:
    """Return those that grew most, each tensor once, at its worst. A gradient flows from the layer
    above to the one below.
    """
    found: dict[tuple[Direction, Line, str], Growth] = {}
    for direction in DIRECTIONS:
        previous: dict[tuple[Line, str], tuple[int, float]] = {}
        for i, record in enumerate(records):
            now = cells(record, direction)
            for (line, column), cell in now.items():
                rms = cell.row.rms
                if not _positive(rms):
                    continue
                at = (direction, line, column)
                for since, before, earlier in _earlier(line, column, direction, now, previous):
                    growth = Growth(i, cell.row, rms / earlier, since, before, earlier)
                    if growth.factor > 1 and (at not in found or growth.factor > found[at].factor):
                        found[at] = growth
                previous[line, column] = i, rms
    return sorted(found.values(), key=lambda x: -x.factor)[:at_most]


def _earlier(
    line: Line,
    column: str,
    direction: Direction,
    now: dict[tuple[Line, str], Cell],
    previous: dict[tuple[Line, str], tuple[int, float]],
) -> Iterator[tuple[Literal["layer", "step"], int, float]]:
    """Yield index and RMS of the checkpoint one layer and one recorded step earlier."""
    if line.layer is not None:
        layer = line.layer - 1 if direction == "forward" else line.layer + 1
        cell = now.get((Line(f"{line.parent}.{layer}".lstrip("."), layer), column))
        if cell is not None and _positive(cell.row.rms):
            yield "layer", layer, cell.row.rms
    if (line, column) in previous:
        yield "step", *previous[line, column]


def _positive(number: float | None) -> TypeGuard[float]:
    return number is not None and math.isfinite(number) and number > 0
