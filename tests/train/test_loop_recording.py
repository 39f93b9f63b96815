"""Chosen steps of a run are recorded: what is written and said, and that the run is the same."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from resumed_runs import Runs, at, records
from torch import Tensor, nn

from npt.adapters.converted import npt_layers
from npt.batch import Batch
from npt.distill.step import student_guard
from npt.errors import TooManyRefusalsError
from npt.recorder.record import Record
from npt.recorder.recorder import Recorder
from npt.train import trainer as trainer_module


@pytest.fixture
def here(load_model: Callable[..., nn.Module], tmp_path: Path) -> Runs:
    """Runs of 6 steps of one micro-batch, or fewer of more."""
    settings = {"batch_size": 2, "eval_samples": 2}
    return Runs(load_model(), tmp_path, lambda: records(12), settings=settings)


@pytest.fixture(autouse=True)
def drawn(monkeypatch) -> list[list[int]]:
    """The steps that are handed to the part that draws, which is replaced."""
    calls: list[list[int]] = []
    picture = ModuleType("npt.recorder.picture")

    def write_pictures(records: list[Record], folder: Path, refused: int = 0) -> list[Path]:
        calls.append([record.step for record in records])
        (folder / "trace.html").write_text(f"{refused} refused")
        return [folder / "trace.html"]

    picture.write_pictures = write_pictures
    monkeypatch.setitem(sys.modules, "npt.recorder.picture", picture)
    monkeypatch.setattr(sys.modules["npt.recorder"], "picture", picture, raising=False)
    return calls


def recorded(folder: Path) -> dict[int, Record]:
    """The records of a run by step."""
    files = sorted((folder / "trace").glob("step-*.json"))
    found = [Record.from_dict(json.loads(path.read_text())) for path in files]
    assert [path.name for path in files] == [f"step-{record.step:08d}.json" for record in found]
    return {record.step: record for record in found}


def observed(model: nn.Module) -> bool:
    return npt_layers(model)[0][1].npt.observer is not None


def poison(model: nn.Module) -> None:
    """Make the input of an attention NaN, once."""

    def once(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        return torch.full_like(output, float("nan"))

    handle = model.model.layers[1].input_layernorm.register_forward_hook(once, prepend=True)


# --- what is written and said


def test_chosen_steps_are_files_lines_and_pictures(here, drawn) -> None:
    result = here.run("run", trace_steps="1,3-4,/6")
    trace, found = result.folder / "trace", recorded(result.folder)
    assert result.steps == 6 and list(found) == [1, 3, 4, 6] and drawn == [[1, 3, 4, 6]]
    assert all(record.micro_batch == 0 and len(record.rows) > 100 for record in found.values())
    assert all(row.finite for record in found.values() for row in record.rows)
    lines = here.said.getvalue().splitlines()
    chosen = "recording the first micro-batch of steps 1,3-4,/6 on process 0"
    assert f"{chosen} into {trace}" in lines
    for step, record in found.items():
        line = f"recorded step {step} (micro-batch 0, process 0) in {trace}/step-{step:08d}.json"
        assert f"{line}: all {len(record.rows)} tensors finite" in "\n".join(lines)
    assert f"pictures of the recorded steps: {trace / 'trace.html'}" in lines


def test_of_a_window_only_the_first_micro_batch_is_watched(here) -> None:
    watched: list[bool] = []
    settings = {"trace_steps": "2", "gradient_accumulation_steps": 3}
    here.run("run", lambda number, batch: watched.append(observed(here.model)), **settings)
    assert watched == [False, False, False, True, False, False]


def test_if_the_first_micro_batch_fails_the_second_is_recorded(here, monkeypatch) -> None:
    numbers = iter(range(100))

    def fault(batch: Batch, vocabulary: int) -> str | None:
        return "token id out of range" if next(numbers) == 2 else None

    monkeypatch.setattr("npt.train.loop.find_fault", fault)
    result = here.run("run", trace_steps="1,2", gradient_accumulation_steps=2)
    assert result.refused == 1 and result.steps == 3
    places = {step: record.micro_batch for step, record in recorded(result.folder).items()}
    assert places == {1: 0, 2: 1}


def test_a_refused_micro_batch_is_recorded_with_what_was_wrong(here) -> None:
    def act(number: int, batch: Batch) -> None:
        if number == 2:
            poison(here.model)

    result = here.run("run", act, trace_steps="3")
    assert result.refused == 1 and result.steps == 5
    assert (result.folder / "trace" / "trace.html").read_text() == "1 refused"
    (record,) = recorded(result.folder).values()
    first = next(row for row in record.rows if not row.finite)
    assert first.name == "model.layers.1.input_layernorm out" and first.rms is None
    # the window that became step 3 in the end is not recorded as well
    assert here.said.getvalue().count("recorded step 3") == 1
    assert f"tensors are not finite; the first is {first.name}" in here.said.getvalue()


# --- the run is the same


@pytest.mark.parametrize(("strategy", "late"), [("local", True), ("end_to_end", False)])
def test_a_run_is_bit_equal_with_and_without_recording(here, monkeypatch, strategy, late) -> None:
    guard = functools.partial(student_guard, late=late)
    monkeypatch.setattr(trainer_module, "student_guard", guard)
    here.settings |= {
        "strategy": strategy,
        "regularization_lambda": 0.1,
        "gradient_accumulation_steps": 2,
    }
    here.run("plain")
    assert list(recorded(here.run("traced", trace_steps="/1").folder)) == [1, 2, 3]
    here.outcome("plain").assert_equal(here.outcome("traced"))


def test_with_late_results_a_record_bears_its_windows_step(here, monkeypatch) -> None:
    guard = functools.partial(student_guard, late=True)
    monkeypatch.setattr(trainer_module, "student_guard", guard)
    seen: list[int] = []

    def act(number: int, batch: Batch) -> None:
        if observed(here.model):
            seen.append(number + 1)

    assert list(recorded(here.run("run", act, trace_steps="2,5").folder)) == seen == [2, 5]


def test_without_chosen_steps_nothing_is_recorded_or_written(here, monkeypatch, drawn) -> None:
    monkeypatch.setattr(Recorder, "__enter__", lambda _: pytest.fail("one was made"))
    result = here.run("run")
    assert not (result.folder / "trace").exists() and drawn == []
    assert "record" not in here.said.getvalue()


# --- an observer ends nothing


def test_a_recorder_that_fails_is_said_and_the_run_is_the_same(here, monkeypatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    here.run("plain", max_steps=3)
    for number, failing in enumerate(("__enter__", "record"), start=1):
        with monkeypatch.context() as patched:
            patched.setattr(Recorder, failing, broken)
            here.run(failing, trace_steps="2-3", max_steps=3)
        for step in (2, 3):
            line = f"step {step} could not be recorded: OSError: no space left on device"
            assert here.said.getvalue().count(line) == number
        assert not observed(here.model)
        here.outcome(failing).assert_equal(here.outcome("plain"))


def test_a_strategy_that_fails_under_the_recorder_leaves_no_hook(here, drawn) -> None:
    def fail(number: int, batch: Batch) -> None:
        if number == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        here.run("run", fail, trace_steps="/1")
    hooks = [(*m._forward_hooks, *m._forward_pre_hooks) for m in here.model.modules()]
    assert not observed(here.model) and not any(hooks)
    assert drawn == [[1, 2, 3]]


@pytest.mark.usefixtures("obeyed_signals")
@pytest.mark.parametrize("end", ["refusals", "a signal"])
def test_a_run_that_ends_early_has_its_pictures(here, drawn, end) -> None:
    if end == "a signal":
        assert here.run("run", at(3), trace_steps="/1").signal is not None
        assert drawn[0][:3] == [1, 2, 3] and len(drawn) == 1
        return

    def act(number: int, batch: Batch) -> None:
        if number >= 2:
            poison(here.model)

    with pytest.raises(TooManyRefusalsError):
        here.run("run", act, trace_steps="2-4", max_consecutive_bad=2)
    assert drawn == [[2, 3]] and (here.place / "run" / "trace" / "trace.html").exists()
