"""Faults on one of two processes, in trainers of other people."""

import json
import multiprocessing
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from several import several, values

import inject_fault
from faults.row_cases import PAIR_CASES, RowCase, cases_of
from faults.row_faults import row
from faults.row_runs import Compared, compared, line_of
from faults.row_trainers import student
from faults.verdict import Line
from npt.guard import guard, parallel
from random_base import shard


def compared_here(_processes: Any, case: RowCase, trainer: str) -> Compared:
    return compared(case, trainer)


def judged(case: RowCase, trainer: str) -> Line:
    return line_of(case, values(several(2, compared_here, case, trainer)), 0.0)


# What two processes add to a fault of one: one of them has nothing left, or both refuse, or a step
# is undone on both. debug/inject_fault.py plants all of PAIR_CASES.
CHOSEN = {
    "accelerate": ("pair-first", "pair-step"),  # and pair-all by the script, below
    "hf": ("pair-three", "pair-both"),
    "grpo": ("pair-all",),
    "fsdp": ("pair-three", "pair-label"),
    "fsdp_sharded": ("pair-tensor-nan", "pair-id", "pair-moment"),
}


@pytest.mark.parametrize(
    ("case", "trainer"),
    [
        pytest.param(case, trainer, id=f"{case.id}-{trainer}")
        for trainer, chosen in CHOSEN.items()
        for case in cases_of(trainer)
        if case.id in chosen
    ],
)
def test_a_fault_on_one_process_leaves_no_trace_on_both(case, trainer) -> None:
    if trainer == "grpo":
        pytest.importorskip("trl")
    line = judged(case, trainer)
    assert line.verdict.passed and line.verdict.located, line.verdict.detail
    fate = "ended by RuntimeError" if trainer == "grpo" else "changed"
    assert line.unguarded == ("not run" if case.kind == "data" else fate)


def logits(_processes: Any, sharded: bool) -> Any:
    (case, *_) = PAIR_CASES
    model = student(case, False).eval()
    if sharded:
        shard(model, [])
        assert all(hasattr(p, "full_tensor") for p in model.parameters())
        assert torch.uint8 in {p.dtype for p in model.parameters()}
    return model(row(1)["input_ids"][None]).logits.tolist()


def test_a_4_bit_base_computes_the_same_in_shards() -> None:
    first, second = values(several(2, logits, True))
    assert first == second == values(several(1, logits, False))[0]


@pytest.mark.parametrize(
    ("trainer", "where", "method", "sabotage"),
    [
        ("accelerate", guard, "unsynchronised", lambda _: nullcontext()),
        ("hf", guard.Guard, "begin_again", lambda *_: []),
        (
            "fsdp_sharded",
            parallel.Sharding,
            "exchange",
            lambda _, code, norms: (code.expand(2), norms),
        ),
    ],
)
def test_a_guard_that_is_broken_fails(trainer, where, method, sabotage, monkeypatch) -> None:
    monkeypatch.setattr(where, method, sabotage)
    (case,) = [case for case in cases_of(trainer) if case.id == "pair-tensor-nan"]
    assert not judged(case, trainer).verdict.passed


def test_a_trainer_is_given_something_on_every_process() -> None:
    """A stock one with nothing on a process waits for ever."""
    left_out = {case.id for case in PAIR_CASES} - {case.id for case in cases_of("hf")}
    assert left_out == {"pair-all", "pair-first"}
    assert all(case.processes == 1 for case in cases_of("loop") + cases_of("trl"))


def test_the_script_starts_two_processes(monkeypatch, capsys) -> None:
    # forked ones, which need not import all anew; here OpenMP has no second thread
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: fork)
    given = ["inject_fault.py", "--trainer", "accelerate", "--case", "pair-all", "--json"]
    monkeypatch.setattr("sys.argv", given)
    assert inject_fault.main() == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["passed"], figures["total"], figures["false_alarms"]) == (1, 1, 0)
    (case,) = figures["cases"]
    assert (case["id"], case["located"], case["unguarded"]) == ("pair-all", True, "changed")
