"""Checks of what becomes of data in training: masks, padding, averages, refusals, and those who
watch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from npt.adapters.stream import open_stream
from npt.base.linear import quantized_linears
from npt.data.batch import Batch, batch_from_tensors, collate, find_fault
from npt.diagnostics.guards import base_fault, logits_fault, target_fault, tensor_fault
from npt.diagnostics.tracer.masks import mask_fault
from npt.distill.strategies import STRATEGIES, MicroBatch
from npt.errors import SmokeTestError
from npt.faults import plants
from npt.faults.bench import FIRST_ID, PAD_ID, Base, Plant, difference, run
from npt.faults.check import (
    CannotLook,
    check,
    filled,
    planted,
    rounding,
    samples_of,
    setting_of,
    student_of,
)
from npt.faults.runs import looped
from npt.step.window_result import WindowResult
from npt.train.smoke import smoke_test

# --- masks and padding
# -----------------------------------------------------------------------------------------------


@check(
    "every valid token has a key", "a query whose keys were all padding made softmax divide 0 by 0"
)
def keyed(base: Base) -> tuple[bool, str]:
    seen = 0
    for side in ("left", "right"):
        batch = collate(samples_of(base), PAD_ID, side=side, length=20).to(
            next(base.model.parameters()).device
        )
        mask = open_stream(base.model, batch).context["attention_mask"]
        if mask is None:
            return False, f"padded on the {side} there is no mask at all"
        if mask.ndim != 4:
            raise CannotLook(
                f"the attention mask has shape {list(mask.shape)}, no row of keys for each query"
            )
        finding = mask_fault(mask, batch.attention_mask)
        if finding is not None:
            return False, f"padded on the {side}: {finding}"
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        valid = batch.attention_mask.bool()
        open_padding = allowed & valid[:, None, :, None] & ~valid[:, None, None, :]
        if bool(open_padding.any()):
            return (
                False,
                (
                    f"padded on the {side}, valid tokens may attend to padding in"
                    f" {int(open_padding.any(dim=1).sum())} places"
                ),
            )
        seen += batch.tokens
    return (
        True,
        (
            f"{seen} valid tokens, padded on the left and on the right: each has a key, and none of"
            " them is padding"
        ),
    )


@check(
    "padded content reaches nothing",
    "whatever stood at padding went into attention, the loss and its gradient",
)
def padding_unseen(base: Base) -> tuple[bool, str]:
    tensors = 0
    for side in ("left", "right"):
        student = student_of(base)
        batch = collate(samples_of(base), PAD_ID, side=side, length=20)
        other = torch.randint(
            FIRST_ID,
            base.model.config.vocab_size,
            batch.input_ids.shape,
            generator=torch.Generator().manual_seed(6),
        )
        changed = replace(
            batch, input_ids=torch.where(batch.attention_mask.bool(), batch.input_ids, other)
        )
        sums, gradients = filled(student, batch)
        other_sums, other_gradients = filled(student, changed)
        if not torch.equal(sums.loss, other_sums.loss):
            return (
                False,
                (
                    f"other ids at padding on the {side} took the loss from {float(sums.loss):.9g}"
                    f" to {float(other_sums.loss):.9g}"
                ),
            )
        different = difference(gradients, other_gradients)
        if different is not None:
            return False, f"other ids at padding on the {side} changed the gradient of {different}"
        tensors = len(gradients)
    return True, f"other ids at padding, left and right: the loss and {tensors} gradients bit-equal"


@check(
    "padding is never counted",
    "means over padded positions shrank the loss and its gradient with the padding",
)
def padding_uncounted(base: Base) -> tuple[bool, str]:
    samples = samples_of(base)
    student = student_of(base)
    alone = [filled(student, collate([sample], PAD_ID))[0] for sample in samples]
    tokens = sum(len(sample.input_ids) for sample in samples)
    expected = sum(float(sums.loss) for sums in alone) / tokens
    losses: dict[int, float] = {}
    counted = set()
    for width in (16, 40):
        sums, _ = filled(student, collate(samples, PAD_ID, length=width))
        losses[width] = float(sums.loss) / sums.tokens
        counted.add(sums.tokens)
    # Other shapes take other kernels and other orders of summation.
    good = counted == {tokens} and all(
        abs(loss / expected - 1) <= 1e3 * rounding() for loss in losses.values()
    )
    padded = ", ".join(f"{loss:.9g} padded to {width}" for width, loss in losses.items())
    counts = " and ".join(map(str, sorted(counted)))
    return (
        good,
        f"loss per token {expected:.9g} one by one, {padded}; {counts} of {tokens} tokens counted",
    )


@check(
    "the same batch gives the same bits",
    "runs that differ by themselves hide what a fault has changed",
)
def repeatable(base: Base) -> tuple[bool, str]:
    student = student_of(base)
    batch = collate(samples_of(base), PAD_ID)
    (sums, gradients), (again, gradients_again) = filled(student, batch), filled(student, batch)
    different = difference(
        {"the loss": sums.loss, **gradients}, {"the loss": again.loss, **gradients_again}
    )
    if different is not None:
        return (
            False,
            (
                f"{different} differs the second time; checks for bit equality cannot pass here,"
                " whatever else is in order"
            ),
        )
    return (
        True,
        (
            f"the loss {float(sums.loss) / sums.tokens:.6g} and {len(gradients)} gradients twice,"
            " bit-equal"
        ),
    )


# --- training
# --------------------------------------------------------------------------------------------------------


@check(
    "the logged loss is a mean per token",
    "sums over micro-batches grew with the accumulation, means of means leant to short texts",
)
def logged(base: Base) -> tuple[bool, str]:
    samples = samples_of(base)
    found: dict[int, dict[str, Any]] = {}
    for size in (4, 2, 1):
        student = student_of(base)
        _, lines = looped(
            student, [[collate(samples[i : i + size], PAD_ID) for i in range(0, 4, size)]]
        )
        (found[4 // size],) = lines
    losses = {k: line["loss"] for k, line in found.items()}
    tokens = {line["tokens"] for line in found.values()}
    first = losses[1]
    # Other shapes take other kernels and other orders of summation.
    good = tokens == {sum(len(s.input_ids) for s in samples)} and all(
        abs(x / first - 1) <= 1e3 * rounding() for x in losses.values()
    )
    return (
        good,
        "logged "
        + ", ".join(f"{loss:.9g} from {k}" for k, loss in losses.items())
        + " micro-batches of the same samples",
    )


@check(
    "samples without a valid token are refused",
    "a loss of 0 tokens divided by 0, and the NaN was stepped on",
)
def empty_refused(base: Base) -> tuple[bool, str]:
    setting = setting_of(base)
    good_batch, other = setting.batch((0, 0)), setting.batch((0, 1))
    empty = batch_from_tensors(
        other.input_ids, torch.zeros_like(other.attention_mask), other.sample_ids
    )
    student = student_of(base)
    loop, lines = looped(student, [[good_batch, empty], [empty, empty]])
    with_empty = student.state()
    twin = student_of(base)
    _, twin_lines = looped(twin, [[good_batch]])
    different = difference(with_empty, twin.state())
    refused, steps = dict(loop.refusals.by_kind), loop.steps
    if different is not None:
        return False, f"they changed {different}"
    if refused != {"data": 3} or steps != 1 or len(lines) != 1:
        return (
            False,
            (
                f"3 micro-batches without a valid token: refused {refused}, {steps} steps,"
                f" {len(lines)} logged"
            ),
        )
    if _figures(lines[0]) != _figures(twin_lines[0]):
        return False, f"logged {_figures(lines[0])} instead of {_figures(twin_lines[0])}"
    return (
        True,
        "3 of 4 micro-batches refused and counted; 1 step, bit-equal to the run without them",
    )


@check(
    "NaN and Inf are refused without a trace", "one NaN batch poisoned weights and moments for good"
)
def refused(base: Base) -> tuple[bool, str]:
    tensor = next(reversed(student_of(base).parameters))
    setting = setting_of(base)
    clean = run(setting, base, absent=[(1, 0)])[1]
    faults: dict[str, Plant] = {
        "loss": plants.extra_loss(lambda student, _: student.parameters[tensor].sum() * math.nan),
        "gradient NaN": plants.gradient_fault((0, 0), math.nan, tensor),
        "gradient Inf": plants.gradient_fault((0, 0), math.inf, tensor),
        "gradient 1e30": plants.gradient_fault((0, 0), 1e30, tensor),
    }
    for name, plant in faults.items():
        outcome = run(setting, base, plants={(1, 0): plant})[1]
        kinds = [
            (window, refusal.kind, refusal.micro_batch) for window, refusal in outcome.refusals
        ]
        if kinds != [(1, name.split()[0], 0)]:
            return (
                False,
                f"{name}: refused {kinds or 'nothing'} instead of micro-batch 0 of window 1",
            )
        different = outcome.difference(clean)
        if different is not None:
            return False, f"{name}: {different} differs from the run that never saw it"
    detail = (
        f"a NaN loss, gradients of NaN, Inf and 1e30: {len(clean.state)} tensors of weights and"
        " moments bit-equal to the run without"
    )
    return True, detail


@check(
    "averages are over the steps that counted",
    "a skipped batch left a NaN, or a 0, in the averages that were logged",
)
def averaged(base: Base) -> tuple[bool, str]:
    setting = setting_of(base, windows=2, size=2)
    windows = [[setting.batch((window, micro)) for micro in range(2)] for window in range(2)]
    student = student_of(base)
    bad = windows[0][1]
    honest = STRATEGIES[student.config.strategy]

    def poisoned(model: Any, batch: Batch, config: Any) -> MicroBatch:
        sums = honest(model, batch, config)
        return (
            replace(sums, loss=sums.loss * math.nan) if batch.sample_ids == bad.sample_ids else sums
        )

    loop, lines = looped(student, windows, poisoned)
    _, twin_lines = looped(student_of(base), [windows[0][:1], windows[1]])
    if dict(loop.refusals.by_kind) != {"loss": 1} or [line["refused_total"] for line in lines] != [
        1,
        1,
    ]:
        return (
            False,
            (
                f"one NaN loss: counted {dict(loop.refusals.by_kind)}, logged"
                f" {[line.get('refused_total') for line in lines]}"
            ),
        )
    for line, twin in zip(lines, twin_lines, strict=True):
        if _figures(line) != _figures(twin):
            return False, f"step {line['step']} logged {_figures(line)} instead of {_figures(twin)}"
    return (
        True,
        (
            f"1 refusal counted; losses {lines[0]['loss']:.6g} and {lines[1]['loss']:.6g} logged,"
            " those of the run without it"
        ),
    )


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    """What of a metrics line the data decide."""
    return {
        key: line[key]
        for key in ("step", "loss", "loss_nmse", "loss_reg", "grad_norm", "lr", "tokens")
    }


SAFE_STEPS = 6


@check(
    "safe mode is additive only, and trains",
    "the multiplicative term was the one that overflowed, and could not be left out",
)
def safe_mode(base: Base) -> tuple[bool, str]:
    student = student_of(
        base, modulation="additive", windows=SAFE_STEPS, size=1, learning_rate=1e-3
    )
    others = [name for name in student.parameters if ".npt.A" not in name and ".npt.B." not in name]
    if others:
        return False, f"{len(others)} tensors are neither A nor B, {others[0]} first"
    batch = collate(samples_of(base), PAD_ID)
    results: list[WindowResult[MicroBatch]] = []
    for _ in range(SAFE_STEPS):
        student.micro_batch(batch)
        results += student.step.window.commit()
    results += student.step.window.flush()
    losses = [result.loss for result in results]
    if None in losses or not all(result.applied for result in results):
        return (
            False,
            (
                f"losses {losses}, {sum(result.applied for result in results)} of {SAFE_STEPS}"
                " steps applied"
            ),
        )
    first, last = losses[0], losses[-1]
    assert first is not None and last is not None
    return (
        last < first,
        (
            f"{len(student.parameters)} tensors, all of them A or B; loss {first:.6g} to {last:.6g}"
            f" in {SAFE_STEPS} steps"
        ),
    )


# --- those who watch
# -------------------------------------------------------------------------------------------------


@check(
    "watchdogs name what is planted",
    "a NaN was noticed many steps after it arose, and nobody knew where",
)
def watched(base: Base) -> tuple[bool, str]:
    student = student_of(base)
    model, vocabulary = base.model, base.model.config.vocab_size
    batch = setting_of(base).batch((0, 0))
    with torch.no_grad():
        on_device = batch.to(next(model.parameters()).device)
        logits = model(
            input_ids=on_device.input_ids, attention_mask=on_device.attention_mask, use_cache=False
        ).logits
    name = next(iter(student.parameters))
    norm = "model.norm.weight"
    alarms = [
        finding for finding in (logits_fault(logits), tensor_fault(student.parameters), base_fault(model), find_fault(batch, vocabulary))
        if finding is not None
    ]  # fmt: skip
    if alarms:
        return False, f"an alarm where nothing was planted: {alarms[0]}"
    missed = []
    logits[1, 3, vocabulary - 1] = math.nan
    finding = logits_fault(logits)
    if finding is None or finding.index != (1, 3, vocabulary - 1):
        missed.append(f"NaN in the logits at [1, 3, {vocabulary - 1}] ({finding})")
    outside = replace(batch, input_ids=batch.input_ids.clone())
    outside.input_ids[1, 2] = vocabulary
    fault = find_fault(outside, vocabulary)
    if (
        fault is None
        or f"token id {vocabulary} outside" not in fault
        or "row 1, position 2" not in fault
    ):
        missed.append(f"an id of {vocabulary} at [1, 2] ({fault})")
    finding = target_fault(outside.input_ids, vocabulary)
    if finding is None or finding.index != (1, 2):
        missed.append(f"a target of {vocabulary} at [1, 2] ({finding})")
    with planted(student.parameters[name], (0, 2)):
        finding = tensor_fault(student.parameters)
    if finding is None or (finding.name, finding.index) != (name, (0, 2)):
        missed.append(f"NaN in {name}[0, 2] ({finding})")
    places = [(norm, model.get_parameter(norm), (3,)), *_statistic(model)]
    for where, tensor, index in places:
        with planted(tensor, index):
            finding = base_fault(model)
        if finding is None or (finding.name, finding.index) != (where, index):
            missed.append(f"NaN in {where}{list(index)} ({finding})")
    if missed:
        return False, f"missed: {'; '.join(missed)}"
    parts = "a norm" + " and the statistics of a 4-bit weight" * (len(places) > 1)
    return (
        True,
        (
            f"NaN in logits, an adapter, {parts}, and an id outside the vocabulary, each named with"
            " its index; no false alarm"
        ),
    )


def _statistic(model: Any) -> list[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Name, tensor and index of a floating-point statistic of the first 4-bit weight, if there is
    one.
    """
    packed = quantized_linears(model)
    if not packed:
        return []
    name, module = packed[0]
    state = module.weight.quant_state
    return (
        [(f"{name}: offset", state.offset, ())]
        if state.nested
        else [(f"{name}: absmax", state.absmax, (0,))]
    )


@check(
    "the smoke test tells a sound model from a poisoned one",
    "runs of hours started on a model that could not train",
)
def smoke_tested(base: Base) -> tuple[bool, str]:
    student = student_of(base)
    batch = collate(samples_of(base), PAD_ID)
    strategy = STRATEGIES[student.config.strategy]
    before = student.state()
    if torch.is_anomaly_enabled():
        return False, "anomaly mode was on before"
    try:
        verdict = smoke_test(base.model, batch, strategy, student.config)
    except SmokeTestError as error:
        return False, f"it failed on the model as it is: {error}"
    different = difference(before, student.state())
    if different is not None:
        return False, f"the smoke test changed {different}"
    name = next(iter(student.parameters))
    said = None
    with planted(student.parameters[name], (0, 0)):
        try:
            smoke_test(base.model, batch, strategy, student.config)
        except SmokeTestError as error:
            said = str(error)
    if said is None:
        return False, f"it passed with NaN in {name}"
    if torch.is_anomaly_enabled():
        return False, "anomaly mode is still on behind it, and slows every step"
    return (
        True,
        (
            f"{verdict.removeprefix('smoke test ')}; failed with NaN in {name}; anomaly mode off"
            " behind both"
        ),
    )
