"""What a guarded step adds to the launches of a plain one, counted on a simulated card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from simulated_cuda import Simulated, _leaves, simulated_cuda
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from npt.guard import Guard, Seeded
from npt.guard.spikes import SIGMAS

TENSORS = 112
"""Of the adapters of 16 layers with three targets."""

AT_ONCE = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
"""Tensors in a launch of `torch._foreach_*`, by how many lists it takes: `depth_to_max_tensors` of
ATen's MultiTensorApply.cuh. It also ends at 320 blocks of 65,536 numbers, which these do not reach.
"""


class Launches(TorchDispatchMode):
    """Counts launches by operation: none for views and for memory that is left as it is, several
    for lists of tensors, one for all else that reads or writes a tensor of the card.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = _leaves((args, kwargs or {}, result))
        if any(isinstance(leaf, Simulated) for leaf in leaves):
            self.counts[func._schema.name.removeprefix("aten::")] += self._launches(
                func, args, kwargs
            )
        return result

    def _launches(self, func: Any, args: Any, kwargs: Any) -> int:
        name = func._schema.name.removeprefix("aten::")
        lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
        if name == "_to_copy" and args[0].dtype == (kwargs or {}).get("dtype", args[0].dtype):
            return 0  # no copy, on a real card
        if func.is_view or name.startswith(("empty", "new_empty")) or name in ("detach", "lift"):
            return 0
        if name in ("stack", "cat"):
            return -(-len(args[0]) // 128)
        if not lists or not name.startswith(("_foreach", "_fused")):
            return 1
        launches = -(-len(lists[0]) // AT_ONCE[min(len(lists), 5)])
        # of a norm also zeros for what its blocks find, and what makes one number of that
        return launches + 2 * (name == "_foreach_norm")


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
