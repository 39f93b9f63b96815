"""TRL's GRPOTrainer and RLOOTrainer on slices of generations, some with a fault.

Without the bad rows the generations would differ. So the run that never saw the fault makes the
same generations and skips the bad slices.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from faults.row_faults import MARK
from npt.random_state import kept_random_state

PROMPTS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
"""Words of prompts. None of their tokens is MARK."""


class Slices:
    """Mixin for Trainers that generate, with some bad slices.

    Attributes:
        bad: bad micro-batches of an epoch, over all processes.
        period: micro-batches of an epoch, over all processes.
        passes: skip bad slices instead of marking them.
    """

    bad: Collection[int] = ()
    period = 1
    passes = False
    _slice: Any = None  # a skipped slice, computed only because the other processes wait
    accelerator: Any
    args: Any
    model: Any
    optimizer: Any
    _step: int

    def _is_bad(self, step: int, process: int) -> bool:
        return (step * self.accelerator.num_processes + process) % self.period in self.bad

    def _prepare_inputs(self, rows: Any) -> Any:
        if self._slice is not None:
            return self._slice
        inputs = super()._prepare_inputs(rows)  # type: ignore[misc]
        bad = self.model.training and self._is_bad(self._step, self.accelerator.process_index)
        if self.passes or not bad:
            return inputs
        prompts = inputs["prompt_ids"].clone()
        prompts[0, -1] = MARK
        return {**inputs, "prompt_ids": prompts}

    def training_step(self, model: Any, inputs: Any, items: Any = None) -> Tensor:
        """Compute a slice, or skip it as if the window did not have it."""
        step = super().training_step  # type: ignore[misc]
        if not self.passes:
            return step(model, inputs, items)
        size, every = self.accelerator.num_processes, self.args.gradient_accumulation_steps
        first = self._step // every * every
        window = [self._is_bad(i, p) for i in range(first, first + every) for p in range(size)]
        self.current_gradient_accumulation_steps = window.count(False) / size
        self.optimizer._is_overflow = all(window)  # so that the scheduler waits
        if not self._is_bad(self._step, self.accelerator.process_index):
            return step(model, inputs, items)
        model.train()
        taken = self._prepare_inputs(inputs)
        if size == 1 or all(window):
            self._step += 1
            return torch.zeros(())
        with kept_random_state():
            self._slice = taken
            loss = step(model, inputs, items)
            self._slice = None
        return loss

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        """Compute a loss, with weight 0 for a skipped slice."""
        loss = super().compute_loss(*arguments, **named)  # type: ignore[misc]
        return loss if self._slice is None else 0.0 * loss


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Return rewards that differ between completions."""
    return [float(sum(map(ord, text)) % 17) for text in completions]


def trainer_of(
    kind: type, config: type, model: Any, tokenizer: Any, period: int, **arguments: Any
) -> Any:
    """Return a Trainer with two completions in a micro-batch.

    arguments: for TRL's configuration, and `optimizer_cls_and_kwargs`.
    """
    from datasets import Dataset

    optimizer = arguments.pop("optimizer_cls_and_kwargs", None)
    settings = {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 4,
        "generation_kwargs": {"suppress_tokens": [MARK]},
        "shuffle_dataset": False,
        "beta": 0.04,
        "bf16": False,
        "log_level_replica": "error",
        **arguments,
    }
    trainer = kind(
        model=model,
        args=config(**settings),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": f"{word}:"} for word in PROMPTS[:period]]),
        processing_class=tokenizer,
    )
    trainer.optimizer_cls_and_kwargs = optimizer
    trainer.period = period
    return trainer
