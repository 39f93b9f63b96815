"""The learning-rate factor."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from npt.config import SCHEDULES
from npt.guard.schedule import learning_rate_scale

kinds = pytest.mark.parametrize("kind", SCHEDULES)


@kinds
def test_warm_up_is_linear_starts_above_zero_and_reaches_one(kind) -> None:
    assert [learning_rate_scale(s, kind, 4, 20) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_falling_schedules_pass_a_half_midway_and_end_at_zero() -> None:
    for kind in ("cosine", "linear"):
        assert learning_rate_scale(12, kind, 4, 20) == pytest.approx(0.5)
        # cos(pi) is rounded
        assert learning_rate_scale(20, kind, 4, 20) == pytest.approx(0.0, abs=1e-15)
        assert learning_rate_scale(19, kind, 4, 20) > 0.0
    assert learning_rate_scale(8, "linear", 4, 20) == pytest.approx(0.75)
    # cos(pi / 4)
    assert learning_rate_scale(8, "cosine", 4, 20) == pytest.approx((1 + 0.5**0.5) / 2)
    assert learning_rate_scale(99, "constant", 2, None) == 1.0  # it needs no length


@kinds
@given(warmup=st.integers(0, 30), total=st.integers(1, 60))
@settings(deadline=None, max_examples=60, derandomize=True)
def test_rates_lie_in_zero_to_one_and_rise_then_fall(kind, warmup, total) -> None:
    scales = [learning_rate_scale(s, kind, warmup, total) for s in range(total)]
    assert all(0.0 < s <= 1.0 for s in scales)
    peak = min(warmup, total)
    assert scales[:peak] == sorted(scales[:peak])
    assert scales[peak:] == sorted(scales[peak:], reverse=True)


@kinds
@given(step=st.integers(0, 200))
@settings(deadline=None, max_examples=20, derandomize=True)
def test_a_run_longer_than_planned_gets_no_negative_or_rising_rate(kind, step) -> None:
    assert 0.0 <= learning_rate_scale(step, kind, 5, 20) <= 1.0
    if step >= 20 and kind != "constant":
        # cos(pi) is rounded
        assert learning_rate_scale(step, kind, 5, 20) == pytest.approx(0.0, abs=1e-15)
