"""A trial: the base is given back as it was, equal settings give equal figures, and each way to
fail is told from the others.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npt.adapters.converted import is_attached
from npt.errors import StoppedError
from npt.tools.sweep.run import run_trial
from npt.train.trainer import Trainer


def figures(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("seconds")}


def test_equal_settings_give_equal_figures(bases, trial) -> None:
    one, again, other = (
        run_trial(bases, trial(seeds=[seed], learning_rate=1e-2, init="random"))
        for seed in (0, 0, 1)
    )
    assert figures(one) == figures(again) and one["kl"] != other["kl"]
    assert (one["steps"], one["refused"], one["outcome"], one["runs"]) == (6, 0, "stable", 1)
    assert one["heldout"] and one["tokens"] == 6 * 2 * 16
    assert 0 < one["kl"] < one["kl_start"] and one["loss_last"] < one["loss_max"]
    assert 0 < one["seconds_training"] < one["seconds"]


def test_the_base_is_given_back_bit_for_bit(bases, trial, monkeypatch) -> None:
    base = bases.get(trial().settings.base)[0]
    before = {n: t.clone() for n, t in base.state_dict().items() if isinstance(t, torch.Tensor)}

    def stopped(trainer: Trainer) -> Any:
        return SimpleNamespace(signal=15, fidelity=None)

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(Trainer, "train", stopped)
        run_trial(bases, trial())
    run_trial(bases, trial(learning_rate=10.0))
    assert not is_attached(base)
    after = base.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_one_base_serves_the_trials_that_share_it(bases, trial) -> None:
    plain = bases.get(trial().settings.base)[0]
    assert bases.get(trial(learning_rate=0.5).settings.base)[0] is plain
    half = bases.get(trial(compute_dtype="bf16").settings.base)[0]
    assert half is not plain
    assert half.model.layers[0].mlp.up_proj.compute_dtype == torch.bfloat16


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_every_trial_sets_the_precision_of_its_products(bases, trial, precision) -> None:
    before = torch.get_float32_matmul_precision()
    base = trial(matmul_precision=precision).settings.base
    try:
        for _ in range(2):
            bases.get(base)
            assert torch.get_float32_matmul_precision() == precision
            torch.set_float32_matmul_precision("medium")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("settings", "outcome", "words"),
    [
        ({"learning_rate": 0.3, "scheduler_type": "constant"}, "worse", "the KL has grown"),
        ({"learning_rate": 1e9, "max_steps": 30, "max_consecutive_bad": 1}, "diverged", "refus"),
    ],
)
def test_a_run_that_does_not_train_says_why(bases, trial, settings, outcome, words) -> None:
    row = run_trial(bases, trial(**settings))
    assert row["outcome"] == outcome and words in row["reason"] and row["kl_start"] > 0
    assert row["steps"] <= settings.get("max_steps", 6)


def test_a_student_that_is_not_finite_has_diverged(bases, trial, monkeypatch) -> None:
    train = Trainer.train

    def broken(trainer: Trainer) -> Any:
        result = train(trainer)
        student = replace(result.fidelity.student, kl=math.nan)
        return replace(result, fidelity=replace(result.fidelity, student=student))

    monkeypatch.setattr(Trainer, "train", broken)
    row = run_trial(bases, trial(learning_rate=1e-3))
    assert (row["outcome"], row["reason"]) == ("diverged", "the student is not finite")


def test_a_bisection_closes_in_on_the_largest_rate_that_trains(bases, trial) -> None:
    row = run_trial(bases, trial(bisect={"low": 1e-4, "high": 100.0, "rounds": 1}))
    assert row["runs"] == 3 and row["outcome"] == "stable"
    # four digits
    assert (row["limit_low"], row["limit_high"]) in ((1e-4, 0.1), (0.1, 100.0))


def trains_below(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are stable if their rate is smaller."""

    def run(bases: Any, settings: Any) -> dict[str, Any]:
        rate = settings.training.learning_rate
        return {"outcome": "stable" if rate < limit else "worse", "rate": rate}

    monkeypatch.setattr("npt.tools.sweep.run.run", run)


def test_a_bisection_ends_with_both_sides_of_the_limit(bases, trial, monkeypatch) -> None:
    trains_below(0.02, monkeypatch)
    row = run_trial(bases, trial(bisect={"low": 1e-4, "high": 100.0, "rounds": 3}))
    assert row["runs"] == 5 and row["rate"] == row["limit_low"] < 0.02 < row["limit_high"]
    # four digits
    assert math.log(row["limit_high"] / row["limit_low"]) == pytest.approx(
        math.log(1e6) / 8, rel=1e-3
    )


@pytest.mark.parametrize(
    ("low", "high", "bracket"), [(1e-6, 1e-5, (1e-5, None)), (50.0, 100.0, (None, 50.0))]
)
def test_a_bracket_that_does_not_hold_the_limit_says_so(
    bases, trial, low, high, bracket, monkeypatch
) -> None:
    trains_below(0.02, monkeypatch)
    row = run_trial(bases, trial(bisect={"low": low, "high": high, "rounds": 3}))
    assert (row["limit_low"], row["limit_high"]) == bracket


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "propagated", "loss": "nmse_update", "gradient_accumulation_steps": 2},
        {"init": "calibrated", "calibration_tokens": 256},
        {"residual": "keep", "teacher_precision": "fp32", "safe_mode": True},
        {"use_quantization": False, "use_fp16": True, "mult_form": "one_plus_tanh"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_way_to_train_can_be_swept(bases, trial, settings) -> None:
    row = run_trial(bases, trial(max_steps=2, **settings))
    assert row["outcome"] in ("stable", "worse") and math.isfinite(row["kl"])
