"""The time of a step: a few layers of the shape are timed on the device at hand, and carried to the
whole depth.

Small models with random weights run through the very strategy and step. Two of them that differ in
the number of their converted layers give the time of one such layer and of everything outside the
layers; others give that of a layer without an adapter, before the first converted one or after it.
No speed of any machine is assumed. Layers so wide that this would take minutes are timed narrower,
and their time is carried to the width by their arithmetic.
"""

from __future__ import annotations

import gc
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
from npt.distill.strategies import drive
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
"""Tokens of a small model whose strategy computes no logits."""

ROUNDS = 30
"""Timing runs of every small model at most."""

SECONDS = 5.0
"""For the timing runs of a stage, unless two rounds take longer."""

NARROWEST = 512
"""D at least of a layer that is timed for a wider one: below it the time is no longer that of
matrix products."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step, and of its parts by name. narrowed: share of the width that was
    timed."""

    seconds: float
    parts: dict[str, float]
    narrowed: int = 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """Seconds of the fastest step, and peak bytes of each phase of `npt.planning.memory`."""

    seconds: float
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "peak_bytes": self.peak}


class Window:
    """Windows of one workload on one model, made of random tokens: `micro_batches` of `rows`
    samples of `length` tokens.
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
        strategy, splitter = partial(drive, teacher=teacher), splitter or MicroBatchSplitter(rows)
        self.step = TrainStep(model, strategy, config, [config.learning_rate], splitter=splitter)
        self.device = next(model.parameters()).device
        vocab = model.config.vocab_size
        self._batches = [_random_batch(vocab, rows, length, seed) for seed in range(micro_batches)]

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
    """Return the time of a step of each stage by its strategy, from timing a few layers for about
    `seconds` per stage.
    """
    return {
        name: _predict(workload, config, samples_at_once, seconds)
        for name, config in workload.stages.items()
    }


def _predict(workload: Workload, config: TrainConfig, samples: int, seconds: float) -> StepTime:
    config = replace(config, layer_weights="uniform")
    depth = workload.depth
    others = depth.between + (depth.after if config.logit_kl_weight else 0)
    models = {"one": Depth(0, 1, 0, 0), "three": Depth(0, 3, 0, 0)}
    if depth.before:
        models["before"] = Depth(2, 1, 0, 0)
    if others:
        models["others"] = Depth(0, 2, 2, 0)
    share, timed = _bearable(workload, config, models, samples * workload.length, seconds)
    windows = {name: _window(timed, config, model, samples) for name, model in models.items()}
    fills, commits = _fastest(windows, seconds)
    found = _layers(fills)
    if share > 1:
        whole, narrow = (_layers(_flops(w, config, models)) for w in (workload, timed))
        for name in found.keys() - {"outside"}:
            found[name] = found[name] * whole[name] / narrow[name]
        found["outside"] *= share ** (2 if config.logit_kl_weight else 1)
    update = max(0.0, commits["three"] - commits["one"]) / 2
    passes = config.gradient_accumulation_steps * config.batch_size / samples
    parts = {f"converted layers ({depth.converted})": passes * depth.converted * found["layer"]}
    if depth.before:
        parts[f"layers before them ({depth.before})"] = passes * depth.before * found["before"]
    if others:
        parts[f"other layers ({others})"] = passes * others * found["others"]
    parts["outside the layers, logits included"] = passes * found["outside"]
    parts["optimizer step"] = max(0.0, commits["one"] - update) + depth.converted * update * share
    return StepTime(sum(parts.values()), parts, share)


def _layers(costs: dict[str, float]) -> dict[str, float]:
    """Return the cost of a layer of each kind, and outside them, from those of small models."""
    layer = max(0.0, costs["three"] - costs["one"]) / 2
    outside = max(0.0, costs["one"] - layer)
    found = {"layer": layer, "outside": outside}
    if "before" in costs:
        found["before"] = max(0.0, costs["before"] - costs["one"]) / 2
    if "others" in costs:
        found["others"] = max(0.0, costs["others"] - outside - 2 * layer) / 2
    return found


def _bearable(
    workload: Workload, config: TrainConfig, models: dict[str, Depth], tokens: int, seconds: float
) -> tuple[int, Workload]:
    """Return the largest share of the width of which two rounds take about `seconds` here, and the
    workload of this width.
    """
    share, timed = 1, workload
    if not seconds:
        return share, timed
    sizes = ROOFLINE_SIZES[workload.device.type][:1]
    speed = matmul_roofline(workload.device, sizes=sizes, seconds=0.05).flops_per_second
    while (
        2 * tokens * sum(_flops(timed, config, models).values()) > seconds * speed
        and timed.shape.hidden >= 2 * NARROWEST
        and (narrower := workload.narrowed(2 * share)) is not None
    ):
        share, timed = 2 * share, narrower
    return share, timed


def _flops(workload: Workload, config: TrainConfig, models: dict[str, Depth]) -> dict[str, float]:
    """Return the arithmetic of each small model, per token."""
    return {
        name: training_flops(
            Shape.of(workload.small_config(depth.layers)),
            workload.length,
            workload.small_adapter(depth, workload.mean_rank),
            config.strategy,
            own_teacher=workload.teacher is not None,
            logits=1.0 if config.logit_kl_weight else 0.0,
            checkpointing=config.gradient_checkpointing,
        )
        for name, depth in models.items()
    }


def _window(workload: Workload, config: TrainConfig, depth: Depth, samples: int) -> Window:
    """Make the window of a small model with random weights."""
    small = workload.small_config(depth.layers, None if config.logit_kl_weight else TINY_VOCAB)
    model = made_base(workload, small)
    attach(model, workload.small_adapter(depth, workload.mean_rank))
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
    """Return a base with random weights, stored and computed in as the workload's."""
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
    """Return the fewest seconds of each one's micro-batch, and of its step: other work on the
    machine can only make one slower.

    They run in turns, once to find their kernels, and once more at least.
    """
    fills: dict[str, list[float]] = {name: [] for name in windows}
    commits: dict[str, list[float]] = {name: [] for name in windows}
    until = time.perf_counter() + seconds
    while len(fills["one"]) < 2 or (time.perf_counter() < until and len(fills["one"]) < ROUNDS):
        for name, window in windows.items():
            started = time.perf_counter()
            window.fill()
            filled = time.perf_counter()
            window.commit()
            fills[name].append(filled - started)
            commits[name].append(time.perf_counter() - filled)
    return (
        {name: min(spent[1:]) for name, spent in fills.items()},
        {name: min(spent[1:]) for name, spent in commits.items()},
    )


def measure(
    model: Any,
    workload: Workload,
    config: TrainConfig,
    splitter: MicroBatchSplitter,
    evaluated_at_once: int,
    *,
    steps: int = 3,
    teacher: Any = None,
) -> Measured:
    """Run a few windows and a batch of an evaluation for real; other memory of this process is not
    counted.

    model: the whole base, with adapters attached; these are trained. splitter: how many samples of
    a micro-batch are computed at once. steps: that are timed, after a first one.
    """
    c, length = workload.training, workload.length
    device = next(model.parameters()).device
    gc.collect()  # small models that were timed before are gone
    live = torch.cuda.memory_allocated(device) if device.type == "cuda" else live_bytes(device)
    others = live - storage_bytes(tensors_of(model, teacher))
    window = Window(
        model, config, c.batch_size, length, c.gradient_accumulation_steps, splitter, teacher
    )
    spent = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        window.fill()
        window.commit()
        spent.append(time.perf_counter() - started)
    # as in a run, which does not wait for them, each keeps the state before it
    for _ in range(IN_FLIGHT if window.step.update.late else 0):
        window.fill(wait=False)
        window.commit(wait=False)

    def peak(act: Callable[[], object]) -> int:
        return peak_bytes(act, device).peak - others

    phases = {"micro-batch": peak(window.fill), "step": peak(window.commit)}
    rows = min(evaluated_at_once, c.eval_samples)
    ids = _random_batch(model.config.vocab_size, rows, length, 0).input_ids.tolist()
    samples = [Sample(str(number), tuple(row)) for number, row in enumerate(ids)]
    phases["evaluation"] = peak(lambda: evaluate(model, None, samples, batch_size=len(samples)))
    return Measured(min(spent[1:]), phases)


def _random_batch(vocab: int, rows: int, length: int, seed: int) -> Batch:
    ids = torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(seed))
    return batch_from_tensors(ids, torch.ones_like(ids))
