"""What a study's table says: which rates train, which settings matter, and how sure that is.

Effects are those of an additive model, fitted by least squares to a part's trials: a mean, and a
contribution of each level of each setting. A level's effect is the model's mean over an even
mixture of all other levels, so an unbalanced design does not tilt it, or where the trials cannot
tell that, over the mixture that they are; its interval is Student's. A level that they cannot tell
from another setting's is left out. A response that is 0 or 1 has the chance that a logistic model
gives it in the place of a mean (`npt.tools.sweep.logistic`): an additive one would leave the range from 0
to 1. It is averaged over the other settings of those trials for which it is told at every level, so
that levels are compared at the same settings. A setting's share of the variance is what the model
loses when it is left out. What is left over is split by the trials that differ in nothing but their
seed: their mean square, for each degree of freedom that is left over, is noise, the rest is what
settings do together.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npt.tools.sweep.logistic import Logistic

Row = Mapping[str, Any]

RATE = "learning_rate"
LEVELS = 12
"""Levels up to which numbers count as levels of their own; more, as a random design has, are put
into four classes of equal count.
"""

RATE_CLASSES = 8
"""Classes, equal in the logarithm, that the rates of a map are put into where there are more than
LEVELS.
"""

ROUNDING = 1e-8
"""Weights of a level are between -1 and 1; fp64 makes no larger difference of them."""

_CLASSES = 4
_ENOUGH = 4
"""Trials that an analysis needs beside one for each parameter of the model."""


@dataclass(frozen=True)
class Effect:
    """One level of a setting. mean: the response there. low, high: of its 95% interval, None where
    there is no spread to tell from.
    """

    setting: str
    level: str
    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True)
class Analysis:
    """Main effects on one response. shares: of the variance, by setting; `together` of what
    settings do together, and `seeds` of noise, None where no two trials differ in their seed alone:
    `together` is both then. chance: the response is 0 or 1, and an effect the chance of 1."""

    response: str
    trials: int
    effects: tuple[Effect, ...]
    shares: Mapping[str, float]
    together: float
    seeds: float | None
    chance: bool = False

    @property
    def rest(self) -> str:
        """What `together` is of."""
        return "together and noise" if self.seeds is None else "together"


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

    setting: what its lines differ in. heads: the rate of each column, or where there are many the
    ends of its class. edges: by line, the largest rate up to which every trial was stable, and the
    smallest at which one was not; None where there is none. groups: each line's rows.
    """

    part: str
    setting: str
    heads: tuple[str, ...]
    lines: tuple[str, ...]
    cells: Mapping[tuple[int, int], Cell]
    edges: tuple[tuple[float | None, float | None], ...]
    groups: tuple[tuple[Row, ...], ...]

    def top(self, count: int) -> Map:
        """The map of the first lines."""
        cells = {place: cell for place, cell in self.cells.items() if place[0] < count}
        return replace(
            self,
            lines=self.lines[:count],
            cells=cells,
            edges=self.edges[:count],
            groups=self.groups[:count],
        )


def finished(rows: Sequence[Row]) -> list[Row]:
    """Rows of trials that have come to an end."""
    return [row for row in rows if row["outcome"] in ("stable", "worse", "diverged")]


def parts_of(rows: Sequence[Row]) -> list[str]:
    """The parts' names, in the design's order."""
    return list(dict.fromkeys(part for row in rows for part in row["parts"].split(";")))


def of_part(rows: Sequence[Row], part: str) -> list[Row]:
    """The rows of a part, each with the arm that it is there; one that stands under two arms of it
    is there twice.
    """
    return [
        {**row, "parts": part, "arms": arm}
        for row in rows
        for own, arm in places(row)
        if own == part
    ]


def places(row: Row) -> list[tuple[str, str]]:
    """The part and the arm of each place at which a trial stands."""
    return list(zip(row["parts"].split(";"), row["arms"].split(";"), strict=True))


def settings_in(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """The settings in which rows differ, seeds left out."""
    return [
        name
        for name in columns
        if name != "seed" and len({repr(row.get(name)) for row in rows}) > 1
    ]


def level_text(value: Any) -> str:
    """A setting's value in a few letters."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def stability_map(rows: Sequence[Row], part: str, columns: Sequence[str]) -> Map | None:
    """The map of a part; None where its learning rate is sought, or no setting has more than one of
    it, as in a random design.
    """
    own = [
        row for row in finished(of_part(rows, part)) if row[RATE] is not None and not sought(row)
    ]
    others = [name for name in factors(own, columns) if name != RATE]
    groups: dict[str, list[Row]] = {}
    for row in _ordered(own, others):
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
        edges.append(
            (max((row[RATE] for row in line if bad is None or row[RATE] < bad), default=None), bad)
        )
    called = (
        ", ".join("arm" if name == "arms" else name for name in others) or "all settings are alike"
    )
    return Map(
        part,
        called,
        heads,
        tuple(groups),
        cells,
        tuple(edges),
        tuple(tuple(line) for line in groups.values()),
    )


def sought(row: Row) -> bool:
    """Whether the trial sought a limit: its figures are of no one value that was chosen."""
    return row.get("limit_low") is not None or row.get("limit_high") is not None


def factors(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """What these rows differ in: the arms, where they are named, and the settings that no arm
    decides.
    """
    varied = settings_in(rows, columns)
    if not all(row["arms"] for row in rows) or len({row["arms"] for row in rows}) < 2:
        return varied
    groups = [
        [row for row in rows if row["arms"] == arm]
        for arm in dict.fromkeys(row["arms"] for row in rows)
    ]
    return [
        "arms",
        *(name for name in varied if any(name in settings_in(group, columns) for group in groups)),
    ]


def _rate_columns(rates: Sequence[float]) -> tuple[tuple[str, ...], dict[float, int]]:
    """What a map's columns are called, and the column of each rate."""
    if len(rates) <= LEVELS:
        return tuple(f"{rate:g}" for rate in rates), {rate: j for j, rate in enumerate(rates)}
    low, high = math.log(rates[0]), math.log(rates[-1])
    width = (high - low) / RATE_CLASSES
    ends = [math.exp(low + j * width) for j in range(RATE_CLASSES + 1)]
    column = {rate: min(RATE_CLASSES - 1, int((math.log(rate) - low) / width)) for rate in rates}
    return tuple(f"{a:.2g} to {b:.2g}" for a, b in itertools.pairwise(ends)), column


def _ordered(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """Rows by these settings: numbers by their size, everything else as it first comes."""
    keys = (
        list(zip(*(_order_of([row[name] for row in rows]) for name in names), strict=True))
        if names
        else [()] * len(rows)
    )
    return [rows[i] for i in sorted(range(len(rows)), key=keys.__getitem__)]


def _line(row: Row, others: Sequence[str]) -> str:
    words = [str(row["arms"])] if "arms" in others else []
    settings = [name for name in others if name != "arms"]
    words += [
        f"{name} {level_text(row[name])}" if len(others) > 1 else level_text(row[name])
        for name in settings
    ]
    return ", ".join(words) or "all"


def _cell(rows: Sequence[Row]) -> Cell:
    known = [row["kl"] for row in rows if row["kl"] is not None and math.isfinite(row["kl"])]
    share = {
        name: sum(row["outcome"] == name for row in rows) / len(rows)
        for name in ("stable", "diverged")
    }
    return Cell(
        len(rows),
        1 - share["stable"],
        share["diverged"],
        statistics.median(known) if known else None,
    )


def log_kl(row: Row) -> float | None:
    """log10 of the KL of a run that was stable."""
    kl = row["kl"]
    return (
        math.log10(kl)
        if row["outcome"] == "stable" and kl is not None and kl > 0 and math.isfinite(kl)
        else None
    )


def training_seconds(row: Row) -> float:
    """Seconds that a run's start and training took, what is measured beside them left out."""
    return float((row.get("seconds_start") or 0.0) + (row["seconds_training"] or 0.0))


def failure(row: Row) -> float | None:
    """1 for a run that diverged or ended worse than it began, 0 for the others."""
    return float(row["outcome"] != "stable")


def analyse(
    rows: Sequence[Row],
    names: Sequence[str],
    response: Callable[[Row], float | None],
    called: str,
    *,
    share: bool = False,
) -> Analysis | None:
    """Main effects and shares of variance.

    Args:
        rows: of one part.
        names: of the settings in question.
        response: of a row; None leaves it out.
        called: the response's name.
        share: the response is 0 or 1.

    Returns:
        None where there are too few trials, or the response is the same in all.
    """
    ended = finished(rows)
    known = [(i, value) for i, row in enumerate(ended) if (value := response(row)) is not None]
    rows, y = [ended[i] for i, _ in known], np.array([value for _, value in known], np.float64)
    # the same classes for every response
    of_all = {name: _levels([row.get(name) for row in ended]) for name in names}
    levels = {name: [found[i] for i, _ in known] for name, found in of_all.items()}
    levels = {name: found for name, found in levels.items() if len(set(found)) > 1}
    if (
        not levels
        or len(rows) < 1 + sum(len(set(found)) - 1 for found in levels.values()) + _ENOUGH
        or float(np.ptp(y)) == 0
    ):
        return None
    order = {name: list(dict.fromkeys(_sorted(found))) for name, found in levels.items()}
    columns = {name: _columns(levels[name], order[name]) for name in levels}
    full = np.hstack([np.ones((len(y), 1)), *columns.values()])
    total = float(np.square(y - y.mean()).sum())
    left = _left(full, y)
    rank = int(np.linalg.matrix_rank(full))
    free = len(y) - rank
    noise = left / free if free > 0 else None
    inverse = np.linalg.pinv(full.T @ full)
    told = inverse @ full.T @ full  # of a level's weights it leaves what the trials tell
    beta = inverse @ full.T @ y
    chances = Logistic.fit(full, y) if share else None
    mixtures = np.eye(1, full.shape[1])[0], full.mean(axis=0)
    effects, at = [], 1
    for name, matrix in columns.items():
        width = matrix.shape[1]
        for level in order[name]:
            block, code = slice(at, at + width), _code(order[name], level)
            weights = next(
                (w for mixture in mixtures if _is_told(w := _with(mixture, block, code), told)),
                None,
            )
            if weights is None:
                continue
            count = levels[name].count(level)
            if chances is not None:
                others = _told_at_every_level(
                    full, block, [_code(order[name], other) for other in order[name]], told
                )
                others = (
                    others if others.any() else np.array([found == level for found in levels[name]])
                )
                effects.append(
                    Effect(
                        name,
                        level[1],
                        *chances.mean_chance(_all_with(full[others], block, code)),
                        count,
                    )
                )
                continue
            mean = float(weights @ beta)
            half = (
                None
                if noise is None
                else student(free) * math.sqrt(max(0.0, noise * float(weights @ inverse @ weights)))
            )
            low, high = (None, None) if half is None else (mean - half, mean + half)
            effects.append(Effect(name, level[1], mean, low, high, count))
        at += width
    if not effects:
        return None
    shares = {}
    for name in columns:
        without = np.hstack(
            [np.ones((len(y), 1)), *(matrix for other, matrix in columns.items() if other != name)]
        )
        shares[name] = max(0.0, (_left(without, y) - left) / total)
    pure, pure_free = _pure(rows, names, y)
    seeds = None if not pure_free else min(left, pure / pure_free * free) / total
    return Analysis(
        called, len(y), tuple(effects), shares, left / total - (seeds or 0.0), seeds, share
    )


def student(free: int) -> float:
    """The 97.5% point of Student's t with `free` degrees of freedom: exact for one and two, else
    the expansion about the normal point (Abramowitz and Stegun 26.7.5), within half a per cent from
    three on."""
    if free == 1:
        return 12.7062
    if free == 2:
        return 4.30265
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / free**power for power, term in enumerate(terms, 1))


_Level = tuple[float, str]


def _levels(values: Sequence[Any]) -> list[_Level]:
    """Each value's level, by which they are sorted, and its name. Numbers of more than LEVELS kinds
    are put into classes.
    """
    if (
        all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        and len(set(values)) > LEVELS
    ):
        ends = [float(np.quantile(values, i / _CLASSES)) for i in range(1, _CLASSES)]
        names = [
            f"≤ {ends[0]:.3g}",
            *(f"{a:.3g} to {b:.3g}" for a, b in itertools.pairwise(ends)),
            f"> {ends[-1]:.3g}",
        ]
        return [
            (float(i), names[i]) for value in values for i in (sum(value > end for end in ends),)
        ]
    return list(zip(_order_of(values), map(level_text, values), strict=True))


def _order_of(values: Sequence[Any]) -> list[float]:
    """By what values are sorted: numbers by their size, others as they first come."""
    kinds = list(dict.fromkeys(values))
    return [
        (
            float(v)
            if isinstance(v, int | float) and not isinstance(v, bool)
            else float(kinds.index(v))
        )
        for v in values
    ]


def _sorted(levels: Sequence[_Level]) -> list[_Level]:
    return sorted(set(levels))


def _code(order: Sequence[_Level], level: _Level) -> np.ndarray:
    """A level's columns: they sum to zero over the levels, so the model's mean is an even mixture
    of them.
    """
    place = order.index(level)
    return (
        np.full(len(order) - 1, -1.0) if place == len(order) - 1 else np.eye(len(order) - 1)[place]
    )


def _with(mixture: np.ndarray, block: slice, code: np.ndarray) -> np.ndarray:
    """A mixture of all settings, but for one of them that is at a level."""
    weights = mixture.copy()
    weights[block] = code
    return weights


def _all_with(rows: np.ndarray, block: slice, code: np.ndarray) -> np.ndarray:
    """Rows of a design, but for one setting that is at a level in all of them."""
    changed = rows.copy()
    changed[:, block] = code
    return changed


def _told_at_every_level(
    design: np.ndarray, block: slice, codes: Sequence[np.ndarray], told: np.ndarray
) -> np.ndarray:
    """Of which trials the model tells what they would have come to at every level of a setting."""
    changed = [_all_with(design, block, code) for code in codes]
    return np.all([np.abs(rows @ told - rows).max(axis=1) <= ROUNDING for rows in changed], axis=0)


def _is_told(weights: np.ndarray, told: np.ndarray) -> bool:
    return float(np.abs(weights @ told - weights).max()) <= ROUNDING


def _columns(levels: Sequence[_Level], order: Sequence[_Level]) -> np.ndarray:
    return np.array([_code(order, level) for level in levels])


def _left(matrix: np.ndarray, y: np.ndarray) -> float:
    """Sum of squares that the model leaves."""
    solution = np.linalg.lstsq(matrix, y, rcond=None)[0]
    return float(np.square(y - matrix @ solution).sum())


def _pure(rows: Sequence[Row], names: Sequence[str], y: np.ndarray) -> tuple[float, int]:
    """Sum of squares within groups of trials that differ in their seed alone, and its degrees of
    freedom.
    """
    groups: dict[tuple[str, ...], list[float]] = {}
    for row, value in zip(rows, y, strict=True):
        groups.setdefault(tuple(repr(row.get(name)) for name in names), []).append(float(value))
    squares = sum(
        sum((value - statistics.fmean(values)) ** 2 for value in values)
        for values in groups.values()
    )
    return squares, len(y) - len(groups)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that none is better than in both coordinates, small being good, by the
    first coordinate.
    """
    order = sorted(range(len(points)), key=lambda i: points[i])
    found, best = [], math.inf
    for i in order:
        if points[i][1] < best:
            best = points[i][1]
            found.append(i)
    return found
