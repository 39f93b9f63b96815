"""A student under the guard: its optimizer, and forward and backward of one micro-batch.

    guard = student_guard(model, config, rates)
    for window in windows:                              # lists of batches
        for batch in window:
            add_batch(guard, batch, partial(summed, model, strategy, config=config))
        for outcome in guard.step():                    # of this window, or of earlier ones
            ...

A base may draw random numbers (dropout, noise). For each micro-batch torch's generators are seeded
by the run's seed, the place of its samples in the data and their ids, and restored afterwards: it
draws the same numbers whatever was refused before, on any process, after a resume, and in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters
from npt.config import TrainConfig
from npt.data.batch import Batch, find_fault
from npt.distill.local import BatchSums
from npt.distill.splitting import MicroBatchSplitter, added
from npt.distill.strategies import Strategy
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError
from npt.guard.guard import Guard
from npt.guard.spikes import SIGMAS
from npt.guard.traces import Seeded
from npt.random_state import micro_batch_draws

ADAM_BETAS = (0.9, 0.999)


def student_guard(
    model: PreTrainedModel,
    config: TrainConfig,
    rates: Sequence[float],
    *,
    processes: ProcessGroup | None = None,
    late: bool | None = None,
    **settings: Any,
) -> Guard:
    """Return a guard that steps a student's adapters by AdamW.

    Args:
        model: with adapters attached.
        config: of the run.
        rates: learning rate of each applied step; the last one stays.
        processes: share each window; default this one alone.
        late: as in `Guard`.
        settings: more of `GuardSettings`; refusals in a row end nothing unless `max_refused` says.

    Raises:
        ConfigError: an adapter is frozen.
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
    spikes = SIGMAS if config.skip_spikes else None
    defaults = {
        "max_grad_norm": config.max_grad_norm,
        "spike_sigmas": spikes,
        "max_refused": float("inf"),
    }
    return Guard(
        model,
        optimizer,
        processes=ProcessGroup() if processes is None else processes,
        rates=rates,
        draws=Seeded(config.seed),
        late=late,
        **{**defaults, **settings},
    )


def add_batch(
    guard: Guard, batch: Batch, compute: Callable[[Batch], BatchSums], vocab_size: int | None
) -> None:
    """Add a micro-batch to the guard's window, or refuse it before anything is computed.

    Args:
        guard: of the student.
        batch: on the host.
        compute: adds its gradients to `.grad` and returns its sums.
        vocab_size: of the model; None checks nothing, for tensors that are on a device already.
    """
    fault = None if vocab_size is None else find_fault(batch, vocab_size)
    if fault is not None:
        guard.refuse(fault, batch.sample_ids)
        return
    ids, offset = batch.sample_ids, batch.offset

    def again() -> BatchSums:
        with guard.draws.drawing(ids, offset):
            return compute(batch)

    with guard.micro_batch(batch.tokens, ids, batch, again, offset=offset) as micro:
        sums = compute(batch)
        micro.loss, micro.tokens, micro.report = sums.loss, sums.tokens, sums.report


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

    Autocast is off. `splitter` gives the parts that are computed one after the other, `observe` a
    context around each.
    """
    device = next(model.parameters()).device
    parts = [batch] if splitter is None else splitter.parts(batch)
    sums = []
    with torch.autocast(device.type, enabled=False):
        for part in parts:
            with nullcontext() if observe is None else observe(part):
                sums.append(strategy(model, part.to(device), config))
    return sums[0] if len(sums) == 1 else added(sums)


def check_unfrozen(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse frozen adapters, which an optimizer would move by its weight decay alone."""
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ConfigError(
            f"{frozen[0]} is frozen (requires_grad is False, {len(frozen)} of {len(parameters)}"
            " tensors), and a run trains every tensor of its adapters; call requires_grad_(True)"
            " on it first"
        )
