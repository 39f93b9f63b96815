"""Faults in other people's trainers: judged by an unguarded run that never saw them."""

import itertools
import json

import pytest
from torch import Tensor

import inject_fault
from faults.row_cases import CASES, RowCase, cases_of
from faults.row_runs import judged
from faults.row_trainers import TRAINERS
from npt.guard.guard import Guard
from npt.guard.traces import Draws
from npt.guard.update import GuardedUpdate
from npt.guard.window import Gradients


def case(name: str):
    return next(case for case in CASES if case.id == name)


def skip_without(trainer: str) -> None:
    if trainer in ("trl", "grpo"):
        pytest.importorskip("trl")


# Each fault in one of the trainers, in turns, TRL's the least often, which is a Trainer too;
# debug/inject_fault.py plants every one in each.
ALONE = [trainer for trainer in TRAINERS if not trainer.startswith("fsdp")]
TRAINERS_IN_TURNS = itertools.cycle([*(t for t in ALONE if t not in ("trl", "grpo")), *ALONE])


def next_for(one: RowCase) -> str:
    return next(trainer for trainer in TRAINERS_IN_TURNS if one in cases_of(trainer))


@pytest.mark.parametrize(("name", "trainer"), [(case.id, next_for(case)) for case in CASES])
def test_a_fault_leaves_no_trace_and_is_located(name, trainer) -> None:
    skip_without(trainer)
    line = judged(case(name), trainer)
    assert line.verdict.passed and line.verdict.located, line.verdict.detail
    assert line.unguarded != "equal"


def add_everything(gradients: Gradients, _flag: Tensor) -> None:
    for place, gradient in gradients.present.items():
        gradients.sum_views[place] += gradient


@pytest.mark.parametrize(
    ("name", "trainer", "where", "method", "sabotage"),
    [
        ("row-tensor-nan", "loop", Draws, "settle", lambda *_: None),
        ("step-weight", "loop", Draws, "rewind", lambda *_: None),
        ("row-gradient-nan", "accelerate", Gradients, "add", add_everything),
        ("row-tensor-nan", "hf", Guard, "begin_again", lambda *_: []),
        ("row-tensor-nan", "trl", Guard, "begin_again", lambda *_: []),
        ("step-moment", "hf", GuardedUpdate, "take_back", lambda *_: None),
    ],
)
def test_a_guard_that_is_broken_fails(name, trainer, where, method, sabotage, monkeypatch) -> None:
    skip_without(trainer)
    monkeypatch.setattr(where, method, sabotage)
    assert not judged(case(name), trainer).verdict.passed


@pytest.mark.parametrize("trainer", ["loop", "hf", "trl"])
def test_the_script_runs_a_case_of_a_trainer(trainer, monkeypatch, capsys) -> None:
    skip_without(trainer)
    given = ["inject_fault.py", "--trainer", trainer, "--case", "row-label", "--json"]
    monkeypatch.setattr("sys.argv", given)
    assert inject_fault.main() == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["passed"], figures["total"], figures["false_alarms"]) == (1, 1, 0)


def test_the_script_lists_the_cases_of_trainers(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["inject_fault.py", "--trainer", "hf", "--list", "--json"])
    assert inject_fault.main() == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in listed] == [case.id for case in cases_of("hf")]
    assert len(listed) >= 20 and all(entry["truth"] for entry in listed)
