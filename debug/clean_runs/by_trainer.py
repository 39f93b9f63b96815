"""Examples by model and Trainer: transformers' models of several kinds, PEFT, and TRL's Trainers.

TRL's distillation and GOLD, which generate in advance, are refused by a guard; those that need a
server of models cannot run here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from clean_runs.parts import ARGUMENTS, Row, called, llama, sentence, sizes, token_rows, tokenizer
from clean_runs.watched import Example
from faults.row_generating import reward
from random_base import random_base

ROWS = 7
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1,
}  # fmt: skip
LORA = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])


def seeded(kind: Any, config: Any) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(0)
    return kind(config)


def on_rows(model: nn.Module, rows: list[Row], **more: Any) -> dict[str, Any]:
    """Return the arguments of a Trainer for a model and its data."""
    collator = hf.default_data_collator
    data = {"train_dataset": rows, "eval_dataset": rows[:3], "data_collator": collator}
    return {"model": model, "arguments": SETTINGS, **data, **more}


def classifier() -> dict[str, Any]:
    """Classify sentences with a BERT."""
    rows = [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(token_rows())]
    config = hf.BertConfig(**sizes(attention_probs_dropout_prob=0.2, num_labels=3))
    model = seeded(hf.BertForSequenceClassification, config)
    return on_rows(model, rows, data_collator=hf.DataCollatorWithPadding(tokenizer()))


def pictures(model: nn.Module, side: int) -> dict[str, Any]:
    """Classify random pictures."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(ROWS, 3, side, side, generator=generator)
    return on_rows(model, [{"pixel_values": one, "labels": i % 2} for i, one in enumerate(made)])


def vit() -> dict[str, Any]:
    """Train a ViT, which has no token embedding."""
    size = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    more = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_dropout_prob": 0.1}
    return pictures(seeded(hf.ViTForImageClassification, hf.ViTConfig(**size, **more)), 16)


def resnet(width: int = 8, depth: tuple[int, int] = (8, 8)) -> dict[str, Any]:
    """Train a ResNet, which has batch norm."""
    config = hf.ResNetConfig(embedding_size=width, hidden_sizes=list(depth), depths=[1, 1])
    return pictures(seeded(hf.ResNetForImageClassification, config), 32)


def channels_last() -> dict[str, Any]:
    """Train a ResNet in channels_last."""
    given = resnet(16, (16, 32))
    given["model"] = given["model"].to(memory_format=torch.channels_last)
    return {**given, "arguments": {**SETTINGS, "max_grad_norm": 0.01}}


def experts() -> dict[str, Any]:
    """Train a mixture of experts with its router loss."""
    more = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    model = seeded(hf.MixtralForCausalLM, hf.MixtralConfig(**sizes(**more)))
    return {"model": model, "arguments": SETTINGS}


class Points(nn.Module):
    """A custom model with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and scores."""
        scores = self.net(values)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def of_ones_own() -> dict[str, Any]:
    """Train a module that is not from transformers."""
    torch.manual_seed(0)
    rows = [{"values": torch.randn(3), "labels": i % 2} for i in range(8)]
    return on_rows(Points(), rows)


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss with `ignore_index=-1`, which no stock loss has."""
    targets = torch.where(labels < 0, -1, labels)[:, 1:].flatten()
    scores = outputs.logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(scores, targets, ignore_index=-1, reduction="sum")
    return loss / num_items_in_batch


def lora(model: Any) -> Any:
    """Return the model with a LoRA that has dropout."""
    torch.manual_seed(1)
    return get_peft_model(model, LORA)


def lora_in_4_bit() -> dict[str, Any]:
    """Train a LoRA on a base in NF4, with checkpointing."""
    model = lora(random_base(hf.LlamaConfig(**sizes(hidden_size=64)), device="cpu"))
    model.enable_input_require_grads()
    saved = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
    return {"model": model, "arguments": {**SETTINGS, **saved}}


BY_MODEL: dict[str, Callable[[], dict[str, Any]]] = {
    "bert-classifier": classifier,
    "vit": vit,
    "resnet": resnet,
    "resnet-channels-last": channels_last,
    "mixtral": experts,
    "own-module": of_ones_own,
    "own-loss": lambda: {"compute_loss_func": summed, "arguments": SETTINGS},
    "lora": lambda: {"model": lora(llama()), "arguments": SETTINGS},
    "lora-4-bit": lora_in_4_bit,
}
"""Arguments of transformers' Trainer, by example."""


def translator(folder: Path) -> Any:
    """Train a T5 with Seq2SeqTrainer, and generate at evaluations."""
    size = {"vocab_size": len(tokenizer()), "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    config = hf.T5Config(**size, decoder_start_token_id=0)
    model = seeded(hf.T5ForConditionalGeneration, config)
    generating = {"predict_with_generate": True, "generation_max_length": 5}
    rows = token_rows()
    return hf.Seq2SeqTrainer(
        model=model,
        args=hf.Seq2SeqTrainingArguments(str(folder), **{**ARGUMENTS, **SETTINGS, **generating}),
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=hf.DataCollatorForSeq2Seq(tokenizer(), model),
        compute_metrics=lambda guessed: {"sum": int(guessed.predictions.sum())},
    )


def texts() -> list[Row]:
    """Return plain texts."""
    return [{"text": sentence(i)} for i in range(ROWS)]


def chats() -> list[Row]:
    """Return chats of a question and an answer."""
    asked = {"role": "user", "content": "tell me"}
    answers = [{"role": "assistant", "content": sentence(i)} for i in range(ROWS)]
    return [{"messages": [asked, answer]} for answer in answers]


def judged() -> list[Row]:
    """Return prompts with wanted and unwanted completions."""
    rows = [{"completion": sentence(i), "label": i % 2 == 0} for i in range(ROWS)]
    return [{"prompt": "tell me: ", **row} for row in rows]


def pairs(prompt: str = "") -> list[Row]:
    """Return pairs of a better and a worse text."""
    return [
        {"chosen": prompt + sentence(i), "rejected": prompt + sentence(i + 1)} for i in range(ROWS)
    ]


def prompted_pairs() -> list[Row]:
    """Return prompts with a better and a worse completion."""
    return [{"prompt": "tell me: ", **row} for row in pairs()]


def judge() -> Any:
    """Return a model that scores a text."""
    return seeded(hf.LlamaForSequenceClassification, hf.LlamaConfig(**sizes(num_labels=1)))


def of_trl(
    folder: Path, name: str, rows: list[Row], arguments: dict[str, Any], given: dict[str, Any]
) -> Any:
    """Return a Trainer of TRL. given: its arguments; functions among them are called."""
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    disable_progress_bar()
    source = importlib.import_module("trl.experimental.gkd" if name == "GKD" else "trl")
    settings = {**ARGUMENTS, "bf16": False, **SETTINGS, **arguments}
    made = {key: value() if callable(value) else value for key, value in given.items()}
    return getattr(source, f"{name}Trainer")(
        args=getattr(source, f"{name}Config")(str(folder), **settings),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:3]),
        processing_class=tokenizer(),
        **{"model": llama(), **made},
    )


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_mean_token_accuracy"}
BEST |= {"save_strategy": "steps", "save_steps": 1}
BY_LORA = {"peft_config": LORA}
FAST = {"learning_rate": 0.1}
GENERATED = {"num_generations": 2, "max_completion_length": 4, "steps_per_generation": 4}
SCORED = {**BY_LORA, "reward_funcs": [reward]}
BY_TRL: dict[str, tuple[str, Callable[[], list[Row]], dict[str, Any], dict[str, Any]]] = {
    "sft": ("SFT", texts, BEST, {}),
    "sft-packed": ("SFT", texts, {"packing": True, "max_length": 24}, {}),
    "sft-lora": ("SFT", texts, FAST, BY_LORA),
    "dpo": ("DPO", prompted_pairs, {}, {"ref_model": llama}),
    "dpo-lora": ("DPO", prompted_pairs, FAST, BY_LORA),
    "reward": ("Reward", partial(pairs, "tell me: "), {}, {"model": judge}),
    "kto": ("KTO", judged, {}, {"ref_model": llama}),
    "grpo": ("GRPO", prompted_pairs, GENERATED, SCORED),
    "rloo": ("RLOO", prompted_pairs, {**GENERATED, "num_iterations": 2}, SCORED),
    "gkd": ("GKD", chats, {"max_new_tokens": 4, "lmbda": 0.5}, {"teacher_model": llama}),
}
"""TRL's Trainers with their rows, settings and other arguments."""


def by_trainer() -> list[Example]:
    """Return the examples."""
    builds: dict[str, Any] = {name: called(make) for name, make in BY_MODEL.items()}
    builds["t5-seq2seq"] = translator
    for label, (name, rows, arguments, given) in BY_TRL.items():
        builds[label] = lambda folder, name=name, rows=rows, rest=(arguments, given): of_trl(
            folder, name, rows(), *rest
        )
    return [Example(name, "trainers", build) for name, build in builds.items()]
