"""Run a trial: an ordinary training run that keeps its figures and deletes its folder."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from npt.adapters.attach import attach, detach
from npt.base.load import load_base, load_teacher
from npt.base.precision import set_matmul_precision
from npt.config import BaseConfig
from npt.console import silent_console
from npt.errors import NumericalError, StoppedError, TooManyRefusalsError
from npt.runs.run_folder import METRICS
from npt.tools.sweep.spec import Trial
from npt.tools.sweep.table import Row
from npt.train.resolve import RunSettings
from npt.train.trainer import Trainer

GROWN = 1.01
"""A run is `worse` if its KL exceeds the KL at the start by this factor; a smaller rise may come
from the choice of held-out tokens."""

AT_THE_END = 3  # last steps to average for the loss at the end

Base = tuple[PreTrainedModel, Any, PreTrainedModel | None]
"""A base without adapters, its tokenizer and, if separate, its teacher."""


class Bases:
    """The base of the trials in one process, loaded once for consecutive trials that share it."""

    def __init__(self, device: Any = None):
        self._device = device
        self._last: tuple[BaseConfig, Base] | None = None

    def get(self, base: BaseConfig) -> Base:
        """Return the base, and set the matmul precision of these settings."""
        if self._last is None or self._last[0] != base:
            self._last = None  # free its memory
            model, tokenizer = load_base(**base.loading, device=self._device)
            teacher = None
            if base.teacher_precision is not None:
                teacher = load_teacher(
                    base.model_name,
                    base.teacher_precision,
                    device=self._device,
                    attn_implementation=base.attn_implementation,
                )
            self._last = base, (model, tokenizer, teacher)
        _, loaded = self._last
        set_matmul_precision(base.matmul_precision, loaded[0])
        return loaded


def is_stable(row: Row) -> bool:
    return bool(row["outcome"] == "stable")


def run_trial(bases: Bases, trial: Trial, between: Callable[[], None] = lambda: None) -> Row:
    """Run a trial and return its row. A search runs several times; its row describes the largest
    value that trained, with the bracket. `between` is called before each run.
    """
    between()
    if trial.bisect is None:
        return {**run(bases, trial.settings), "runs": 1}
    started = time.perf_counter()
    rows: list[Row] = []

    def trains(value: float) -> bool:
        between()
        rows.append(run(bases, trial.at(value)))
        return is_stable(rows[-1])

    low = trial.bisect.low
    high = trial.bisect.high
    bracket: tuple[float | None, float | None]
    if not trains(low):
        bracket = (None, low)
    elif trains(high):
        bracket = (high, None)
    else:
        for _ in range(trial.bisect.rounds):
            # four digits, to be read in a table
            middle = float(f"{math.sqrt(low * high):.4g}")
            if trains(middle):
                low = middle
            else:
                high = middle
        bracket = (low, high)
    limits = {"limit_low": bracket[0], "limit_high": bracket[1], "runs": len(rows)}
    # each value that trains is larger than those before
    trained = list(filter(is_stable, rows))
    best = trained[-1] if trained else rows[0]
    return {**best, **limits, "seconds": time.perf_counter() - started}


def run(bases: Bases, settings: RunSettings) -> Row:
    """Train once with these settings and restore the base; StoppedError if a signal came."""
    started = time.perf_counter()
    model, tokenizer, teacher = bases.get(settings.base)
    report = attach(model, settings.adapter, seed=settings.training.seed)
    try:
        with tempfile.TemporaryDirectory(prefix="npt-trial-") as folder:
            output = Path(folder) / "run"
            training = replace(
                settings.training,
                output_dir=str(output),
                log_steps=1,
                save_steps=None,
                smoke_test=False,
            )
            trainer = Trainer(
                model,
                tokenizer,
                None,
                training,
                data_config=settings.data,
                teacher=teacher,
                settings=asdict(settings.base),
                console=silent_console(),
                report=False,
            )
            row = _trained(trainer)
            # what `_trained` returns counts, if both know it
            row = {**_course(output / METRICS), **row, "parameters": report.trainable_parameters}
        return {**row, "seconds": time.perf_counter() - started}
    finally:
        detach(model)


def _trained(trainer: Trainer) -> Row:
    """Train and return the outcome with its reason: `diverged` (stopped, or the student is not
    finite), `worse` (its KL has grown) or `stable`.
    """
    try:
        result = trainer.train()
    except (TooManyRefusalsError, NumericalError) as error:
        if not hasattr(trainer, "initial"):  # the base itself is not finite
            raise
        kl = trainer.initial.aim.kl
        reason = str(error).partition(";")[0][:500]  # the rest is about the run folder
        return {"outcome": "diverged", "reason": reason, "kl_start": kl}
    # without a row, the trial waits again
    if result.signal is not None or result.fidelity is None:
        raise StoppedError(result.signal or 15)
    fidelity = result.fidelity
    layers = [layer["nmse_student"] for layer in fidelity.layers.values()]
    start = trainer.initial.aim.kl
    outcome = "stable"
    reason = "; ".join(result.diverged)
    if not math.isfinite(fidelity.aim.kl):
        outcome = "diverged"
        reason = "the student is not finite"
    elif fidelity.aim.kl > GROWN * start:
        outcome = "worse"
        reason = "the KL has grown"
    # sorted: equal runs give equal rows
    refusals = [f"{kind} {number}" for kind, number in sorted(result.refused_by_kind.items())]
    names = ("kl", "kl_se", "perplexity_ratio", "top1", "acceptance")
    return {
        "outcome": outcome,
        "reason": reason or None,
        **{name: getattr(fidelity.aim, name) for name in names},
        "kl_start": start,
        "floor_kl": fidelity.floor.kl,
        "nmse": statistics.fmean(layers) if layers else None,
        "heldout": result.heldout,
        "steps": result.steps,
        "tokens": result.tokens,
        "refused": result.refused,
        "refused_kinds": ",".join(refusals) or None,
        "seconds_training": result.seconds,
    }


def _course(metrics: Path) -> Row:
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    steps = [json.loads(line) for line in lines]
    last = steps[-1] if steps else {}

    def finite(name: str) -> list[float]:
        values = [step.get(name) for step in steps]
        return [value for value in values if value is not None]

    losses = finite("loss")
    ends = {}
    if losses:
        ends = {"loss_first": losses[0], "loss_last": statistics.fmean(losses[-AT_THE_END:])}
    return {
        "steps": last.get("step", 0),
        "refused": last.get("refused_total", 0),
        **ends,
        "loss_max": max(losses, default=None),
        "grad_norm_max": max(finite("grad_norm"), default=None),
    }
