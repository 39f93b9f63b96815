"""Checks of the guarded step, and of the watchdogs around it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from faults.bench import Fault, difference, run
from faults.runs import looped
from faults.transient_faults import extra_loss, gradient_spoilt
from fixes.check import (
    ROUNDING,
    Subject,
    Wrong,
    device_of,
    ensure,
    gradients_of,
    padded_batch,
    planted,
    proves,
    samples_of,
    setting_of,
    student_of,
    with_form,
)
from npt.adapters.converted import npt_layers
from npt.batch import Batch, collate, find_fault
from npt.distill.local import BatchSums
from npt.distill.strategies import STRATEGIES
from npt.errors import SmokeTestError
from npt.recorder.recorder import Recorder
from npt.tracer.trace import trace
from npt.tracer.watchdogs import base_fault, tensor_fault
from npt.train.smoke import smoke_test

SAFE_STEPS = 6


@proves("NaN, Inf and 1e30 are skipped bit-exactly")
def refused(subject: Subject) -> str:
    tensor = next(reversed(student_of(subject).parameters))
    setting = setting_of(subject)
    clean = run(setting, subject, absent=[(1, 0)])[1]
    faults: dict[str, Fault] = {
        "a NaN loss": extra_loss(lambda student, _: student.parameters[tensor].sum() * math.nan),
        "a gradient of NaN": gradient_spoilt((0, 0), math.nan, tensor),
        "a gradient of Inf": gradient_spoilt((0, 0), math.inf, tensor),
        "a gradient of 1e30": gradient_spoilt((0, 0), 1e30, tensor),
    }
    for name, fault in faults.items():
        outcome = run(setting, subject, faults={(1, 0): fault})[1]
        places = [(window, refusal.micro_batch) for window, refusal in outcome.refusals]
        if places != [(1, 0)]:
            raise Wrong(f"{name} in micro-batch 0 of window 1: refused {places}")
        different = outcome.difference(clean)
        if different is not None:
            raise Wrong(f"{name}: {different} differs from the run that never saw it")
    return f"{len(faults)} faults; {len(clean.state)} weights and moments bit-equal"


@proves("refusals are counted, and averages are over valid steps only")
def averaged(subject: Subject) -> str:
    setting = setting_of(subject)
    windows = [[setting.batch((window, micro)) for micro in range(2)] for window in range(2)]
    bad = windows[0][1]
    honest = STRATEGIES[subject.config.strategy]

    def poisoned(model: Any, batch: Batch, config: Any, *more: Any) -> BatchSums:
        sums = honest(model, batch, config, *more)
        factor = math.nan if batch.sample_ids == bad.sample_ids else 1.0
        return sums._replace(loss=sums.loss * factor)

    loop, lines = looped(student_of(subject), windows, poisoned)
    _, expected = looped(student_of(subject), [windows[0][:1], windows[1]])
    counted = dict(loop.progress.refused_by_kind)
    if counted != {"loss": 1} or [line["refused_total"] for line in lines] != [1, 1]:
        raise Wrong(f"one NaN loss is counted as {counted}")
    for line, other in zip(lines, expected, strict=True):
        if (line["loss"], line["grad_norm"]) != (other["loss"], other["grad_norm"]):
            raise Wrong(f"step {line['step']} logs {line['loss']} instead of {other['loss']}")
    losses = " and ".join(f"{line['loss']:.6g}" for line in lines)
    return f"1 refusal; losses {losses} as in the run that never saw it"


@proves("the loss is per token: 1x8 equals 4x2")
def accumulated(subject: Subject) -> str:
    samples = samples_of(subject, 16, 11, 5, 14, 9, 16, 7, 12)
    found = {}
    for size in (8, 2):
        student = student_of(subject, windows=1, size=1)
        for start in range(0, 8, size):
            student.micro_batch(collate(samples[start : start + size]))
        student.results += student.guard.step()
        (outcome,) = student.outcome().results
        if not outcome.applied or outcome.loss is None or outcome.grad_norm is None:
            raise Wrong(f"{8 // size}x{size} was refused: {outcome.refused}")
        found[size] = (outcome.loss, outcome.grad_norm)
    close = all(abs(a / b - 1) < ROUNDING for a, b in zip(found[8], found[2], strict=True))
    losses = " and ".join(f"{loss:.6g}" for loss, _ in found.values())
    norms = " and ".join(f"{norm:.4g}" for _, norm in found.values())
    return ensure(close, f"loss {losses}, gradient norm {norms}")


@proves("safe mode is additive only, and trains")
def safe_mode(subject: Subject) -> str:
    student = student_of(
        with_form(subject, modulation="additive"), size=1, rates=(1e-3,) * SAFE_STEPS
    )
    others = [name for name in student.parameters if ".npt.A" not in name and ".npt.B." not in name]
    if others:
        raise Wrong(f"{len(others)} tensors are neither A nor B, {others[0]} first")
    batch = padded_batch(subject)
    for _ in range(SAFE_STEPS):
        student.micro_batch(batch)
        student.results += student.guard.step()
    losses = [outcome.loss for outcome in student.outcome().results]
    first, last = losses[0], losses[-1]
    if first is None or last is None:
        raise Wrong(f"losses {losses}")
    said = f"{len(student.parameters)} tensors A and B; loss {first:.6g} to {last:.6g}"
    return ensure(last < first, f"{said} in {SAFE_STEPS} steps")


@proves("watchdogs name what is wrong in logits, ids and parameters")
def watched(subject: Subject) -> str:
    student, model, vocabulary = student_of(subject), subject.model, subject.model.config.vocab_size
    batch = setting_of(subject).batch((0, 0)).to(device_of(subject))
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    name, parameter = next(iter(student.parameters.items()))
    outside = replace(batch, input_ids=batch.input_ids.clone())
    outside.input_ids[1, 2] = vocabulary

    def findings() -> dict[str, Any]:
        return {
            "logits[1, 3, 7]": tensor_fault({"logits": logits}),
            f"token id {vocabulary} outside": find_fault(outside, vocabulary),
            f"{name}[0, 2]": tensor_fault(student.parameters),
            "model.norm.weight[3]": base_fault(model),
        }

    clean = {**findings(), "ids": find_fault(batch, vocabulary)}
    alarms = [str(finding) for finding in clean.values() if finding is not None]
    if len(alarms) != 1:  # that of the id
        raise Wrong(f"false alarms: {alarms}")
    logits[1, 3, 7] = math.nan
    norm = model.get_parameter("model.norm.weight")
    with planted(parameter, (0, 2), math.nan), planted(norm, (3,), math.nan):
        found = findings()
    missed = [where for where, finding in found.items() if where not in str(finding)]
    said = f"{len(found)} faults named with their places, no false alarm"
    return ensure(not missed, f"missed: {', '.join(missed)}" if missed else said)


@proves("the smoke test passes a sound model and stops a poisoned one")
def smoke_tested(subject: Subject) -> str:
    student, batch = student_of(subject), padded_batch(subject)
    strategy, before = STRATEGIES[subject.config.strategy], student.state()

    def uphill(*arguments: Any) -> BatchSums:
        sums: BatchSums = strategy(*arguments)
        for parameter in student.parameters.values():
            if parameter.grad is not None:
                parameter.grad.neg_()
        return sums

    verdict = smoke_test(subject.model, batch, strategy, subject.config)
    name, parameter = next(iter(student.parameters.items()))
    for fault, used in {f"NaN in {name}": strategy, "a gradient uphill": uphill}.items():
        poison = fault.startswith("NaN")
        with planted(parameter, (0, 0), math.nan if poison else float(parameter.detach()[0, 0])):
            try:
                smoke_test(subject.model, batch, used, subject.config)
            except SmokeTestError:
                continue
        raise Wrong(f"it passed with {fault}")
    different = difference(before, student.state())
    if different is not None or torch.is_anomaly_enabled():
        raise Wrong(f"it changed {different or 'anomaly mode, which is still on'}")
    return verdict.removeprefix("smoke test passed: ").partition(";")[0]


@proves("tensor health covers every layer of a chosen step, and changes nothing")
def recorded(subject: Subject) -> str:
    student, batch = student_of(subject), padded_batch(subject)
    sums, gradients = gradients_of(student, batch)
    with Recorder(subject.model) as recorder:
        again, others = gradients_of(student, batch)
    record = recorder.record(step=1)
    same = torch.equal(sums.loss, again.loss) and difference(gradients, others) is None
    converted = {index for index, _ in npt_layers(subject.model)}
    seen = {row.layer for row in record.rows if row.stage == "z"}
    return ensure(
        same and seen == converted and not record.bad,
        f"{len(record.rows)} tensors, {len(seen)} of {len(converted)} converted layers,"
        f" {len(record.bad)} bad; loss and gradients {'bit-equal' if same else 'CHANGED'}",
    )


@proves("the operation that explodes is named")
def explosion_named(subject: Subject) -> str:
    model = subject.model
    name = f"model.layers.{model.config.num_hidden_layers // 2}.mlp.up_proj"
    ids = collate(samples_of(subject, 16, 16)).input_ids.to(device_of(subject))
    found = trace(model, {"input_ids": ids})
    if found is not None:
        raise Wrong(f"a false alarm: {found.module}")
    with exploding(model, name):
        found = trace(model, {"input_ids": ids})
    said = "nothing" if found is None else f"{found.operation} in {found.module}"
    return ensure(found is not None and found.module == name, f"exp overflows in {name}: {said}")


@contextmanager
def exploding(model: Any, name: str) -> Iterator[None]:
    handle = model.get_submodule(name).register_forward_hook(
        lambda _module, _inputs, output: output + (1000.0 * output.abs() + 200.0).exp()
    )
    try:
        yield
    finally:
        handle.remove()
