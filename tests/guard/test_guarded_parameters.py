"""Which parameters a guard steps, and what it makes of their gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npt.errors import ConfigError
from npt.guard import Guard


def unfreeze(model: nn.Sequential, _optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.requires_grad_(True)


def add(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [model.late], "lr": 0.1})


class Late(nn.Sequential):
    """Has a frozen weight, and a parameter that the optimizer is not given."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 3), nn.Linear(3, 3))
        self[0].weight.requires_grad_(False)
        self.late = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.late

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self[0].parameters(), *self[1].parameters()], lr=0.1)


@pytest.mark.parametrize("at", [(1, 0), (0, 1), (0, 2)], ids=["between", "within", "at the end"])
@pytest.mark.parametrize("change", [unfreeze, add])
def test_a_parameter_that_joins_is_guarded_from_the_next_window_on(change, at) -> None:
    """The third window has a bad micro-batch, whose NaN must reach nothing. Before a parameter is
    guarded its gradient, which nothing has looked at, is not stepped.
    """
    plain, guarded = Late(), Late()
    own, other = plain.optimizer(), guarded.optimizer()
    guard = Guard(guarded, other, max_grad_norm=1.0)
    for window in range(3):
        for place in range(2):
            if (window, place) == at:
                change(guarded, other)
            if (window, place) == (1, 0):
                change(plain, own)
            inputs = torch.full((1, 3), 1.0 + window + place)
            (plain(inputs).square().sum() / 2).backward()
            with guard.micro_batch() as micro:
                micro.loss = guarded(inputs).square().sum()
                micro.loss.backward()
        if window == 2:
            with guard.micro_batch() as micro:
                micro.loss = guarded(inputs * float("nan")).square().sum()
                micro.loss.backward()
        if (window, 2) == at:
            change(guarded, other)
        stepped = [p for group in own.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(stepped, 1.0)
        own.step()
        plain.zero_grad()
        assert guard.step().applied
    assert guard.outcome.refused and guard.first_bad() is None
    assert all(map(torch.equal, plain.parameters(), guarded.parameters()))
    assert len(guard.update.names) == 4


def test_parameters_outside_of_the_model_are_guarded_by_their_place() -> None:
    model, scale = nn.Linear(3, 3), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    guard = Guard(model, optimizer)
    with guard.micro_batch() as micro:
        micro.loss = model(torch.ones(1, 3)).sum() * scale
        micro.loss.backward()
        scale.grad.fill_(float("nan"))
    (refusal,) = guard.step().refused
    assert refusal.tensor == "parameter 2 of the optimizer's group 0" and scale == 1.0


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^none of the optimizer's parameters is in the .* made"):
        Guard(nn.Linear(3, 3), torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))


def test_a_parameter_frozen_later_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    before = model[1].weight.detach().clone()
    model[1].weight.requires_grad_(False)
    with guard.micro_batch():
        model(torch.ones(1, 3)).sum().backward()
    assert guard.step().applied
    assert torch.equal(model[1].weight, before)


def test_a_weight_under_two_names_is_one_weight() -> None:
    norms = []
    for twice in (False, True):
        layer = nn.Linear(3, 3)
        if twice:
            layer.again = layer.weight
        guard = Guard(layer, torch.optim.SGD(layer.parameters(), lr=1.0))
        with guard.micro_batch():
            layer(torch.ones(1, 3)).sum().backward()
        norms.append(guard.step().grad_norm)
        assert guard.update.names == ("weight", "bias")
    # twelve gradients of 1
    assert norms == [pytest.approx(12**0.5, rel=1e-6)] * 2


def test_gradients_that_the_loop_assigns_are_stepped() -> None:
    """As of torch.autograd.grad, whose gradients reach no hook of a parameter."""
    model, plain = nn.Linear(3, 3), nn.Linear(3, 3)
    plain.load_state_dict(model.state_dict())
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0)
    for fault in (1.0, float("nan")):
        with guard.micro_batch() as micro:
            micro.loss = model(torch.ones(1, 3)).sum()
            (model.weight.grad,) = torch.autograd.grad(fault * micro.loss, [model.weight])
    outcome = guard.step()
    assert outcome.applied
    assert [refusal.tensor for refusal in outcome.refused] == ["weight"]
    plain(torch.ones(1, 3)).sum().backward()
    plain.bias.grad = None
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.bias, plain.bias)


def test_a_gradient_that_the_loop_drops_is_not_stepped() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer)
    before = model.bias.detach().clone()
    with guard.micro_batch():
        model(torch.ones(1, 3)).sum().backward()
        model.bias.grad = None
    assert guard.step().applied
    assert torch.equal(model.bias, before)
    assert model.bias not in optimizer.state


def test_a_window_that_reached_no_parameter_is_not_applied() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    guard = Guard(model, optimizer, scheduler)
    with guard.micro_batch() as micro:
        micro.loss = model(torch.ones(1, 3)).sum()  # and no backward
    outcome = guard.step()
    assert (outcome.applied, outcome.refused, outcome.steps) == (False, (), 0)
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", ["Lomo", "AdaLomo", "LayerWiseDummyOptimizer"])
def test_an_optimizer_that_steps_in_backward_is_refused(name: str) -> None:
    model = nn.Linear(3, 3)
    kind = type(name, (torch.optim.SGD,), {})
    for own in (kind, type("Own", (kind,), {})):
        said = f"^{own.__name__} steps inside backward, before .* or AdamW, or train unguarded"
        with pytest.raises(ConfigError, match=said):
            Guard(model, own(model.parameters(), lr=0.1))


def of_rows() -> tuple[nn.Module, Any]:
    model = nn.Embedding(6, 4, sparse=True, dtype=torch.float64)
    return model, lambda: model(torch.tensor([1, 2, 1])).square().sum()


def of_complex_numbers(dtype: torch.dtype) -> tuple[nn.Module, Any]:
    model = nn.ParameterList([torch.tensor([1 + 2j, 3 - 1j], dtype=dtype)])
    return model, lambda: (model[0].conj() * torch.tensor([2 - 1j, 1j], dtype=dtype)).real.sum()


def of_one_memory() -> tuple[nn.Module, Any]:
    model = nn.ParameterList([torch.ones(8), torch.ones(2, 2), torch.ones(2, 2)]).double()

    def loss() -> Tensor:
        joined = torch.cat([*model][1:])  # backward gives all three views of one gradient
        return ((joined + model[0].view(4, 2)) * torch.arange(8.0).view(4, 2)).sum()

    return model, loss


@pytest.mark.parametrize(
    "make",
    [
        of_rows,
        of_one_memory,
        *(partial(of_complex_numbers, dtype) for dtype in (torch.complex64, torch.complex128)),
    ],
    ids=["sparse", "views", "complex64", "complex128"],
)
def test_gradients_of_any_form_are_summed(make) -> None:
    model, loss = make()
    loss().backward()
    plain = [p.grad.to_dense().clone() for p in model.parameters()]
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), loss="mean") as guard:
        for factor in (1, math.nan, 1):
            with guard.micro_batch(tokens=2) as micro:
                micro.loss = loss() * factor
                micro.loss.backward()
        guard.close_window()
        for parameter, gradient in zip(model.parameters(), plain, strict=True):
            assert torch.equal(parameter.grad, gradient)


class Container(torch.optim.Optimizer):
    """torchtitan's optimizer: it steps several, and holds no state of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = [*optimizers]
        super().__init__([p for each in optimizers for p in each.param_groups[0]["params"]], {})

    def step(self, *_: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def test_the_optimizer_in_a_container_is_guarded() -> None:
    model = nn.Linear(3, 1)
    adamw = torch.optim.AdamW(model.parameters())
    for held in (Container(adamw), [adamw]):
        guard = Guard(model, held)
        assert guard.update.optimizer is adamw
        guard.close()


def test_several_optimizers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    several = [torch.optim.AdamW(layer.parameters()) for layer in model]
    with pytest.raises(ConfigError, match=r"^Container holds 2 optimizers, .* parameter group"):
        Guard(model, Container(*several))
    with pytest.raises(ConfigError, match=r"^list holds 2 optimizers"):
        Guard(model, several)
