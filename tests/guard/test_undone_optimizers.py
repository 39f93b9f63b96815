"""A step that is taken back leaves nothing in the optimizer, wherever the optimizer keeps it."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from guarded_loops import Micro, World, assert_same_state, guarded_run, plain_run
from torch import Tensor, nn

from npt.guard import Guard, Outcome, Seeded
from npt.guard.update import Holdings


class Counting(torch.optim.Optimizer):
    """SGD whose rate falls with a count of its steps, which each subclass keeps elsewhere."""

    def __init__(self, parameters: Any):
        super().__init__(parameters, {"lr": 0.05})
        self.keep(torch.zeros(()))

    def keep(self, count: Tensor) -> None:
        raise NotImplementedError

    def count(self) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        rate = self.param_groups[0]["lr"] / float(self.count())
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-rate)


class InTheGroup(Counting):
    def keep(self, count):
        self.param_groups[0]["count"] = count

    def count(self):
        return self.param_groups[0]["count"].add_(1)


class UnderAnotherKey(Counting):
    def keep(self, count):
        self.state["all"] = count

    def count(self):
        return self.state["all"].add_(1)


class InAnAttribute(Counting):
    def keep(self, count):
        self.steps, self.seen = count, 0

    def count(self):
        self.seen += 1
        return self.steps.add_(1) + self.seen


class InContainers(Counting):
    def keep(self, count):
        self.kept = {"all": [(count, {count: 1})], "seen": set()}

    def count(self):
        ((count, by_tensor),) = self.kept["all"]
        self.kept["seen"].add(len(self.kept["seen"]))
        by_tensor[count] += 1
        return count.add_(1) + by_tensor[count] + len(self.kept["seen"])


class MadeByTheStep(Counting):
    def keep(self, count):
        pass

    def count(self):
        self.state.setdefault("all", torch.zeros(())).add_(1)
        self.steps = getattr(self, "steps", 0) + 1
        return self.state["all"] + self.steps


class Pace:
    def __init__(self, count: Tensor):
        self.steps = count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pace) and torch.equal(self.steps, other.steps)


class InListsOfAParameter(Counting):
    def keep(self, count):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factors"] = [torch.ones(2), Pace(torch.ones(2))]

    def count(self):
        state = self.state[self.param_groups[0]["params"][0]]
        return state["factors"][0].mul_(2).sum() + state["factors"][1].steps.mul_(2).sum()


class SharedWithAParameter(Counting):
    def keep(self, count):
        self.flat = torch.ones(len(self.param_groups[0]["params"]))
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter]["steps"] = self.flat[place]

    def count(self):
        self.flat += 1
        return self.state[self.param_groups[0]["params"][0]]["steps"]


class AroundAnother(Counting):
    def keep(self, count):
        inner = torch.optim.SGD(self.param_groups, lr=0.01, momentum=0.9)
        self.inner, self.param_groups = inner, inner.param_groups

    def count(self):
        self.inner.step()
        return torch.ones(())


class Drawing(Counting):
    def keep(self, count):
        pass

    def count(self):
        return 1 + torch.rand(())


KINDS = Counting.__subclasses__()


def spoilt_step(optimizer: torch.optim.Optimizer, at: int, error: bool) -> None:
    """Let the step number `at` leave a NaN in a weight, or end in an error."""
    step, calls = optimizer.step, 0

    def spoiling() -> None:
        nonlocal calls
        calls += 1
        step()
        if calls == at + 1:
            if error:
                raise MemoryError("planted")
            optimizer.param_groups[0]["params"][0].data.view(-1)[0] = math.nan

    optimizer.step = spoiling  # type: ignore[method-assign]


def assert_taken_back_whole(make: Any, at: int, error: bool) -> None:
    """A run with a step that is taken back equals the run that never made it."""
    good = [[Micro(1, branch=True), Micro(2)], [Micro(3, branch=True)], [Micro(4, branch=True)]]
    guarded = World(make)
    spoilt_step(guarded.optimizer, at, error)
    if error:
        guarded_run(guarded, good[:at])
        with pytest.raises(MemoryError):
            guarded_run(guarded, [[Micro(9, branch=True)]])
        guarded_run(guarded, good[at:])
    else:
        outcomes = guarded_run(guarded, [*good[:at], [Micro(9, branch=True)], *good[at:]])
        assert [o.applied for o in outcomes] == [index != at for index in range(len(good) + 1)]
    plain = World(make)
    plain_run(plain, good, "sum")
    assert_same_state(guarded, plain)


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nothing_stays_of_a_step_that_is_taken_back(kind, at, error) -> None:
    assert_taken_back_whole(kind, at, error)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_tensors_of_the_optimizer_stay_the_same_objects(kind) -> None:
    world = World(kind)
    guarded_run(world, [[Micro(1, branch=True)]])
    states = {id(t) for s in world.optimizer.state.values() for t in tensors_in(s)}
    spoilt_step(world.optimizer, 0, error=False)
    guarded_run(world, [[Micro(2, branch=True)]])
    assert {id(t) for s in world.optimizer.state.values() for t in tensors_in(s)} == states


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list):
        return [t for item in value for t in tensors_in(item)]
    return []


def test_frozen_weights_are_not_copied() -> None:
    """A frozen base may be among the optimizer's parameters; no step changes it."""
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(50), requires_grad=False)
    optimizer = InAnAttribute([weight, frozen])
    (before,) = Guard(nn.ParameterDict({"weight": weight}), optimizer).update.snapshot().values()
    assert torch.equal(before[0], weight)
    copies, _ = Holdings([optimizer]).before()
    assert id(weight) in copies and id(frozen) not in copies


def test_a_hook_that_removed_itself_in_the_step_stays_removed() -> None:
    world, calls = World(), 0

    def spoil(optimizer: Any, *_: Any) -> None:
        nonlocal calls
        calls += 1
        handle.remove()
        optimizer.param_groups[0]["params"][0].data.view(-1)[0] = math.nan

    handle = world.optimizer.register_step_post_hook(spoil)
    outcomes = guarded_run(world, [[Micro(1)], [Micro(2)]])
    assert [outcome.applied for outcome in outcomes] == [False, True]
    assert calls == 1


def test_a_kept_snapshot_outlives_later_steps() -> None:
    """On a CPU a step takes over the memory of the last one's copies, unless they are kept."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, rates=[0.1] * 5, draws=Seeded(0))

    def window(*scales: float) -> Outcome:
        for scale in scales:
            with guard.micro_batch(ids=[scale]) as micro:
                micro.loss = loss = model(torch.full((1, 3), scale)).square().sum()
                loss.backward()
        (outcome,) = guard.step()
        return outcome

    window(1.0)
    before = deepcopy(dict(model.named_parameters()))
    moments = {n: deepcopy(optimizer.state[p]) for n, p in model.named_parameters()}
    snapshot = window(math.nan, 2.0).snapshot
    assert snapshot is not None
    window(3.0)
    window(4.0)
    for name, (value, state) in snapshot.items():
        assert torch.equal(value, before[name])
        assert all(torch.equal(state[key], moments[name][key]) for key in state)


def test_a_step_is_undone_after_a_parameter_was_given_other_data() -> None:
    """Its copy then needs memory of its own."""
    model = nn.Linear(3, 2)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def step(rate: float) -> bool:
        with guard.micro_batch() as micro:
            micro.loss = loss = model(torch.ones(1, 3)).square().sum()
            loss.backward()
        guard.update.optimizer.param_groups[0]["lr"] = rate
        return guard.step().applied

    assert step(0.1) and step(0.1)
    model.to(torch.bfloat16)
    model.to(torch.float32)
    before = deepcopy(model.state_dict())
    assert not step(math.inf)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_excluded_parameters_are_not_copied_wherever_they_are_held() -> None:
    """What follows the optimizer, such as a scheduler, may hold the parameters in a list."""
    weight = nn.Parameter(torch.ones(2))
    copies, _ = Holdings([[weight], {"a": weight}], without=[weight]).before()
    assert not copies


class Shrinking(torch.optim.SGD):
    """Keeps a table that it shrinks in place."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            table = state.setdefault("table", torch.ones(8))
            table.resize_(len(table) - 1)
        return super().step(closure)


def test_a_state_that_changes_its_size_in_place_is_copied_and_checked_anew() -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = Shrinking(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    for left in range(7, 2, -1):
        with guard.micro_batch() as micro:
            micro.loss = loss = model(torch.ones(1, 3)).sum()
            loss.backward()
        assert guard.step().applied
        assert len(optimizer.state[model.weight]["table"]) == left


def test_a_buffer_that_changes_its_size_in_place_between_micro_batches_is_checked_anew() -> None:
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.ones(8))
    model.register_buffer("also", torch.ones(8))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for size in (8, 4, 6):
        model.seen.resize_(size).fill_(1.0)
        with guard.micro_batch() as micro:
            micro.loss = loss = model(torch.ones(1, 3)).sum()
            loss.backward()
        assert guard.step().applied
