"""Nothing in a clean step, in moving a batch or in recording makes the host wait for the GPU."""

from __future__ import annotations

import pytest
import torch
from gpu_student import LENGTHS, micro_batch, student
from windows import StudentStep

import npt
from host_waits import HostWaitError, count_waits, no_waits
from npt.distill.strategies import STRATEGIES
from npt.recorder.recorder import Recorder

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def test_a_wait_is_noticed() -> None:
    """In forward and in backward, which runs in a thread of its own; without this the other tests
    would show nothing.
    """
    x = torch.ones(3, device=CUDA, requires_grad=True)
    with pytest.raises(HostWaitError), no_waits(CUDA):
        x.sum().item()
    y = x * 2
    y.register_hook(lambda gradient: gradient * gradient.sum().item())
    with pytest.raises(HostWaitError), no_waits(CUDA):
        y.sum().backward()
    with count_waits(CUDA) as found:
        for _ in range(3):
            x.sum().item()
    assert found.total() == 3
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_clean_step_makes_the_host_wait_for_nothing(strategy: str, kind: str) -> None:
    model, _ = student()
    config = npt.TrainConfig(strategy=strategy)
    train_step = StudentStep(model, STRATEGIES[strategy], config, [1e-3])
    assert train_step.update.late
    batch = micro_batch(0, kind).to(CUDA)

    def step() -> None:
        train_step.run([batch], check=False)

    step()
    step()
    torch.cuda.synchronize()
    with no_waits(CUDA):
        step()
    assert all(result.applied for result in train_step.guard.flush())


def test_pinned_batches_are_copied_without_the_host_waiting() -> None:
    batch = micro_batch(0).pinned()
    assert batch.input_ids.is_pinned() and batch.scored_index.is_pinned()
    with no_waits(CUDA):
        moved = batch.to(CUDA)
    assert (
        torch.equal(moved.input_ids.cpu(), batch.input_ids) and moved.sample_ids == batch.sample_ids
    )


def test_the_recorder_waits_for_nothing_before_its_record_is_read() -> None:
    model, _ = student()
    batch = micro_batch(0).to(CUDA)
    with Recorder(model, valid=batch.attention_mask.bool()) as recorder:
        STRATEGIES["local"](model, batch, npt.TrainConfig())
        with no_waits(CUDA):
            STRATEGIES["local"](model, batch, npt.TrainConfig())
    record = recorder.record()
    assert len(record.rows) > 200 and all(row.finite and row.rms is not None for row in record.rows)
