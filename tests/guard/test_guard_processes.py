"""Two processes under one guard: a fault on one of them is refused by both, and leaves no trace."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from guarded_loops import MAX_NORM, Micro, World, assert_equal, state_of
from several import several, values
from torch import nn

from npt.distributed.processes import ProcessGroup
from npt.errors import TooManyRefusalsError
from npt.guard import Guard, Outcome

Windows = list[list[Micro]]
WINDOWS: list[Windows] = [  # of process 0 and 1
    [[Micro(1), Micro(2, 3)], [Micro(3), Micro(4)], [Micro(5), Micro(6)], [Micro(7), Micro(8)]],
    [
        [Micro(11), Micro(12, fault="gradient")],
        [Micro(13, branch=True), Micro(14)],
        [Micro(15, fault="loss"), Micro(16, fault="exception")],
        [Micro(17), Micro(18)],
    ],
]
"""Of the third window nothing survives on process 1."""


def accelerated(processes: Any, lost: tuple[int, ...] = ()) -> tuple[Any, list[Outcome]]:
    """Train in a loop of accelerate's; windows `lost` have a fault in every micro-batch."""
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == processes.size
    world = World()
    model, optimizer, scheduler = accelerator.prepare(world.model, world.optimizer, world.scheduler)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    guard = Guard(model, optimizer, scheduler, max_grad_norm=MAX_NORM, trace=1)
    outcomes = []
    torch.manual_seed(processes.index)
    for number, window in enumerate(WINDOWS[processes.index]):
        for micro in window:
            with guard.micro_batch(micro.tokens, [micro.seed]) as told:
                output = model(micro.data(torch.float32), micro.branch)
                loss = output.square().sum() * (float("nan") if number in lost else 1.0)
                told.loss = loss
                handle = None
                if micro.fault == "gradient":
                    handle = world.model.norm.weight.register_hook(lambda g: g * float("nan"))
                accelerator.backward(loss)
                if handle is not None:
                    handle.remove()
                if micro.fault == "exception":
                    raise FloatingPointError("planted")
        outcomes.append(guard.step())
    assert len(guard.findings) == (processes.index if not lost else 1)  # each traces its own
    world.random = torch.get_rng_state()
    return state_of(world), outcomes


def plain(processes: Any, lost: tuple[int, ...] = ()) -> Any:
    """Train by hand: sum gradients over the processes, divide, clip, step; no guard."""
    world = World()
    parameters = list(world.model.parameters())
    torch.manual_seed(processes.index)
    for number, window in enumerate(WINDOWS[processes.index]):
        if number in lost:
            continue
        kept = [micro for micro in window if micro.fault is None]
        world.optimizer.zero_grad()
        for micro in kept:
            world.model(micro.data(torch.float32), micro.branch).square().sum().backward()
        tokens = torch.tensor(float(sum(micro.tokens for micro in kept)))
        dist.all_reduce(tokens)
        for parameter in parameters:
            reached = torch.tensor(float(parameter.grad is not None))
            dist.all_reduce(reached)
            if reached:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(tokens)
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        world.optimizer.step()
        for _ in range(processes.size):  # as accelerate's schedulers do
            world.scheduler.step()
    world.random = torch.get_rng_state()
    return state_of(world)


def both(processes: Any, lost: tuple[int, ...] = ()) -> Any:
    guarded, outcomes = accelerated(processes, lost)
    assert_equal(guarded, plain(processes, lost), "state")
    del guarded["random"]  # of each process its own
    told = [replace(outcome, own=[]) for outcome in outcomes]
    return json.dumps(guarded, default=torch.Tensor.tolist), told


@pytest.mark.parametrize("lost", [(), (0,), (1, 3)])
def test_a_fault_on_one_process_is_refused_by_both(lost) -> None:
    ended = values(several(2, both, lost))
    assert ended[0] == ended[1]  # one decision, known to both
    outcomes: list[Outcome] = ended[0][1]
    assert [o.applied for o in outcomes] == [number not in lost for number in range(4)]
    if not lost:
        found = [[(r.process, r.kind, r.sample_ids) for r in o.refused] for o in outcomes]
        bad = [(1, "loss", ("15",)), (1, "error", ("16",))]
        assert found == [[(1, "gradient", ("12",))], [], bad, []]
        assert [r.micro_batch for r in outcomes[2].refused] == [1, 3]


def unequal(processes: Any, faults: list[list[str]]) -> list[str]:
    """Train on windows of one micro-batch per letter, `b` for a bad one; how each ended."""
    model = nn.Linear(3, 3)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), max_refused=3)
    ended = []
    for letters in faults[processes.index]:
        for letter in letters:
            with guard.micro_batch() as micro:
                data = torch.full((1, 3), float("nan") if letter == "b" else 1.0)
                micro.loss = model(data).sum()
                micro.loss.backward()
        try:
            guard.step()
            ended.append(str(guard.counts.in_a_row))
        except TooManyRefusalsError:
            ended.append("too many")
    return ended


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        # good ones of process 0 and 1 come first, then bad ones of process 0 alone
        ([["gb", "gb", "gbb"], ["g", "g", "g"]], ["1", "1", "2"]),
        ([["gbbb", "g"], ["g", "g"]], ["too many", "0"]),
        # process 1 has nothing, and forgets the run as process 0 does
        ([["gb", "g", "gbb"], ["g", "", "g"]], ["1", "0", "2"]),
    ],
)
def test_processes_count_alike_with_unequal_micro_batches(faults, said) -> None:
    assert values(several(2, unequal, faults)) == [said, said]


class Buffered(nn.Module):
    """A model with a buffer, which DistributedDataParallel sends around in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return (self.inner(data) * self.scale).sum()


def refused_before_a_forward(processes: Any) -> list[int]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Buffered())
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for window in range(2):
        with guard.micro_batch() as micro:
            if processes.index == 1 and window == 0:
                raise FloatingPointError("planted")
            micro.loss = model(torch.ones(1, 3))
            micro.loss.backward()
        guard.step()
    return [guard.counts.refused, guard.counts.steps]


def test_nobody_waits_in_a_forward_for_a_refused_one() -> None:
    assert values(several(2, refused_before_a_forward)) == [[1, 2], [1, 2]]


def refused_of_a_compiled_model(processes: Any) -> list[list[Any]]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")
    guard = Guard(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    for bad in (False, processes.index == 1):
        with guard.micro_batch() as micro:
            data = torch.full((3, 4), float("nan") if bad else 1.0)
            micro.loss = loss = compiled(data).sum()
            loss.backward()
    return [[r.kind, r.process] for r in guard.step().refused]


def test_a_compiled_model_spreads_no_nan_over_the_processes() -> None:
    assert values(several(2, refused_of_a_compiled_model)) == [[["loss", 1]]] * 2


def test_a_micro_batch_that_an_error_ended_takes_no_place() -> None:
    model = nn.Linear(3, 3)
    second = ProcessGroup(1, 2, torch.device("cpu"))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), processes=second)
    with pytest.raises(KeyError), guard.micro_batch():
        raise KeyError
    assert guard.window.place == 0
    with guard.micro_batch():
        raise FloatingPointError
    assert [micro.index for micro in guard.window.refused()] == [1]


def traced_alone(processes: Any) -> int:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Buffered())
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), trace=1)
    for bad in (False, processes.index == 1):
        data = torch.full((1, 3), float("nan") if bad else 1.0)
        with guard.micro_batch(run=lambda data=data: model(data).square()) as micro:
            micro.loss = loss = model(data).square()
            loss.backward()
        guard.step()
    return len(guard.findings)


def test_a_loss_that_is_computed_again_waits_for_nobody() -> None:
    assert values(several(2, traced_alone, timeout=5.0)) == [0, 1]


def statistics(processes: Any) -> Any:
    model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(3))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean")
    torch.manual_seed(processes.index)
    for _ in range(2):
        with guard.micro_batch() as told:
            told.loss = loss = model(torch.randn(4, 3)).square().sum()
            loss.backward()
        assert guard.step().applied
    return model.module.running_mean.tolist()


def test_statistics_of_batch_norm_are_those_of_process_0() -> None:
    first, second = values(several(2, statistics))
    assert first == second != [0.0] * 3
