"""The fault campaign: every case passes, and a transaction that leaves traces, misses a fault or
cries wolf does not.
"""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import inject_fault
import npt
from faults import bench, campaign, runs
from faults.bench import clean_run, run
from faults.campaign import clean_steps, judged, print_scorecard, summary
from faults.cases import all_cases
from faults.patterns import Case
from npt.adapters import trained
from npt.base import linear
from npt.data import encoding
from npt.distill import local
from npt.evaluation import greedy
from npt.guard import outcome
from npt.guard.window import GradientWindow


def smaller(case: Case) -> Case:
    """The case on a base of four layers, which is as far as any fault reaches, its long runs
    shorter.
    """
    changes: dict[str, object] = {"base_layers": 4}
    if case.setting.spikes:
        changes |= {"rows": 1, "length": 8}
    if case.id == "run-after-nan":
        changes |= {"spike_history": 40, "windows": 42}
    return replace(case, setting=replace(case.setting, **changes))


CASES = [smaller(case) for case in all_cases()]
SMALL = replace(bench.SMALL, base_layers=4)


def case(id: str) -> Case:
    return next(case for case in CASES if case.id == id)


def at_once(id: str) -> Case:
    """The case in one reading mode, for what does not depend on it."""
    return replace(case(id), modes=(False,))


# Each case in one of its reading modes, in turns: every pattern and every kind of refusal comes in
# both, and that a clean run is the same one in both has a test of its own. debug/inject_fault.py
# judges every case in both. Left out is what another case has too, with more around it: draw-two,
# -every, -all, -interrupted, -update, -spike and -loss plant the same under a base that draws,
# gradient-nan is judged where plain loops are, and foreign-hook-nan refuses as foreign-lora-nan
# does.
COVERED = {"gradient-nan", "gradient-two", "gradient-every", "gradient-all", "gradient-interrupted"}
COVERED |= {"gradient-minus-inf", "gradient-huge", "draw-gradient", "spike-gradient"}
COVERED |= {"optimizer-first", "optimizer-write-weight", "loss-labels-mean", "foreign-lora-nan"}
TURNS = [
    (case, case.modes[number % len(case.modes)])
    for number, case in enumerate(c for c in CASES if c.id not in COVERED)
]


@pytest.mark.parametrize(
    ("chosen", "late"),
    TURNS,
    ids=lambda v: v.id if isinstance(v, Case) else "late" if v else "at-once",
)
def test_the_case_passes(chosen, late) -> None:
    verdict = judged(replace(chosen, modes=(late,))).verdict
    assert verdict.passed and verdict.located and not verdict.false_alarms and not verdict.detail


def test_clean_steps_raise_no_alarm() -> None:
    """More of them, than the statistics of spikes hold, are in the case run-after-nan, read at
    once.
    """
    verdict = judged(replace(smaller(clean_steps(40)), modes=(True,))).verdict
    assert verdict.passed and verdict.false_alarms == 0


# --- the campaign finds what is wrong


@pytest.fixture
def sound_twins():
    """The counterfactual is made before anything is broken, and none while something is."""
    clean_run(SMALL, frozenset({(1, 1)}))
    made = bench._clean_run.cache_info().misses
    yield
    assert bench._clean_run.cache_info().misses == made


def test_a_fault_that_is_not_refused_is_missed(monkeypatch, sound_twins) -> None:
    monkeypatch.setattr(bench, "find_fault", lambda batch, vocabulary: None)
    verdict = judged(at_once("data-label")).verdict
    assert not verdict.passed and not verdict.located


def spoil_a_weight(window: GradientWindow) -> None:
    with torch.no_grad():
        window.update.parameters[0].view(-1)[0].nextafter_(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("trace", "detail"),
    [(spoil_a_weight, "model.layers.1.npt.A"), (lambda _: torch.rand(1), "random state")],
)
def test_a_refusal_that_leaves_a_trace_is_harm(trace, detail, monkeypatch, sound_twins) -> None:
    refuse = GradientWindow.refuse

    def careless(self, *arguments) -> None:
        refuse(self, *arguments)
        trace(self)

    monkeypatch.setattr(GradientWindow, "refuse", careless)
    verdict = judged(at_once("data-label")).verdict
    assert (verdict.verdict, verdict.passed, verdict.located) == ("harmed", False, True)
    assert detail in verdict.detail


def test_a_refusal_of_what_nobody_planted_is_a_false_alarm(monkeypatch, sound_twins) -> None:
    honest = bench.find_fault

    def nervous(batch, vocabulary):
        return "a feeling" if batch.sample_ids[:1] == ("w2-m0-r0",) else honest(batch, vocabulary)

    monkeypatch.setattr(bench, "find_fault", nervous)
    verdict = judged(case("data-label")).verdict
    # one in each reading mode
    assert (verdict.passed, verdict.located, verdict.false_alarms) == (False, False, 2)


def test_a_refusal_at_the_wrong_place_is_not_located(monkeypatch, sound_twins) -> None:
    explain = outcome.describe_norms
    careless = lambda norms, names: explain(norms.flip(0), names)  # noqa: E731
    monkeypatch.setattr(outcome, "describe_norms", careless)
    verdict = judged(at_once("gradient-nan")).verdict
    assert (verdict.verdict, verdict.passed, verdict.located) == ("survived", False, False)


def test_a_case_that_raises_has_failed_and_says_what() -> None:
    def check(setting):
        raise RuntimeError("boom")

    line = judged(Case("x", "x", "x", check))
    assert not line.verdict.passed and "RuntimeError: boom" in line.verdict.detail


# --- the cases of what is seen find the earlier mistakes


@pytest.mark.parametrize("id", ["foreign-lora", "foreign-hook", "foreign-hook-whole"])
def test_parts_of_others_that_training_leaves_out_are_harm(monkeypatch, id) -> None:
    for module in (trained, local):
        monkeypatch.setattr(module, "may_change", lambda module: False)
    monkeypatch.setattr(trained, "is_plain_linear", lambda module: True)
    monkeypatch.setattr(
        trained,
        "product_weight",
        lambda module, dtype: linear.product_weight(getattr(module, "base_layer", module), dtype),
    )
    monkeypatch.setattr(trained, "effective_dtype", lambda module: "float32")
    verdict = judged(at_once(id)).verdict
    assert not verdict.passed and ("gradient" in verdict.detail or "a loss of" in verdict.detail)


def test_a_bundle_without_documents_is_harm(monkeypatch) -> None:
    honest = runs.read_student

    def forgetful(bundle: Path) -> Any:
        read = honest(bundle)
        for stored in read.postmortem.micro_batches:
            stored.inputs.pop("documents", None)
        return read

    monkeypatch.setattr(runs, "read_student", forgetful)
    verdict = judged(at_once("run-packed")).verdict
    assert not verdict.passed and "the documents of" in verdict.detail


def test_a_teacher_that_is_handed_the_students_masks_is_harm(monkeypatch) -> None:
    honest, first = local.open_stream, []

    def shared(model, batch):
        stream = honest(model, batch)
        first.append(stream.masks)
        return replace(stream, masks=first[0])

    monkeypatch.setattr(local, "open_stream", shared)
    verdict = judged(at_once("sight-attention")).verdict
    assert not verdict.passed and "from an eager teacher" in verdict.detail


def test_padding_that_takes_part_of_a_window_is_harm(monkeypatch) -> None:
    honest = greedy.batch_from_tensors

    def closed(ids, mask):
        """Its mask is left out, so that padding is attended to and takes a window's columns."""
        return replace(
            honest(ids, torch.ones_like(mask)), position_ids=honest(ids, mask).position_ids
        )

    monkeypatch.setattr(greedy, "batch_from_tensors", closed)
    verdict = judged(at_once("sight-window")).verdict
    assert not verdict.passed and "prompt 0 continues with" in verdict.detail


def test_a_space_that_the_tokenizer_made_up_is_harm(monkeypatch) -> None:
    monkeypatch.setattr(encoding.Encoder, "_begins_with_space", False)
    verdict = judged(at_once("sight-space")).verdict
    assert not verdict.passed and "'the:' and 'answer' became 'the: answer'" in verdict.detail


# --- the counterfactual is worth something


def test_the_run_without_a_micro_batch_is_another_run() -> None:
    assert clean_run(SMALL).difference(clean_run(SMALL, frozenset({(1, 1)}))) is not None
    # a schedule that moved by one step would be seen
    assert len(set(clean_run(SMALL).rates)) == SMALL.windows


@pytest.mark.parametrize("late", [False, True])
def test_both_reading_modes_are_the_same_run(late) -> None:
    assert (
        not clean_run(SMALL).refusals
        and run(replace(SMALL, late=late))[1].difference(clean_run(SMALL)) is None
    )


def test_the_shared_base_is_never_changed() -> None:
    before = npt.base_hash(bench.embedded(4))
    for id in ("weight-absmax", "weight-packed", "data-padding-nan"):
        judged(at_once(id))
    assert npt.base_hash(bench.embedded(4)) == before


# --- what is printed


def test_the_figures_have_their_keys_and_add_up() -> None:
    lines = [
        judged(at_once("data-label")),
        judged(
            Case("bad", "[x]", "-", lambda setting: campaign.Verdict("harmed", False, False, 3))
        ),
    ]
    figures = summary(lines)
    assert (figures["passed"], figures["total"], figures["false_alarms"]) == (1, 2, 6)
    assert {"id", "name", "verdict", "located", "passed"} <= figures["cases"][0].keys()
    out = io.StringIO()
    print_scorecard(Console(file=out, width=120, markup=False), lines)
    assert "FAILED: harmed" in out.getvalue() and "passed 1 of 2, 6 false alarms" in out.getvalue()


def script(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["inject_fault.py", *arguments])
    return inject_fault.main()


def test_the_script_lists_every_case_with_its_truth(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["id"] for entry in listed] == [*(c.id for c in CASES), "clean-steps"]
    assert all(entry["truth"] for entry in listed)


def test_the_script_runs_one_case_and_tells_by_its_exit_status(monkeypatch, capsys) -> None:
    assert script(monkeypatch, "--case", "data-label", "--json") == 0
    assert json.loads(capsys.readouterr().out)["passed"] == 1
    monkeypatch.setattr(bench, "find_fault", lambda batch, vocabulary: None)
    assert script(monkeypatch, "--case", "data-label") == 1
    assert "FAILED" in capsys.readouterr().out


def test_the_script_refuses_an_unknown_case(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        script(monkeypatch, "--case", "nonsense")
    assert stop.value.code == 2
    assert "that --list prints" in capsys.readouterr().err
