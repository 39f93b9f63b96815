"""The cases: each plants a fault and states what must be reported. The fault must change nothing.

A case with a guarded step runs in both of its modes, with flags read at once and one window late.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from faults import agreement, runs, scenarios
from faults.bench import SMALL, Setting, let_change, let_draw, put_around
from faults.patterns import (
    Case,
    costs_its_window,
    costs_itself,
    costs_nothing,
    found,
    stops_everything,
    survived,
)
from faults.persistent_faults import (
    flipped_bit,
    frozen,
    moment,
    one_bad_write,
    padding_embedding,
    statistic,
    weight,
)
from faults.scenarios import NAN_GRADIENT
from faults.transient_faults import (
    MASK_FORMS,
    TENSOR,
    attention_masks,
    changed_batch,
    cross_entropy_of_nothing,
    empty,
    extra_loss,
    gradient_hooked,
    gradient_spoilt,
    head_fault,
    id_at,
    in_fp16,
    interruption,
    label_at,
    mask_out,
    masked_by_multiplication,
    output_spoilt,
    padding_spoilt,
    reverse_kl,
    scaled,
    short_mask,
    spoilt,
    trained_head,
    without_labels,
)

LEFT = Setting(padding="left")
PROPAGATED, STUDENT_STREAM = Setting(strategy="propagated"), Setting(strategy="end_to_end")
END_TO_END = replace(STUDENT_STREAM, logit_kl_weight=1.0)
LONG = Setting(layers="0", targets=("gate",), windows=34, size=1, spikes=True, learning_rate=1e-3)
"""Many cheap steps, with spike refusal on."""
NAN, INF = math.nan, math.inf
GATE = "model.layers.1.mlp.gate_proj"
NAN_LOSS = extra_loss(cross_entropy_of_nothing("mean"))
HUGE_GRADIENT = gradient_spoilt((0, 0), 1e10, "model.layers.0.npt.B.gate")
TWO, EACH_WINDOW = ((1, 0), (1, 2)), ((0, 2), (1, 0), (2, 1))
AT_ONCE = (False,)

# Unformatted tables: the formatter would write one word a line.
# fmt: off


def data_cases() -> list[Case]:
    outside = "outside the vocabulary [0, 2048)"
    return [
        costs_itself("data-id-too-large", "a token id equal to the vocabulary size",
                     id_at(1, 3, 2048),
                     "data", f"token id 2048 {outside} at row 1, position 3", "w1-m1-r1"),
        costs_itself("data-id-negative", "a negative token id", id_at(0, 0, -1),
                     "data", f"token id -1 {outside} at row 0, position 0", "w1-m1-r0"),
        costs_itself("data-label", "a label out of range", label_at(0, 5, 9999),
                     "data", f"label 9999 {outside} at row 0, position 5", "w1-m1-r0"),
        costs_itself("data-no-rows", "a batch without rows", empty(rows=True),
                     "data", "shapes (0, 16)"),
        costs_itself("data-no-tokens", "rows without tokens", empty(rows=False),
                     "data", "shapes (2, 0)"),
        costs_itself("data-shapes", "a mask shorter than its ids", changed_batch(short_mask),
                     "data", "(2, 16) of ids", "(2, 15) of mask"),
        Case("data-teacher-nan", "NaN among the teacher's logits",
             "micro-batch 1 of window 1: refused as loss; the guard names [b=0, t=5, v=77]",
             scenarios.teacher_logits, END_TO_END),
        costs_nothing("data-padding-inf", "-Inf as the padding token's embedding",
                      padding_embedding(-INF)),
        costs_nothing("data-padding-nan",
                      "NaN as the padding token's embedding, padding on the left",
                      padding_embedding(NAN), LEFT),
        costs_nothing("data-padding-stream",
                      "NaN as the padding token's embedding, student's own stream",
                      padding_embedding(NAN), replace(LEFT, strategy="end_to_end")),
    ]


def mask_and_loss_cases() -> list[Case]:
    forms = {"bool": "bool", "inf": "-inf", "min": "finfo.min"}
    return [
        *(costs_nothing(f"mask-padding-{key}", f"padded tokens without a key, mask as {form}",
                        attention_masks(MASK_FORMS[form]), LEFT)
          for key, form in forms.items()),
        *(found(f"mask-row-{key}", f"a valid token without a key, mask as {form}",
                "the mask check names [b=1, t=5]", scenarios.masked_row(form))
          for key, form in forms.items()),
        costs_itself("mask-row-empty", "a row without a valid token", mask_out(1),
                     "data", "no valid token in row 1", "w1-m1-r1"),
        costs_itself("mask-all-empty", "one micro-batch without a valid token", mask_out(0, 1),
                     "data", "no valid token in row 0", "w1-m1-r0"),
        costs_nothing("loss-labels-unused", "every label -100 under a loss of hidden states",
                      changed_batch(without_labels)),
        costs_itself("loss-labels-mean", "every label -100 under a mean cross-entropy", NAN_LOSS,
                     "loss", "nan"),
        Case("loss-labels-sum", "every label -100 under a summed cross-entropy, a count of 0",
             "no alarm; the run equals the one without the micro-batch",
             scenarios.empty_sum([1])),
        Case("loss-labels-window", "no label in any micro-batch of a window",
             "no alarm, no step", scenarios.empty_sum([0, 1, 2])),
        costs_nothing("loss-padding-inf", "Inf at padded positions of a layer's output",
                      padding_spoilt("model.layers.0", INF)),
        costs_itself("loss-inf-times-zero", "Inf at a padded position times a mask of 0",
                     extra_loss(masked_by_multiplication), "loss", "nan"),
        costs_itself("loss-reverse-kl", "reverse KL at T = 0.05: finite loss, NaN gradient",
                     extra_loss(reverse_kl), "gradient", "nan"),
    ]


def weight_cases() -> list[Case]:
    absmax = "model.layers.2.mlp.down_proj: state2.absmax"
    return [
        stops_everything("weight-nan", "NaN in an adapter's tensor",
                         weight("model.layers.1.npt.A", (2, 7), NAN),
                         "loss", "nan", scenarios.trainable, unsaved=True),
        stops_everything("weight-absmax", "Inf in absmax of a 4-bit weight",
                         statistic(absmax, (1,), INF), "loss", "nan", scenarios.base),
        stops_everything("weight-offset", "NaN in the offset of a 4-bit weight",
                         statistic("model.layers.0.self_attn.q_proj: offset", (), NAN),
                         "loss", "nan", scenarios.base),
        stops_everything("weight-norm", "NaN in a frozen norm",
                         frozen("model.layers.1.input_layernorm.weight", (9,), NAN),
                         "loss", "nan", scenarios.base),
        Case("weight-packed", "packed bytes that read as NaN", "no alarm", scenarios.packed_bytes),
        stops_everything("weight-flip",
                         "an exponent bit of an adapter's weight flipped: finite, 1e35",
                         flipped_bit("model.layers.2.npt.B.down", (4, 1), 30),
                         "loss", "loss is", scenarios.too_large),
        Case("weight-flip-bounded", "an exponent bit of M flipped, inside the bound",
             "no alarm, everything stays finite; the size limit names M.gate[3, 1]",
             scenarios.bounded_flip),
        found("weight-dtype", "a 4-bit layer flipped to fp16",
              "the audit names model.layers.3.self_attn.k_proj", runs.dtype_flipped),
        Case("weight-autocast", "autocast enabled by the caller",
             "the run is the same, bit for bit; the audit names autocast", runs.autocast),
    ]


def activation_cases() -> list[Case]:
    return [
        costs_itself("activation-inf", "Inf in a gate", output_spoilt(GATE, (3, 17), INF),
                     "loss", "nan"),
        costs_nothing("activation-clamped", "Inf in a gate, masked by a clamp",
                      output_spoilt(GATE, (3, 17), INF, clamp=50.0),
                      instead=output_spoilt(GATE, (3, 17), 50.0, clamp=50.0)),
        costs_itself("activation-softmax", "Inf in a key, which softmax turns into NaN and zeros",
                     output_spoilt("model.layers.1.self_attn.k_proj", (3, 17), INF),
                     "loss", "nan", setting=STUDENT_STREAM),
        costs_itself("activation-fp16", "fp16 overflow inside a 4-bit layer",
                     in_fp16("model.layers.1.mlp.down_proj", lambda x: x * 1e5), "loss", "nan"),
        costs_itself("activation-recomputed", "NaN in a recomputation only",
                     trained_head(head_fault((1,), False, 5, 77)),
                     "gradient", "nan", setting=END_TO_END),
    ]


def gradient_cases() -> list[Case]:
    one = [
        ("nan", "NaN in one tensor, micro-batch 2 of 3", (5, 2), NAN, "nan"),
        ("inf", "+Inf in one tensor", (5, 2), INF, "inf"),
        ("minus-inf", "-Inf in one tensor", (0, 0), -INF, "inf"),
        ("large", "a finite 1e20 in one tensor", (5, 2), 1e20, "inf"),
        ("huge", "a finite 1e30 in one tensor", (5, 2), 1e30, "inf"),
    ]
    return [
        *(costs_itself(f"gradient-{id}", name, gradient_spoilt(index, value),
                       "gradient", f"{TENSOR} has norm {norm} (1 of")
          for id, name, index, value, norm in one),
        costs_itself("gradient-backward", "a backward that computes NaN after a finite loss",
                     gradient_hooked(lambda gradient: spoilt(gradient, (5, 2), NAN)),
                     "gradient", f"{TENSOR} has norm nan (1 of",
                     setting=STUDENT_STREAM),
        costs_itself("gradient-two", "two micro-batches of a window", NAN_GRADIENT,
                     "gradient", TENSOR, places=TWO),
        costs_itself("gradient-every", "one micro-batch in every window", NAN_GRADIENT,
                     "gradient", TENSOR, places=EACH_WINDOW),
        Case("gradient-all", "every micro-batch of a window", "three refusals, no step",
             partial(scenarios.whole_window_refused, 1)),
        Case("gradient-interrupted", "an exception in the middle of a micro-batch",
             "no refusal; the run equals the one without the micro-batch",
             survived(interruption, "")),
    ]


def optimizer_cases() -> list[Case]:
    first, second, count = (f"{key} of {TENSOR}" for key in ("exp_avg", "exp_avg_sq", "step"))
    return [
        stops_everything("optimizer-nan", "NaN in a first moment", moment(first, (5, 2), NAN),
                         "update", TENSOR, scenarios.moments, whole=True),
        stops_everything("optimizer-negative", "a second moment below zero",
                         moment(second, (5, 2), -1.0),
                         "update", TENSOR, scenarios.moments, whole=True),
        costs_its_window("optimizer-write-weight", "a step that writes NaN into a weight",
                         one_bad_write(TENSOR, NAN)),
        costs_its_window("optimizer-write-moment", "a step that writes Inf into a moment",
                         one_bad_write(second, INF)),
        costs_its_window("optimizer-write-count", "a step that writes NaN into a step count",
                         one_bad_write(count, NAN)),
        costs_itself("optimizer-first", "a fault on step 1", NAN_GRADIENT,
                     "gradient", TENSOR, places=((0, 1),)),
        Case("optimizer-first-all", "only faults before step 1",
             "moments, counts and schedule do not move",
             partial(scenarios.whole_window_refused, 0)),
        Case("optimizer-rate", "a learning rate that overflows every weight",
             "each step is undone; schedule and counters do not move",
             scenarios.overflowing_rate),
    ]


def drawing_cases() -> list[Case]:
    """Return cases with a base that draws random numbers (dropout, noise): a refused micro-batch
    must not change the draws of later ones.
    """
    draws, under = replace(SMALL, change=let_draw), "on a base with dropout"
    id_of_v, nan = id_at(1, 3, 2048), NAN_GRADIENT
    costly = [
        ("data", "a token id equal to the vocabulary size", id_of_v, "data", "token id 2048", SMALL,
         ((1, 1),)),
        ("loss", "a NaN loss", NAN_LOSS, "loss", "nan", SMALL, ((1, 1),)),
        ("gradient", "NaN in one tensor", nan, "gradient", TENSOR, SMALL, ((1, 1),)),
        ("propagated", "NaN in one tensor, propagated,",
         nan, "gradient", TENSOR, PROPAGATED, ((1, 1),)),
        ("end-to-end", "NaN in one tensor, end to end,",
         nan, "gradient", TENSOR, END_TO_END, ((1, 1),)),
        ("two", "two micro-batches of a window", nan, "gradient", TENSOR, SMALL, TWO),
        ("every", "one micro-batch in every window", nan, "gradient", TENSOR, SMALL, EACH_WINDOW),
    ]
    return [
        *(costs_itself(f"draw-{id}", f"{name} {under}", fault, kind, says,
                       setting=replace(setting, change=let_draw), places=places)
          for id, name, fault, kind, says, setting, places in costly),
        Case("draw-all", f"every micro-batch of a window {under}", "three refusals, no step",
             partial(scenarios.whole_window_refused, 1), draws),
        costs_its_window("draw-update", f"a step that writes NaN into a weight, {under}",
                         one_bad_write(TENSOR, NAN), draws),
        Case("draw-spike", f"a finite 1e10 in one gradient {under}", "window 30: refused as spike",
             scenarios.spike(HUGE_GRADIENT), replace(LONG, change=let_draw)),
        Case("draw-interrupted", f"an exception in the middle of a micro-batch {under}",
             "no refusal; the run equals the one without the micro-batch",
             survived(interruption, ""), draws),
        Case("draw-diagnosed", f"a refused micro-batch that is diagnosed {under}",
             "micro-batch 1 of window 1: refused as gradient; tracing draws nothing from training",
             scenarios.diagnosed, draws),
    ]


def run_cases() -> list[Case]:
    return [
        Case("spike-loss", "loss and gradient of a step 1,000 times too large",
             "window 30: refused as spike", scenarios.spike(scaled(1000.0)), LONG),
        Case("spike-gradient", "a finite 1e10 in one gradient",
             "window 30: refused as spike", scenarios.spike(HUGE_GRADIENT), LONG),
        Case("run-packed", "a bad record in a packed row",
             "stopped at once; the bundle keeps where documents end", runs.packed_run),
        Case("run-data", "bad micro-batches in a row",
             "stopped after 3, exit status 3, with the bundle", runs.bad_in_a_row),
        Case("run-weight", "NaN in an adapter's tensor during a run",
             "stopped, exit status 3; the only non-finite value in the bundle is this one;"
             " nothing is saved", runs.poisoned_run),
        Case("run-budget", "every other micro-batch bad",
             "stopped over the share of refusals, with the bundle", runs.over_budget),
        Case("run-dtype", "a 4-bit layer flipped to fp16 during a run",
             "the audit at the next checkpoint names it; that step is not saved",
             runs.dtype_flipped_in_a_run),
        Case("run-save", "saving over a good adapter while a tensor is not finite",
             "refused, naming the tensor; good files are kept", runs.refused_save, modes=AT_ONCE),
        Case("run-tracker", "NaN and Inf in a tracker and in JSON",
             "not drawn, null in JSON, no crash", runs.tracker, modes=AT_ONCE),
        Case("run-after-nan", "129 clean steps after one NaN loss, spike refusal on",
             "micro-batch 0 of window 0: refused as loss; nothing else",
             survived(NAN_LOSS, "loss", ("nan",), [(0, 0)]), replace(LONG, windows=130)),
    ]


def foreign_cases() -> list[Case]:
    """Return cases with foreign parts in the base, such as LoRA: training must compute with them,
    and refuse faults as usual.
    """
    cases = []
    for id, change, name in (
        ("lora", put_around, "a LoRA around every MLP projection"),
        ("hook", let_change, "hooks that change values"),
    ):
        foreign = replace(SMALL, change=change)
        cases += [
            Case(f"foreign-{id}", name, "loss and gradients equal those of calls of whole layers",
                 agreement.as_called, foreign, AT_ONCE),
            Case(f"foreign-{id}-whole", f"{name}, end to end",
                 "loss and gradients equal those of calls of whole layers",
                 agreement.as_called, replace(END_TO_END, change=change), AT_ONCE),
            costs_itself(f"foreign-{id}-nan", f"NaN in one tensor under {name}", NAN_GRADIENT,
                         "gradient", TENSOR, setting=foreign),
        ]
    return cases


def agreement_cases() -> list[Case]:
    return [
        Case("sight-attention", "a separate teacher with eager attention, the student under SDPA",
             "no difference", agreement.other_attention, modes=AT_ONCE),
        Case("sight-window", "prompts of unequal length under a sliding window",
             "no difference", agreement.unequal_prompts, modes=AT_ONCE),
        Case("sight-space", "a tokenizer that begins every text with a space",
             "no difference", agreement.space_in_front, modes=AT_ONCE),
    ]


# fmt: on


def all_cases() -> list[Case]:
    """Return every case, by group."""
    groups = (
        *(data_cases, mask_and_loss_cases, weight_cases, activation_cases, gradient_cases),
        *(optimizer_cases, drawing_cases, run_cases, foreign_cases, agreement_cases),
    )
    cases = [case for group in groups for case in group()]
    assert len({case.id for case in cases}) == len(cases)
    return cases
