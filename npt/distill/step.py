"""A student under the guard: its optimizer, and forward and backward of one micro-batch.

    guard = student_guard(model, config, rates)
    for window in windows:                              # lists of batches
        for batch in window:
            ids, offset = batch.sample_ids, batch.offset
            with guard.micro_batch(batch.tokens, ids, batch, offset=offset) as micro:
                sums = summed(model, strategy, batch, config)
                micro.loss, micro.tokens, micro.report = sums.loss, sums.tokens, sums.report
        for outcome in guard.step():                    # of this window, or of earlier ones
            ...

A base may draw random numbers (dropout, noise). Torch's generators are seeded for each micro-batch
from the run's seed and its samples' positions and ids, then restored. So it draws the same numbers
in any process, after refusals or a resume, and in a replay.

A micro-batch that does not fit into memory is computed in parts, each padded to its own longest
sample. Their gradients and sums add up to those of one micro-batch; only the order of summation
changes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, attached_config, is_sharded
from npt.batch import Batch
from npt.config import PRODUCTS, TrainConfig
from npt.device import wait_for
from npt.distill.local import BatchSums
from npt.distill.strategies import Strategy
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, NoMemoryError, first_line, is_out_of_memory
from npt.guard.guard import Guard, PlannedGuard
from npt.guard.spikes import SIGMAS
from npt.guard.traces import Seeded
from npt.guard.update import RATE_SCALE
from npt.hooks import within
from npt.random_state import micro_batch_draws

ADAM_BETAS = (0.9, 0.999)

PRODUCT_RATE = 0.1
"""Share of the learning rate at which M and B of gate, up and down train after a closed-form start.
Adam moves them from 0 by the rate, however little they gain. At the full rate a student that starts
close to its teacher ends worse than it began (docs/results/choosing-settings.md)."""

NATS = 100.0
"""How much higher that share is if the products read a code in nats, whose numbers are about a
hundredth as large."""

THRESHOLD_RATE = 20.0
"""Multiple of the learning rate at which the logarithm of the codes' threshold follows their mean
count: at the usual rate of 5e-5 the threshold changes by up to a thousandth of itself per step."""


def student_guard(
    model: PreTrainedModel, config: TrainConfig, rates: Sequence[float], **settings: Any
) -> PlannedGuard:
    """Return a guard that steps a student's adapters with AdamW.

    Args:
        model: with adapters attached.
        config: settings of the run.
        rates: learning rate of each applied step; the last one also for further steps.
        settings: further arguments of `Guard`. By default the windows belong to this process alone
            (`processes`), and refusals do not stop training (`max_refused`).

    Raises:
        ConfigError: a tensor of an adapter is frozen.
    """
    parameters = adapter_parameters(model)
    check_unfrozen(parameters)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=config.weight_decay,
        fused=True,
    )
    defaults = {
        "max_grad_norm": config.max_grad_norm,
        "spike_sigmas": SIGMAS if config.skip_spikes else None,
        "max_refused": float("inf"),
        "recheck": config.recheck,
        "processes": ProcessGroup(),
        "draws": Seeded(config.seed),
    }
    return Guard(model, optimizer, rates=rates, **(defaults | settings))


def parameter_groups(model: PreTrainedModel, config: TrainConfig) -> list[dict[str, Any]]:
    """Return the optimizer's groups of parameters: the products' M and B train at PRODUCT_RATE of
    the learning rate if the student starts close to a teacher that it imitates, NATS times as fast
    if they read nats, and the threshold at THRESHOLD_RATE.
    """
    form = attached_config(model)
    share = 1.0
    is_calibrated = form.init == "calibrated"
    imitates = config.judged_by == "kl"
    if is_calibrated and imitates:
        share = PRODUCT_RATE
    if form.token_part:
        share *= NATS
    groups: dict[str, dict[str, Any]] = {
        "stream": {"params": []},
        "products": {"params": [], RATE_SCALE: share},
        # decay would pull the logarithm to 0, and so the threshold to 1
        "threshold": {"params": [], RATE_SCALE: THRESHOLD_RATE, "weight_decay": 0.0},
    }
    kinds = {"log_tau": "threshold"}
    if share != 1.0:
        kinds |= dict.fromkeys(PRODUCTS, "products")
    for name, parameter in adapter_parameters(model).items():
        *_, tensor = name.split(".")
        kind = kinds.get(tensor, "stream")
        members = groups[kind]["params"]
        members.append(parameter)
    return [group for group in groups.values() if group["params"]]


def check_unfrozen(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ConfigError for frozen adapters, which weight decay alone would move."""
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ConfigError(
            f"{frozen[0]} is frozen (requires_grad is False, {len(frozen)} of {len(parameters)}"
            " tensors), but a run trains all tensors of its adapters: call requires_grad_(True) on"
            " it first"
        )


def nowhere(_samples: int, _now: int, _message: str) -> None:
    """Ignore an OOM report."""


class MicroBatchSplitter:
    """Splits micro-batches into parts of at most `samples` rows, fewer after an OOM.

    Args:
        samples: most samples to compute at once.
        report: called after every halving: (samples before, samples now, message of the error).

    Attributes:
        shrunk_to: number of samples that `shrink` last set; None if it was never called.
    """

    def __init__(self, samples: int, report: Callable[[int, int, str], None] = nowhere) -> None:
        self.samples = samples
        self.report = report
        self.shrunk_to: int | None = None

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the batch in parts of at most `samples` rows."""
        count = len(batch.input_ids)
        if count <= self.samples:
            return [batch]
        starts = range(0, count, self.samples)
        return [_rows(batch, slice(start, start + self.samples)) for start in starts]

    def shrink(self, batch: Batch, message: str) -> None:
        """Halve the size of the parts after an OOM with this message.

        Raises:
            NoMemoryError: a part was one sample already.
        """
        count, length = batch.input_ids.shape
        at_once = min(count, self.samples)
        if at_once == 1:
            raise NoMemoryError(
                f"out of memory with one sample of {length} tokens at once ({message}): lower"
                " --max_length or --adapter_rank, convert fewer --layers, add --use_quantization,"
                " or pass --strategy local (or end_to_end with --gradient_checkpointing)"
            )
        self.samples = self.shrunk_to = (at_once + 1) // 2
        self.report(at_once, self.samples, message)


def forward_backward(
    model: PreTrainedModel,
    strategy: Strategy,
    batch: Batch,
    config: TrainConfig,
    splitter: MicroBatchSplitter | None = None,
) -> BatchSums:
    """Seed the micro-batch's random numbers, then do what `summed` does. Use it outside a guard."""
    with micro_batch_draws(config.seed, batch.sample_ids, batch.offset):
        return summed(model, strategy, batch, config, splitter)


def summed(
    model: PreTrainedModel,
    strategy: Strategy,
    batch: Batch,
    config: TrainConfig,
    splitter: MicroBatchSplitter | None = None,
    observe: Callable[[Batch], AbstractContextManager[Any]] = nullcontext,
) -> BatchSums:
    """Add the gradients of a micro-batch's summed loss to `.grad`; return its sums.

    Autocast is disabled. `splitter` splits the micro-batch into parts. After an OOM, the whole
    micro-batch starts again with zero gradients and the same random numbers, and with smaller parts
    unless a CUDA graph was freed. `observe` returns a context to enter around each part.
    """
    device = model.device
    draws: AbstractContextManager[None] = nullcontext()
    while True:
        sums = []
        try:
            parts = [batch]
            if splitter is not None:
                parts = splitter.parts(batch)
            no_autocast = torch.autocast(device.type, enabled=False)
            with draws, no_autocast:
                for part in parts:
                    compute = partial(strategy, model, part.to(device), config)
                    with observe(part):
                        sums.append(within(model.model, compute))
            return reduce(_added, sums)
        except (RuntimeError, MemoryError) as error:
            message = oom_message(error)
            # a process that stopped inside a layer of a sharded base would be out of step
            if message is None or splitter is None or is_sharded(model):
                raise
        # only here: inside the handler the error keeps what it held alive
        if not free_memory(device):
            splitter.shrink(batch, message)
        # the parts that fitted have added theirs
        for parameter in adapter_parameters(model).values():
            if parameter.grad is not None:
                parameter.grad.zero_()
        draws = micro_batch_draws(config.seed, batch.sample_ids, batch.offset)


def _added(one: BatchSums, other: BatchSums) -> BatchSums:
    return BatchSums(*map(add, one, other))


def oom_message(error: RuntimeError | MemoryError) -> str | None:
    """Return the first line of an out-of-memory error; None for any other error."""
    return first_line(error)[:200] if is_out_of_memory(error) else None


def free_memory(device: torch.device) -> bool:
    """Free what a caught error held; return whether a CUDA graph was freed too. Call it after the
    handler, which keeps the error alive.
    """
    gc.collect()
    # A replay in flight needs its memory. And pending errors raise here: bitsandbytes would end the
    # process.
    wait_for(device)
    freed = False
    if device.type == "cuda":
        from npt.distill.graphed import STEPS  # needed on a GPU alone

        freed = any(step.graph for step in STEPS.values())
        for step in STEPS.values():
            step.give_up()
        torch.cuda.empty_cache()
    return freed


def _rows(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, without the columns that are padding in all of them."""
    filled = batch.attention_mask[rows].any(dim=0).nonzero()
    columns = slice(None)
    if len(filled):
        columns = slice(int(filled[0]), int(filled[-1]) + 1)
    tensors: dict[str, Any] = {}
    for name, tensor in batch.row_tensors.items():
        tensors[name] = tensor[rows, columns].clone()
    if "documents" in tensors and not tensors["documents"].any():
        tensors["documents"] = None
    if batch.teacher is not None:
        tensors["teacher"] = _rows(batch.teacher, rows)
    part = replace(batch, **tensors, sample_ids=batch.sample_ids[rows])
    # pinned, so that the copy to the GPU does not block
    return part.pinned() if batch.input_ids.is_pinned() else part
