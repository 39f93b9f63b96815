"""A study's table by part: which rates train with which settings, and where that ends."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Row = Mapping[str, Any]

RATE = "learning_rate"
LEVELS = 12
"""Different numbers up to which each is a level of its own; more, as a random design has, are put
into classes.
"""

RATE_CLASSES = 8
"""Classes, equal in the logarithm, of the rates of a map that has more than LEVELS."""


@dataclass(frozen=True)
class Cell:
    """The trials of one setting at one rate. failed: share that was not stable. kl: median of the
    finite ones.
    """

    count: int
    failed: float
    diverged: float
    kl: float | None


@dataclass(frozen=True)
class Map:
    """A part's outcomes by learning rate and by its other settings.

    setting: what its lines differ in. heads: the rate of each column, or if there are many the ends
    of its class. edges: by line, the largest rate up to which every trial was stable, and the
    smallest at which one was not; None if there is none. groups: each line's rows.
    """

    part: str
    setting: str
    heads: tuple[str, ...]
    lines: tuple[str, ...]
    cells: Mapping[tuple[int, int], Cell]
    edges: tuple[tuple[float | None, float | None], ...]
    groups: tuple[tuple[Row, ...], ...]

    def top(self, count: int) -> Map:
        """Return the map of the first lines."""
        return replace(
            self,
            lines=self.lines[:count],
            cells={at: cell for at, cell in self.cells.items() if at[0] < count},
            edges=self.edges[:count],
            groups=self.groups[:count],
        )


def finished(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of trials that have ended."""
    return [row for row in rows if row["outcome"] in ("stable", "worse", "diverged")]


def parts_of(rows: Sequence[Row]) -> list[str]:
    """Return the parts' names, in the design's order."""
    return list(dict.fromkeys(part for row in rows for part in row["parts"].split(";")))


def of_part(rows: Sequence[Row], part: str) -> list[Row]:
    """Return the rows of a part, each with the arm that it has there; twice if it has two."""
    return [
        {**row, "parts": part, "arms": arm}
        for row in rows
        for own, arm in places(row)
        if own == part
    ]


def places(row: Row) -> list[tuple[str, str]]:
    """Return the part and the arm of each place of a trial in the specification."""
    return list(zip(row["parts"].split(";"), row["arms"].split(";"), strict=True))


def factors(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return what these rows differ in, seeds left out: the arms, if they are named, and the
    settings that no arm decides.
    """

    def varied(group: Sequence[Row]) -> list[str]:
        names = [name for name in columns if name != "seed"]
        return [name for name in names if len({repr(row.get(name)) for row in group}) > 1]

    arms: dict[str, list[Row]] = {}
    for row in rows:
        arms.setdefault(row["arms"], []).append(row)
    if len(arms) < 2 or "" in arms:
        return varied(rows)
    within = {name for group in arms.values() for name in varied(group)}
    return ["arms", *(name for name in varied(rows) if name in within)]


def level_text(value: Any) -> str:
    """Return a setting's value in a few letters."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_order(values: Sequence[Any]) -> list[Any]:
    """Return the different values: numbers by their size, others as they first come."""
    kinds = list(dict.fromkeys(values))
    return sorted(kinds, key=lambda value: value if is_number(value) else kinds.index(value))


def is_number(value: Any) -> bool:
    """Return whether a setting's value is a number, which true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def sought(row: Row) -> bool:
    """Return whether the trial sought a limit: its figures are of no one value that was chosen."""
    return row.get("limit_low") is not None or row.get("limit_high") is not None


def failure(row: Row) -> float:
    """Return 1 for a run that diverged or ended worse than it began, 0 for the others."""
    return float(row["outcome"] != "stable")


def log_kl(row: Row) -> float | None:
    """Return log10 of the KL of a run that was stable."""
    kl = row["kl"]
    known = row["outcome"] == "stable" and kl is not None and 0 < kl < math.inf
    return math.log10(kl) if known else None


def training_seconds(row: Row) -> float:
    """Return the seconds of a run's start and training, its other measurements left out."""
    return float((row.get("seconds_start") or 0.0) + (row["seconds_training"] or 0.0))


def stability_map(rows: Sequence[Row], part: str, columns: Sequence[str]) -> Map | None:
    """Return the map of a part; None if its learning rate is sought, or no setting has more than
    one of it, as in a random design.
    """
    own = [
        row for row in finished(of_part(rows, part)) if row[RATE] is not None and not sought(row)
    ]
    others = [name for name in factors(own, columns) if name != RATE]
    orders = {name: in_order([row[name] for row in own]) for name in others}
    own.sort(key=lambda row: [orders[name].index(row[name]) for name in others])
    groups: dict[str, list[Row]] = {}
    for row in own:
        groups.setdefault(_line(row, others), []).append(row)
    if all(len({row[RATE] for row in line}) < 2 for line in groups.values()):
        return None
    heads, column = _rate_columns(sorted({row[RATE] for row in own}))
    cells: dict[tuple[int, int], Cell] = {}
    edges = []
    for i, line in enumerate(groups.values()):
        for j in {column[row[RATE]] for row in line}:
            cells[i, j] = _cell([row for row in line if column[row[RATE]] == j])
        bad = min((row[RATE] for row in line if failure(row)), default=None)
        good = [row[RATE] for row in line if bad is None or row[RATE] < bad]
        edges.append((max(good, default=None), bad))
    called = ", ".join("arm" if name == "arms" else name for name in others)
    return Map(
        part,
        called or "all settings are alike",
        heads,
        tuple(groups),
        cells,
        tuple(edges),
        tuple(map(tuple, groups.values())),
    )


def _rate_columns(rates: Sequence[float]) -> tuple[tuple[str, ...], dict[float, int]]:
    """Return what a map's columns are called, and the column of each rate."""
    if len(rates) <= LEVELS:
        return tuple(f"{rate:g}" for rate in rates), {rate: j for j, rate in enumerate(rates)}
    low, high = math.log(rates[0]), math.log(rates[-1])
    width = (high - low) / RATE_CLASSES
    ends = [math.exp(low + j * width) for j in range(RATE_CLASSES + 1)]
    column = {rate: min(RATE_CLASSES - 1, int((math.log(rate) - low) / width)) for rate in rates}
    return tuple(f"{a:.2g} to {b:.2g}" for a, b in itertools.pairwise(ends)), column


def _line(row: Row, others: Sequence[str]) -> str:
    words = [
        f"{name} {level_text(row[name])}"
        if len(others) > 1 and name != "arms"
        else level_text(row[name])
        for name in others
    ]
    return ", ".join(words) or "all"


def _cell(rows: Sequence[Row]) -> Cell:
    known = [row["kl"] for row in rows if row["kl"] is not None and math.isfinite(row["kl"])]
    outcomes = [row["outcome"] for row in rows]
    return Cell(
        len(rows),
        1 - outcomes.count("stable") / len(rows),
        outcomes.count("diverged") / len(rows),
        statistics.median(known) if known else None,
    )


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points that none is better than in both coordinates, small being good,
    by the first coordinate.
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    found, best = [], math.inf
    for i in order:
        if points[i][1] < best:
            best = points[i][1]
            found.append(i)
    return found
