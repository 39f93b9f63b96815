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

A base may draw random numbers (dropout, noise). For each micro-batch torch's generators are seeded
by the run's seed, the place of its samples in the data and their ids, and restored afterwards: it
draws the same numbers whatever was refused before, on any process, after a resume, and in a replay.

A micro-batch that memory does not hold at once is computed in parts, each padded to its own longest
sample. Their gradients and their sums are added as those of one backward, so to the window they are
one micro-batch, and only the order of a sum changes.
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

from npt.adapters.converted import adapter_parameters, is_sharded
from npt.adapters.layer import within
from npt.base.device import wait_for
from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.distill.local import BatchSums
from npt.distill.strategies import Strategy
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, NoMemoryError, first_line, is_out_of_memory
from npt.guard.guard import Guard
from npt.guard.spikes import SIGMAS
from npt.guard.traces import Seeded
from npt.random_state import micro_batch_draws

ADAM_BETAS = (0.9, 0.999)


def student_guard(
    model: PreTrainedModel, config: TrainConfig, rates: Sequence[float], **settings: Any
) -> Guard:
    """Return a guard that steps a student's adapters by AdamW.

    Args:
        model: with adapters attached; ConfigError if one is frozen.
        config: of the run.
        rates: learning rate of each applied step; the last one stays.
        settings: more of `Guard`; this process shares its windows with none unless `processes`
            says, and refusals in a row end nothing unless `max_refused` does.
    """
    parameters = adapter_parameters(model)
    check_unfrozen(parameters)
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=config.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=config.weight_decay,
        fused=True,
    )
    defaults = {
        "max_grad_norm": config.max_grad_norm,
        "spike_sigmas": SIGMAS if config.skip_spikes else None,
        "max_refused": float("inf"),
        "processes": ProcessGroup(),
        "draws": Seeded(config.seed),
    }
    return Guard(model, optimizer, rates=rates, **(defaults | settings))


def check_unfrozen(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse frozen adapters, which an optimizer would move by its weight decay alone."""
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ConfigError(
            f"{frozen[0]} is frozen (requires_grad is False, {len(frozen)} of {len(parameters)}"
            " tensors), and a run trains every tensor of its adapters; call requires_grad_(True)"
            " on it first"
        )


def nowhere(_samples: int, _now: int, _message: str) -> None:
    """Report a lack of memory to nobody."""


class MicroBatchSplitter:
    """Splits micro-batches into parts of at most `samples` rows, fewer once memory has run out.

    Args:
        samples: at once.
        report: called after every halving: samples at once before it and now, and why.

    Attributes:
        shrunk_to: samples that `shrink` has come down to; None if it was never called.
    """

    def __init__(self, samples: int, report: Callable[[int, int, str], None] = nowhere) -> None:
        self.samples, self.report = samples, report
        self.shrunk_to: int | None = None

    def parts(self, batch: Batch) -> list[Batch]:
        """Return the batch in parts of `samples` rows, or itself if it has no more."""
        count, size = len(batch.input_ids), self.samples
        if count <= size:
            return [batch]
        return [_rows(batch, slice(start, start + size)) for start in range(0, count, size)]

    def shrink(self, batch: Batch, message: str) -> None:
        """Halve the parts of a batch after memory ran out, as `message` says.

        Raises:
            NoMemoryError: it was one sample.
        """
        at_once, length = min(len(batch.input_ids), self.samples), batch.input_ids.shape[1]
        if at_once == 1:
            raise NoMemoryError(
                f"out of memory with one sample of {length} tokens at once ({message}); lower"
                " --max_length or --adapter_rank, convert fewer --layers, or take --strategy local"
                " (or end_to_end with --gradient_checkpointing) and --use_quantization"
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
    """Do what `summed` does, outside of a guard: with the random numbers of the micro-batch."""
    with micro_batch_draws(config.seed, batch.sample_ids, batch.offset):
        return summed(model, strategy, batch, config, splitter)


def summed(
    model: PreTrainedModel,
    strategy: Strategy,
    batch: Batch,
    config: TrainConfig,
    splitter: MicroBatchSplitter | None = None,
    observe: Callable[[Batch], AbstractContextManager[None]] | None = None,
) -> BatchSums:
    """Add the gradients of a micro-batch's summed loss to `.grad`; return its sums.

    Autocast is off. `splitter` gives the parts that are computed one after the other; if memory
    runs out, all begins again from empty gradients in smaller ones, which draw the same random
    numbers. `observe` gives a context around each part.
    """
    device = next(model.parameters()).device
    draws: AbstractContextManager[None] = nullcontext()
    while True:
        sums = []
        try:
            with draws, torch.autocast(device.type, enabled=False):
                for part in [batch] if splitter is None else splitter.parts(batch):
                    compute = partial(strategy, model, part.to(device), config)
                    with nullcontext() if observe is None else observe(part):
                        sums.append(within(model.model, compute))
            return BatchSums(*[reduce(add, parts) for parts in zip(*sums, strict=True)])
        except (RuntimeError, MemoryError) as error:
            message = oom_message(error)
            # one that stopped inside a layer of a shared base would be out of step
            if message is None or splitter is None or is_sharded(model):
                raise
        free_memory(device)  # after the handler, in which the error keeps the graph alive
        splitter.shrink(batch, message)
        for parameter in adapter_parameters(model).values():
            if parameter.grad is not None:
                parameter.grad.zero_()
        draws = micro_batch_draws(config.seed, batch.sample_ids, batch.offset)


def oom_message(error: RuntimeError | MemoryError) -> str | None:
    """Return the first line of an error if memory ran out; None for any other error."""
    return first_line(error)[:200] if is_out_of_memory(error) else None


def free_memory(device: torch.device) -> None:
    """Free what a caught error has held; call it after the handler, in which the error is alive."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    wait_for(device)  # raises what is pending, at which bitsandbytes ends the process


def _rows(batch: Batch, rows: slice) -> Batch:
    """Return some rows of a batch, without the columns that are padding in all of them."""
    filled = batch.attention_mask[rows].any(dim=0).nonzero()
    columns = slice(int(filled[0]), int(filled[-1]) + 1) if len(filled) else slice(None)
    tensors: dict[str, Any] = {
        name: tensor[rows, columns].clone() for name, tensor in batch.row_tensors.items()
    }
    if "documents" in tensors and not bool(tensors["documents"].any()):
        tensors["documents"] = None
    part = replace(batch, **tensors, sample_ids=batch.sample_ids[rows])
    # so that it is on its way to the device while the host continues
    return part.pinned() if batch.input_ids.is_pinned() else part
