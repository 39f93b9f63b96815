"""The scale of fp16 losses under a guard: what lowers it, what does not, and what it costs."""

import math

import pytest
import torch
from accelerate import Accelerator
from guarded_loops import Micro, World, assert_same_state, guarded_run, never_saw, plain_run
from torch import nn

from npt.guard import Guard, TooManyRefusalsError

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
        # one with survivors costs nothing by itself
        ([BAD, GOOD, GOOD], 2048.0, 0),
        # most of a window, or all of it, is the scale's fault
        ([GOOD, LOST, GOOD, GOOD], 512.0, 2),
        ([[*BAD, *LOST]], 512.0, 0),
        ([[*NO_LOSS, *LOST]], 512.0, 0),
        # nor does a loss that is not finite, ever
        ([NO_LOSS, NO_LOSS, GOOD, GOOD], 1024.0, 2),
        # no growth on it: on the next window
        ([GOOD, GOOD, BAD], 1024.0, 2),
        ([GOOD, GOOD, BAD, GOOD], 2048.0, 0),
        # it recurs within three windows
        ([BAD, GOOD, GOOD, BAD], 1024.0, 0),
        ([BAD, BAD], 512.0, 0),
        ([BAD, GOOD, BAD, GOOD], 512.0, 1),
        ([LOST, LOST, LOST], 128.0, 0),
        # and not within three
        ([BAD, GOOD, GOOD, GOOD, BAD], 2048.0, 2),
    ],
)
def test_the_scale_falls_where_refused_gradients_recur(windows, scale, tracker) -> None:
    scaler = scaler_at(3)
    guarded_run(World(), windows, scaler=scaler)
    assert (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) == (scale, tracker)


def refused_of(losses, windows: int, **settings) -> list[list[int]]:
    """Train on micro-batches of these losses; the places of those refused, by window."""
    weight, scaler = nn.Parameter(torch.zeros(2)), torch.amp.GradScaler("cpu", **settings)
    model = nn.ParameterDict({"weight": weight})
    guard = Guard(model, torch.optim.SGD([weight], lr=0.1), scaler=scaler)
    refused = []
    for _ in range(windows):
        for loss_of in losses:
            with guard.micro_batch() as micro:
                micro.loss = loss = loss_of(weight)
                scaler.scale(loss).backward()
        refused.append([refusal.micro_batch for refusal in guard.step().refused])
    return refused


def test_micro_batches_with_large_gradients_are_used() -> None:
    """One in four has a gradient eight times as large: at the scale that the others bear, it
    overflows always.
    """
    sizes = (1.0, 1.0, 8.0, 1.0)
    losses = [lambda weight, size=size: (weight.half() * size).sum().float() for size in sizes]
    windows = refused_of(losses, 120, init_scale=1024.0, growth_interval=5)
    refused = [place for places in windows for place in places]
    assert set(refused) == {2}  # the large ones alone
    # growth is tried every five windows, and is taken back when it fails for the second time
    assert len(refused) <= 120 * 2 // 5


class Half(nn.Module):
    """A model whose gradient overflows in fp16 once the scale is 65,536."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.weight, self.fault = nn.Parameter(torch.ones(2)), fault

    def forward(self, size: float) -> torch.Tensor:
        half = self.weight.half() * size
        if self.fault == "gradient":  # of a root at 0, which is infinite at every scale
            half = half + (half - half.detach()).abs().sqrt()
        return half.sum().float() * (math.nan if self.fault == "loss" else 1.0)


def half_run(how: str, size: int, fault: str = "", windows: int = 12, **settings):
    """Train in fp16 with a scale that is far too high, with micro-batches alike in size."""
    model = Half(fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    if how == "accelerate":
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = scaler
        model, optimizer = accelerator.prepare(model, optimizer)
    guard = Guard(model, optimizer, scaler=scaler, **settings) if how != "plain" else None
    if how == "accelerate":
        guard = Guard(model, optimizer, **settings)
    applied = []
    for window in range(windows):
        for place in range(size):
            loss = model(1.0 + 0.25 * ((window + place) % 3)) / size
            if guard is None:
                scaler.scale(loss).backward()
                continue
            with guard.micro_batch() as micro:
                micro.loss = loss * size
                scaler.scale(micro.loss).backward()
        if guard is not None:
            applied.append(guard.step().applied)
            continue
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        applied.append(scaler.get_scale() >= before)
    return model.weight.detach(), scaler.get_scale(), applied, guard


@pytest.mark.parametrize("how", ["loop", "accelerate"])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_scale_that_is_too_high_is_no_bad_data(how, size) -> None:
    weight, scale, applied, guard = half_run(how, size, trace=1)
    assert guard.counts.refused == 0 and not guard.refusals and not guard.findings
    if size == 1:  # else a plain loop drops the survivors of a window as well
        plain, its_scale, its_applied, _ = half_run("plain", size)
        assert torch.equal(weight, plain)
        assert (scale, applied) == (its_scale, its_applied)
    assert applied == [False] * 5 + [True] * 7


def test_most_of_a_window_may_overflow_until_the_scale_has_fallen() -> None:
    """The largest run of refusals in it ends nothing."""
    sizes = 0.1, *[1.0] * 15
    losses = [lambda weight, size=size: (weight.half().float() * size).sum() for size in sizes]
    refused = [len(places) for places in refused_of(losses, 8, init_scale=2.0**18)]
    assert refused == [15, 15, 15, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("size", [1, 4, 8])
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_what_no_scale_mends_is_refused_and_traced(fault, size) -> None:
    with pytest.raises(TooManyRefusalsError, match=f"micro-batch [0-9]+: {fault} "):
        half_run("loop", size, fault, 40, trace=1)
    model = Half(fault)
    guard = Guard(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
        trace=1,
    )
    with guard.micro_batch() as micro:
        micro.loss = loss = model(1.0)
        guard._scale.scaler.scale(loss).backward()
    (refusal,) = guard.step().refused
    assert refusal.kind == fault and guard.findings[0].verdict is not None
