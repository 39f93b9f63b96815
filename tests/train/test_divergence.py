"""A run that is finite and ruined says so: when it shows, at its end, and on its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resumed_runs import Runs, events, records

from npt.cli.main import main
from npt.config import TrainConfig
from npt.report.page import status
from npt.report.run import RunRecord
from npt.runs.run_folder import NullRunFolder
from npt.runs.trackers import Trackers
from npt.train.observers import DivergenceWatch

RUINOUS = 30.0
"""A learning rate that throws every multiplier to a bound in its first steps."""


@pytest.fixture
def here(load_model: Any, tmp_path: Path) -> Runs:
    return Runs(load_model(), tmp_path, lambda: records(24), eval_data=records(4, seed=7))


def causes(folder: Path) -> set[str]:
    return {found["diverged"] for found in events(folder, "warning") if found.get("diverged")}


def test_a_ruined_run_warns_at_once_and_ends_in_red(here) -> None:
    here.report = True
    result = here.run("run", learning_rate=RUINOUS, max_steps=12)
    found = events(result.folder, "warning")
    assert {"saturation", "loss", "floor"} == {x["diverged"] for x in found}
    first = next(x for x in found if x["diverged"] == "saturation")
    assert first["step"] == 2 and "--learning_rate" in first["message"]
    assert "the run has diverged" in here.said.getvalue()
    mood, said = status(RunRecord(result.folder))
    assert mood == "bad" and "diverged" in said and "at their bounds" in said
    assert len(result.diverged) == 3 and result.refused == 0


def test_a_healthy_run_says_nothing_of_it(here) -> None:
    result = here.run("run", max_steps=12, eval_steps=4)
    assert not causes(result.folder) and result.diverged == ()
    assert status(RunRecord(result.folder))[0] == "good"


PAIRS = [
    {"input_ids": [5, 9 + i % 7, 6, 20, 21, 22], "labels": [-100] * 3 + [20, 21, 22]}
    for i in range(80)
]


def test_a_student_of_completions_is_judged_by_them(load_model, tmp_path) -> None:
    """It moves away from its teacher, which does not know them: the KL rises beyond the floor's."""
    here = Runs(load_model(), tmp_path, lambda: PAIRS, eval_data=PAIRS[:4])
    learning = {
        "strategy": "end_to_end", "hidden_weight": 0.0, "logit_kl_weight": 1.0,
        "logit_loss": "cross_entropy", "learning_rate": 0.02, "max_steps": 30, "eval_steps": 15,
    }  # fmt: skip
    result = here.run("run", **learning)
    found = result.fidelity
    assert found.student.perplexity < 0.5 * found.teacher.perplexity
    assert found.student.kl > found.floor.kl
    assert not causes(result.folder) and result.diverged == ()
    best = json.loads((result.folder / "best" / "fidelity.json").read_text())
    assert best["student"]["perplexity"] == found.student.perplexity


def test_an_evaluation_in_the_run_finds_it_too(here) -> None:
    result = here.run("run", learning_rate=RUINOUS, max_steps=6, eval_steps=3)
    steps = {x["diverged"]: x["step"] for x in events(result.folder, "warning")}
    assert steps["floor"] == 3


def test_a_loss_that_came_back_is_no_divergence_any_more(here) -> None:
    context = SimpleNamespace(
        setup=SimpleNamespace(config=TrainConfig()),
        say=here.said.write,
        folder=NullRunFolder(here.place),
        trackers=Trackers(TrainConfig(), here.place),
    )
    watch = DivergenceWatch(context)
    for step, loss in enumerate([1.0] * 5 + [4.0] * 5, start=1):
        watch.after_step(step, loss)
    assert list(watch.causes.values()) == ["the loss is 4, 4 times that of the start"]
    for step in range(11, 16):
        watch.after_step(step, 2.9)
    assert watch.causes == {}


def test_adapters_without_multipliers_are_judged_by_loss_and_floor(here) -> None:
    form = {"modulation": "additive"}
    result = here.run("run", learning_rate=RUINOUS, max_steps=12, adapter=form)
    assert causes(result.folder) == {"loss", "floor"}


def test_a_resumed_run_remembers_where_its_loss_began(here) -> None:
    here.run("run", max_steps=6, save_steps=3)
    ruined = here.run("run", resume="auto", max_steps=14, learning_rate=RUINOUS)
    assert "loss" in causes(ruined.folder)


def test_the_looks_change_no_bit(here, monkeypatch) -> None:
    with_looks = here.run("one", max_steps=11)
    monkeypatch.setattr("npt.train.run_writer.RunWriter.looks", lambda self: None)
    without = here.run("two", max_steps=11)
    assert with_looks.steps == without.steps
    here.outcome("one").assert_equal(here.outcome("two"))


def test_the_terminal_ends_with_the_cause(tmp_path: Path, capsys: Any) -> None:
    asked = "--model_name tiny --max_steps 2 --learning_rate 30 --layers 3 --init random"
    small = "--batch_size 1 --max_length 32 --eval_samples 2 --no_smoke_test"
    folder = ["--output_dir", str(tmp_path / "run")]
    assert main(["pretrain", *asked.split(), *small.split(), *folder]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("warning: this run has")
