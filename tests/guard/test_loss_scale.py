"""The scale of fp16 losses under a guard: what lowers it, what does not, and what it costs."""

from __future__ import annotations

import pytest
import torch
from guarded_loops import Micro, World, assert_same_state, guarded_run, never_saw, plain_run
from torch import nn

from npt.guard import Guard

GOOD, BAD = [Micro(3)], [Micro(1), Micro(2, fault="gradient")]
LOST = [Micro(4, fault="gradient")]
NO_LOSS = [Micro(5, fault="told")]


def scaler_at(growth_interval: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth_interval)


def test_an_overflow_of_fp16_costs_its_micro_batch_alone() -> None:
    """Scales are powers of two, so that a scaled run equals an unscaled one bit for bit."""
    windows = [BAD, GOOD, LOST, GOOD]
    guarded, plain = World(), World()
    outcomes = guarded_run(guarded, windows, scaler=scaler_at(4))
    plain_run(plain, never_saw(windows), "sum")
    assert_same_state(guarded, plain)
    assert [o.applied for o in outcomes] == [True, True, False, True]


@pytest.mark.parametrize(
    ("windows", "scale", "tracker"),
    [
        # growth after three windows
        ([GOOD] * 3, 2048.0, 0),
        # one by itself costs nothing, lost or with survivors
        ([BAD, GOOD, GOOD], 2048.0, 0),
        ([GOOD, LOST, GOOD, GOOD], 2048.0, 0),
        # nor does a loss that is not finite, ever
        ([NO_LOSS, NO_LOSS, GOOD, GOOD], 1024.0, 2),
        # no growth on it: on the next window
        ([GOOD, GOOD, BAD], 1024.0, 2),
        ([GOOD, GOOD, BAD, GOOD], 2048.0, 0),
        # it recurs within three windows
        ([BAD, GOOD, GOOD, BAD], 1024.0, 0),
        ([BAD, BAD], 512.0, 0),
        ([BAD, GOOD, BAD, GOOD], 512.0, 1),
        ([LOST, LOST, LOST], 256.0, 0),
        # and not within three
        ([BAD, GOOD, GOOD, GOOD, BAD], 2048.0, 2),
    ],
)
def test_the_scale_falls_where_refused_gradients_recur(windows, scale, tracker) -> None:
    scaler = scaler_at(3)
    guarded_run(World(), windows, scaler=scaler)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (scale, tracker)


def test_micro_batches_with_large_gradients_are_used() -> None:
    """One in four has a gradient eight times as large: at the scale that the others bear, it
    overflows always.
    """
    weight = nn.Parameter(torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    guard = Guard(
        nn.ParameterDict({"weight": weight}), torch.optim.SGD([weight], lr=0.0), scaler=scaler
    )
    refused = []
    for _ in range(120):
        for size in (1.0, 1.0, 8.0, 1.0):
            with guard.micro_batch() as micro:
                micro.loss = loss = (weight.half() * size).sum().float()
                scaler.scale(loss).backward()
        refused += [refusal.micro_batch for refusal in guard.step().refused]
    assert set(refused) == {2}  # the large ones alone
    # growth is tried every five windows, and is taken back when it fails for the second time
    assert len(refused) <= 120 * 2 // 5
