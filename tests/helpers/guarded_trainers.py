"""Small runs of transformers' Trainer, guarded or not, on rows of which some have faults.

A row's fault is bound to the row: whoever trains on it meets the fault, and nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 64, 12
MARK = VOCABULARY - 1
"""An id that only a row with a fault in the model has."""

DATA_FAULTS = ("id", "label")
MODEL_FAULTS = ("loss", "gradient", "inf", "tensor", "overflow", "exception", "recomputation")
FAULTS = (*DATA_FAULTS, *MODEL_FAULTS)


def row(seed: int, fault: str | None = None) -> dict[str, Tensor]:
    """Return token ids and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MARK, (LENGTH,), generator=generator)
    labels = ids.clone()
    labels[: 1 + seed % 5] = -100
    if fault == "id":
        ids[3] = VOCABULARY
    elif fault == "label":
        labels[-1] = VOCABULARY + 5
    elif fault is not None:
        ids[0] = MARK
    return {"input_ids": ids, "labels": labels}


def small_llama(dropout: float = 0.2) -> nn.Module:
    """Return a Llama whose attention drops out, so that a step draws random numbers."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=dropout,
            max_position_embeddings=LENGTH,
        )
    )


def plant(
    model: nn.Module, fault: str, inside: nn.Module, spoilt: nn.Parameter, mark: int = MARK
) -> None:
    """Let the model fail on marked rows: in the output of `inside`, or the gradient of `spoilt`.

    `inside` lies in a layer, so that checkpointing computes it again, for `recomputation`, and a
    product of its output is kept for the backward.
    """
    marked, calls = False, 0

    def look(_module: Any, arguments: Any, named: Any) -> None:
        nonlocal marked, calls
        calls = 0
        ids = named.get("input_ids", arguments[0] if arguments else None)
        marked = bool((ids == mark).any())

    def change(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if not marked:
            return output
        if fault == "exception":
            raise FloatingPointError("planted")
        if fault == "loss" or (fault == "recomputation" and calls > 1):
            return output * math.nan
        if fault in ("gradient", "inf") and output.requires_grad:
            value = math.nan if fault == "gradient" else math.inf
            output.register_hook(lambda g: torch.full_like(g, value))
        return output

    def spoil(gradient: Tensor) -> Tensor:
        value = {"tensor": math.nan, "overflow": 1e30}.get(fault)
        return torch.full_like(gradient, value) if marked and value is not None else gradient

    model.register_forward_pre_hook(look, with_kwargs=True)
    inside.register_forward_hook(change)
    spoilt.register_hook(spoil)


class RowsInOrder:
    """Mixin of Trainers that take rows in their order."""

    train_dataset: Any

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class InOrder(RowsInOrder, Trainer):
    """transformers' Trainer."""


ARGUMENTS = {
    "per_device_train_batch_size": 1,
    "max_steps": 3,
    "learning_rate": 0.01,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


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
