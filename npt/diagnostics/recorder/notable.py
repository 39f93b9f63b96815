"""What in a run of records deserves a look first: non-finite tensors, those nearest to overflow,
and those that grew most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

from npt.diagnostics.recorder.grid import Line, cells, place, value
from npt.diagnostics.recorder.record import Direction, Record, Row


@dataclass(frozen=True)
class NonFinite:
    """A tensor with NaN or infinities. record: index among the records."""

    record: int
    row: Row


@dataclass(frozen=True)
class NearOverflow:
    """A tensor whose largest element is this share of its dtype's largest number."""

    record: int
    row: Row
    share: float


@dataclass(frozen=True)
class Growth:
    """A tensor whose RMS is `factor` times that of the same checkpoint one layer, or one recorded
    step, earlier in the pass.
    """

    record: int
    row: Row
    factor: float
    since: Literal["layer", "step"]
    before: int
    """Index of that layer, or of that record."""
    rms_before: float


def non_finite(records: Sequence[Record]) -> list[NonFinite]:
    """All of them, in the order in which they appeared."""
    return [
        NonFinite(i, row)
        for i, record in enumerate(records)
        for row in record.rows
        if not row.finite
    ]


def near_overflow(records: Sequence[Record], at_most: int = 5) -> list[NearOverflow]:
    """Those nearest to their dtype's largest number, each tensor once, at its worst."""
    found: dict[tuple[Direction, Line, str], NearOverflow] = {}
    for i, record in enumerate(records):
        for row in record.rows:
            share = value(row, "maximum_share")
            at = (row.direction, *place(row))
            if share is not None and (at not in found or share > found[at].share):
                found[at] = NearOverflow(i, row, share)
    return sorted(found.values(), key=lambda x: -x.share)[:at_most]


def growths(records: Sequence[Record], at_most: int = 5) -> list[Growth]:
    """Those that grew most, each tensor once, at its worst. A gradient flows from the layer above
    to the one below.
    """
    found: dict[tuple[Direction, Line, str], Growth] = {}
    directions: tuple[Direction, ...] = ("forward", "gradient")
    for direction in directions:
        previous: dict[tuple[Line, str], tuple[int, float]] = {}
        for i, record in enumerate(records):
            now = {at: (cell.row, cell.row.rms) for at, cell in cells(record, direction).items()}
            for (line, column), (row, rms) in now.items():
                if not _positive(rms):
                    continue
                candidates = []
                if line.layer is not None:
                    layer = line.layer - 1 if direction == "forward" else line.layer + 1
                    _, below = now.get(
                        (Line(f"{line.parent}.{layer}".lstrip("."), layer), column), (None, None)
                    )
                    if _positive(below):
                        candidates.append(Growth(i, row, rms / below, "layer", layer, below))
                if (line, column) in previous:
                    j, earlier = previous[line, column]
                    candidates.append(Growth(i, row, rms / earlier, "step", j, earlier))
                for growth in candidates:
                    at = (direction, line, column)
                    if growth.factor > 1 and (at not in found or growth.factor > found[at].factor):
                        found[at] = growth
                previous[line, column] = i, rms
    return sorted(found.values(), key=lambda x: -x.factor)[:at_most]


def _positive(number: float | None) -> TypeGuard[float]:
    return number is not None and math.isfinite(number) and number > 0
