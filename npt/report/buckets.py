"""Many steps on few columns of a picture, so that none of them is lost: a column keeps the smallest and the largest of its values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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

    def column(self, step: int) -> int:
        return (step - self.first) * self.columns // (self.last - self.first + 1)

    def position(self, step: int) -> float:
        """Where a step stands, from 0 to 1: the middle of its column."""
        return self.middle(self.column(step))

    def middle(self, column: int) -> float:
        return (column + 0.5) / self.columns

    def steps(self, column: int) -> tuple[int, int]:
        """The first and the last step of a column."""
        span = self.last - self.first + 1
        low, high = -(-column * span // self.columns), -(-(column + 1) * span // self.columns) - 1
        return self.first + low, self.first + high


@dataclass
class Bucket:
    """A column's values. low, high: of the finite ones, of which there are `count`. rising: the smallest came first. bad: others."""

    low: float = math.inf
    high: float = -math.inf
    count: int = 0
    bad: int = 0
    rising: bool = True

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            self.bad += 1
            return
        if value > self.high:
            self.high, self.rising = value, True
        if value < self.low:
            self.low, self.rising = value, value == self.high
        self.count += 1


def buckets(axis: Axis, steps: Sequence[int], values: Sequence[float]) -> dict[int, Bucket]:
    """The columns that have a value, in ascending order.

    Args:
        axis: of the picture.
        steps: ascending.
        values: one for each step; NaN where there is none, an infinity where it was not finite.
    """
    found: dict[int, Bucket] = {}
    for step, value in zip(steps, values, strict=True):
        if not math.isnan(value):
            found.setdefault(axis.column(step), Bucket()).add(value)
    return found
