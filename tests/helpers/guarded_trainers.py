"""Small runs of transformers' Trainer, guarded or not, on rows of which some have faults."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from faults.row_faults import LENGTH, VOCABULARY


def small_llama(dropout: float = 0.2) -> nn.Module:
    """Return a Llama whose attention drops out, so that a step draws random numbers."""
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32}
    size |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**size, attention_dropout=dropout))


class RowsInOrder:
    """Mixin of Trainers that take rows in their order."""

    train_dataset: Any

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class InOrder(RowsInOrder, Trainer):
    """transformers' Trainer."""


ARGUMENTS = {"per_device_train_batch_size": 1, "max_steps": 3, "learning_rate": 0.01}
ARGUMENTS |= {"lr_scheduler_type": "cosine", "logging_steps": 1, "save_strategy": "no"}
ARGUMENTS |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
ARGUMENTS |= {"dataloader_pin_memory": False}


def trainer_of(
    kind: Callable[..., Any],
    rows: Sequence[dict[str, Tensor]],
    folder: Path,
    model: nn.Module | None = None,
    **arguments: Any,
) -> Any:
    """Return a trainer for the rows; arguments: those of TrainingArguments."""
    return kind(
        model=small_llama() if model is None else model,
        args=TrainingArguments(str(folder), **{**ARGUMENTS, **arguments}),
        train_dataset=list(rows),
    )


def state_of(trainer: Any) -> dict[str, Any]:
    """Weights, moments, schedule and random state."""
    return {
        "weights": dict(trainer.model.named_parameters()),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "random": torch.get_rng_state(),
    }
