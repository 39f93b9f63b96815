"""One run of a study: the base is given back as it was, equal settings give equal figures, and each
way to fail is told from the others.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from npt.adapters.converted import is_attached
from npt.errors import StoppedError
from npt.tools.sweep.run import Course, enlarged, run, run_trial
from npt.tools.sweep.spec import design_of

TIMES = ("seconds", "seconds_start", "seconds_training")


def figures(row):
    return {name: value for name, value in row.items() if name not in TIMES}


def test_equal_settings_give_equal_figures(lab, trial) -> None:
    one, again, other = (
        run_trial(lab, trial(seeds=[seed], learning_rate=1e-2)) for seed in (0, 0, 1)
    )
    assert figures(one) == figures(again) and one["kl"] != other["kl"]
    assert (one["steps"], one["applied"], one["refused"], one["outcome"]) == (6, 6, 0, "stable")
    assert one["heldout"] and one["tokens"] == 6 * 2 * 16


def test_the_base_is_given_back_bit_for_bit(lab, trial) -> None:
    base = lab.base(trial().settings).model
    before = {
        name: tensor.clone()
        for name, tensor in base.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }

    def stop() -> None:
        raise StoppedError(15)

    with pytest.raises(StoppedError):
        run_trial(lab, trial(), between=stop)
    run_trial(lab, trial(learning_rate=10.0))
    assert not is_attached(base)
    after = base.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_one_base_serves_all_trials_of_its_number_format(lab, trial) -> None:
    plain, fp32, half = (
        lab.base(trial(**extra).settings).model
        for extra in ({}, {"compute_dtype": "fp32"}, {"compute_dtype": "fp16"})
    )
    assert lab.base(trial(learning_rate=0.5).settings).model is plain
    assert (
        plain.model.norm.weight.dtype == torch.bfloat16
        and half.model.norm.weight.dtype == torch.float16
    )
    assert half is not plain and fp32.model.layers[0].mlp.up_proj.compute_dtype == torch.float32
    assert half.model.layers[0].mlp.up_proj.compute_dtype == torch.float16


def test_a_loss_that_runs_away_ends_the_run_and_says_when_and_where(lab, trial) -> None:
    row = run_trial(lab, trial(learning_rate=30.0, divergence_factor=2.0, max_steps=30))
    assert (row["outcome"], row["reason"]) == ("diverged", "loss")
    assert row["stopped_at"] == row["steps"] < 30 and "at the start" in row["detail"]
    assert row["bad_layer"] in (2, 3) and row["bad_stage"]


def test_refusals_in_a_row_end_the_run(lab, trial, monkeypatch) -> None:
    # Every window is faulted, with a size that no 16-bit number has.
    monkeypatch.setattr(
        "npt.tools.sweep.run.enlarged",
        lambda model, probe, armed: enlarged(model, probe, armed=True),
    )
    row = run_trial(lab, trial(compute_dtype="fp16", fault_step=2, fault_scale=1e30))
    assert (row["outcome"], row["reason"], row["stopped_at"]) == (
        "diverged",
        "3 refusals in a row",
        3,
    )
    assert row["refused"] == 3 and row["applied"] == 0 and "loss" in row["refused_kinds"]
    assert (row["bad_layer"], row["bad_stage"], row["bad_finite"]) == (2, "a", False)


def test_a_run_that_ends_worse_than_it_began_is_no_success(lab, trial) -> None:
    row = run_trial(lab, trial(learning_rate=0.3, divergence_factor=1e9, scheduler_type="constant"))
    assert row["loss_end"] > row["loss_first"] and row["outcome"] == "worse"


def with_losses(lab: Any, trial: Any) -> tuple[dict[str, Any], list[float | None]]:
    """A trial's row, and the loss of each of its steps."""
    courses: list[Course] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "npt.tools.sweep.run.Course", lambda s: courses.append(Course(s)) or courses[-1]
        )
        row = run_trial(lab, trial)
    return row, courses[0].losses


def test_a_run_begins_with_its_own_figures_and_is_judged_by_them(lab, trial) -> None:
    row, losses = with_losses(lab, trial(learning_rate=1e-3))
    assert row["loss_first"] == pytest.approx(losses[0]) and 0 < row["kl"] < row["kl_start"]
    assert 0 < row["seconds_start"] + row["seconds_training"] < row["seconds"]


def test_a_run_whose_loss_falls_and_whose_kl_grows_is_worse(lab, trial, monkeypatch) -> None:
    import npt.tools.sweep.run as module

    real, kls = module._Student.fidelity, iter([0.1, 0.1005, 0.1, 0.102])

    def fidelity(student: Any) -> Any:
        return real(student) | {"kl": next(kls)}

    monkeypatch.setattr(module._Student, "fidelity", fidelity)
    small, large = (run_trial(lab, trial(learning_rate=1e-3)) for _ in range(2))
    assert small["outcome"] == "stable" and (large["outcome"], large["reason"]) == (
        "worse",
        "the KL has grown",
    )
    assert large["loss_end"] < large["loss_first"]


def test_the_first_loss_is_of_the_first_window_even_if_refused(lab, trial, monkeypatch) -> None:
    plain, losses = with_losses(lab, trial(compute_dtype="fp16"))
    steps = iter([True] + [False] * 20)
    monkeypatch.setattr(
        "npt.tools.sweep.run.enlarged",
        lambda model, probe, armed: enlarged(model, probe, armed=next(steps)),
    )
    row, hit = with_losses(lab, trial(compute_dtype="fp16", fault_step=6 - 1, fault_scale=1e30))
    assert row["refused"] == 1 and hit[0] is None
    assert row["loss_first"] == plain["loss_first"] == pytest.approx(losses[0])


def test_the_norm_of_a_faults_gradient_is_per_token(lab, trial) -> None:
    # With a scale of 1 nothing is changed, and a window of one batch has that batch's norm.
    row = run_trial(lab, trial(fault_step=4, fault_scale=1.0, learning_rate=1e-3))
    usual = run_trial(lab, trial(learning_rate=1e-3))
    # fp32
    assert (
        usual["grad_norm_max"] / 10 < row["fault_grad_norm"] <= usual["grad_norm_max"] * (1 + 1e-6)
    )


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_every_trial_sets_the_precision_of_its_products(lab, trial, precision) -> None:
    before = torch.get_float32_matmul_precision()
    settings = trial(matmul_precision=precision).settings
    try:
        lab.base(settings)
        torch.set_float32_matmul_precision("medium")
        lab.base(settings)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_fault_is_planted_in_its_step_alone(lab, trial) -> None:
    _, plain = with_losses(lab, trial(learning_rate=1e-3))
    hit, losses = with_losses(lab, trial(learning_rate=1e-3, fault_step=4))
    assert losses[:3] == plain[:3] and losses[3] > 2 * plain[3]
    assert hit["fault_loss"] == pytest.approx(losses[3])
    assert hit["loss_before_fault"] == pytest.approx(sum(plain[:3]) / 3)
    assert not hit["fault_refused"] and hit["fault_harm"] > 0 and hit["outcome"] == "stable"


def test_half_precision_overflows_where_fp32_does_not(lab, trial) -> None:
    half = run_trial(lab, trial(compute_dtype="fp16", fault_step=4, fault_scale=1e6))
    full = run_trial(lab, trial(fault_step=4, fault_scale=1e6))
    assert (
        half["fault_refused"]
        and half["refused"] == 1
        and half["fault_loss"] is not None
        and not math.isfinite(half["fault_loss"])
    )
    assert half["fault_harm"] == 1.0  # nothing of a refused batch is left
    assert not full["fault_refused"] and full["refused"] == 0


def test_a_bisection_closes_in_on_the_largest_rate_that_trains(lab, trial) -> None:
    row = run_trial(lab, trial(bisect={"low": 1e-4, "high": 100.0, "rounds": 3}))
    assert 1e-4 <= row["limit_low"] < row["limit_high"] <= 100
    # four digits
    assert row["runs"] == 5 and math.log(row["limit_high"] / row["limit_low"]) == pytest.approx(
        math.log(1e6) / 8, rel=1e-3
    )
    ends = [
        run(lab, trial(learning_rate=rate).settings)["outcome"]
        for rate in (row["limit_low"], row["limit_high"])
    ]
    assert ends[0] == "stable" and ends[1] != "stable"


@pytest.mark.parametrize(
    ("low", "high", "bracket"), [(1e-6, 1e-5, (1e-5, None)), (50.0, 100.0, (None, 50.0))]
)
def test_a_bracket_that_does_not_hold_the_limit_says_so(lab, trial, low, high, bracket) -> None:
    row = run_trial(lab, trial(bisect={"low": low, "high": high, "rounds": 3}))
    assert (row["limit_low"], row["limit_high"]) == bracket


@pytest.mark.parametrize(
    "settings",
    [
        {
            "strategy": "propagated",
            "loss": "nmse_update",
            "gradient_accumulation_steps": 2,
            "compute_dtype": "bf16",
        },
        {"strategy": "end_to_end", "logit_kl_weight": 1.0},
        {"init": "calibrated", "calibration_tokens": 256},
        {"residual": "keep", "teacher_precision": "fp32", "safe_mode": True},
        {"use_quantization": False, "use_fp16": True, "mult_form": "one_plus_tanh"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_every_way_to_train_can_be_swept(lab, trial, settings) -> None:
    row = run_trial(lab, trial(**settings))
    assert row["outcome"] in ("stable", "worse") and math.isfinite(row["kl"])


EMBEDDED = {
    "model_name": "tiny", "use_quantization": True, "layers": "upper_half", "batch_size": 2,
    "max_length": 64, "num_samples": 128, "eval_samples": 2, "max_steps": 12, "learning_rate": 0.03,
    "max_consecutive_bad": 4, "targets": "gate,up,down",
}  # fmt: skip


def test_the_sigmoid_form_trains_where_forms_that_reach_zero_fail(lab) -> None:
    forms = ["sigmoid", "one_plus_tanh", "unbounded"]
    design = design_of(
        {"settings": EMBEDDED, "parts": {"a": {"grid": {"mult_form": forms}}}}, "forms.yaml"
    )
    found = {
        form: run(lab, trial.settings) for form, trial in zip(forms, design.trials, strict=True)
    }
    ours = found.pop("sigmoid")
    assert ours["outcome"] == "stable" and ours["kl"] < 0.9 * ours["kl_start"]
    # 0.94 of 1.39 measured with Python 3.11, whose library is the text; 0.87 of 1.08 with 3.13.
    assert ours["m_min"] >= 0.5 and ours["m_max"] <= 1.5 and ours["dead"] == 0
    for form, row in found.items():
        assert row["outcome"] != "stable" and row["m_min"] <= 0 and row["dead"] > 0, form
        # 2.5 and 3.4 times measured with Python 3.11.7, 1.35 with the text of 3.11.2
        assert row["kl"] > 1.2 * row["kl_start"], form
