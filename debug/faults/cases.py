"""The cases: what is planted, what has to be said about it, and what may remain of it, which is
nothing.

Every case has its ground truth and runs in both reading modes of the transaction where it goes
through one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from faults import plants, poisons, runs
from faults.bench import (
    SMALL,
    Outcome,
    Plant,
    Run,
    Setting,
    Student,
    clean_run,
    let_change,
    let_draw,
    module_of,
    put_around,
    run,
    whole_window,
)
from faults.patterns import (
    Case,
    Expected,
    costs_its_window,
    costs_itself,
    costs_nothing,
    found,
    judge,
    stops_everything,
)
from faults.plants import TENSOR
from faults.sight import as_called, sight_cases
from faults.verdict import Check, Verdict
from npt.adapters.stream import open_stream
from npt.diagnostics.diagnose import diagnose
from npt.diagnostics.guards import Finding, base_fault, logits_fault, moments_fault, tensor_fault
from npt.diagnostics.tracer.mask_check import mask_fault

END_TO_END = Setting(strategy="end_to_end", logit_kl_weight=1.0)
STUDENT_STREAM = Setting(strategy="end_to_end")
LEFT = Setting(padding="left")
LONG = Setting(layers="0", targets=("gate",), size=1, spikes=True, learning_rate=1e-3)
"""Many cheap steps, with spike refusal on."""
ONLY_TENSOR = "model.layers.0.npt.B.gate"


def trainable(made: Run) -> Finding | None:
    return tensor_fault(made.parameters)


def too_large(made: Run) -> Finding | None:
    return tensor_fault(made.parameters, limit=1e6)


def moments(made: Run) -> Finding | None:
    return moments_fault(made.parameters, made.optimizer)


def base(made: Run) -> Finding | None:
    return base_fault(made.model)


def teacher_logits(late: bool) -> Verdict:
    """Refused in training, and the guard names position and vocabulary entry of the captured
    logits.
    """
    seen: list[Tensor] = []
    setting = replace(END_TO_END, late=late)
    _, outcome = run(setting, plants={(1, 1): plants.head_fault((0, 1), True, 5, 77, seen)})
    finding = logits_fault(seen[0][None])
    complaints = (
        [] if finding is not None and finding.index == (0, 5, 77) else [f"the guard says {finding}"]
    )
    return judge(
        outcome,
        clean_run(setting, frozenset({(1, 1)})),
        [(1, "loss", 1, ("nan",))],
        "survived",
        complaints,
    )


def masked_row(form: str) -> Callable[[], tuple[str | None, str]]:
    """A valid token's row of the mask without a key: attention gives zeros or an even mixture, so
    only the mask shows it.
    """

    def look() -> tuple[str | None, str]:
        student = Student(SMALL)
        batch = SMALL.batch((0, 0))
        mask = open_stream(student.model, batch).context["attention_mask"].clone()
        if mask_fault(plants.MASK_FORMS[form](mask), batch.attention_mask) is not None:
            return "an alarm about the sound mask", "none"
        mask[1, :, 5] = False
        finding = mask_fault(plants.MASK_FORMS[form](mask), batch.attention_mask)
        return None if finding is None else finding.message, "[b=1, t=5] may attend to nothing"

    return look


def packed_bytes(late: bool) -> Verdict:
    """Every packed byte pair of a layer a bf16 NaN: training and the guard take no notice, since
    they are just codes.
    """
    module = "model.layers.1.mlp.up_proj"

    def act(student: Student) -> None:
        layer: Any = module_of(student, module)
        layer.weight.data.view(torch.uint8).view(-1).copy_(
            torch.tensor([0xC0, 0x7F]).repeat(layer.weight.data.numel() // 2)
        )

    made, outcome = run(replace(SMALL, late=late), before={0: act})
    layer: Any = module_of(made, module)
    assert torch.isnan(layer.weight.data.view(-1).view(torch.bfloat16)).all()
    finding = base_fault(made.model)
    alarms = len(outcome.refusals) + (finding is not None)
    good = alarms == 0 and outcome.steps == made.setting.windows
    return Verdict(
        "unharmed" if good else "alarmed",
        good,
        good,
        alarms,
        "" if good else f"{finding}, {outcome.refusals}",
    )


def bounded_flip(late: bool) -> Verdict:
    """M enters through a bounded function: with one weight at 1e35 the modulation still lies in
    (0.5, 1.5), so training goes on and says nothing. Only a limit on the size of weights names it.
    """
    name, index = "model.layers.1.npt.M.gate", (3, 1)
    made, outcome = run(replace(SMALL, late=late), before={1: poisons.flipped_bit(name, index, 30)})
    finding = too_large(made)
    named = finding is not None and finding.name == name and finding.index == index
    finite = (
        tensor_fault(made.parameters) is None
        and moments(made) is None
        and all(r.applied for r in outcome.results)
    )
    good = named and finite and not outcome.refusals
    return Verdict(
        "bounded" if finite else "harmed",
        named,
        good,
        len(outcome.refusals),
        "" if good else f"{finding}, {outcome.refusals}",
    )


def spike(plant: Plant, change: Callable[[PreTrainedModel], None] | None = None) -> Check:
    """With spike refusal on, one window far above thirty accepted ones is refused, and leaves no
    trace.
    """

    def check(late: bool) -> Verdict:
        setting = replace(LONG, late=late, windows=34, change=change)
        _, outcome = run(setting, plants={(30, 0): plant})
        return judge(
            outcome,
            clean_run(setting, frozenset({(30, 0)})),
            [(30, "spike", None, ("is above",))],
            "survived",
        )

    return check


def after_a_nan(late: bool) -> Verdict:
    """One NaN among the losses must not blind or sharpen the spike statistics: the 129 clean steps
    behind it all count.
    """
    setting = replace(LONG, late=late, windows=130)
    _, outcome = run(
        setting, plants={(0, 0): plants.extra_loss(plants.cross_entropy_of_nothing("mean"))}
    )
    return judge(
        outcome, clean_run(setting, frozenset({(0, 0)})), [(0, "loss", 0, ("nan",))], "survived"
    )


def overflowing_rate(late: bool) -> Verdict:
    """A schedule whose second entry overflows every weight: the step is taken back again and again,
    and the schedule waits.
    """
    setting = replace(SMALL, late=late, rates=(SMALL.learning_rate, 3e38, SMALL.learning_rate))
    kept: list[Outcome] = []
    _, outcome = run(setting, before={1: lambda made: kept.append(made.outcome())})
    expected: list[Expected] = [
        (window, "update", None, ("was not finite after the step",)) for window in (1, 2)
    ]
    return judge(outcome, kept[0], expected, "stopped")


def nothing_at_all(window: int, plant: Plant, of: Setting = SMALL) -> Check:
    """Every micro-batch of the window is refused for its gradient: no step, and the run equals the
    one without the window.
    """

    def check(late: bool) -> Verdict:
        setting = replace(of, late=late)
        places = sorted(whole_window(setting, window))
        _, outcome = run(setting, plants=dict.fromkeys(places, plant))
        expected: list[Expected] = [(window, "gradient", micro, (TENSOR,)) for _, micro in places]
        return judge(outcome, clean_run(setting, frozenset(places)), expected, "survived")

    return check


def empty_sum(micros: Sequence[int]) -> Check:
    """These micro-batches of window 1 have a loss of 0 over 0 tokens: nothing is wrong with them,
    and nothing comes of them.
    """

    def check(late: bool) -> Verdict:
        setting = replace(SMALL, late=late)
        plant = plants.extra_loss(plants.cross_entropy_of_nothing("sum"), tokens=0, alone=True)
        places = [(1, micro) for micro in micros]
        _, outcome = run(setting, plants=dict.fromkeys(places, plant))
        return judge(outcome, clean_run(setting, frozenset(places)), [], "survived")

    return check


def interrupted(late: bool, setting: Setting = SMALL) -> Verdict:
    setting = replace(setting, late=late)
    _, outcome = run(setting, plants={(1, 1): plants.interruption})
    return judge(outcome, clean_run(setting, frozenset({(1, 1)})), [], "survived")


def diagnosed(late: bool) -> Verdict:
    """The training loop diagnoses what it refuses, with two forward passes of its own."""
    setting = replace(SMALL, late=late, change=let_draw)
    _, outcome = run(
        setting,
        plants={(1, 1): NAN_GRADIENT},
        before={2: lambda made: diagnose(made.model, setting.batch((1, 1)))},
    )
    return judge(
        outcome,
        clean_run(setting, frozenset({(1, 1)})),
        [(1, "gradient", 1, (TENSOR,))],
        "survived",
    )


NAN, INF = math.nan, math.inf
MODULE = "model.layers.1.mlp.gate_proj"
NAN_GRADIENT = plants.gradient_fault((5, 2), NAN)
FORMS = (("bool", "bool"), ("inf", "-inf"), ("min", "finfo.min"))


def data_cases() -> list[Case]:
    broken = plants.batch_fault
    outside = "outside the vocabulary [0, 2048)"
    return [
        costs_itself(
            "data-id-too-large",
            "a token id of V",
            broken(plants.id_at(1, 3, 2048)),
            "data",
            [f"token id 2048 {outside} at row 1, position 3", "w1-m1-r1"],
        ),
        costs_itself(
            "data-id-negative",
            "a token id of -1",
            broken(plants.id_at(0, 0, -1)),
            "data",
            [f"token id -1 {outside} at row 0, position 0", "w1-m1-r0"],
        ),
        costs_itself(
            "data-label",
            "a label out of range",
            broken(plants.label_at(0, 5, 9999)),
            "data",
            [f"label 9999 {outside} at row 0, position 5", "w1-m1-r0"],
        ),
        costs_itself(
            "data-no-rows",
            "a batch of no rows",
            broken(plants.without(rows=True)),
            "data",
            ["shapes (0, 16)"],
        ),
        costs_itself(
            "data-no-tokens",
            "rows of no tokens",
            broken(plants.without(rows=False)),
            "data",
            ["shapes (2, 0)"],
        ),
        costs_itself(
            "data-shapes",
            "a mask shorter than its ids",
            broken(plants.short_mask),
            "data",
            ["(2, 16) of ids", "(2, 15) of mask"],
        ),
        Case(
            "data-teacher-nan",
            "NaN among the teacher's logits",
            "micro-batch 1 of window 1: loss; the guard names [b=0, t=5, v=77]",
            teacher_logits,
            plant=plants.head_fault((0, 1), True, 5, 77),
            setting=END_TO_END,
        ),
        costs_nothing(
            "data-padding-inf",
            "-Inf as the padding token's embedding",
            before=poisons.padding_embedding(-INF),
        ),
        costs_nothing(
            "data-padding-nan",
            "NaN as the padding token's embedding, padding on the left",
            LEFT,
            before=poisons.padding_embedding(NAN),
        ),
        costs_nothing(
            "data-padding-stream",
            "the same on the student's own stream",
            replace(LEFT, strategy="end_to_end"),
            before=poisons.padding_embedding(NAN),
        ),
    ]


def mask_and_loss_cases() -> list[Case]:
    broken = plants.batch_fault
    return [
        *(
            costs_nothing(
                f"mask-padding-{key}",
                f"padded tokens without a key, mask as {form}",
                LEFT,
                plant=plants.mask_form(form),
            )
            for key, form in FORMS
        ),
        *(
            found(
                f"mask-row-{key}",
                f"a valid token without a key, mask as {form}",
                "the mask guard names [b=1, t=5]",
                masked_row(form),
            )
            for key, form in FORMS
        ),
        costs_itself(
            "mask-row-empty",
            "a row without a valid token",
            broken(plants.mask_out(1)),
            "data",
            ["no valid token in row 1", "w1-m1-r1"],
        ),
        costs_itself(
            "mask-all-empty",
            "one micro-batch without a valid token",
            broken(plants.mask_out(0, 1)),
            "data",
            ["no valid token in row 0", "w1-m1-r0"],
        ),
        costs_nothing(
            "loss-labels-unused",
            "every label -100 under a loss of hidden states",
            plant=broken(plants.no_labels),
        ),
        costs_itself(
            "loss-labels-mean",
            "every label -100 under a mean cross-entropy",
            plants.extra_loss(plants.cross_entropy_of_nothing("mean")),
            "loss",
            ["nan"],
            compare=True,
        ),
        Case(
            "loss-labels-sum",
            "every label -100 under a summed cross-entropy, a count of 0",
            "no alarm, and the run equals the one without the micro-batch",
            empty_sum((1,)),
        ),
        Case(
            "loss-labels-window",
            "the same in every micro-batch of a window",
            "no alarm, no step",
            empty_sum((0, 1, 2, 3)),
        ),
        costs_nothing(
            "loss-padding-inf",
            "Inf at padded positions of a layer's output",
            plant=plants.output_fault("model.layers.0", plants.spoil_padding(INF)),
        ),
        costs_itself(
            "loss-inf-times-zero",
            "Inf at a padded position times a mask of 0",
            plants.extra_loss(plants.masked_by_multiplication),
            "loss",
            ["nan"],
            compare=True,
        ),
        costs_itself(
            "loss-reverse-kl",
            "reverse KL at T = 0.05: finite loss, NaN gradient",
            plants.extra_loss(plants.reverse_kl),
            "gradient",
            ["nan"],
            compare=True,
        ),
    ]


def weight_cases() -> list[Case]:
    code, down = "model.layers.1.npt.A", "model.layers.2.npt.B.down"
    norm = "model.layers.1.input_layernorm.weight"
    absmax, offset = (
        "model.layers.2.mlp.down_proj: state2.absmax",
        "model.layers.0.self_attn.q_proj: offset",
    )
    return [
        stops_everything(
            "weight-nan",
            "NaN in an adapter's tensor",
            poisons.weight(code, (2, 7), NAN),
            "loss",
            ["nan"],
            trainable,
            code,
            (2, 7),
            unsaved=True,
        ),
        stops_everything(
            "weight-absmax",
            "Inf in absmax of a 4-bit weight",
            poisons.statistic(absmax, (1,), INF),
            "loss",
            ["nan"],
            base,
            absmax,
            (1,),
        ),
        stops_everything(
            "weight-offset",
            "NaN in the offset of a 4-bit weight",
            poisons.statistic(offset, (), NAN),
            "loss",
            ["nan"],
            base,
            offset,
            (),
        ),
        stops_everything(
            "weight-norm",
            "NaN in a frozen norm",
            poisons.frozen(norm, (9,), NAN),
            "loss",
            ["nan"],
            base,
            norm,
            (9,),
        ),
        Case("weight-packed", "packed bytes that read as NaN", "no alarm", packed_bytes),
        stops_everything(
            "weight-flip",
            "an exponent bit of an adapter's weight flipped: finite, 1e35",
            poisons.flipped_bit(down, (4, 1), 30),
            "loss",
            ["loss is"],
            too_large,
            down,
            (4, 1),
        ),
        Case(
            "weight-flip-bounded",
            "the same in M, behind the bound",
            "no alarm, all stays finite; the size guard names M.gate[3, 1]",
            bounded_flip,
        ),
        found(
            "weight-dtype",
            "a 4-bit layer flipped to fp16",
            "the audit names model.layers.3.self_attn.k_proj",
            runs.dtype_flipped,
        ),
        Case(
            "weight-autocast",
            "autocast switched on by the caller",
            "the loop computes the same, bit for bit; the audit names autocast",
            runs.autocast,
        ),
    ]


def activation_cases() -> list[Case]:
    return [
        costs_itself(
            "activation-inf",
            "Inf in a gate",
            plants.output_fault(MODULE, plants.spoil((3, 17), INF)),
            "loss",
            ["nan"],
            compare=True,
        ),
        costs_nothing(
            "activation-clamped",
            "Inf in a gate, hidden by a clamp",
            plant=plants.output_fault(MODULE, plants.spoil_and_clamp((3, 17), INF, 50.0)),
            instead=plants.output_fault(MODULE, plants.spoil_and_clamp((3, 17), 50.0, 50.0)),
        ),
        costs_itself(
            "activation-softmax",
            "Inf in a key, of which softmax makes NaN and zeros",
            plants.output_fault("model.layers.1.self_attn.k_proj", plants.spoil((3, 17), INF)),
            "loss",
            ["nan"],
            STUDENT_STREAM,
        ),
        costs_itself(
            "activation-fp16",
            "fp16 overflow inside a 4-bit layer",
            plants.half_precision_overflow("model.layers.1.mlp.down_proj", 1e5),
            "loss",
            ["nan"],
        ),
        costs_itself(
            "activation-recomputed",
            "NaN in a recomputation only",
            plants.trained_head(plants.head_fault((1,), False, 5, 77)),
            "gradient",
            ["nan"],
            END_TO_END,
            compare=True,
        ),
    ]


def gradient_cases() -> list[Case]:
    def one(id: str, name: str, value: float, says: str, index: tuple[int, ...] = (5, 2)) -> Case:
        return costs_itself(
            id,
            name,
            plants.gradient_fault(index, value),
            "gradient",
            [f"{TENSOR} has norm {says} (1 of"],
            compare=True,
        )

    return [
        one("gradient-nan", "NaN in one tensor, micro-batch 2 of 3", NAN, "nan"),
        one("gradient-inf", "+Inf in one tensor", INF, "inf"),
        one("gradient-minus-inf", "-Inf in one tensor", -INF, "inf", (0, 0)),
        one("gradient-large", "a finite 1e20 in one tensor", 1e20, "inf"),
        one("gradient-huge", "a finite 1e30 in one tensor", 1e30, "inf"),
        costs_itself(
            "gradient-backward",
            "a backward that computes NaN behind a finite loss",
            plants.backward_fault((5, 2), NAN),
            "gradient",
            [f"{TENSOR} has norm nan (1 of"],
            STUDENT_STREAM,
            compare=True,
        ),
        costs_itself(
            "gradient-two",
            "two micro-batches of a window",
            NAN_GRADIENT,
            "gradient",
            [TENSOR],
            places=((1, 0), (1, 2)),
        ),
        costs_itself(
            "gradient-every",
            "one micro-batch in every window",
            NAN_GRADIENT,
            "gradient",
            [TENSOR],
            places=((0, 2), (1, 0), (2, 1)),
        ),
        Case(
            "gradient-all",
            "every micro-batch of a window",
            "three refusals, no step",
            nothing_at_all(1, NAN_GRADIENT),
        ),
        Case(
            "gradient-interrupted",
            "an exception in the middle of a micro-batch",
            "no refusal; the micro-batch has not happened",
            interrupted,
        ),
    ]


def optimizer_cases() -> list[Case]:
    first, second, count = (f"{key} of {TENSOR}" for key in ("exp_avg", "exp_avg_sq", "step"))
    step = "a step that writes"
    return [
        stops_everything(
            "optimizer-nan",
            "NaN in a first moment",
            poisons.moment(first, (5, 2), NAN),
            "update",
            [TENSOR],
            moments,
            first,
            (5, 2),
            whole=True,
        ),
        stops_everything(
            "optimizer-negative",
            "a second moment below zero",
            poisons.moment(second, (5, 2), -1.0),
            "update",
            [TENSOR],
            moments,
            second,
            (5, 2),
            whole=True,
        ),
        costs_its_window(
            "optimizer-write-weight",
            f"{step} NaN into a weight",
            poisons.one_bad_write(TENSOR, NAN),
            "update",
            [TENSOR],
        ),
        costs_its_window(
            "optimizer-write-moment",
            f"{step} Inf into a moment",
            poisons.one_bad_write(second, INF),
            "update",
            [second],
        ),
        costs_its_window(
            "optimizer-write-count",
            f"{step} NaN into a step count",
            poisons.one_bad_write(count, NAN),
            "update",
            [count],
        ),
        costs_itself(
            "optimizer-first",
            "a fault on step 1",
            NAN_GRADIENT,
            "gradient",
            [TENSOR],
            places=((0, 1),),
            compare=True,
        ),
        Case(
            "optimizer-first-all",
            "nothing but faults before step 1",
            "moments and counts stay at zero, the schedule at its start",
            nothing_at_all(0, NAN_GRADIENT),
        ),
        Case(
            "optimizer-rate",
            "a learning rate that overflows every weight",
            "each step taken back; schedule and counters do not move",
            overflowing_rate,
        ),
    ]


def drawing_cases() -> list[Case]:
    """The base draws random numbers (dropout, noise), and what is refused must not leave later
    micro-batches other ones.
    """
    draws = replace(SMALL, change=let_draw)
    end_to_end, propagated = (
        replace(END_TO_END, change=let_draw),
        replace(draws, strategy="propagated"),
    )
    nan_loss = plants.extra_loss(plants.cross_entropy_of_nothing("mean"))

    def one(
        id: str,
        name: str,
        plant: Plant,
        kind: str,
        says: str,
        setting: Setting = draws,
        **more: Any,
    ) -> Case:
        return costs_itself(
            f"draw-{id}", f"{name} under a base that draws", plant, kind, [says], setting, **more
        )

    return [
        one(
            "data",
            "a token id of V",
            plants.batch_fault(plants.id_at(1, 3, 2048)),
            "data",
            "token id 2048",
        ),
        one("loss", "a NaN loss", nan_loss, "loss", "nan"),
        one("gradient", "NaN in one tensor", NAN_GRADIENT, "gradient", TENSOR),
        one(
            "propagated",
            "NaN in one tensor, propagated,",
            NAN_GRADIENT,
            "gradient",
            TENSOR,
            propagated,
        ),
        one(
            "end-to-end",
            "NaN in one tensor, end to end,",
            NAN_GRADIENT,
            "gradient",
            TENSOR,
            end_to_end,
        ),
        one(
            "two",
            "two micro-batches of a window",
            NAN_GRADIENT,
            "gradient",
            TENSOR,
            places=((1, 0), (1, 2)),
        ),
        one(
            "every",
            "one micro-batch in every window",
            NAN_GRADIENT,
            "gradient",
            TENSOR,
            places=((0, 2), (1, 0), (2, 1)),
        ),
        Case(
            "draw-all",
            "every micro-batch of a window under a base that draws",
            "three refusals, no step",
            nothing_at_all(1, NAN_GRADIENT, draws),
        ),
        costs_its_window(
            "draw-update",
            "a step that writes NaN into a weight, under a base that draws",
            poisons.one_bad_write(TENSOR, NAN),
            "update",
            [TENSOR],
            draws,
        ),
        Case(
            "draw-spike",
            "a finite 1e10 in one gradient under a base that draws",
            "window 30: spike",
            spike(plants.gradient_fault((0, 0), 1e10, ONLY_TENSOR), change=let_draw),
        ),
        Case(
            "draw-interrupted",
            "an exception in the middle of a micro-batch under a base that draws",
            "no refusal; the micro-batch has not happened",
            partial(interrupted, setting=draws),
        ),
        Case(
            "draw-diagnosed",
            "a refused micro-batch that is diagnosed under a base that draws",
            "micro-batch 1 of window 1: gradient; looking into it draws nothing from training",
            diagnosed,
        ),
    ]


def foreign_cases() -> list[Case]:
    """Somebody else's parts are in the base: what they compute is trained with, and what is refused
    is refused as it ever is.
    """
    cases = []
    for id, change, name in (
        ("lora", put_around, "a LoRA around every MLP projection"),
        ("hook", let_change, "hooks that change values"),
    ):
        own, whole = replace(SMALL, change=change), replace(END_TO_END, change=change)
        cases += [
            Case(
                f"foreign-{id}",
                name,
                "loss and gradients are those of whole layers, called",
                partial(as_called, setting=own),
                (False,),
            ),
            Case(
                f"foreign-{id}-whole",
                f"{name}, end to end",
                "likewise",
                partial(as_called, setting=whole),
                (False,),
            ),
            costs_itself(
                f"foreign-{id}-nan",
                f"NaN in one tensor under {name}",
                NAN_GRADIENT,
                "gradient",
                [TENSOR],
                own,
            ),
        ]
    return cases


def run_cases() -> list[Case]:
    return [
        Case(
            "spike-loss",
            "loss and gradient of a step 1,000 times too large",
            "window 30: spike",
            spike(plants.scaled(1000.0)),
        ),
        Case(
            "spike-gradient",
            "a finite 1e10 in one gradient",
            "window 30: spike",
            spike(plants.gradient_fault((0, 0), 1e10, ONLY_TENSOR)),
        ),
        Case(
            "run-packed",
            "a bad record in a packed row",
            "stopped at once; the bundle knows where documents end",
            runs.packed_run,
        ),
        Case(
            "run-data",
            "bad micro-batches in a row",
            "stopped after 3, exit status 3, with the bundle",
            runs.bad_in_a_row,
        ),
        Case(
            "run-weight",
            "NaN in an adapter's tensor during a run",
            "stopped, exit status 3; the bundle holds it and nothing else that is not finite;"
            " nothing saved",
            runs.poisoned_run,
        ),
        Case(
            "run-budget",
            "every other micro-batch bad",
            "stopped over --max_refused_share, with the bundle",
            runs.over_budget,
        ),
        Case(
            "run-dtype",
            "a 4-bit layer flipped to fp16 during a run",
            "the audit at the next checkpoint names it; no checkpoint of that step",
            runs.dtype_flipped_in_a_run,
        ),
        Case(
            "run-save",
            "saving over a good adapter while a tensor is not finite",
            "refused, naming the tensor; the good files stay",
            runs.refused_save,
            modes=(False,),
        ),
        Case(
            "run-tracker",
            "NaN and Inf shown to a tracker and to JSON",
            "left out there, null here, no crash",
            runs.tracker,
            modes=(False,),
        ),
        Case(
            "run-after-nan",
            "129 clean steps behind one NaN loss, spike refusal on",
            "micro-batch 0 of window 0: loss; nothing else",
            after_a_nan,
        ),
    ]


def all_cases() -> list[Case]:
    """Every case, by group."""
    groups = (
        data_cases,
        mask_and_loss_cases,
        weight_cases,
        activation_cases,
        gradient_cases,
        optimizer_cases,
        drawing_cases,
        run_cases,
    )
    cases = [case for group in (*groups, foreign_cases, sight_cases) for case in group()]
    assert len({case.id for case in cases}) == len(cases)
    return cases
