"""Tiny models and data that the examples train with; nothing is loaded but the embedded
tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from npt.base.source import EMBEDDED_FOLDER

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]
"""A dataset has a row for each word: an odd number, so that windows and batches end short."""

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 0.01,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}

Row = dict[str, Any]


@cache
def tokenizer() -> Any:
    """Return the embedded model's tokenizer with a chat template."""
    made = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    if made.pad_token is None:
        made.pad_token = made.eos_token
    made.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return made


def sizes(**more: Any) -> dict[str, Any]:
    """Return the settings of a tiny decoder with attention dropout, so that it draws numbers."""
    return {
        "vocab_size": len(tokenizer()),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "attention_dropout": 0.2,
        "max_position_embeddings": 64,
        "pad_token_id": tokenizer().pad_token_id,
        **more,
    }


def llama(**more: Any) -> nn.Module:
    """Return a random Llama."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes(**more)))


def sentence(i: int) -> str:
    """Return a sentence. Neighbouring sentences differ in length."""
    return f"the number {WORDS[i]} " + "and so on " * (i * 5 % 7)


def token_rows() -> list[Row]:
    """Return rows of token ids of several lengths."""
    made = [tokenizer()(sentence(i))["input_ids"] for i in range(len(WORDS))]
    return [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids} for ids in made]


class Stream(IterableDataset):
    """The rows as an iterable without length and indices."""

    def __iter__(self) -> Iterator[Row]:
        return iter(token_rows())


def causal(folder: Path, **given: Any) -> Any:
    """Return a Trainer of the Llama.

    given: arguments of the Trainer, and `arguments`, those of TrainingArguments.
    """
    arguments = TrainingArguments(str(folder), **{**ARGUMENTS, **given.pop("arguments", {})})
    if "model_init" not in given:
        given = {"model": llama(), **given}
    return Trainer(
        args=arguments,
        **{
            "train_dataset": token_rows(),
            "eval_dataset": token_rows()[:5],
            "data_collator": DataCollatorForSeq2Seq(tokenizer()),
            **given,
        },
    )


def called(make: Callable[[], dict[str, Any]]) -> Callable[[Path], Any]:
    """Return a function that builds a Trainer with newly made arguments."""
    return lambda folder: causal(folder, **make())
