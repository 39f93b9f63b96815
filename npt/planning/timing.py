"""What a step takes in time: one layer of the shape is tried on the device at hand, and what that
gives is carried to the whole depth.

Small models with random weights run through the very strategy and step, with all that
belongs to a step but the other layers. Two of them that differ in the number of their converted
layers say what one such layer takes, and what is left beside the layers; others say what a layer
without an adapter takes, in front of the first converted one or behind it. No speed of any machine
is assumed: where the layers are so wide that these trials would take minutes, they are tried
narrower, and their time is carried to the width by their arithmetic.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from npt.adapters.attach import attach
from npt.base.device import wait_for
from npt.base.precision import enforce_policy
from npt.base.random_base import random_base
from npt.config import TrainConfig
from npt.data.batch import Batch, Sample, batch_from_tensors
from npt.distill.strategies import Strategy, drive
from npt.evaluation.evaluate import evaluate
from npt.planning.flops import training_flops
from npt.planning.measure import (
    ROOFLINE_SIZES,
    live_bytes,
    matmul_roofline,
    peak_bytes,
    storage_bytes,
    tensors_of,
)
from npt.planning.shape import Shape
from npt.planning.workload import Depth, Workload
from npt.step.gradient_window import IN_FLIGHT
from npt.step.splitting import MicroBatchSplitter
from npt.step.train_step import TrainStep

TINY_VOCAB = 512
"""Tokens of a trial whose strategy computes no logits."""

ROUNDS = 30
"""Times that every trial is run at most."""

SECONDS = 5.0
"""That a stage's trials may take, but where they do not get twice round in it."""

NARROWEST = 512
"""D at least of a layer that is tried in the place of a wider one: below it the time is no longer
that of matrix products.
"""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step and what they are made of, by the name of each part. narrowed:
    share of the width that was tried.
    """

    seconds: float
    parts: dict[str, float]
    narrowed: int = 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """What steps really took. seconds: of the fastest step. phases: peak bytes of each phase of
    `npt.planning.memory`.
    """

    seconds: float
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "peak_bytes": self.peak}


class Window:
    """Windows of one workload on one model, made of random tokens.

    Args:
        model: with adapters attached.
        config: of the stage.
        rows: samples of a micro-batch.
        length: of each.
        micro_batches: of a window.
        splitter: into parts of so many samples; default none.
        teacher: of its own.
    """

    def __init__(
        self,
        model: Any,
        config: TrainConfig,
        rows: int,
        length: int,
        micro_batches: int = 1,
        splitter: MicroBatchSplitter | None = None,
        teacher: Any = None,
    ):
        strategy: Strategy = partial(drive, teacher=teacher)
        self.step = TrainStep(
            model,
            strategy,
            config,
            [config.learning_rate],
            splitter=splitter or MicroBatchSplitter(rows),
        )
        self.device = next(model.parameters()).device
        self._batches = [
            _random_batch(model.config.vocab_size, rows, length, seed)
            for seed in range(micro_batches)
        ]

    def fill(self, wait: bool = True) -> None:
        """Add the window's micro-batches."""
        for batch in self._batches:
            self.step.add(batch)
        if wait:
            wait_for(self.device)

    def commit(self, wait: bool = True) -> None:
        """Make the step."""
        self.step.window.commit()
        if wait:
            wait_for(self.device)


def predict_time(
    workload: Workload, samples_at_once: int, *, seconds: float = SECONDS
) -> dict[str, StepTime]:
    """The time of a step of each stage, from trials of a few layers.

    Args:
        workload: the run.
        samples_at_once: of a micro-batch.
        seconds: that the trials of a stage may take.

    Returns:
        By strategy, in the order of the stages.
    """
    return {
        name: _predict(workload, config, samples_at_once, seconds)
        for name, (_, config) in workload.stages.items()
    }


def _predict(workload: Workload, config: TrainConfig, samples: int, seconds: float) -> StepTime:
    config = replace(config, layer_weights="uniform")
    depth = workload.depth
    others = depth.between + (depth.behind if config.logit_kl_weight else 0)
    trials = {"one": Depth(0, 1, 0, 0), "three": Depth(0, 3, 0, 0)}
    if depth.before:
        trials["before"] = Depth(2, 1, 0, 0)
    if others:
        trials["others"] = Depth(0, 2, 2, 0)
    share, tried = _bearable(workload, config, trials, samples * workload.length, seconds)
    windows = {name: _window(tried, config, trial, samples) for name, trial in trials.items()}
    fills, commits = _fastest(windows, seconds)
    found = _layers(fills)
    if share > 1:
        whole, narrow = (_layers(_flops(w, config, trials)) for w in (workload, tried))
        found = {
            name: size * whole[name] / narrow[name]
            for name, size in found.items()
            if name != "beside"
        } | {"beside": found["beside"] * share ** (2 if config.logit_kl_weight else 1)}
    update = max(0.0, commits["three"] - commits["one"]) / 2
    passes = config.gradient_accumulation_steps * config.batch_size / samples
    parts = {f"converted layers ({depth.converted})": passes * depth.converted * found["layer"]}
    if depth.before:
        parts[f"layers in front of them ({depth.before})"] = passes * depth.before * found["before"]
    if others:
        parts[f"other layers ({others})"] = passes * others * found["others"]
    parts |= {
        "beside the layers, logits included": passes * found["beside"],
        "optimizer step": max(0.0, commits["one"] - update) + depth.converted * update * share,
    }
    return StepTime(sum(parts.values()), parts, share)


def _layers(trials: dict[str, float]) -> dict[str, float]:
    """What a layer of each kind takes, and what is left beside them, from what the trials take."""
    layer = max(0.0, trials["three"] - trials["one"]) / 2
    beside = max(0.0, trials["one"] - layer)
    found = {"layer": layer, "beside": beside}
    if "before" in trials:
        found["before"] = max(0.0, trials["before"] - trials["one"]) / 2
    if "others" in trials:
        found["others"] = max(0.0, trials["others"] - beside - 2 * layer) / 2
    return found


def _bearable(
    workload: Workload, config: TrainConfig, trials: dict[str, Depth], tokens: int, seconds: float
) -> tuple[int, Workload]:
    """The largest share of the width whose trials get twice round in about `seconds` here, and the
    workload of this width.
    """
    if not seconds:
        return 1, workload
    speed = matmul_roofline(
        workload.device, sizes=ROOFLINE_SIZES[workload.device.type][:1], seconds=0.05
    ).flops_per_second
    share, tried = 1, workload
    while (
        2 * tokens * sum(_flops(tried, config, trials).values()) > seconds * speed
        and tried.shape.hidden >= 2 * NARROWEST
    ):
        narrower = workload.narrowed(2 * share)
        if narrower is None:
            break
        share, tried = 2 * share, narrower
    return share, tried


def _flops(workload: Workload, config: TrainConfig, trials: dict[str, Depth]) -> dict[str, float]:
    """Arithmetic of each trial, per token."""
    rank = max(1, round(statistics.mean(workload.ranks)))
    return {
        name: training_flops(
            Shape.of(workload.small_config(depth.layers)),
            workload.length,
            workload.small_adapter(depth, rank),
            config.strategy,
            own_teacher=workload.teacher is not None,
            logits=1.0 if config.logit_kl_weight else 0.0,
            checkpointing=config.gradient_checkpointing,
        )
        for name, depth in trials.items()
    }


def _window(workload: Workload, config: TrainConfig, depth: Depth, samples: int) -> Window:
    """Of a small model with random weights."""
    small = workload.small_config(depth.layers, None if config.logit_kl_weight else TINY_VOCAB)
    model = made_base(workload, small)
    rank = max(1, round(statistics.mean(workload.ranks)))
    attach(model, workload.small_adapter(depth, rank))
    teacher = None
    if workload.teacher is not None:
        attention = workload.teacher_attention or workload.attn_implementation
        teacher = random_base(
            small, quantization=None, device=workload.device, attn_implementation=attention
        )
        teacher = teacher.to(workload.teacher)
        enforce_policy(teacher)
    return Window(model, config, samples, workload.length, teacher=teacher)


def made_base(workload: Workload, config: Any) -> Any:
    """A base with random weights, stored and computed in as the workload's."""
    model = random_base(
        config,
        quantization=workload.quantization,
        device=workload.device,
        attn_implementation=workload.attn_implementation,
        compute_dtype=workload.compute_dtype,
    )
    return model if workload.quantization is not None else model.to(workload.stored)


def _fastest(
    windows: dict[str, Window], seconds: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The fewest seconds of each one's micro-batch, and of its step: whatever else the machine does
    can only make one slower.

    They run in turns, once to find their kernels, and once more at least.
    """
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in windows}
    until = time.perf_counter() + seconds
    while len(spent["one"]) < 2 or (time.perf_counter() < until and len(spent["one"]) < ROUNDS):
        for name, window in windows.items():
            started = time.perf_counter()
            window.fill()
            filled = time.perf_counter()
            window.commit()
            spent[name].append((filled - started, time.perf_counter() - filled))
    found = {
        name: [min(part) for part in zip(*values[1:], strict=True)]
        for name, values in spent.items()
    }
    return {name: fill for name, (fill, _) in found.items()}, {
        name: commit for name, (_, commit) in found.items()
    }


def measure(
    model: Any,
    workload: Workload,
    config: TrainConfig,
    passes: MicroBatchSplitter,
    evaluated_at_once: int,
    *,
    steps: int = 3,
    teacher: Any = None,
) -> Measured:
    """Run a few windows and a batch of an evaluation for real. What else lives in this process is
    not counted.

    Args:
        model: the whole base, with adapters attached; these are trained.
        workload: what it was planned for.
        config: of a stage.
        passes: how many samples of a micro-batch are computed at once.
        evaluated_at_once: samples of the evaluation's batch.
        steps: that time is taken of, behind a first one.
        teacher: of its own.
    """
    c, length = workload.training, workload.length
    device = next(model.parameters()).device
    gc.collect()  # small models that were tried before are gone
    there = torch.cuda.memory_allocated(device) if device.type == "cuda" else live_bytes(device)
    beside = there - storage_bytes(tensors_of(model, teacher))
    window = Window(
        model, config, c.batch_size, length, c.gradient_accumulation_steps, passes, teacher
    )
    spent = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        window.fill()
        window.commit()
        spent.append(time.perf_counter() - started)
    # as in a run, where nobody waits for them, each keeps the state before it
    for _ in range(IN_FLIGHT if window.step.update.late else 0):
        window.fill(wait=False)
        window.commit(wait=False)

    def peak(act: Callable[[], object]) -> int:
        return peak_bytes(act, device).peak - beside

    phases = {"micro-batch": peak(window.fill), "step": peak(window.commit)}
    samples = _samples(model.config.vocab_size, min(evaluated_at_once, c.eval_samples), length)
    phases["evaluation"] = peak(lambda: evaluate(model, None, samples, batch_size=len(samples)))
    return Measured(min(spent[1:]), phases)


def _random_batch(vocab: int, rows: int, length: int, seed: int) -> Batch:
    ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    return batch_from_tensors(ids, torch.ones_like(ids))


def _samples(vocab: int, rows: int, length: int) -> list[Sample]:
    return [
        Sample(str(i), tuple(row))
        for i, row in enumerate(_random_batch(vocab, rows, length, 0).input_ids.tolist())
    ]
