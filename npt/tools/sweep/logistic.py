"""The chance that a trial fails, by its settings: logistic regression with Firth's penalty.

A least-squares line through zeros and ones leaves the range from 0 to 1, and so do its intervals.
Plain logistic regression has no estimate where a setting tells failures from successes without
exception, which a study of limits is full of: its coefficients run off. Firth's penalty (Biometrika
80, 1993), half the logarithm of the information's determinant, which is Jeffreys' prior, takes the
first order of the bias away and keeps every estimate finite (Heinze and Schemper, Statistics in
Medicine 21, 2002). Of one group it is as if half a failure and half a success were added. Left out:
profile intervals; those here are Wald's, taken on the log odds, so that they stay within 0 and 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

STEPS = 200
CONVERGED = 1e-10
"""Change of the log odds at which Newton's steps end."""

FAR = 4.0
"""Log odds that a step may change a trial's by: far from the solution the information says little.
"""

_Z = 1.959964


@dataclass(frozen=True)
class Logistic:
    """A fitted model.

    basis: [P, R], from a row of the design to the R combinations of its columns that the trials
    tell apart. weights: [R]. covariance: [R, R], of the weights.
    """

    basis: np.ndarray
    weights: np.ndarray
    covariance: np.ndarray

    @classmethod
    def fit(cls, design: np.ndarray, outcomes: np.ndarray) -> Logistic:
        """Fit.

        Args:
            design: [N, P], an intercept's ones among its columns; columns may depend on one
                another.
            outcomes: [N], 0 or 1.
        """
        left, sizes, right = np.linalg.svd(design, full_matrices=False)
        kept = sizes > sizes[0] * max(design.shape) * np.finfo(np.float64).eps
        rows, basis = left[:, kept], right[kept].T / sizes[kept]
        weights = np.zeros(rows.shape[1])
        height = _penalised(rows, outcomes, weights)
        for _ in range(STEPS):
            chance, inverse = _state(rows, weights)
            # the diagonal of the hat matrix
            pull = chance * (1 - chance) * np.einsum("nr,rs,ns->n", rows, inverse, rows)
            step = inverse @ (rows.T @ (outcomes - chance + pull * (0.5 - chance)))
            step *= min(1.0, FAR / max(FAR, float(np.abs(rows @ step).max())))
            while (higher := _penalised(rows, outcomes, weights + step)) < height and np.abs(
                rows @ step
            ).max() > CONVERGED:
                step /= 2
            weights, height = weights + step, higher
            if np.abs(rows @ step).max() <= CONVERGED:
                break
        return cls(basis, weights, _state(rows, weights)[1])

    def mean_chance(self, rows: np.ndarray) -> tuple[float, float, float]:
        """The mean chance over rows of a design, [M, P], and its 95% interval."""
        combined = rows @ self.basis
        chance = _chance(combined @ self.weights)
        mean = float(chance.mean())
        slope = (chance * (1 - chance)) @ combined / len(rows)
        odds = math.log(mean / (1 - mean))
        half = (
            _Z * math.sqrt(max(0.0, float(slope @ self.covariance @ slope))) / (mean * (1 - mean))
        )
        low, high = (float(_chance(np.array(odds + side))) for side in (-half, half))
        return mean, low, high


def _chance(odds: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(odds / 2))


def _state(rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every trial's chance, and the inverse of the information."""
    chance = _chance(rows @ weights)
    return chance, np.linalg.inv(rows.T @ (rows * (chance * (1 - chance))[:, None]))


def _penalised(rows: np.ndarray, outcomes: np.ndarray, weights: np.ndarray) -> float:
    """The logarithm of the likelihood, and the penalty."""
    odds = rows @ weights
    chance = _chance(odds)
    sign, size = np.linalg.slogdet(rows.T @ (rows * (chance * (1 - chance))[:, None]))
    likely = -np.logaddexp(0.0, np.where(outcomes > 0, -odds, odds)).sum()
    return float(likely + size / 2) if sign > 0 else -math.inf
