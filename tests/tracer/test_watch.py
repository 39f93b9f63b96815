"""`trace.watch`: code that runs once, and with all it changes, gets the verdict of a trace."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import npt
from npt.errors import ConfigError

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Loss = Callable[[Tensor], Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, loss_of: Loss, x: Tensor = X) -> None:
    """A step of one's own, which leaves no gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss_of(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


FAULTS: list[Loss] = [
    lambda out: (out - 9).log().sum(),
    lambda out: (out * 0).sqrt().sum(),
    lambda out: torch.where(out == out, out, (out * 0).log()).sum(),
    lambda out: (out.abs() * 1e30).exp().sum(),
    lambda out: (out / out.detach().sub(out.detach())).sum(),
    lambda out: torch.where(out == out, out, out * (out.detach() * 0).log()).sum(),
    lambda out: out.masked_fill(out > -9, -math.inf).softmax(-1).sum(),
]


@pytest.mark.parametrize("loss_of", FAULTS)
def test_a_step_of_ones_own_gets_the_verdict_of_a_trace(loss_of: Loss) -> None:
    model = net()
    traced: Any = npt.trace(model, run=lambda: loss_of(model(X)))
    with npt.trace.watch(model) as watched:
        train(model, loss_of)
    verdict: Any = watched.verdict
    for field in ("cause", "phase", "operation", "source", "explanation", "module", "index"):
        assert getattr(verdict, field) == getattr(traced, field), field
    assert str(verdict.operands) == str(traced.operands)


@pytest.mark.parametrize("hides", [False, True])
def test_a_sound_step_is_as_without_it_and_has_no_verdict(hides: bool) -> None:
    """Nor has one whose NaN is masked, or before which a gradient was kept."""

    def loss_of(out: Tensor) -> Tensor:
        hidden = torch.where(out == out, out, (out.detach() * 0).log())
        return (hidden if hides else out).square().sum()

    model, plain = net(), net()
    train(plain, loss_of)
    with npt.trace.watch(model) as watched:
        train(model, loss_of)
    assert watched.verdict is None
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_number_of_the_batch_and_of_a_weight_is_named() -> None:
    model, x = net(), X.clone()
    x[2, 1] = math.nan
    with npt.trace.watch(model, {"x": x}) as watched:
        watched.loss = model(x).sum()
    assert watched.verdict is not None and watched.verdict.tensor.startswith("x [3, 4]")
    model[2].weight.data[1, 3] = math.inf
    with npt.trace.watch(model) as watched:
        train(model, Tensor.sum)
    assert watched.verdict is not None
    assert (watched.verdict.cause, watched.verdict.tensor) == (
        "corrupt weight",
        "2.weight [2, 4] float32",
    )


def test_operands_are_shown_as_they_were_before_the_optimizer_stepped() -> None:
    model, x = nn.Linear(3, 1, bias=False), torch.full((1, 3), 2e38)
    nn.init.constant_(model.weight, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    with npt.trace.watch(model, x) as watched:
        model(x).sum().backward()
        optimizer.step()
        x.fill_(1.0)
    assert watched.verdict is not None and watched.verdict.operation == "mm"
    shown = {operand.name: operand.absmax for operand in watched.verdict.operands}
    assert shown == {"input": pytest.approx(2e38), "weight": 3.0}


def test_without_backward_the_loss_is_assigned() -> None:
    model = net()
    with torch.no_grad(), npt.trace.watch(model) as watched:
        watched.loss = {"metric": (model(X) * 0).log()}
    assert watched.verdict is not None and watched.verdict.reached == "loss.metric"
    with pytest.raises(ConfigError, match="assign its loss"), npt.trace.watch(model):
        model(X)
    with npt.trace.watch(model, limit=10.0) as watched:
        watched.loss = (model(X).exp() * 50).log()
    assert watched.verdict is not None and watched.verdict.cause == "beyond the limit"


def test_code_that_raises_because_of_the_nan_has_a_verdict() -> None:
    model = net()
    with pytest.raises(FloatingPointError), npt.trace.watch(model) as watched:
        watched.loss = loss = model(X).sub(9).sqrt().sum()
        if loss.isnan():
            raise FloatingPointError
    assert watched.verdict is not None and watched.verdict.operation == "sqrt"


def test_what_an_operation_overwrote_is_not_guessed() -> None:
    model = net()
    with npt.trace.watch(model) as watched:
        watched.loss = model(X).detach().sub(9).log_()
    assert watched.verdict is not None and watched.verdict.cause == "unknown"
    assert watched.verdict.explanation == "log_ gave nan" and ".log_()" in watched.verdict.source
