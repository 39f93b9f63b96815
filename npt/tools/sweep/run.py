"""One short run of a study with its measures. Windows go through the step that every run makes, so
what is measured is what a run would do; nothing is written.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.attach import attach, detach
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.calibration.calibrate import calibrate
from npt.data.batch import Batch, collate
from npt.distill.step import add_batch, forward_backward, student_guard, summed
from npt.distill.strategies import drive
from npt.evaluation.evaluate import evaluate
from npt.guard.outcome import Outcome
from npt.guard.schedule import rate_table
from npt.tools.sweep.inspect_student import Inspection, inspect_student
from npt.tools.sweep.lab import Lab
from npt.tools.sweep.settings import ProbeConfig, Settings
from npt.tools.sweep.spec import Trial

AROUND = 3  # steps before a fault, and at the end of a run, whose mean loss is the loss there

RECOVERED = 1.5
"""A run has recovered from a fault when its loss is at most this many times the loss before."""

Row = dict[str, Any]


@dataclass
class Course:
    """The steps of a run. losses, norms: None if nothing of a window was finite. reason: why the
    run must end, once it must.
    """

    settings: Settings
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    applied: int = 0
    tokens: int = 0
    reason: str | None = None
    detail: str | None = None
    fault: Row = field(default_factory=dict)

    def take(self, result: Outcome, faulted: bool) -> None:
        """Count a window; a faulted one's loss ends no run."""
        loss, norm = (
            x if x is not None and math.isfinite(x) else None
            for x in (result.loss, result.grad_norm)
        )
        self.losses.append(loss)
        self.norms.append(norm)
        self.refused.update(refusal.kind for refusal in result.refused)
        self.applied += result.applied
        self.tokens += result.tokens
        most = self.settings.probe.divergence_factor
        first = next((loss for loss in self.losses if loss is not None), None)
        if result.refused:
            self.detail = str(result.refused[-1])
        if result.longest >= self.settings.training.max_consecutive_bad:
            self.reason = f"{result.longest} refusals in a row"
        elif not faulted and loss is not None and first is not None and loss > most * first:
            self.reason, self.detail = "loss", f"loss {loss:.4g} after {first:.4g} at the start"

    def figures(self) -> Row:
        """Return the figures of a row."""
        losses = [loss for loss in self.losses if loss is not None]
        norms = [norm for norm in self.norms if norm is not None]
        quarter = max(1, len(norms) // 4)
        first = statistics.median(norms[:quarter]) if norms else None
        last = statistics.median(norms[-quarter:]) if norms else None
        kinds = sorted(self.refused.items())
        return {
            "steps": len(self.losses),
            "applied": self.applied,
            "refused": self.refused.total(),
            "refused_kinds": ",".join(f"{kind} {number}" for kind, number in kinds) or None,
            "tokens": self.tokens,
            "loss_last": statistics.fmean(losses[-AROUND:]) if losses else None,
            "loss_max": max(losses, default=None),
            "grad_norm_first": first,
            "grad_norm_last": last,
            "grad_norm_max": max(norms, default=None),
            "grad_growth": last / first if first and last is not None else None,
            **self._recovery(),
        }

    def _recovery(self) -> Row:
        """Return how the run took the fault: losses before and after it, and the steps until the
        loss was as before.
        """
        at = self.settings.probe.fault_step
        if at is None:
            return {}
        before = [x for x in self.losses[max(0, at - 1 - AROUND) : at - 1] if x is not None]
        after = [(i, loss) for i, loss in enumerate(self.losses[at:], 1) if loss is not None]
        if not before or not after:
            return self.fault
        usual = statistics.fmean(before)
        return {
            **self.fault,
            "loss_before_fault": usual,
            "loss_worst_behind": max(loss for _, loss in after),
            "loss_after_fault": statistics.fmean([loss for _, loss in after][-AROUND:]),
            "recovered_after": next((i for i, loss in after if loss <= RECOVERED * usual), None),
        }


GROWN = 1.01
"""A run's KL has grown when it is more than this many times what it was at the start; less is the
choice of the held-out tokens.
"""

Between = Callable[[], None]
"""Called before every step; what it raises ends the trial."""


def run_trial(lab: Lab, trial: Trial, between: Between = lambda: None) -> Row:
    """Run a trial: once, or if it seeks a limit as often as that takes; the row is then of the
    largest value that trained, with the bracket.
    """
    if trial.bisect is None:
        return run(lab, trial.settings, between)
    started = time.perf_counter()
    best: Row = {}
    runs = 0

    def trains(value: float) -> bool:
        nonlocal best, runs
        found = run(lab, trial.at(value), between)
        runs += 1
        stable = bool(found["outcome"] == "stable")
        best = found if stable or not best else best
        return stable

    low, high = trial.bisect.low, trial.bisect.high
    bracket: tuple[float | None, float | None]
    if not trains(low):
        bracket = (None, low)
    elif trains(high):
        bracket = (high, None)
    else:
        for _ in range(trial.bisect.rounds):
            middle = float(f"{math.sqrt(low * high):.4g}")
            low, high = (middle, high) if trains(middle) else (low, middle)
        bracket = (low, high)
    seconds = time.perf_counter() - started
    limits = {"limit_low": bracket[0], "limit_high": bracket[1]}
    return {**best, **limits, "runs": runs, "seconds": seconds}


def run(lab: Lab, settings: Settings, between: Between = lambda: None) -> Row:
    """Train once with these settings from the beginning; the base is as before afterwards."""
    student = _Student(lab, settings, between)
    lab.reference(student.base, settings)  # what runs share is not one run's time
    started = time.perf_counter()
    attach(student.model, settings.adapter, seed=settings.training.seed)
    try:
        student.start()
        row: Row = {"runs": 1, "seconds_start": time.perf_counter() - started}
        row["parameters"] = sum(p.numel() for p in adapter_parameters(student.model).values())
        row["loss_first"] = student.loss()
        row["kl_start"] = student.fidelity()["kl"]
        training = time.perf_counter()
        course, last = _train(student)
        row["seconds_training"] = time.perf_counter() - training
        row |= course.figures() | {"loss_end": student.loss()}
        seen = student.inspect()
        row |= seen.measures() | student.fidelity()
        row |= _outcome(course, row, seen.finite)
        if row["outcome"] == "diverged":
            row |= _post_mortem(student, course, last, seen)
        return {**row, "seconds": time.perf_counter() - started}
    finally:
        detach(student.model)


class _Student:
    """A run's student, and its measures."""

    def __init__(self, lab: Lab, settings: Settings, between: Between):
        self.lab, self.settings, self.between = lab, settings, between
        self.base = lab.base(settings)
        self.model = self.base.model
        self.windows = lab.windows(self.base, settings)
        teacher = self.base.teacher
        self.strategy = drive if teacher is None else partial(drive, teacher=teacher)

    def start(self) -> None:
        c = self.settings.training
        self.model.eval()
        torch.manual_seed(c.seed)
        if self.settings.adapter.init == "calibrated":
            samples = self.lab.training_samples(self.base, self.settings)
            calibrate(
                self.model, self.base.tokenizer, samples, c.calibration_tokens,
                batch_size=c.batch_size, seed=c.seed,
            )  # fmt: skip

    def loss(self) -> float:
        """Return the mean loss per token of the first window with the adapters as they are;
        nothing is stepped.
        """
        config, window = self.settings.training, self.windows[0]
        sums = [forward_backward(self.model, self.strategy, batch, config) for batch in window]
        for parameter in adapter_parameters(self.model).values():
            parameter.grad = None
        return sum(float(part.loss) for part in sums) / sum(part.tokens for part in sums)

    def inspect(self) -> Inspection:
        """Measure the student on held-out samples."""
        samples, _ = self.lab.heldout(self.base, self.settings)
        first = samples[: self.settings.training.batch_size]
        batch = collate(first)
        return inspect_student(self.model, batch.to(self.model.device))

    def fidelity(self) -> Row:
        samples, heldout = self.lab.heldout(self.base, self.settings)
        found = evaluate(
            self.model,
            self.base.tokenizer,
            samples,
            batch_size=self.settings.training.batch_size,
            unquantized=self.lab.reference(self.base, self.settings),
            between=self.between,
        )
        names = ("kl", "kl_se", "perplexity_ratio", "top1", "acceptance")
        return {
            **{name: getattr(found.aim, name) for name in names},
            "floor_kl": found.floor.kl,
            "nmse": statistics.fmean(layer["nmse_student"] for layer in found.layers.values()),
            "heldout": heldout,
        }


@contextmanager
def enlarged(model: PreTrainedModel, probe: ProbeConfig, armed: bool = True) -> Iterator[None]:
    """Make the base's activations `fault_scale` times as large within the context, as a token that
    nobody has seen before or a broken kernel would: of every converted layer's attention, which
    modulates the student and is part of the teacher's stream, or of the embedding.
    """

    def enlarge(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # of attention
            return (output[0] * probe.fault_scale, *output[1:])
        return output * probe.fault_scale

    hit = [layer.self_attn for _, layer in npt_layers(model)]
    if probe.fault_place == "embedding":
        hit = [model.get_input_embeddings()]
    with ExitStack() as stack:
        for module in hit if armed else ():
            stack.callback(module.register_forward_hook(enlarge).remove)
        yield


Refused = tuple[list[Batch], bool] | None
"""The last window with a refusal, and whether it was faulted."""


def _train(student: _Student) -> tuple[Course, Refused]:
    config, probe = student.settings.training, student.settings.probe
    assert config.max_steps is not None
    rates = rate_table(
        config.learning_rate, config.scheduler_type, config.warmup_steps, config.max_steps
    )
    guard = student_guard(student.model, config, rates)
    guarded, vocab_size = guard.window, student.model.config.vocab_size
    course, last = Course(student.settings), None
    for step, window in enumerate(student.windows, 1):
        student.between()
        faulted = step == probe.fault_step
        compute = partial(summed, student.model, student.strategy, config=config)
        before = student.loss() if faulted else math.nan
        for index, batch in enumerate(window):
            with enlarged(student.model, probe, armed=faulted and index == 0):
                add_batch(guard, batch, compute, vocab_size)
        outcomes: list[Outcome] = guard.step()
        (result,) = outcomes + guard.flush()
        if result.refused:
            last = window, faulted
        course.take(result, faulted)
        if faulted:  # as it came out, refused or not
            trace = next(trace for trace in reversed(guarded.history) if trace.micro_batch == 0)
            course.fault = {
                "fault_refused": bool(result.refused),
                "fault_loss": trace.loss,
                # per token, as the norms of windows are
                "fault_grad_norm": trace.grad_norm / sum(batch.tokens for batch in window),
                "fault_harm": student.loss() / before,
            }
        if course.reason is not None:
            break
    return course, last


def _outcome(course: Course, row: Row, finite: bool) -> Row:
    """Return `diverged` (stopped, or the student is not finite), `worse` (the loss of the first
    window or the KL is larger in the end than at the start) or `stable`, with the reason.
    """
    kl, kl_start, end = row["kl"], row["kl_start"], row["loss_end"]
    reason = course.reason
    if reason is None and not (finite and kl is not None and math.isfinite(kl)):
        reason = "the student is not finite"
    if reason is not None:
        return {"outcome": "diverged", "reason": reason, "stopped_at": len(course.losses)}
    if not course.applied:
        reason = "no step was applied"
    elif not math.isfinite(end) or end > row["loss_first"]:
        reason = "the loss has grown"
    elif kl_start is not None and kl > GROWN * kl_start:
        reason = "the KL has grown"
    outcome = "stable" if reason is None else "worse"
    return {"outcome": outcome, "reason": reason, "stopped_at": None}


def _post_mortem(student: _Student, course: Course, last: Refused, seen: Inspection) -> Row:
    """Return the place of the first number that is not finite on the batch that was refused last,
    else the layer that is furthest off.
    """
    if last is not None:
        window, faulted = last
        with enlarged(student.model, student.settings.probe, armed=faulted):
            found = inspect_student(student.model, window[0].to(student.model.device))
        seen = found if not found.finite else seen
    return {
        "detail": course.detail,
        "bad_layer": seen.bad_layer,
        "bad_stage": seen.bad_stage,
        "bad_finite": seen.finite,
    }
