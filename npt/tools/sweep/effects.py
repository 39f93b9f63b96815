"""Which settings of a study matter, and how sure that is.

Effects are those of an additive model of a part's trials. A level's effect is the model's mean over
these trials with that level in all of them, so that an unbalanced design does not tilt it; trials
are left out if two settings always change together. The model is least squares with Student's
interval; of a response that is 0 or 1 it is a logistic regression with Firth's penalty (Biometrika
80, 1993), which keeps every estimate finite where a setting tells failures from successes without
exception (Heinze and Schemper, Statistics in Medicine 21, 2002).

A setting's share of the variance is what least squares loses without it. The rest is split by the
trials that differ in nothing but their seed: their mean square, for each degree of freedom that is
left over, is noise, and what remains is what settings do together. `optuna.importance` knows
neither: its importances sum to 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import orth
from scipy.optimize import minimize
from scipy.special import expit, log_expit, logit, ndtri, stdtrit

from npt.tools.sweep.analysis import LEVELS, Row, finished, in_order, is_number, level_text

ROUNDING = 1e-8  # entries of a design are 0 or 1; fp64 makes no larger difference of them

_CLASSES = 4
_SPARE = 4  # trials that an analysis needs in addition to one for each parameter of the model


@dataclass(frozen=True)
class Effect:
    """One level of a setting. mean: the response there. low, high: of its 95% interval, None if
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
    settings do together, and `seeds` of noise, None if no two trials differ in their seed alone:
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
        """The name of `together`."""
        return "together and noise" if self.seeds is None else "together"


def analyse(
    rows: Sequence[Row], names: Sequence[str], response: Callable[[Row], float | None], called: str,
    *, share: bool = False,
) -> Analysis | None:  # fmt: skip
    """Return main effects of the named settings on a response and shares of its variance; None if
    there are too few trials, or the response is the same in all. A response of None leaves a row
    out. share: the response is 0 or 1.
    """
    ended = finished(rows)
    known = [i for i, row in enumerate(ended) if response(row) is not None]
    y = np.array([response(ended[i]) for i in known], np.float64)
    columns, texts = {}, {}  # by setting: [N, levels], True at a trial's level
    for name in names:
        # the same classes for every response
        level, of_all = _levels([row.get(name) for row in ended])
        found = np.unique(level[known])
        if len(found) > 1:
            columns[name] = level[known][:, None] == found
            texts[name] = [of_all[i] for i in found]
    parameters = 1 + sum(matrix.shape[1] - 1 for matrix in columns.values())
    if not columns or len(y) < parameters + _SPARE or np.ptp(y) == 0:
        return None
    design = _design(len(y), columns)
    linear = _LeastSquares(design, y)
    model = _Firth(design, y) if share else linear
    told = np.linalg.pinv(design) @ design  # leaves alone only those rows that the trials tell
    effects, at = [], 1
    for name, matrix in columns.items():
        end = at + matrix.shape[1] - 1
        changed = []  # every trial with each level
        for code in np.eye(matrix.shape[1])[:, 1:]:
            changed.append(design.copy())
            changed[-1][:, at:end] = code
        sure = np.all([np.abs(d @ told - d).max(axis=1) <= ROUNDING for d in changed], axis=0)
        if sure.any():
            effects += [
                Effect(name, text, *model.mean(d[sure]), int(own.sum()))
                for text, d, own in zip(texts[name], changed, matrix.T, strict=True)
            ]
        at = end
    if not effects:
        return None
    total, left = float(np.square(y - y.mean()).sum()), linear.left
    shares = {}
    for name in columns:
        rest = _design(len(y), {other: m for other, m in columns.items() if other != name})
        shares[name] = max(0.0, (_LeastSquares(rest, y).left - left) / total)
    pure, free = _pure([ended[i] for i in known], names, y)
    seeds = min(left, pure / free * linear.free) / total if free else None
    together = left / total - (seeds or 0.0)
    return Analysis(called, len(y), tuple(effects), shares, together, seeds, share)


def _levels(values: Sequence[Any]) -> tuple[np.ndarray, list[str]]:
    """Return each value's level, and the levels' names. Numbers of more than LEVELS kinds
    are put into classes.
    """
    kinds = in_order(values)
    if all(map(is_number, values)) and len(kinds) > LEVELS:
        ends = np.quantile(values, np.arange(1, _CLASSES) / _CLASSES)
        names = [f"{a:.3g} to {b:.3g}" for a, b in itertools.pairwise(ends)]
        names = [f"≤ {ends[0]:.3g}", *names, f"> {ends[-1]:.3g}"]
        return np.searchsorted(ends, values), names
    return np.array([kinds.index(value) for value in values], int), list(map(level_text, kinds))


def _design(count: int, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return an intercept, and a column for each level but a setting's first: [N, P]."""
    return np.hstack([np.ones((count, 1)), *(matrix[:, 1:] for matrix in columns.values())])


class _LeastSquares:
    """A linear model. left: the sum of squares that it leaves. free: degrees of freedom left."""

    def __init__(self, design: np.ndarray, y: np.ndarray):
        self._inverse = np.linalg.pinv(design.T @ design)
        self._weights = self._inverse @ design.T @ y
        self.left = float(np.square(y - design @ self._weights).sum())
        self.free = len(y) - int(np.linalg.matrix_rank(design))

    def mean(self, rows: np.ndarray) -> tuple[float, float | None, float | None]:
        """Return the mean over rows of a design, and its 95% interval by Student's t."""
        row = rows.mean(axis=0)
        mean = float(row @ self._weights)
        if self.free <= 0:
            return mean, None, None
        variance = self.left / self.free * float(row @ self._inverse @ row)
        half = float(stdtrit(self.free, 0.975)) * math.sqrt(max(0.0, variance))
        return mean, mean - half, mean + half


class _Firth:
    """A logistic model, fitted with Firth's penalty: half the log determinant of the information.

    statsmodels' `fit_regularized` is no alternative: it shrinks every chance, and has no interval.
    """

    def __init__(self, design: np.ndarray, y: np.ndarray):
        self._basis = orth(design.T)  # columns may depend on one another
        rows, sign = design @ self._basis, 2 * y - 1

        def information(weights: np.ndarray) -> np.ndarray:
            chance = expit(rows @ weights)
            return rows.T @ (rows * (chance * (1 - chance))[:, None])

        def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
            odds, matrix = rows @ weights, information(weights)
            chance = expit(odds)
            hat = chance * (1 - chance) * ((rows @ np.linalg.pinv(matrix)) * rows).sum(axis=1)
            likelihood = log_expit(sign * odds).sum() + np.linalg.slogdet(matrix)[1] / 2
            return -likelihood, -rows.T @ (y - chance + hat * (0.5 - chance))

        start = np.zeros(rows.shape[1])
        found = minimize(loss, start, jac=True, hess=information, method="trust-exact", tol=1e-8)
        self._weights, self._covariance = found.x, np.linalg.inv(information(found.x))

    def mean(self, rows: np.ndarray) -> tuple[float, float, float]:
        """Return the mean chance over rows of a design, and its 95% interval: Wald's, of the log
        odds, so that it stays within 0 and 1.
        """
        combined = rows @ self._basis
        chance = expit(combined @ self._weights)
        mean = float(chance.mean())
        slope = (chance * (1 - chance)) @ combined / len(rows) / (mean * (1 - mean))
        half = ndtri(0.975) * math.sqrt(max(0.0, float(slope @ self._covariance @ slope)))
        low, high = expit(logit(mean) + np.array([-half, half]))
        return mean, float(low), float(high)


def _pure(rows: Sequence[Row], names: Sequence[str], y: np.ndarray) -> tuple[float, int]:
    """Return the sum of squares within groups of trials that differ in their seed alone, and its
    degrees of freedom.
    """
    groups: dict[tuple[str, ...], list[float]] = {}
    for row, value in zip(rows, y, strict=True):
        groups.setdefault(tuple(repr(row.get(name)) for name in names), []).append(float(value))
    squares = sum(float(np.var(group)) * len(group) for group in groups.values())
    return squares, len(y) - len(groups)
