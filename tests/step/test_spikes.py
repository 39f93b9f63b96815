"""The spike guard: what it calls a spike, and what cannot move its limits."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from npt.guard.spikes import MINIMUM, SpikeGuard


def exceeds(guard: SpikeGuard, loss: float, norm: float) -> bool:
    return bool(guard.exceeds(torch.tensor(loss), torch.tensor(norm)))


def steady(steps: int = 60, k: float = 10.0) -> SpikeGuard:
    """After steps whose loss and norm wander by a tenth around 1 and 5."""
    generator = torch.Generator().manual_seed(0)
    guard = SpikeGuard(k)
    for wobble in (0.1 * torch.randn(steps, generator=generator)).exp().tolist():
        guard.accept(wobble, 5 * wobble)
    return guard


def test_nothing_is_a_spike_before_there_is_a_history() -> None:
    guard = steady(MINIMUM - 1)
    assert not exceeds(guard, 1e30, 1e30)
    guard.accept(1.0, 5.0)
    assert exceeds(guard, 1e30, 5.0)


def test_a_spike_in_loss_or_norm_is_one_and_what_was_usual_is_not() -> None:
    guard = steady()
    assert not exceeds(guard, 1.2, 6.0)
    assert exceeds(guard, 100.0, 5.0)
    assert exceeds(guard, 1.0, 500.0)
    assert not exceeds(guard, 1e-9, 1e-9)  # a fall is no spike


def test_a_heavy_upper_tail_is_no_spike() -> None:
    generator = torch.Generator().manual_seed(1)
    guard, alarms = SpikeGuard(10.0), 0
    # log-normal, over four orders of magnitude
    for norm in torch.randn(1000, generator=generator).exp().tolist():
        alarms += exceeds(guard, 1.0, norm)
        guard.accept(1.0, norm)
    assert alarms == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0]), max_size=30))
def test_values_without_a_logarithm_move_nothing(values: list[float]) -> None:
    guard = steady()
    before = guard.limits
    for value in values:
        guard.accept(value, value)
    assert guard.limits == before


def test_one_spike_that_was_let_through_hardly_moves_the_limits() -> None:
    guard = steady()
    before = guard.limits[1]
    guard.accept(1e6, 1e6)
    assert guard.limits[1] == pytest.approx(before, rel=0.2)


def test_values_that_repeat_exactly_leave_room_for_rounding() -> None:
    guard = SpikeGuard(10.0)
    for _ in range(50):
        guard.accept(2.0, 3.0)
    assert not exceeds(guard, 2.0 * 1.05, 3.0 * 1.05)
    assert exceeds(guard, 2.0, 3.0 * 1.2)
