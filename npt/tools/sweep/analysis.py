"""A study's table by part: which rates train with which settings, and where that ends."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]

RATE = "learning_rate"

LEVELS = 12  # different numbers up to which each is a level of its own; more are put into classes
RATE_CLASSES = 8  # classes, equal in the logarithm, of the rates of a map that has more than LEVELS


@dataclass(frozen=True)
class Cell:
    """The trials of one setting at one rate. failed: those not stable. kl: median of the finite."""

    count: int
    failed: int
    diverged: int
    kl: float | None


@dataclass(frozen=True)
class Line:
    """One setting of a map. cells: by column. good: the largest rate up to which every trial was
    stable. bad: the smallest at which one was not.
    """

    name: str
    rows: tuple[Row, ...]
    cells: Mapping[int, Cell]
    good: float | None
    bad: float | None

    @property
    def best(self) -> Row | None:
        """The stable trial with the smallest KL."""
        stable = [row for row in self.rows if row["outcome"] == "stable" and row["kl"]]
        return min(stable, key=lambda row: row["kl"], default=None)


@dataclass(frozen=True)
class Map:
    """A part's outcomes by learning rate and by its other settings. setting: what its lines differ
    in. heads: the rate of each column, or if there are many the ends of its class.
    """

    part: str
    setting: str
    heads: tuple[str, ...]
    lines: tuple[Line, ...]


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
    """Return the names that differ in these rows, seeds left out: the arms, if named, and the
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
    own = [r for r in finished(of_part(rows, part)) if r[RATE] is not None and not sought(r)]
    others = [name for name in factors(own, columns) if name != RATE]
    orders = {name: in_order([row[name] for row in own]) for name in others}
    own.sort(key=lambda row: [orders[name].index(row[name]) for name in others])
    groups: dict[str, list[Row]] = {}
    for row in own:
        words = [level_text(row[name]) for name in others]
        if len(others) > 1:
            named = zip(others, words, strict=True)
            words = [word if name == "arms" else f"{name} {word}" for name, word in named]
        groups.setdefault(", ".join(words) or "all", []).append(row)
    if all(len({row[RATE] for row in group}) < 2 for group in groups.values()):
        return None
    heads, column = _rate_columns(sorted({row[RATE] for row in own}))
    lines = tuple(_line(name, group, column) for name, group in groups.items())
    called = ", ".join("arm" if name == "arms" else name for name in others)
    return Map(part, called or "all settings are alike", heads, lines)


def _rate_columns(rates: Sequence[float]) -> tuple[tuple[str, ...], dict[float, int]]:
    """Return the names of a map's columns, and the column of each rate."""
    if len(rates) <= LEVELS:
        return tuple(f"{rate:g}" for rate in rates), {rate: j for j, rate in enumerate(rates)}
    low, high = math.log(rates[0]), math.log(rates[-1])
    width = (high - low) / RATE_CLASSES
    ends = [math.exp(low + j * width) for j in range(RATE_CLASSES + 1)]
    column = {rate: min(RATE_CLASSES - 1, int((math.log(rate) - low) / width)) for rate in rates}
    return tuple(f"{a:.2g} to {b:.2g}" for a, b in itertools.pairwise(ends)), column


def _line(name: str, rows: Sequence[Row], column: Mapping[float, int]) -> Line:
    by_column: dict[int, list[Row]] = {}
    for row in rows:
        by_column.setdefault(column[row[RATE]], []).append(row)
    cells = {}
    for j, own in sorted(by_column.items()):
        kls = [row["kl"] for row in own if row["kl"] is not None and math.isfinite(row["kl"])]
        outcomes = [row["outcome"] for row in own]
        failed, diverged = len(own) - outcomes.count("stable"), outcomes.count("diverged")
        cells[j] = Cell(len(own), failed, diverged, statistics.median(kls) if kls else None)
    bad = min((row[RATE] for row in rows if failure(row)), default=None)
    good = [row[RATE] for row in rows if bad is None or row[RATE] < bad]
    return Line(name, tuple(rows), cells, max(good, default=None), bad)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points that none is better than in both coordinates, small being good,
    by the first coordinate.
    """
    found, best = [], math.inf
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best:
            best = points[i][1]
            found.append(i)
    return found
