"""One step: what a process does that runs out of memory, or fails, in the middle of a window."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npt
from npt.data.batch import batch_from_tensors
from npt.distill.strategies import drive
from npt.distributed.processes import ProcessGroup
from npt.step import train_step
from npt.step.gradient_window import FAILED
from npt.step.train_step import TrainStep


@pytest.fixture
def student(load_model: Any) -> Any:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=2, layers="1"))
    return model


def batch(rows: int = 1) -> Any:
    ids = torch.arange(3, 3 + 8 * rows).view(rows, 8)
    return batch_from_tensors(ids, torch.ones_like(ids))


@pytest.mark.parametrize("rows", [1, 4])
def test_memory_is_freed_before_a_window_begins_again(student, monkeypatch, rows) -> None:
    """A single sample too, which is tried again while windows in flight hold memory."""
    done: list[str] = []
    lacking = iter([True])

    def strategy(*arguments: Any) -> Any:
        if next(lacking, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        done.append(f"{len(arguments[1].input_ids)} rows")
        return drive(*arguments)

    free = train_step.free_memory
    monkeypatch.setattr(train_step, "free_memory", lambda: done.append("freed") or free())
    step = TrainStep(student, strategy, npt.TrainConfig(batch_size=rows), [1e-3], late=True)
    step.on_out_of_memory = lambda samples, message: done.append(f"{samples} at once: {message}")
    monkeypatch.setattr(type(step.window), "in_flight", 1)
    step.run([batch(rows)])
    parts = ["2 rows", "2 rows"] if rows == 4 else ["1 rows"]
    assert done == ["freed", f"{rows} at once: it asked for 2.00 GiB more", *parts]


def test_a_failing_check_stops_one_process_of_several_at_the_commit(student, monkeypatch) -> None:
    def broken(*_: Any) -> str:
        raise IndexError("labels of another shape")

    monkeypatch.setattr(train_step, "find_fault", broken)
    step = TrainStep(student, drive, npt.TrainConfig(), [1e-3], processes=ProcessGroup(0, 2))
    assert step.add(batch())
    assert isinstance(step.failure, IndexError) and step.window._halt == FAILED
    alone = TrainStep(student, drive, npt.TrainConfig(), [1e-3])
    with pytest.raises(IndexError, match="another shape"):
        alone.add(batch())
