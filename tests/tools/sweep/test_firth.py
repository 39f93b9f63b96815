"""The chance to fail, against cases that are known in closed form, and where plain logistic
regression has no answer.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.tools.sweep.effects import _Firth


def groups(*counts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """An intercept and a column for each group but the first, of (failures, trials) each."""
    design = [
        [1.0, *(float(i == j) for j in range(1, len(counts)))]
        for i, (_, trials) in enumerate(counts)
        for _ in range(trials)
    ]
    return np.array(design), np.array(
        [float(k < failed) for failed, trials in counts for k in range(trials)]
    )


@pytest.mark.parametrize(
    "counts",
    [((2, 10), (7, 9)), ((0, 6), (6, 6)), ((0, 2), (0, 3), (1, 4)), ((5, 5),), ((0, 40), (1, 40))],
)
def test_a_group_has_half_a_failure_and_half_a_success_more(counts) -> None:
    """A model with a column for each group has the estimate (k + 1/2) / (n + 1),
    separated or not.
    """
    design, outcomes = groups(*counts)
    fitted = _Firth(design, outcomes)
    for i, (failed, trials) in enumerate(counts):
        row = np.array([[1.0, *(float(i == j) for j in range(1, len(counts)))]])
        mean, low, high = fitted.mean(row)
        assert mean == pytest.approx((failed + 0.5) / (trials + 1), abs=1e-7)
        # Wald's, of the log odds of one group
        half = 1.959964 / math.sqrt(trials * mean * (1 - mean))
        assert [math.log(x / (1 - x)) for x in (low, high)] == pytest.approx(
            [math.log(mean / (1 - mean)) + s * half for s in (-1, 1)]
        )


def test_the_coefficients_are_found_within_three_standard_errors() -> None:
    draw = np.random.default_rng(0)
    design = np.hstack([np.ones((4000, 1)), draw.normal(size=(4000, 2))])
    truth = np.array([-1.0, 0.8, -0.5])
    outcomes = (draw.random(4000) < 1 / (1 + np.exp(-design @ truth))).astype(float)
    fitted = _Firth(design, outcomes)
    found, errors = (
        fitted._basis @ fitted._weights,
        np.sqrt(np.diag(fitted._basis @ fitted._covariance @ fitted._basis.T)),
    )
    assert (np.abs(found - truth) < 3 * errors).all() and errors.max() < 0.06


def test_separation_has_a_finite_estimate_and_a_wide_interval() -> None:
    rate = np.array(list(itertools.product([-1.0, 1.0], [0.0, 1.0], range(3))))
    design = np.hstack([np.ones((len(rate), 1)), rate[:, :2]])
    fitted = _Firth(design, (rate[:, 0] > 0).astype(float))
    low, high = (
        fitted.mean(np.array([[1.0, -1.0, 0.5]])),
        fitted.mean(np.array([[1.0, 1.0, 0.5]])),
    )
    assert low[0] < 0.15 and high[0] > 0.85 and low[2] > 0.3 and high[1] < 0.7
    assert low[0] == pytest.approx(1 - high[0], abs=1e-7)


def test_columns_that_say_the_same_change_nothing() -> None:
    design, outcomes = groups((1, 6), (4, 5))
    twice = np.hstack([design, design[:, 1:], 3 * design[:, :1]])
    once = _Firth(design, outcomes).mean(design[-1:])
    assert _Firth(twice, outcomes).mean(twice[-1:]) == pytest.approx(once, abs=1e-7)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=2, max_size=30
    )
)
def test_every_chance_and_interval_lies_within_0_and_1(trials) -> None:
    design = np.array(
        [
            [1.0, *(float(a == k) for k in range(4)), *(float(b == k) for k in range(3))]
            for a, b, _ in trials
        ]
    )
    fitted = _Firth(design, np.array([float(failed) for *_, failed in trials]))
    for row in np.unique(design, axis=0):
        mean, low, high = fitted.mean(row[None])
        assert 0 <= low < mean < high <= 1
