"""The whole step on a simulated card: strategies, batches of every kind, refusals, late flags."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import simulated_cuda as card
import torch
from simulated_cuda import no_waits, simulated_cuda, to_cuda
from students import load_student, make_batch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from windows import StudentStep

import npt
from faults.bench import let_draw
from npt.adapters.converted import adapter_parameters
from npt.distill.local import BatchSums
from npt.distill.strategies import drive
from npt.guard import Guard, Outcome, Seeded

WAYS = {
    "local": {},
    "propagated": {"strategy": "propagated", "loss": "nmse_update"},
    "end_to_end": {"strategy": "end_to_end", "logit_kl_weight": 0.5},
}


def take_steps(
    model: Any,
    kind: str,
    way: str,
    steps: int,
    *,
    late: bool | None = None,
    bad: Callable[[int], bool] = lambda number: False,
    around: Callable[[], Any] | None = None,
) -> tuple[list[Outcome], dict[str, torch.Tensor]]:
    """Take steps of two micro-batches each; results, and the weights on the host.

    Args:
        model: a student.
        kind: of batch.
        way: of `WAYS`.
        steps: windows.
        late: of the transaction.
        bad: micro-batches, by number, whose gradient is made NaN.
        around: a context for every step but the first, which may compile or cache.
    """
    config = npt.TrainConfig(learning_rate=1e-2, regularization_lambda=0.1, **WAYS[way])
    parameters = adapter_parameters(model)
    number = 0

    def strategy(model: Any, batch: Any, config: Any) -> BatchSums:
        sums = drive(model, batch, config)
        if bad(number):
            next(iter(parameters.values())).grad.mul_(float("nan"))
        return sums

    train_step = StudentStep(model, strategy, config, [1e-2] * steps, late=late)
    results = []
    for step in range(steps):
        batches = [make_batch(kind, 2 * step + i) for i in range(2)]
        if next(iter(parameters.values())).is_cuda:
            batches = [batch.pinned() for batch in batches]

        def run(batches: list[Any] = batches, step: int = step) -> None:
            nonlocal number
            for number, batch in enumerate(batches, 2 * step):  # noqa: B007
                train_step.add(batch)
            results.extend(train_step.guard.step())

        if around is None or step == 0:
            run()
        else:
            with around():
                run()
    results += train_step.guard.flush()
    return results, {name: p.detach().cpu() for name, p in parameters.items()}


@pytest.mark.parametrize(
    ("kind", "way"), [("packed", "local"), ("left", "end_to_end"), ("right", "propagated")]
)
def test_a_clean_step_waits_for_nothing_and_is_the_cpus(kind, way) -> None:
    expected = take_steps(load_student(), kind, way, 2)
    with simulated_cuda() as simulation:
        found = take_steps(load_student("cuda"), kind, way, 2, around=no_waits)
    for one, other in zip(found[0], expected[0], strict=True):
        assert (one.applied, one.tokens, one.loss, one.grad_norm) == (
            other.applied,
            other.tokens,
            other.loss,
            other.grad_norm,
        )
    assert all(torch.equal(found[1][name], value) for name, value in expected[1].items())
    # The math kernel keeps the scores of all heads: 16.6 GiB of them at 32 heads and 8,192 tokens.
    assert set(simulation.kernels) == {"efficient"}


def test_late_flags_leave_the_bits_of_flags_read_at_once() -> None:
    def bad(number: int) -> bool:
        return number in (1, 2, 3)  # one of a window, and a whole window

    with simulated_cuda():
        late, weights = take_steps(load_student("cuda"), "right", "local", 3, late=True, bad=bad)
        once, others = take_steps(load_student("cuda"), "right", "local", 3, late=False, bad=bad)
    assert [r.applied for r in late] == [r.applied for r in once] == [True, False, True]
    assert [len(r.refused) for r in late] == [len(r.refused) for r in once] == [1, 2, 0]
    assert all(torch.equal(weights[name], value) for name, value in others.items())


def drawing_student() -> Any:
    model = load_student("cuda")
    let_draw(model)
    return model


def test_clean_steps_of_a_base_that_draws_wait_for_nothing() -> None:
    with simulated_cuda():
        found = take_steps(drawing_student(), "right", "local", 2, around=no_waits)[0]
    assert all(result.applied for result in found)


@pytest.mark.parametrize("way", ["local", "end_to_end"])
def test_a_late_refusal_leaves_later_draws_as_they_were(way) -> None:
    """A refusal is known a window late: by then the next micro-batches have drawn."""
    found = []
    with simulated_cuda():
        for add in (plain, passing_over("1-")):
            with mock.patch.object(StudentStep, "add", add):
                steps = take_steps(
                    drawing_student(), "right", way, 2, bad=lambda number: number == 1
                )
                found.append(steps)
    (refused, weights), (passed_over, others) = found
    assert [len(r.refused) for r in refused] == [1, 0]
    assert not any(r.refused for r in passed_over)
    assert all(torch.equal(weights[name], value) for name, value in others.items())


plain = StudentStep.add


def passing_over(name: str) -> Callable[..., bool]:
    """`StudentStep.add` that leaves out the micro-batch whose samples bear this number."""

    def add(self: StudentStep, batch: Any) -> Any:
        return batch.sample_ids[0].startswith(name) or plain(self, batch)

    return add


class Paged(torch.optim.Optimizer):
    """Momentum in managed memory, as bitsandbytes' paged optimizers keep it (`get_paged`): to torch
    a tensor of the host, with two attributes that none of its copies has.
    """

    is_paged = True

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})
        self.spoilt: Iterator[bool] = iter(())  # by step

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        spoil = next(self.spoilt, False)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["state1"] = torch.zeros(parameter.shape)
                state["state1"].is_paged, state["state1"].page_deviceid = True, 0
            assert state["state1"].is_paged  # of what `prefetch_tensor` is given
            momentum = card.Simulated(state["state1"], 0)
            parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.1)
            if spoil:
                momentum.fill_(float("inf"))


class OnHost(TorchDispatchMode):
    """Counts operations of the host on memory of these addresses."""

    def __init__(self, addresses: set[int]):
        super().__init__()
        self.addresses, self.found = addresses, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [leaf for leaf in card._leaves((args, kwargs)) if type(leaf) is torch.Tensor]
        views = func._schema.name in ("aten::detach", "aten::lift_fresh")
        if not views and any(leaf.data_ptr() in self.addresses for leaf in plain):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


def test_paged_moments_are_copied_and_restored_on_the_card(monkeypatch) -> None:
    def managed(given: Any, **settings: Any) -> Any:
        if isinstance(given, torch.Tensor) or not hasattr(given, "__cuda_array_interface__"):
            return as_tensor(given, **settings)
        layout = SimpleNamespace(of=given, __array_interface__=given.__cuda_array_interface__)
        return card.Simulated(torch.from_numpy(np.asarray(layout)), 0)

    def train(*spoilt: bool) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        to_cuda(model)
        optimizer = Paged(model.parameters())
        optimizer.spoilt = iter(spoilt)
        guard = Guard(model, optimizer)

        def window() -> Any:
            with guard.micro_batch() as micro:
                micro.loss = loss = model(torch.ones(1, 4, device="cuda")).square().sum()
                loss.backward()
            addresses = {s["state1"].data_ptr() for s in optimizer.state.values()}
            with OnHost(addresses) as host:
                outcome = guard.step()
            assert not host.found
            return outcome

        outcomes = [window() for _ in spoilt]
        assert guard.first_bad() is None
        state = [t.held.clone() for _, t in guard.update._tensors()]
        return state, [outcome.applied for outcome in outcomes]

    as_tensor = torch.as_tensor
    with simulated_cuda():
        monkeypatch.setattr(torch, "as_tensor", managed)
        state, applied = train(True, False, True, False, False)
        assert applied == [False, True, False, True, True]
        assert all(map(torch.equal, state, train(False, False, False)[0]))


def test_memory_that_cannot_be_pinned_ends_a_step_before_it_moves_anything(monkeypatch) -> None:
    """After the optimizer has stepped nothing is allocated on the host."""
    pin, allowed = card._pin, [0]

    def failing(tensor: Any) -> Any:
        if not allowed[0]:
            raise MemoryError("planted")
        allowed[0] -= 1
        return pin(tensor)

    with simulated_cuda():
        model = nn.Linear(4, 2)
        to_cuda(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        guard = Guard(model, optimizer, rates=[0.1], draws=Seeded(0), max_grad_norm=1.0)
        steps = []
        optimizer.register_step_pre_hook(lambda *_: steps.append(1))

        def state() -> Any:
            return deepcopy([t.held for _, t in guard.update._tensors()])

        def window() -> None:
            with guard.micro_batch() as micro:
                micro.loss = loss = model(torch.ones(1, 4, device="cuda")).sum()
                loss.backward()
            guard.step()

        monkeypatch.setattr(card, "_pin", failing)
        before, fails = state(), 0
        while not steps:
            allowed[0] = fails
            with suppress(MemoryError):
                window()
            if not steps:
                assert all(map(torch.equal, state(), before))
                fails += 1
        assert fails >= 2 and guard.window.applied_steps == 1
        guard.flush()
        allowed[0] = 1  # for the window's tokens: the record lands where the first one did
        window()
        assert guard.flush()[-1].steps == 2
