"""The tracer: on a GPU backward runs in a thread of its own, without the caller's frames and
counters.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gpu_student import micro_batch, student
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import npt
from npt.distill.local import BatchSums
from npt.distill.strategies import STRATEGIES

pytestmark = pytest.mark.gpu


class Step(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def faulty(x: Tensor) -> Tensor:
    return x + (x * 0).sqrt()


def hooked(x: Tensor) -> Tensor:
    x = x * 2
    if x.requires_grad:  # not in the first forward of a reentrant checkpoint
        x.register_hook(lambda gradient: gradient.masked_fill(gradient == gradient, float("nan")))
    return x


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize(
    ("function", "phase", "operation", "line"),
    [
        (faulty, "backward", "div in SqrtBackward0", "in faulty: (x * 0).sqrt()"),
        (hooked, "backward", "masked_fill", "gradient.masked_fill("),
        (lambda x: (x - x).log(), "forward", "log", "(x - x).log()"),
    ],
)
def test_a_trace_on_a_gpu_says_what_it_says_on_a_cpu(
    checkpointing, function, phase, operation, line
) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Step(function)), nn.Linear(4, 4)
    ).cuda()
    x = torch.randn(3, 4, device="cuda")

    def run() -> Tensor:
        h = model[0](x)
        h = (
            model[1](h)
            if checkpointing is None
            else checkpoint(model[1], h, use_reentrant=checkpointing)
        )
        return model[2](h).square().sum()

    for _ in range(3):  # the threads of backward count on from one pass to the next
        verdict = npt.trace(model, run=run)
        assert verdict is not None
        assert (verdict.phase, verdict.operation, verdict.module) == (phase, operation, "1.1")
        assert line in verdict.source


@pytest.mark.parametrize("reentrant", [True, False])
def test_on_a_gpu_too_a_recomputation_is_told_from_backward(reentrant) -> None:
    def function(x: Tensor) -> Tensor:
        return x * float("nan") if torch._C._current_autograd_node() is not None else x * 2

    model = nn.Sequential(nn.Linear(4, 4), Step(function)).cuda()
    x = torch.randn(3, 4, device="cuda")
    verdict = npt.trace(
        model, run=lambda: checkpoint(model[1], model[0](x), use_reentrant=reentrant).square().sum()
    )
    assert verdict is not None and (verdict.phase, verdict.operation, verdict.module) == (
        "recomputation",
        "mul",
        "1",
    )


def test_a_trace_on_a_gpu_gives_no_alarm_and_finds_a_bad_statistic() -> None:
    model, _ = student()
    batch = micro_batch(0)

    def run() -> BatchSums:
        return STRATEGIES["local"](model, batch.to(torch.device("cuda")), npt.TrainConfig())

    assert npt.trace(model, batch) is None
    assert npt.trace(model, batch, run=run) is None
    state = torch.cuda.get_rng_state()
    model.model.layers[5].mlp.up_proj.weight.quant_state.state2.absmax[1] = float("nan")
    verdict = npt.trace(model, batch, run=run)
    assert verdict is not None and (verdict.cause, verdict.module, verdict.index) == (
        "corrupt absmax",
        "model.layers.5.mlp.up_proj",
        (1,),
    )
    assert torch.equal(torch.cuda.get_rng_state(), state)
