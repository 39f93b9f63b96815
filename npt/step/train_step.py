"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from npt.config import TrainConfig
from npt.data.batch import Batch, find_fault
from npt.distill.strategies import MicroBatch, Strategy
from npt.distributed.processes import Ranks
from npt.errors import ConfigError
from npt.step.spikes import SpikeGuard
from npt.step.transaction import S, Transaction, WindowResult

ADAM_BETAS = (0.9, 0.999)


def check_unfrozen(parameters: dict[str, nn.Parameter]) -> None:
    """Refuse adapters that are frozen: an optimizer given them moves them by its weight decay
    alone.

    Raises:
        ConfigError: the first such tensor.
    """
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    if frozen:
        raise ConfigError(
            f"{frozen[0]} is frozen (requires_grad is False, {len(frozen)} of {len(parameters)}"
            " tensors), and a run trains every tensor of its adapters; call requires_grad_(True)"
            " on it first"
        )


def new_transaction(
    parameters: dict[str, nn.Parameter],
    config: TrainConfig,
    rates: Sequence[float],
    ranks: Ranks | None = None,
) -> Transaction[MicroBatch]:
    """The optimizer and the transaction of a run with these settings.

    Args:
        parameters: the trainable tensors by name.
        config: training settings.
        rates: learning rate of each applied step.
        ranks: the processes that train together.

    Raises:
        ConfigError: a tensor is frozen.
    """
    check_unfrozen(parameters)
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=config.learning_rate,
        betas=ADAM_BETAS,
        weight_decay=config.weight_decay,
        fused=True,
    )
    spikes = SpikeGuard(config.spike_sigmas) if config.skip_spikes else None
    report = attrgetter("report")
    return Transaction(
        parameters,
        optimizer,
        config.max_grad_norm,
        rates,
        spikes=spikes,
        ranks=ranks,
        report=report,
        seed=config.seed,
    )


def fill_gradients(
    strategy: Strategy, model: PreTrainedModel, batch: Batch, config: TrainConfig
) -> MicroBatch:
    """The strategy on one batch, on the model's device and with autocast off, whatever a caller has
    on.
    """
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):
        return strategy(model, batch.to(device), config)


def try_micro_batch(
    transaction: Transaction[S], batch: Batch, vocab_size: int, fill: Callable[[], S]
) -> None:
    """Hand one batch to the transaction: refused where the host's check finds a fault, filled in
    otherwise.

    Args:
        transaction: with an open window.
        batch: on the host.
        vocab_size: V.
        fill: computes the batch's gradients and sums.
    """
    fault = find_fault(batch, vocab_size)
    if fault is not None:
        transaction.refuse(fault, batch.sample_ids)
    else:
        transaction.micro_batch(fill, batch.sample_ids, batch.offset)


def bad_in_a_row(before: int, result: WindowResult[Any]) -> tuple[int, int]:
    """The longest row of refusals that this window made or went on with, and the row that stands at
    its end.

    A micro-batch that counted ends a row. In a window that was refused as a whole none counted.
    """
    if not result.applied:
        row = before + len(result.refusals)
        return row, row
    bad = {refusal.micro_batch for refusal in result.refusals}
    longest = row = before
    for index in range(result.micro_batches):
        row = row + 1 if index in bad else 0
        longest = max(longest, row)
    return longest, row
