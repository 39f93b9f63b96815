"""Checks of cases that follow no pattern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import npt
from faults.bench import (
    Fault,
    Outcome,
    Run,
    Setting,
    Student,
    clean_run,
    module_of,
    run,
    whole_window,
)
from faults.patterns import Check, Expected, judge, survived
from faults.persistent_faults import flipped_bit
from faults.transient_faults import (
    MASK_FORMS,
    TENSOR,
    cross_entropy_of_nothing,
    extra_loss,
    gradient_spoilt,
    head_fault,
)
from faults.verdict import Verdict
from npt.adapters.stream import open_stream
from npt.tracer.mask_check import mask_fault
from npt.tracer.watchdogs import BadNumber, base_fault, moments_fault, tensor_fault

NAN_GRADIENT = gradient_spoilt((5, 2), float("nan"))


def trainable(made: Run) -> BadNumber | None:
    return tensor_fault(made.parameters)


def too_large(made: Run) -> BadNumber | None:
    return tensor_fault(made.parameters, limit=1e6)


def moments(made: Run) -> BadNumber | None:
    named = {
        f"{key} of {name}": value
        for name, parameter in made.parameters.items()
        for key, value in made.optimizer.state[parameter].items()
    }
    return moments_fault(named)


def base(made: Run) -> BadNumber | None:
    return base_fault(made.model)


def teacher_logits(setting: Setting) -> Verdict:
    """Check that training refuses the micro-batch, and that the guard names position and vocabulary
    entry in the captured logits.
    """
    seen: list[Tensor] = []
    _, outcome = run(setting, faults={(1, 1): head_fault((0, 1), True, 5, 77, seen)})
    finding = tensor_fault({"logits": seen[0][None]})
    named = finding is not None and finding.index == (0, 5, 77)
    complaints = [] if named else [f"the guard says {finding}"]
    twin = clean_run(setting, [(1, 1)])
    return judge(outcome, twin, [(1, "loss", 1, ("nan",))], also=complaints)


def masked_row(form: str) -> Callable[[Setting], tuple[str | None, str]]:
    """Look at a mask that leaves a valid token no key. Attention then gives zeros or an even
    mixture, so only the mask shows the fault.
    """

    def look(setting: Setting) -> tuple[str | None, str]:
        batch, as_form = setting.batch((0, 0)), MASK_FORMS[form]
        mask = open_stream(Student(setting).model, batch).masks[0].clone()
        if mask_fault(as_form(mask), batch.attention_mask) is not None:
            return "an alarm about the sound mask", "none"
        mask[1, :, 5] = False
        finding = mask_fault(as_form(mask), batch.attention_mask)
        return None if finding is None else finding.message, "[b=1, t=5] may attend to nothing"

    return look


def packed_bytes(setting: Setting) -> Verdict:
    """Set every packed byte pair of a layer to a bf16 NaN. They are only codes, so training and the
    guard must not react.
    """

    def packed(student: Student) -> Any:
        return module_of(student, "model.layers.1.mlp.up_proj").weight.data.view(-1)

    def act(student: Student) -> None:
        pair = torch.tensor([0xC0, 0x7F])
        packed(student).view(torch.uint8).copy_(pair.repeat(packed(student).numel() // 2))

    made, outcome = run(setting, before={0: act})
    assert torch.isnan(packed(made).view(torch.bfloat16)).all()
    finding = base_fault(made.model)
    alarms = len(outcome.refusals) + (finding is not None)
    return _unharmed(outcome, setting, alarms, f"{finding}, {outcome.refusals}")


def clean(setting: Setting) -> Verdict:
    """Train without faults: every refusal is a false alarm."""
    _, outcome = run(setting)
    detail = "; ".join(str(r) for _, r in outcome.refusals[:3])
    return _unharmed(outcome, setting, len(outcome.refusals), detail)


def _unharmed(outcome: Outcome, setting: Setting, alarms: int, detail: str) -> Verdict:
    good = alarms == 0 and outcome.steps == setting.windows
    return Verdict("unharmed" if good else "alarmed", good, good, alarms, "" if good else detail)


def bounded_flip(setting: Setting) -> Verdict:
    """Set a weight of M to 1e35. The multiplier stays within (0.5, 1.5), so training continues
    without a refusal; only a limit on the size of weights names the fault.
    """
    fault = flipped_bit("model.layers.1.npt.M.gate", (3, 1), 30)
    made, outcome = run(setting, before={1: fault})
    finding = too_large(made)
    named = finding is not None and (finding.name, finding.index) == (fault.name, fault.index)
    applied = all(r.applied for r in outcome.results)
    finite = trainable(made) is None and moments(made) is None and applied
    good = named and finite and not outcome.refusals
    return Verdict(
        "bounded" if finite else "harmed",
        named,
        good,
        len(outcome.refusals),
        "" if good else f"{finding}, {outcome.refusals}",
    )


def spike(fault: Fault) -> Check:
    """Check that a window far above thirty accepted ones is refused and changes nothing."""

    def check(setting: Setting) -> Verdict:
        _, outcome = run(setting, faults={(30, 0): fault})
        twin = clean_run(setting, [(30, 0)])
        return judge(outcome, twin, [(30, "spike", None, ("is above",))])

    return check


def overflowing_rate(setting: Setting) -> Verdict:
    """Train with a schedule whose second rate overflows every weight: each step is taken back, and
    the schedule does not advance.
    """
    rate = setting.learning_rate
    kept: list[Outcome] = []
    before = {1: lambda made: kept.append(made.outcome())}
    _, outcome = run(replace(setting, rates=(rate, 3e38, rate)), before=before)
    says = ("was not finite after the step",)
    expected: list[Expected] = [(window, "update", None, says) for window in (1, 2)]
    return judge(outcome, kept[0], expected, "stopped")


def whole_window_refused(window: int, setting: Setting) -> Verdict:
    """Spoil every micro-batch of the window: no step, and the run equals the one without the
    window.
    """
    places = whole_window(setting, window)
    return survived(NAN_GRADIENT, "gradient", (TENSOR,), places)(setting)


def empty_sum(micros: Sequence[int]) -> Check:
    """Give these micro-batches of window 1 a loss of 0 over 0 tokens: they are not refused and
    change nothing.
    """
    fault = extra_loss(cross_entropy_of_nothing("sum"), tokens=0, alone=True)
    return survived(fault, "", places=[(1, micro) for micro in micros])


def diagnosed(setting: Setting) -> Verdict:
    """Trace a refused micro-batch during training, as the training loop does."""
    before = {2: lambda made: npt.trace(made.model, setting.batch((1, 1)))}
    _, outcome = run(setting, faults={(1, 1): NAN_GRADIENT}, before=before)
    twin = clean_run(setting, [(1, 1)])
    return judge(outcome, twin, [(1, "gradient", 1, (TENSOR,))])
