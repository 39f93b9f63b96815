"""One window in the loop: what a process does that runs out of memory, or fails, in its middle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from faults.bench import Setting, Student
from faults.runs import looped
from npt.distill.strategies import drive
from npt.distributed.processes import ProcessGroup
from npt.guard.window import FAILED, GradientWindow
from npt.train import loop as loop_module
from npt.train.run import Run


@pytest.mark.parametrize("rows", [1, 4])
def test_memory_is_freed_before_a_window_begins_again(monkeypatch, rows) -> None:
    """A single sample too, which is tried again while windows in flight hold memory."""
    done: list[str] = []
    lacking = iter([True])

    def strategy(*arguments: Any) -> Any:
        if next(lacking, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        done.append(f"{len(arguments[1].input_ids)} rows")
        return drive(*arguments)

    free = loop_module.free_memory
    monkeypatch.setattr(loop_module, "free_memory", lambda: done.append("freed") or free())
    said = Run.say
    monkeypatch.setattr(Run, "say", lambda *words: done.append(words[1]) or said(*words))
    monkeypatch.setattr(GradientWindow, "in_flight", 1)
    student = Student(Setting(size=1, rows=rows))
    looped(student, [[student.setting.batch((0, 0))]], strategy, late=True)
    parts = ["2 rows", "2 rows"] if rows == 4 else ["1 rows"]
    lack = f"out of memory with {rows} samples at once (CUDA out of memory."
    assert done[0] == "freed" and lack in done[1] and done[2 : 2 + len(parts)] == parts


def test_a_failing_check_stops_one_process_of_several_at_the_step(monkeypatch) -> None:
    def broken(*_: Any) -> str:
        raise IndexError("labels of another shape")

    student = Student(Setting(size=1))
    loop, _ = looped(student, [])
    batch = student.setting.batch((0, 0))
    monkeypatch.setattr("npt.distill.step.find_fault", broken)
    with pytest.raises(IndexError, match="another shape"):
        loop._add(batch, 0)
    loop.guard.window.processes = ProcessGroup(0, 2)
    loop.setup = replace(loop.setup, processes=ProcessGroup(0, 2))
    assert loop._add(batch, 0)
    assert isinstance(loop.failure, IndexError) and loop.guard.window._halt == FAILED
