"""The memory of a guard is what it says, against the same loop unguarded."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from guarded_loops import OPTIMIZERS
from several import several, values
from torch import Tensor, nn

from npt.guard import Guard, Memory
from npt.planning.measure import peak_bytes

WEIGHT = 512 * 512 * 4
COUNT = 4
"""AdamW's count of steps is a tensor too."""


def peak(undo: str | None, rows: int) -> tuple[int, int]:
    """Return the bytes of two windows at their peak, and those that a guard says it needs.

    Args:
        undo: of a guard; None for a plain loop.
        rows: of activations, many in windows of one micro-batch, few in windows of two.
    """
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    micro_batches = 1 if rows > 1 else 2

    def backward() -> None:
        hidden: Tensor = model(torch.ones(1, 512)).expand(rows, 512)
        hidden.sin().cos().sin().sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    said = 0

    def plain() -> None:
        for _ in range(2):
            for _ in range(micro_batches):
                backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def guarded() -> None:
        nonlocal said
        guard = Guard(model, optimizer, undo=undo)
        said = guard.memory().peak
        for _ in range(2):
            for _ in range(micro_batches):
                with guard.micro_batch():
                    backward()
            guard.step()

    return peak_bytes(plain if undo is None else guarded, "cpu"), said


@pytest.mark.parametrize(
    ("undo", "rows", "elsewhere"),
    [
        # Activations are largest, and a plain loop holds no gradient then.
        ("none", 2048, 0),
        # A plain loop is at its peak in backward, with a gradient that is added to another one.
        ("none", 1, 1),
        ("step", 1, 2),
    ],
)
def test_memory_is_what_it_says(undo, rows, elsewhere) -> None:
    unguarded, _ = peak(None, rows)
    added, said = peak(undo, rows)
    assert said == (5 * WEIGHT + COUNT if undo == "step" else 2 * WEIGHT)
    # a tenth of a weight is for small tensors of torch's own
    assert added - unguarded <= said + WEIGHT // 10
    assert added - unguarded >= said - elsewhere * WEIGHT - WEIGHT // 10


@pytest.fixture
def no_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes keeps for good what a Trainer, here of another test, asked for embeddings, by
    their places in its optimizer.
    """
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    monkeypatch.setattr(manager, "index2config", {}, raising=False)


@pytest.mark.usefixtures("no_overrides")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_moments_are_known_before_the_first_step(name) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = OPTIMIZERS[name](model.parameters())
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # replaces the optimizer's step
    before = [parameter.detach().clone() for parameter in model.parameters()]
    guard = Guard(model, optimizer)
    said = guard.memory()
    assert not optimizer.state
    assert all(map(torch.equal, before, model.parameters()))
    with guard.micro_batch():
        model(torch.ones(1, 6)).sum().backward()
    assert guard.step().applied
    assert guard.memory() == said


def shared(processes: Any, dtype: torch.dtype) -> Memory:
    model = nn.Linear(8, 8, bias=False).to(dtype)
    return Guard(model, torch.optim.SGD(model.parameters(), lr=0.1)).memory()


@pytest.mark.parametrize(("dtype", "copies"), [(torch.float32, 1), (torch.bfloat16, 2)])
def test_processes_need_a_copy_in_fp32_to_sum(dtype, copies) -> None:
    for memory in values(several(2, shared, dtype)):
        assert memory.shared == 64 * 4 * copies
        assert memory.peak == memory.gradients + memory.shared
