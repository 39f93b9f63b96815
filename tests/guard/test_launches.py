"""What a guarded step adds to the launches of a plain one, counted on a simulated card."""

from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from launches import Launches
from simulated_cuda import Simulated, simulated_cuda
from torch import Tensor, nn

from npt.guard import Guard, Seeded
from npt.guard.spikes import SIGMAS

TENSORS = 112
"""Of the adapters of 16 layers with three targets."""


class Sum(nn.Module):
    """A layer for which nobody has a kernel: a sum over many small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.full((2,), float(i + 1), device="cuda")) for i in range(TENSORS)
        )

    def forward(self) -> Tensor:
        return torch.stack([(weight * 2.0).sum() for weight in self.weights]).sum()


def launches(guarded: bool, size: int) -> Counter[str]:
    """Count the launches of the second of two windows of so many micro-batches."""
    model = Sum()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    guard = Guard(
        model, optimizer, rates=[0.1], draws=Seeded(0), max_grad_norm=1.0, spike_sigmas=SIGMAS
    )

    def step() -> None:
        for _ in range(size):
            if not guarded:
                model().backward()
                continue
            with guard.micro_batch() as micro:
                micro.loss = loss = model()
                loss.backward()
        if guarded:
            guard.step()
            return
        torch._foreach_div_([p.grad for p in model.parameters()], float(size))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    # torch takes its operations on lists for tensors of a card, which it sees on `meta` here
    lists = {"_foreach_supported_types": [Tensor, Simulated]}
    lists["_get_foreach_kernels_supported_devices"] = lambda: ["meta"]
    with mock.patch.multiple("torch.utils._foreach_utils", **lists):
        return counted(step)


def counted(step: Callable[[], None]) -> Counter[str]:
    step()
    with Launches() as counter:
        step()
    return counter.counts


@pytest.mark.parametrize(("size", "most"), [(1, 80), (2, -10), (4, -200)])
def test_a_guarded_step_adds_few_launches(size, most) -> None:
    """Of several micro-batches it makes fewer than a plain loop, which adds tensor by tensor."""
    with simulated_cuda():
        guarded, plain = launches(True, size), launches(False, size)
    added = {
        name: guarded[name] - plain[name]
        for name in guarded | plain
        if guarded[name] != plain[name]
    }
    assert guarded.total() - plain.total() <= most, added
