"""One window in the loop: what a process does that runs out of memory, or fails, in its middle."""

from typing import Any

import pytest
import torch

from faults.bench import Setting, Student
from faults.runs import looped
from npt.data.samples import Window
from npt.distill import step as step_module
from npt.distill.strategies import drive
from npt.guard.window import FAILED
from npt.train.setup import RunSetup


def test_memory_is_freed_before_a_micro_batch_begins_again(monkeypatch) -> None:
    done: list[str] = []
    lacking = iter([True])

    def strategy(*arguments: Any) -> Any:
        if next(lacking, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        done.append(f"{len(arguments[1].input_ids)} rows")
        return drive(*arguments)

    free = step_module.free_memory
    monkeypatch.setattr(step_module, "free_memory", lambda d: done.append("freed") or free(d))
    said = RunSetup.say
    monkeypatch.setattr(RunSetup, "say", lambda *words: done.append(words[1]) or said(*words))
    student = Student(Setting(size=1, rows=4))
    looped(student, [[student.setting.batch((0, 0))]], strategy, late=True)
    lack = "out of memory with 4 samples at once (CUDA out of memory."
    assert done[0] == "freed" and lack in done[1] and done[2:4] == ["2 rows", "2 rows"]
    waited: list[torch.device] = []  # for the model's own, which need not be the current one
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    free(torch.device("cpu")), free(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_a_failing_check_stops_one_process_of_several_at_the_step(monkeypatch) -> None:
    def broken(*_: Any) -> str:
        raise IndexError("labels of another shape")

    student = Student(Setting(size=1))
    batches = [student.setting.batch((0, 0))]
    monkeypatch.setattr("npt.train.loop.find_fault", broken)
    with pytest.raises(IndexError, match="another shape"):
        looped(student, [batches])
    loop, _ = looped(Student(Setting(size=1)), [])
    loop._ended = False
    monkeypatch.setattr(loop.setup.processes, "size", 2)
    # alone it would wait for the other at the step
    monkeypatch.setattr(loop.guard, "step", lambda _: loop.halts.update(stopped=1))
    monkeypatch.setattr(loop, "_account", lambda _: setattr(loop, "_ended", True))
    monkeypatch.setattr(loop, "settle", lambda: None)
    monkeypatch.setattr(loop.setup.processes, "raise_together", lambda _: None)
    loop.train([Window(batches)])
    assert isinstance(loop.failure, IndexError) and loop.guard.window._halt == FAILED
