"""Many steps on few columns of a picture, so that none of them is lost: a column keeps the smallest
and the largest of its values.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

COLUMNS = 480
"""Columns of a chart: about as many as a wide screen has points to spare."""


@dataclass(frozen=True)
class Axis:
    """Steps from `first` to `last` on `columns` columns."""

    first: int
    last: int
    columns: int

    @classmethod
    def of(cls, steps: Iterable[int], columns: int = COLUMNS) -> Axis:
        """The axis that these steps need, one column for each step where there is room."""
        found = list(steps)
        first, last = (min(found), max(found)) if found else (1, 1)
        return cls(first, last, min(columns, last - first + 1))

    @property
    def span(self) -> int:
        return self.last - self.first + 1

    @property
    def shared(self) -> bool:
        """Whether several steps share a column."""
        return self.columns < self.span

    def column(self, step: int) -> int:
        return (step - self.first) * self.columns // self.span

    def steps(self, column: int) -> tuple[int, int]:
        """The first and the last step of a column."""
        low, high = (-(-edge * self.span // self.columns) for edge in (column, column + 1))
        return self.first + low, self.first + high - 1

    def middle(self, column: int) -> float:
        """Where a column stands, from 0 to 1."""
        return (column + 0.5) / self.columns


@dataclass(frozen=True)
class Bucket:
    """A column's values. low, high, mean: of the finite ones, of which there are `count`. bad: how
    many were not finite.
    """

    low: float
    high: float
    mean: float
    count: int
    bad: int = 0


def buckets(axis: Axis, steps: Sequence[int], values: Sequence[float]) -> dict[int, Bucket]:
    """The columns that have a value, in ascending order.

    Args:
        axis: of the picture.
        steps: ascending, on the axis.
        values: one for each step; NaN where there is none, an infinity where it was not finite.
    """
    found: dict[int, Bucket] = {}
    start = 0
    while start < len(steps):
        column = axis.column(steps[start])
        end = bisect_left(steps, axis.steps(column)[1] + 1, start)
        bucket = _bucket(values[start:end])
        if bucket is not None:
            found[column] = bucket
        start = end
    return found


def _bucket(values: Sequence[float]) -> Bucket | None:
    bad = 0
    if not math.isfinite(sum(values)):
        bad = sum(math.isinf(value) for value in values)
        values = [value for value in values if math.isfinite(value)]
    if not values:
        return Bucket(math.inf, -math.inf, math.nan, 0, bad) if bad else None
    low, high = min(values), max(values)
    mean = min(high, max(low, sum(value / len(values) for value in values)))
    return Bucket(low, high, mean, len(values), bad)


def coarser(fine: Axis, coarse: Axis, found: Mapping[int, Bucket]) -> dict[int, Bucket]:
    """The same on fewer columns, each of which holds whole columns of the finer axis over the same
    steps.
    """
    groups: dict[int, list[Bucket]] = {}
    for column, bucket in found.items():
        groups.setdefault(coarse.column(fine.steps(column)[0]), []).append(bucket)
    return {column: _merged(group) for column, group in groups.items()}


def _merged(group: Sequence[Bucket]) -> Bucket:
    low, high = min(b.low for b in group), max(b.high for b in group)
    count, bad = sum(b.count for b in group), sum(b.bad for b in group)
    mean = sum(b.mean * (b.count / count) for b in group if b.count) if count else math.nan
    return Bucket(low, high, mean, count, bad)
