"""A run that is finite and ruined says so: when it is evaluated, at its end, and on its page."""

import json
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import Runs, events, records

from npt.cli.main import main
from npt.report.page import status
from npt.report.run import RunRecord


@pytest.fixture
def here(load_model: Any, tmp_path: Path) -> Runs:
    return Runs(load_model(), tmp_path, lambda: records(24), eval_data=records(4, seed=7))


def test_a_ruined_run_warns_once_and_ends_in_red(here) -> None:
    result = here.run("run", learning_rate=30.0, max_steps=6, eval_steps=3)
    (warning,) = (e["message"] for e in events(result.folder, "warning"))
    assert warning.startswith("step 3: the run has diverged: the student's KL to its teacher is")
    assert "--learning_rate" in warning and warning in here.said.getvalue()
    mood, sentence = status(RunRecord(result.folder))
    assert mood == "bad" and "diverged" in sentence and "the floor's" in sentence
    assert len(result.diverged) == 1 and result.refused == 0


def test_a_healthy_run_says_nothing_of_it(here) -> None:
    result = here.run("run", max_steps=6, eval_steps=3)
    assert not events(result.folder, "warning") and result.diverged == ()
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
        "logit_loss": "cross_entropy", "learning_rate": 0.02, "max_steps": 20, "eval_steps": 10,
    }  # fmt: skip
    result = here.run("run", **learning)
    fidelity = result.fidelity
    assert fidelity.student.perplexity < 0.5 * fidelity.teacher.perplexity
    assert fidelity.student.kl > fidelity.floor.kl
    assert result.diverged == ()
    best = json.loads((result.folder / "best" / "fidelity.json").read_text())
    assert best["student"]["perplexity"] == fidelity.student.perplexity


def test_the_terminal_ends_with_the_cause(tmp_path: Path, capsys: Any) -> None:
    arguments = "--model_name tiny --max_steps 2 --learning_rate 30 --layers 3 --init random"
    small = "--batch_size 1 --max_length 32 --eval_samples 2 --no_smoke_test"
    folder = ["--output_dir", str(tmp_path / "run")]
    assert main(["pretrain", *arguments.split(), *small.split(), *folder]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("warning: the run diverged")
