"""A record as a grid: decoder layers down, checkpoints across, and one number in each cell.

Lines run in the order of the forward pass, modules outside the decoder layers among them; columns
are the rest of a tensor's name after the layer's index. Gradients have the cells of their values: a
forward fault spreads right and down, a gradient's left and up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Literal, TypeVar

import numpy as np
import torch

from npt.diagnostics.recorder.record import DIRECTIONS, Direction, Record, Row

Quantity = Literal["rms", "absmax", "maximum_share", "finite_share", "saturation", "update_ratio"]

LOGARITHMIC: tuple[Quantity, ...] = ("rms", "absmax", "maximum_share", "update_ratio")
"""Quantities whose colours go by powers of ten; the others are shares in [0, 1]."""

DECADES = 4.0
"""How far the colours reach to each side of the median at most: an exploded tensor must not make
all others look alike.
"""

T = TypeVar("T")


class Mark(IntEnum):
    """The state of a cell, whatever its number; the largest is the worst."""

    ABSENT = 0
    FINITE = 1
    INF = 2
    NAN = 3


@dataclass(frozen=True)
class Line:
    """One line of the grid: a decoder layer, or a module outside of them. name: dotted, up to the
    layer's index.
    """

    name: str
    layer: int | None

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def tail(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Cell:
    """The worst row of those that fell on one place, and their number: a module may be called more
    than once in a pass.
    """

    row: Row
    calls: int

    @property
    def mark(self) -> Mark:
        return mark(self.row)


@dataclass(frozen=True)
class Layout:
    """The lines and columns of a grid."""

    lines: tuple[Line, ...]
    columns: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return labels(self.lines)


@dataclass(frozen=True)
class Grid:
    """One record in one direction. values: NaN if there is no number. marks: values of `Mark`.
    first: line and column of the first non-finite tensor of the pass, if any.
    """

    lines: tuple[str, ...]
    columns: tuple[str, ...]
    values: np.ndarray
    marks: np.ndarray
    first: tuple[int, int] | None


def labels(lines: Sequence[Line], whole: str = "model") -> tuple[str, ...]:
    """Return short names of lines: a layer's index, a module's last part, each if that is enough to
    tell it apart; `whole` for the model itself.
    """
    one_stack = len({line.parent for line in lines if line.layer is not None}) == 1
    tails = Counter(line.tail for line in lines if line.layer is None)

    def label(line: Line) -> str:
        if line.layer is not None:
            return str(line.layer) if one_stack else line.name
        return (line.tail if tails[line.tail] == 1 else line.name) or whole

    return tuple(label(line) for line in lines)


def place(row: Row) -> tuple[Line, str]:
    """Return the line and the column of a row: `model.layers.3.mlp.gate_proj` `out` is
    `mlp.gate_proj out` of line `model.layers.3`.
    """
    return _place(row.module, row.layer, row.stage)


@lru_cache(maxsize=2**16)
def _place(module: str, layer: int | None, stage: str) -> tuple[Line, str]:
    if layer is None:
        return Line(module, None), stage
    parts = module.split(".")
    cut = parts.index(str(layer)) + 1 if str(layer) in parts else 0
    name = ".".join(parts[:cut]) or f"layers.{layer}"
    return Line(name, layer), f"{'.'.join(parts[cut:])} {stage}".strip()


def mark(row: Row) -> Mark:
    return Mark.NAN if row.nan else Mark.FINITE if row.finite else Mark.INF


def cells(record: Record, direction: Direction) -> dict[tuple[Line, str], Cell]:
    """Return the cells of one direction, in the order of the pass."""
    found: dict[tuple[Line, str], Cell] = {}
    for row in record.rows:
        if row.direction == direction:
            before = found.get(place(row), Cell(row, 0))
            found[place(row)] = Cell(max(before.row, row, key=_badness), before.calls + 1)
    return found


def layout(records: Iterable[Record], direction: Direction) -> Layout:
    """Return the lines and columns that the records need in one direction, in the order of the
    forward pass; those of some records or layers only come after the one that they followed there.
    """
    records = list(records)
    lines: list[Line] = []
    columns: list[str] = []
    present: set[Line | str] = set()
    for each in DIRECTIONS:
        for record in records:
            sequences: dict[Line, list[str]] = {}
            for line, column in cells(record, each):
                sequences.setdefault(line, []).append(column)
            _merge(lines, sequences)
            for line, sequence in sequences.items():
                _merge(columns, sequence)
                if each == direction:
                    present.update((line, *sequence))
    return Layout(
        tuple(x for x in _by_depth(lines) if x in present),
        tuple(x for x in columns if x in present),
    )


def grid(
    record: Record, direction: Direction, quantity: Quantity = "rms", where: Layout | None = None
) -> Grid:
    """Return a record as labels and a matrix, by default in the record's own layout."""
    where = layout([record], direction) if where is None else where
    values = np.full((len(where.lines), len(where.columns)), np.nan)
    marks = np.zeros(values.shape, np.int8)
    line_at = {line: i for i, line in enumerate(where.lines)}
    column_at = {column: i for i, column in enumerate(where.columns)}
    for (line, column), cell in cells(record, direction).items():
        at = line_at[line], column_at[column]
        marks[at] = cell.mark
        number = value(cell.row, quantity)
        values[at] = math.nan if number is None else number
    bad = first_bad(record, direction)
    first = None if bad is None else (line_at[bad[0]], column_at[bad[1]])
    return Grid(where.labels, where.columns, values, marks, first)


def first_bad(record: Record, direction: Direction) -> tuple[Line, str] | None:
    """Return the place of the first non-finite tensor of the pass."""
    return next((place(row) for row in record.bad if row.direction == direction), None)


def value(row: Row, quantity: Quantity) -> float | None:
    """Return the quantity of one row; None if there is no such number, or it is NaN."""
    number: float | None
    if quantity == "maximum_share":
        largest = maximum(row.dtype)
        number = None if largest is None or row.absmax is None else row.absmax / largest
    else:
        number = getattr(row, quantity)
    return None if number is None or math.isnan(number) else float(number)


def maximum(dtype: str) -> float | None:
    """Return the largest finite number of a floating-point dtype, by its name with or without
    `torch.`; None for any other.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        return None
    return torch.finfo(found).max


def scale(numbers: Iterable[float], quantity: Quantity) -> tuple[float, float]:
    """Return the ends of the colours: [0, 1] for a share, else in log10, for all but a fiftieth at
    either end and one decade more, at most `DECADES` from the median.
    """
    if quantity not in LOGARITHMIC:
        return 0.0, 1.0
    array = np.asarray(list(numbers), np.float64)
    logs = np.log10(array[np.isfinite(array) & (array > 0)])
    if logs.size == 0:
        return -1.0, 1.0
    ends = np.quantile(logs, (0, 0.02, 0.5, 0.98, 1))
    least, small, middle, large, most = (float(x) for x in ends)
    low, high = max(least, small - 1, middle - DECADES), min(most, large + 1, middle + DECADES)
    return (low, high) if high - low > 0.1 else (low - 0.5, high + 0.5)


def spread(count: int, at_most: int, include: int | None = None) -> list[int]:
    """Return at most `at_most` (>= 3) of `count` indices, evenly: always the first and the last,
    and `include` instead of its neighbour.
    """
    if count <= at_most:
        return list(range(count))
    chosen = [round(i * (count - 1) / (at_most - 1)) for i in range(at_most)]
    if include is not None and include not in chosen:
        nearest = min(range(1, at_most - 1), key=lambda i: abs(chosen[i] - include))
        chosen[nearest] = include
    return sorted(chosen)


def step_labels(records: Sequence[Record]) -> list[str]:
    """Return `step 12` for each, with the micro-batch if a step occurs more than once."""
    times = Counter(record.step for record in records)
    return [
        f"step {r.step}" + (f", micro-batch {r.micro_batch}" if times[r.step] > 1 else "")
        for r in records
    ]


def span(records: Sequence[Record]) -> str:
    """Return `step 3` or `steps 1 to 8` for a title."""
    first, last = records[0].step, records[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _badness(row: Row) -> tuple[Mark, float]:
    return mark(row), -1.0 if row.absmax is None or math.isnan(row.absmax) else row.absmax


def _merge(order: list[T], sequence: Iterable[T]) -> None:
    """Insert what is new after its predecessor in `sequence`, or before its successor there."""
    sequence, known = list(sequence), set(order)
    at = next((order.index(item) for item in sequence if item in known), len(order))
    for item in sequence:
        if item in known:
            at = order.index(item) + 1
        else:
            order.insert(at, item)
            known.add(item)
            at += 1


def _by_depth(lines: list[Line]) -> list[Line]:
    """Return each stack of layers in ascending order, in the places that it takes: a pass that ran
    backwards meets the last one first.
    """
    layers = sorted((x for x in lines if x.layer is not None), key=lambda line: line.layer or 0)
    stacks = {line.parent: iter([x for x in layers if x.parent == line.parent]) for line in layers}
    return [line if line.layer is None else next(stacks[line.parent]) for line in lines]
