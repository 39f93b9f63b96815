"""Checks of what becomes of data in training: masks, padding, averages, refusals, and those who
watch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from faults.bench import FIRST_ID, PAD_ID, Base, Fault, run
from faults.check import (
    CannotLook,
    Wrong,
    check,
    device_of,
    ensure,
    filled,
    logits_of,
    planted,
    rounding,
    same,
    samples_of,
    setting_of,
    student_of,
)
from faults.runs import looped
from faults.transient_faults import Index, extra_loss, gradient_spoilt
from npt.adapters.stream import open_stream
from npt.base.linear import quantized_linears
from npt.data.batch import Batch, batch_from_tensors, collate, find_fault
from npt.diagnostics.guards import Finding, base_fault, logits_fault, target_fault, tensor_fault
from npt.diagnostics.tracer.mask_check import mask_fault
from npt.distill.local import MicroBatch
from npt.distill.strategies import STRATEGIES
from npt.errors import SmokeTestError
from npt.step.window_result import WindowResult
from npt.train.preparation import smoke_test

# --- masks and padding


@check(
    "every valid token has a key", "a query whose keys were all padding made softmax divide 0 by 0"
)
def keyed(base: Base) -> str:
    seen = 0
    for side in ("left", "right"):
        batch = collate(samples_of(base), PAD_ID, side=side, length=20).to(device_of(base))
        mask = open_stream(base.model, batch).masks[0]
        if mask is None:
            raise Wrong(f"padded on the {side} there is no mask at all")
        if mask.ndim != 4:
            raise CannotLook(
                f"the attention mask has shape {list(mask.shape)}, no row of keys for each query"
            )
        finding = mask_fault(mask, batch.attention_mask)
        if finding is not None:
            raise Wrong(f"padded on the {side}: {finding}")
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        valid = batch.attention_mask.bool()
        open_padding = allowed & valid[:, None, :, None] & ~valid[:, None, None, :]
        if bool(open_padding.any()):
            raise Wrong(
                f"padded on the {side}, valid tokens may attend to padding in"
                f" {int(open_padding.any(dim=1).sum())} places"
            )
        seen += batch.tokens
    return (
        f"{seen} valid tokens, padded on the left and on the right: each has a key, and none of"
        " them is padding"
    )


@check(
    "padded content reaches nothing",
    "whatever stood at padding went into attention, the loss and its gradient",
)
def padding_unseen(base: Base) -> str:
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
            raise Wrong(
                f"other ids at padding on the {side} took the loss from {float(sums.loss):.9g}"
                f" to {float(other_sums.loss):.9g}"
            )
        wrong = f"other ids at padding on the {side} changed the gradient of {{}}"
        same(gradients, other_gradients, wrong)
        tensors = len(gradients)
    return f"other ids at padding, left and right: the loss and {tensors} gradients bit-equal"


@check(
    "padding is never counted",
    "means over padded positions shrank the loss and its gradient with the padding",
)
def padding_uncounted(base: Base) -> str:
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
    return ensure(
        good,
        f"loss per token {expected:.9g} one by one, {padded}; {counts} of {tokens} tokens counted",
    )


@check(
    "the same batch gives the same bits",
    "runs that differ by themselves hide what a fault has changed",
)
def repeatable(base: Base) -> str:
    student = student_of(base)
    batch = collate(samples_of(base), PAD_ID)
    (sums, gradients), (again, gradients_again) = filled(student, batch), filled(student, batch)
    wrong = "{} differs the second time; checks for bit equality cannot pass here, whatever else is"
    wrong += " in order"
    one, other = {"the loss": sums.loss}, {"the loss": again.loss}
    same({**one, **gradients}, {**other, **gradients_again}, wrong)
    loss = float(sums.loss) / sums.tokens
    return f"the loss {loss:.6g} and {len(gradients)} gradients twice, bit-equal"


# --- training


@check(
    "the logged loss is a mean per token",
    "sums over micro-batches grew with the accumulation, means of means leant to short texts",
)
def logged(base: Base) -> str:
    samples = samples_of(base)
    found: dict[int, dict[str, Any]] = {}
    for size in (4, 2, 1):
        student = student_of(base)
        batches = [collate(samples[i : i + size], PAD_ID) for i in range(0, 4, size)]
        (found[4 // size],) = looped(student, [batches])[1]
    losses = {k: line["loss"] for k, line in found.items()}
    tokens = {line["tokens"] for line in found.values()}
    first = losses[1]
    # Other shapes take other kernels and other orders of summation.
    good = tokens == {sum(len(s.input_ids) for s in samples)} and all(
        abs(x / first - 1) <= 1e3 * rounding() for x in losses.values()
    )
    each = ", ".join(f"{loss:.9g} from {k}" for k, loss in losses.items())
    return ensure(good, f"logged {each} micro-batches of the same samples")


@check(
    "samples without a valid token are refused",
    "a loss of 0 tokens divided by 0, and the NaN was stepped on",
)
def empty_refused(base: Base) -> str:
    setting = setting_of(base)
    good, other = setting.batch((0, 0)), setting.batch((0, 1))
    no_token = torch.zeros_like(other.attention_mask)
    empty = batch_from_tensors(other.input_ids, no_token, other.sample_ids)
    student = student_of(base)
    loop, lines = looped(student, [[good, empty], [empty, empty]])
    with_empty = student.state()
    twin = student_of(base)
    _, twin_lines = looped(twin, [[good]])
    refused, steps = dict(loop.refusals.by_kind), loop.steps
    same(with_empty, twin.state(), "they changed {}")
    if refused != {"data": 3} or steps != 1 or len(lines) != 1:
        raise Wrong(
            f"3 micro-batches without a valid token: refused {refused}, {steps} steps,"
            f" {len(lines)} logged"
        )
    if _figures(lines[0]) != _figures(twin_lines[0]):
        raise Wrong(f"logged {_figures(lines[0])} instead of {_figures(twin_lines[0])}")
    return "3 of 4 micro-batches refused and counted; 1 step, bit-equal to the run without them"


@check(
    "NaN and Inf are refused without a trace", "one NaN batch poisoned weights and moments for good"
)
def refused(base: Base) -> str:
    tensor = next(reversed(student_of(base).parameters))
    setting = setting_of(base)
    clean = run(setting, base, absent=[(1, 0)])[1]
    faults: dict[str, Fault] = {
        "loss": extra_loss(lambda student, _: student.parameters[tensor].sum() * math.nan),
        "gradient NaN": gradient_spoilt((0, 0), math.nan, tensor),
        "gradient Inf": gradient_spoilt((0, 0), math.inf, tensor),
        "gradient 1e30": gradient_spoilt((0, 0), 1e30, tensor),
    }
    for name, fault in faults.items():
        outcome = run(setting, base, faults={(1, 0): fault})[1]
        kinds = [(window, r.kind, r.micro_batch) for window, r in outcome.refusals]
        if kinds != [(1, name.split()[0], 0)]:
            said = kinds or "nothing"
            raise Wrong(f"{name}: refused {said} instead of micro-batch 0 of window 1")
        different = outcome.difference(clean)
        if different is not None:
            raise Wrong(f"{name}: {different} differs from the run that never saw it")
    return (
        f"a NaN loss, gradients of NaN, Inf and 1e30: {len(clean.state)} tensors of weights and"
        " moments bit-equal to the run without"
    )


@check(
    "averages are over the steps that counted",
    "a skipped batch left a NaN, or a 0, in the averages that were logged",
)
def averaged(base: Base) -> str:
    setting = setting_of(base, windows=2, size=2)
    windows = [[setting.batch((window, micro)) for micro in range(2)] for window in range(2)]
    student = student_of(base)
    bad = windows[0][1]
    honest = STRATEGIES[student.config.strategy]

    def poisoned(model: Any, batch: Batch, config: Any) -> MicroBatch:
        sums = honest(model, batch, config)
        factor = math.nan if batch.sample_ids == bad.sample_ids else 1.0
        return replace(sums, loss=sums.loss * factor)

    loop, lines = looped(student, windows, poisoned)
    _, twin_lines = looped(student_of(base), [windows[0][:1], windows[1]])
    counted, totals = dict(loop.refusals.by_kind), [line.get("refused_total") for line in lines]
    if counted != {"loss": 1} or totals != [1, 1]:
        raise Wrong(f"one NaN loss: counted {counted}, logged {totals}")
    for line, twin in zip(lines, twin_lines, strict=True):
        if _figures(line) != _figures(twin):
            raise Wrong(f"step {line['step']} logged {_figures(line)} instead of {_figures(twin)}")
    return (
        f"1 refusal counted; losses {lines[0]['loss']:.6g} and {lines[1]['loss']:.6g} logged,"
        " those of the run without it"
    )


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    """Return what of a metrics line the data decide."""
    keys = ("step", "loss", "loss_nmse", "loss_reg", "grad_norm", "lr", "tokens")
    return {key: line[key] for key in keys}


SAFE_STEPS = 6


@check(
    "safe mode is additive only, and trains",
    "the multiplicative term was the one that overflowed, and could not be left out",
)
def safe_mode(base: Base) -> str:
    student = student_of(
        base, modulation="additive", windows=SAFE_STEPS, size=1, learning_rate=1e-3
    )
    others = [name for name in student.parameters if ".npt.A" not in name and ".npt.B." not in name]
    if others:
        raise Wrong(f"{len(others)} tensors are neither A nor B, {others[0]} first")
    batch = collate(samples_of(base), PAD_ID)
    results: list[WindowResult[MicroBatch]] = []
    for _ in range(SAFE_STEPS):
        student.micro_batch(batch)
        results += student.step.window.commit()
    results += student.step.window.flush()
    losses = [result.loss for result in results]
    if None in losses or not all(result.applied for result in results):
        raise Wrong(
            f"losses {losses}, {sum(result.applied for result in results)} of {SAFE_STEPS}"
            " steps applied"
        )
    first, last = losses[0], losses[-1]
    assert first is not None and last is not None
    return ensure(
        last < first,
        f"{len(student.parameters)} tensors, all of them A or B; loss {first:.6g} to {last:.6g}"
        f" in {SAFE_STEPS} steps",
    )


# --- those who watch


@check(
    "watchdogs name what is planted",
    "a NaN was noticed many steps after it arose, and nobody knew where",
)
def watched(base: Base) -> str:
    student = student_of(base)
    model, vocabulary = base.model, base.model.config.vocab_size
    batch = setting_of(base).batch((0, 0))
    logits = logits_of(base, batch)
    named = tensor_fault(student.parameters)
    for alarm in (logits_fault(logits), named, base_fault(model), find_fault(batch, vocabulary)):
        if alarm is not None:
            raise Wrong(f"an alarm though nothing was planted: {alarm}")
    missed: list[str] = []

    def expect(planted: str, finding: Finding | None, index: Index, name: str = "") -> None:
        named = finding is not None and finding.index == index and name in ("", finding.name)
        missed.extend([] if named else [f"{planted} ({finding})"])

    last = (1, 3, vocabulary - 1)
    logits[last] = math.nan
    expect(f"NaN in the logits at {list(last)}", logits_fault(logits), last)
    outside = replace(batch, input_ids=batch.input_ids.clone())
    outside.input_ids[1, 2] = vocabulary
    fault = find_fault(outside, vocabulary) or ""
    if f"token id {vocabulary} outside" not in fault or "row 1, position 2" not in fault:
        missed.append(f"an id of {vocabulary} at [1, 2] ({fault or None})")
    target = target_fault(outside.input_ids, vocabulary)
    expect(f"a target of {vocabulary} at [1, 2]", target, (1, 2))
    name = next(iter(student.parameters))
    with planted(student.parameters[name], (0, 2)):
        expect(f"NaN in {name}[0, 2]", tensor_fault(student.parameters), (0, 2), name)
    norm = "model.norm.weight"
    places = [(norm, model.get_parameter(norm), (3,)), *_statistic(model)]
    for where, tensor, index in places:
        with planted(tensor, index):
            expect(f"NaN in {where}{list(index)}", base_fault(model), index, where)
    if missed:
        raise Wrong(f"missed: {'; '.join(missed)}")
    parts = "a norm" + " and the statistics of a 4-bit weight" * (len(places) > 1)
    return (
        f"NaN in logits, an adapter, {parts}, and an id outside the vocabulary, each named with"
        " its index; no false alarm"
    )


def _statistic(model: Any) -> list[tuple[str, torch.Tensor, Index]]:
    """Return name, tensor and index of a statistic of the first 4-bit weight, if there is one."""
    for name, module in quantized_linears(model):
        state = module.weight.quant_state
        if state.nested:
            return [(f"{name}: offset", state.offset, ())]
        return [(f"{name}: absmax", state.absmax, (0,))]
    return []


@check(
    "the smoke test tells a sound model from a poisoned one",
    "runs of hours started on a model that could not train",
)
def smoke_tested(base: Base) -> str:
    student = student_of(base)
    batch = collate(samples_of(base), PAD_ID)
    strategy = STRATEGIES[student.config.strategy]
    before = student.state()
    if torch.is_anomaly_enabled():
        raise Wrong("anomaly mode was on before")
    try:
        verdict = smoke_test(base.model, batch, strategy, student.config)
    except SmokeTestError as error:
        raise Wrong(f"it failed on the model as it is: {error}") from error
    same(before, student.state(), "the smoke test changed {}")
    name = next(iter(student.parameters))
    said = None
    with planted(student.parameters[name], (0, 0)):
        try:
            smoke_test(base.model, batch, strategy, student.config)
        except SmokeTestError as error:
            said = str(error)
    if said is None:
        raise Wrong(f"it passed with NaN in {name}")
    if torch.is_anomaly_enabled():
        raise Wrong("anomaly mode is still on after it, and slows every step")
    return (
        f"{verdict.removeprefix('smoke test ')}; failed with NaN in {name}; anomaly mode off"
        " after both"
    )
