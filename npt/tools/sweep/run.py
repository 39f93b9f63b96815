"""One short run, and everything that a study wants to know of it. Windows go through the
transaction that every run has, so what is measured is what a run would do; nothing is written."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from npt.adapters.attach import adapter_parameters, attach, detach
from npt.calibration.calibrate import calibrate
from npt.data.batch import Batch, collate, pad_id_of
from npt.distill.stages import stage_at, stages_of
from npt.distill.strategies import MicroBatch, drive
from npt.evaluation.evaluate import evaluate
from npt.step.schedule import rate_table
from npt.step.spikes import SpikeGuard
from npt.step.train_step import TrainStep, forward_backward
from npt.step.window_result import WindowResult
from npt.tools.sweep.fault import enlarged
from npt.tools.sweep.inspect_student import Look, look
from npt.tools.sweep.lab import Base, Lab
from npt.tools.sweep.settings import Settings
from npt.tools.sweep.sharpness import layer_sharpness
from npt.tools.sweep.spec import Trial

CURVE = 64
"""Points of a loss curve that are kept."""

AROUND = 3
"""Steps before a fault, and at the end of a run, whose mean loss is taken as the loss there."""

GROWN = 1.01
"""A run's KL has grown when it is more than this many times what it was at the start; less is the
choice of the held-out tokens.
"""

RECOVERED = 1.5
"""A run has recovered from a fault when its loss is no more than this many times the loss before.
"""

Row = dict[str, Any]
Watch = Callable[[int, float | None, float | None], None]
"""Told of each step its number, loss and gradient norm."""


@dataclass
class _Course:
    """What has become of the windows so far. losses, norms: None where nothing of a window was
    finite.
    """

    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    applied: int = 0
    tokens: int = 0
    in_a_row: int = 0
    reason: str | None = None
    detail: str | None = None
    fault: Row = field(default_factory=dict)
    stage_from: int = 0  # a loss is compared with those of its own stage

    def first(self) -> float | None:
        return next((loss for loss in self.losses[self.stage_from :] if loss is not None), None)


def run_trial(
    lab: Lab,
    trial: Trial,
    between: Callable[[], None] = lambda: None,
    watch: Watch = lambda *_: None,
) -> Row:
    """Run a trial: once, or where it seeks a limit as often as that takes.

    Args:
        lab: bases and data.
        trial: which.
        between: called in front of every step; what it raises ends the trial.
        watch: told of every step.

    Returns:
        Figures by name. Of a bisection those of the run at the largest value that trained, with the
        bracket.
    """
    if trial.bisect is None:
        return run(lab, trial.settings, between, watch)
    started = time.perf_counter()
    best: Row = {}
    runs = 0

    def trains(value: float) -> bool:
        nonlocal best, runs
        found = run(lab, trial.at(value), between, watch)
        runs += 1
        stable = bool(found["outcome"] == "stable")
        best = found if stable or not best else best
        return stable

    low, high = trial.bisect.low, trial.bisect.high
    if not trains(low):
        bracket: tuple[float | None, float | None] = (None, low)
    elif trains(high):
        bracket = (high, None)
    else:
        for _ in range(trial.bisect.rounds):
            middle = float(f"{math.sqrt(low * high):.4g}")
            low, high = (middle, high) if trains(middle) else (low, middle)
        bracket = (low, high)
    return {
        **best,
        "limit_low": bracket[0],
        "limit_high": bracket[1],
        "runs": runs,
        "seconds": time.perf_counter() - started,
    }


def run(
    lab: Lab,
    settings: Settings,
    between: Callable[[], None] = lambda: None,
    watch: Watch = lambda *_: None,
) -> Row:
    """Train once with these settings from the beginning; the base is as before afterwards.

    Args:
        lab, between, watch: as `run_trial`.
        settings: of the run.
    """
    base = lab.base(settings)
    windows = lab.windows(base, settings)
    lab.reference(base, settings)  # and the held-out samples: what runs share is not one run's time
    started = time.perf_counter()
    attach(base.model, settings.adapter, seed=settings.training.seed)
    try:
        base.model.eval()
        torch.manual_seed(settings.training.seed)
        _start(lab, base, settings)
        row: Row = {"runs": 1, "seconds_start": time.perf_counter() - started}
        row["parameters"] = sum(p.numel() for p in adapter_parameters(base.model).values())
        batch = windows[0][0].to(base.model.device)
        row |= {
            "sharpness_start": _sharpness(base, batch, settings),
            "loss_first": _loss(base, settings, windows[0]),
        }
        row["kl_start"] = _fidelity(lab, base, settings, between)["kl"]
        training = time.perf_counter()
        course, last = _train(base, settings, windows, between, watch)
        row |= {
            "seconds_training": time.perf_counter() - training,
            **_course_figures(course, settings),
        }
        row["loss_end"] = _loss(base, settings, windows[0])
        row["sharpness_end"] = _sharpness(base, batch, settings)
        seen = _heldout_look(lab, base, settings)
        row |= (
            seen.measures() | {"look_finite": seen.finite} | _fidelity(lab, base, settings, between)
        )
        row |= _outcome(course, settings, row)
        if row["outcome"] == "diverged":
            row |= _post_mortem(base, settings, course, last, seen)
        return {**row, "seconds": time.perf_counter() - started}
    finally:
        detach(base.model)


def _start(lab: Lab, base: Base, settings: Settings) -> None:
    c = settings.training
    if settings.adapter.init == "calibrated":
        calibrate(
            base.model,
            base.tokenizer,
            lab.training_samples(base, settings),
            c.calibration_tokens,
            inputs=c.calibration_inputs,
            rounds=c.calibration_rounds,
            batch_size=c.batch_size,
            seed=c.seed,
        )


def _train(
    base: Base,
    settings: Settings,
    windows: list[list[Batch]],
    between: Callable[[], None],
    watch: Watch,
) -> tuple[_Course, tuple[list[Batch], bool] | None]:
    """The loop; the last window of which something was refused, and whether it was faulted."""
    config, probe, model = settings.training, settings.probe, base.model
    assert config.max_steps is not None
    strategy = drive if base.teacher is None else partial(drive, teacher=base.teacher)
    rates = rate_table(
        config.learning_rate, config.scheduler_type, config.warmup_steps, config.max_steps
    )
    train_step = TrainStep(model, strategy, config, rates)
    guarded = train_step.window
    stages = stages_of(config, config.max_steps)
    course, last = _Course(), None
    for step, window in enumerate(windows, 1):
        between()
        stage, faulted = stage_at(stages, step - 1), step == probe.fault_step
        # losses of another kind are not measured by those before
        if stage.start != course.stage_from and guarded.spikes is not None:
            guarded.spikes = SpikeGuard(config.spike_sigmas)
        course.stage_from, train_step.config = stage.start, stage.config
        before = _loss(base, settings, windows[0]) if faulted else math.nan
        for index, batch in enumerate(window):
            with enlarged(model, probe, armed=faulted and index == 0):
                train_step.add(batch)
        (result,) = (*guarded.commit(), *guarded.flush())
        if result.refusals:
            last = window, faulted
        _account(course, result, settings, step, faulted)
        if faulted:  # as it came out, refused or not
            trace = next(trace for trace in reversed(guarded.history) if trace.micro_batch == 0)
            # per token, as the norms of windows are
            norm = trace.grad_norm / sum(batch.tokens for batch in window)
            course.fault |= {
                "fault_refused": bool(result.refusals),
                "fault_loss": trace.loss,
                "fault_grad_norm": norm,
            }
            course.fault["fault_harm"] = _loss(base, settings, windows[0]) / before
        watch(step, result.loss, result.grad_norm)
        if course.reason is not None:
            break
    return course, last


def _account(
    course: _Course, result: WindowResult[MicroBatch], settings: Settings, step: int, faulted: bool
) -> None:
    config = settings.training
    finite = result.loss is not None and math.isfinite(result.loss)
    course.losses.append(result.loss if finite else None)
    course.norms.append(
        result.grad_norm
        if result.grad_norm is not None and math.isfinite(result.grad_norm)
        else None
    )
    course.refused.update(refusal.kind for refusal in result.refusals)
    course.applied += result.applied
    course.tokens += result.tokens
    longest, course.in_a_row = result.bad_in_a_row(course.in_a_row)
    first, loss = course.first(), course.losses[-1]
    if result.refusals:
        course.detail = str(result.refusals[-1])
    if longest >= config.max_consecutive_bad:
        course.reason = f"{longest} refusals in a row"
    elif (
        not faulted
        and loss is not None
        and first is not None
        and loss > settings.probe.divergence_factor * first
    ):
        course.reason, course.detail = "loss", f"loss {loss:.4g} after {first:.4g} at the start"


def _course_figures(course: _Course, settings: Settings) -> Row:
    losses = [loss for loss in course.losses if loss is not None]
    norms = [norm for norm in course.norms if norm is not None]
    quarter = max(1, len(norms) // 4)
    first, last = (
        (statistics.median(norms[:quarter]), statistics.median(norms[-quarter:]))
        if norms
        else (None, None)
    )
    return {
        "steps": len(course.losses),
        "applied": course.applied,
        "refused": course.refused.total(),
        "refused_kinds": ",".join(
            f"{kind} {count}" for kind, count in sorted(course.refused.items())
        ),
        "tokens": course.tokens,
        "loss_last": statistics.fmean(losses[-AROUND:]) if losses else None,
        "loss_max": max(losses) if losses else None,
        "grad_norm_first": first,
        "grad_norm_last": last,
        "grad_norm_max": max(norms) if norms else None,
        "grad_growth": last / first if first and last is not None else None,
        "curve": [course.losses[i] for i in _spread(len(course.losses), CURVE)],
        **_recovery(course, settings.probe.fault_step),
    }


def _loss(base: Base, settings: Settings, window: list[Batch]) -> float:
    """The mean loss per token of a window with the adapters as they are, in the run's first stage;
    nothing is stepped.
    """
    config = stages_of(settings.training, settings.training.max_steps)[0].config
    strategy = drive if base.teacher is None else partial(drive, teacher=base.teacher)
    sums = [forward_backward(base.model, strategy, batch, config) for batch in window]
    for parameter in adapter_parameters(base.model).values():
        parameter.grad = None
    return sum(float(part.loss) for part in sums) / sum(part.tokens for part in sums)


def _recovery(course: _Course, at: int | None) -> Row:
    """How a run took the fault: mean loss before it, the largest and the mean of the last behind
    it, and steps until it was as before.
    """
    if at is None:
        return {}
    before = [loss for loss in course.losses[max(0, at - 1 - AROUND) : at - 1] if loss is not None]
    after = [(i, loss) for i, loss in enumerate(course.losses[at:], 1) if loss is not None]
    if not before or not after:
        return course.fault
    usual = statistics.fmean(before)
    return {
        **course.fault,
        "loss_before_fault": usual,
        "loss_worst_behind": max(loss for _, loss in after),
        "loss_after_fault": statistics.fmean([loss for _, loss in after][-AROUND:]),
        "recovered_after": next((i for i, loss in after if loss <= RECOVERED * usual), None),
    }


def _outcome(course: _Course, settings: Settings, row: Row) -> Row:
    """`diverged` (stopped, or what came out is not finite), `worse` (the loss of the first window
    or the KL is larger in the end than at the start), `stable`."""
    kl, kl_start = row["kl"], row["kl_start"]
    if course.reason is not None:
        return {"outcome": "diverged", "reason": course.reason, "stopped_at": len(course.losses)}
    if not row["look_finite"] or kl is None or not math.isfinite(kl):
        return {
            "outcome": "diverged",
            "reason": "the student is not finite",
            "stopped_at": len(course.losses),
        }
    end = row["loss_end"]
    if not course.applied or not math.isfinite(end) or end > row["loss_first"]:
        reason = "the loss has grown" if course.applied else "no step was applied"
        return {"outcome": "worse", "reason": reason, "stopped_at": None}
    if kl_start is not None and kl > GROWN * kl_start:
        return {"outcome": "worse", "reason": "the KL has grown", "stopped_at": None}
    return {"outcome": "stable", "reason": None, "stopped_at": None}


def _post_mortem(
    base: Base,
    settings: Settings,
    course: _Course,
    last: tuple[list[Batch], bool] | None,
    seen: Look,
) -> Row:
    """Where it went wrong: the first number that is not finite on the batch that was refused last,
    else the layer that is furthest off.
    """
    if last is not None:
        window, faulted = last
        with enlarged(base.model, settings.probe, armed=faulted):
            found = look(base.model, window[0].to(base.model.device))
        seen = found if not found.finite else seen
    return {
        "detail": course.detail,
        "bad_layer": seen.bad_layer,
        "bad_stage": seen.bad_stage,
        "bad_finite": seen.finite,
    }


def _heldout_look(lab: Lab, base: Base, settings: Settings) -> Look:
    samples, _ = lab.heldout(base, settings)
    batch = collate(
        samples[: settings.training.batch_size],
        pad_id_of(base.tokenizer),
        side=settings.data.padding_side,
    )
    return look(base.model, batch.to(base.model.device))


def _fidelity(lab: Lab, base: Base, settings: Settings, between: Callable[[], None]) -> Row:
    samples, heldout = lab.heldout(base, settings)
    reference = lab.reference(base, settings)
    found = evaluate(
        base.model,
        base.tokenizer,
        samples,
        batch_size=settings.training.batch_size,
        unquantized=reference,
        between=between,
    )
    aim = found.aim
    return {
        "kl": aim.kl,
        "kl_se": aim.kl_se,
        "perplexity_ratio": aim.perplexity_ratio,
        "top1": aim.top1,
        "acceptance": aim.acceptance,
        "floor_kl": found.floor.kl,
        "nmse": statistics.fmean(layer["nmse_student"] for layer in found.layers.values()),
        "heldout": heldout,
    }


def _sharpness(base: Base, batch: Batch, settings: Settings) -> float | None:
    steps = settings.probe.sharpness_steps
    return layer_sharpness(base.model, batch, settings.training, steps) if steps else None


def _spread(count: int, at_most: int) -> list[int]:
    """Indices of a curve's points, the first and the last among them."""
    if count <= at_most:
        return list(range(count))
    return [round(i * (count - 1) / (at_most - 1)) for i in range(at_most)]
