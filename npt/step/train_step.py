"""One optimizer step, the page to read first: forward, backward, guard, update.

    step = TrainStep(model, strategy, config, rates)
    for window in windows:                  # lists of micro-batches
        for result in step.run(window):     # of this window, or of earlier ones on a GPU
            ...

A micro-batch that cannot be used is refused before any computation (`find_fault`). The others run
forward and backward of their summed loss into scratch gradients, and count only if loss and
gradients are finite (`gradient_window.py`). The window is divided once by its tokens, checked,
clipped, stepped, verified, and restored if anything is not finite (`guarded_update.py`). A refusal
leaves no trace: the run equals, bit for bit, the one that never saw the bad micro-batch.

A base may draw random numbers (dropout, noise). For each micro-batch torch's generators are seeded
by the run's seed, the place of its samples in the data and their ids, and restored afterwards: it
draws the same numbers whatever was refused before, on any process, after a resume, and in a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, is_sharded
from npt.config import TrainConfig
from npt.data.batch import Batch, find_fault
from npt.distill.local import MicroBatch
from npt.distill.strategies import Strategy
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError
from npt.random_state import micro_batch_draws
from npt.step.gradient_window import FAILED, GradientWindow
from npt.step.guarded_update import GuardedUpdate
from npt.step.spikes import SpikeGuard
from npt.step.splitting import MicroBatchSplitter, added, free_memory, oom_message
from npt.step.window_result import WindowResult

ADAM_BETAS = (0.9, 0.999)


class TrainStep:
    """One optimizer step: forward, backward, guard, update.

    Args:
        model: with adapters attached.
        strategy: forward and backward of one micro-batch.
        config: of the current stage; may be replaced between steps.
        rates: learning rate of each applied step; the last one stays.
        processes: share each window, micro-batch i on process i modulo their number.
        splitter: of micro-batches into parts that fit into memory.
        late: read results a window late or more; default on CUDA.

    Attributes:
        interrupted: returns the number of a signal that ends the window, or None.
        observe: a context around forward and backward of a part, given its batch and `index`.
        on_out_of_memory: called with the number of samples and the request that failed; the window
            then begins again, in smaller parts. None lets the error through.
        failure: the error that stops this process, one of several, at the next commit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        strategy: Strategy,
        config: TrainConfig,
        rates: Sequence[float],
        *,
        processes: ProcessGroup | None = None,
        splitter: MicroBatchSplitter | None = None,
        late: bool | None = None,
    ):
        self.model, self.strategy, self.config = model, strategy, config
        self._sharded = is_sharded(model)
        self.splitter = splitter if splitter is not None else MicroBatchSplitter(config.batch_size)
        parameters = adapter_parameters(model)
        check_unfrozen(parameters)
        optimizer = torch.optim.AdamW(
            parameters.values(),
            lr=config.learning_rate,
            betas=ADAM_BETAS,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.update = GuardedUpdate(parameters, optimizer, late)
        if not optimizer.state:
            self.update.make_moments()
        self.window: GradientWindow[MicroBatch] = GradientWindow(
            self.update,
            config.max_grad_norm,
            rates,
            spikes=SpikeGuard() if config.skip_spikes else None,
            processes=processes,
        )
        self.interrupted: Callable[[], int | None] = lambda: None
        self.observe: Callable[..., AbstractContextManager[None]] | None = None
        self.on_out_of_memory: Callable[[int, str], None] | None = None
        self.failure: Exception | None = None

    def run(self, batches: Sequence[Batch], fingerprint: int = 0) -> list[WindowResult[MicroBatch]]:
        """Make one step from micro-batches [K]; return the results that have become known.

        The fingerprint of the window's data is compared between processes.
        """
        index = 0
        while index < len(batches) and self.failure is None:
            number = self.interrupted()
            if number is not None:
                self.window.halt(number)
                break
            index = index + 1 if self.add(batches[index], index) else 0
        return self.window.commit(fingerprint)

    def add(self, batch: Batch, index: int = 0) -> bool:
        """Add micro-batch `index` to the window; False if memory ran out and it was cleared."""
        if index % self.window.processes.size != self.window.processes.index:
            self.window.skip()
            return True
        observe = None if self.observe is None else partial(self.observe, index=index)
        message = None
        try:
            fault = find_fault(batch, self.model.config.vocab_size)
            if fault is not None:
                self.window.refuse(fault, batch.sample_ids)
                return True
            try:
                self.window.begin()
                sums = forward_backward(
                    self.model, self.strategy, batch, self.config, self.splitter, observe
                )
                self.window.add(sums, batch.sample_ids)
            except (RuntimeError, MemoryError) as error:
                # Processes that share a base stay in step: one that stopped inside a layer would
                # not.
                if self.on_out_of_memory is not None and not self._sharded:
                    message = oom_message(error)
                if message is None:
                    raise
            if message is not None:
                self._shrink(batch, message)
        except Exception as error:
            self.fail(error)
        return message is None or self.failure is not None

    def forward_backward(self, batch: Batch) -> MicroBatch:
        """Return the sums of a micro-batch, unobserved."""
        return forward_backward(self.model, self.strategy, batch, self.config, self.splitter)

    def fail(self, error: Exception) -> None:
        """Raise the error, or, as one of several processes, stop with it at the next commit."""
        if self.window.processes.size == 1:
            raise error
        if self.failure is None:
            self.failure = error
            self.window.halt(FAILED)

    def _shrink(self, batch: Batch, message: str) -> None:
        """Begin the window again with smaller parts.

        A single sample is tried again while windows in flight hold memory that will be freed.
        """
        assert self.on_out_of_memory is not None
        in_flight = self.window.in_flight if self.window.processes.size == 1 else 0
        self.window.clear()
        free_memory()
        alone = self.splitter.samples_of(batch) == 1
        samples = 1 if alone and in_flight else self.splitter.shrink(batch, message)
        self.on_out_of_memory(samples, message)


def forward_backward(
    model: PreTrainedModel,
    strategy: Strategy,
    batch: Batch,
    config: TrainConfig,
    splitter: MicroBatchSplitter | None = None,
    observe: Callable[[Batch], AbstractContextManager[None]] | None = None,
) -> MicroBatch:
    """Add the gradients of a micro-batch's summed loss to `.grad`; return its sums.

    Autocast is off, and random numbers are the micro-batch's own. `splitter` gives the parts that
    are computed one after the other, `observe` a context around each.
    """
    device = next(model.parameters()).device
    parts = [batch]
    if splitter is not None and len(batch.input_ids) > splitter.samples:
        parts = splitter.parts(batch)
    draws = micro_batch_draws(config.seed, batch.sample_ids, batch.offset)
    sums = []
    with draws, torch.autocast(device.type, enabled=False):
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
