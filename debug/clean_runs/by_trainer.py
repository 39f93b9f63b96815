"""Examples by model and Trainer: transformers' models of several kinds, PEFT, and TRL's Trainers.

TRL's Trainers that generate for several steps at once (GRPO, RLOO, distillation, GOLD) are refused
by a guard; those that need a server of models cannot run here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from clean_runs.parts import ARGUMENTS, Row, causal, llama, sentence, sizes, token_rows, tokenizer
from clean_runs.watched import Example

ROWS = 7
ACCUMULATED = {"gradient_accumulation_steps": 2, "max_steps": 3}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}


def seeded(kind: Any, config: Any) -> nn.Module:
    """Return a model of random weights."""
    torch.manual_seed(0)
    return kind(config)


def encoder() -> Any:
    """Return the configuration of a tiny BERT."""
    return hf.BertConfig(**sizes(attention_probs_dropout_prob=0.2, num_labels=3))


def classifier(folder: Path) -> Any:
    """Classify sentences."""
    rows = [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(token_rows())]
    return causal(
        folder,
        model=seeded(hf.BertForSequenceClassification, encoder()),
        train_dataset=rows,
        eval_dataset=rows[:5],
        data_collator=hf.DataCollatorWithPadding(tokenizer()),
        arguments={**ACCUMULATED, **EVALUATED},
    )


def translator(folder: Path) -> Any:
    """Train a T5 with Seq2SeqTrainer, and generate at evaluations."""
    config = hf.T5Config(
        vocab_size=len(tokenizer()),
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = seeded(hf.T5ForConditionalGeneration, config)
    given = {"predict_with_generate": True, "generation_max_length": 5}
    arguments = {**ARGUMENTS, **ACCUMULATED, **EVALUATED, **given}
    return hf.Seq2SeqTrainer(
        model=model,
        args=hf.Seq2SeqTrainingArguments(str(folder), **arguments),
        train_dataset=token_rows(),
        eval_dataset=token_rows()[:3],
        data_collator=hf.DataCollatorForSeq2Seq(tokenizer(), model),
        compute_metrics=lambda guessed: {"sum": int(guessed.predictions.sum())},
    )


def pictures(side: int) -> list[Row]:
    """Return random pictures with labels."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"pixel_values": torch.randn(3, side, side, generator=generator), "labels": i % 2}
        for i in range(ROWS)
    ]


def seen(folder: Path, model: nn.Module, side: int) -> Any:
    """Classify pictures."""
    rows = pictures(side)
    return causal(
        folder,
        model=model,
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=hf.default_data_collator,
        arguments={**ACCUMULATED, **EVALUATED},
    )


def vit(folder: Path) -> Any:
    """Train a ViT, which has no token embedding."""
    config = hf.ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.1,
    )
    return seen(folder, seeded(hf.ViTForImageClassification, config), 16)


def resnet(folder: Path) -> Any:
    """Train a ResNet, whose normalisation has statistics."""
    config = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    return seen(folder, seeded(hf.ResNetForImageClassification, config), 32)


def channels_last(folder: Path) -> Any:
    """Train a ResNet whose weights, and so gradients, lie in another order than their indices."""
    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])
    model: Any = seeded(hf.ResNetForImageClassification, config)
    trainer = seen(folder, model.to(memory_format=torch.channels_last), 32)
    trainer.args.max_grad_norm = 0.01
    return trainer


def experts(folder: Path) -> Any:
    """Train a mixture of experts with the loss of its router."""
    config = hf.MixtralConfig(
        **sizes(num_key_value_heads=2, num_local_experts=4, output_router_logits=True)
    )
    return causal(folder, model=seeded(hf.MixtralForCausalLM, config), arguments=ACCUMULATED)


class Points(nn.Module):
    """A model of one's own, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))

    def forward(self, values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return loss and scores."""
        scores = self.net(values)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def of_ones_own(folder: Path) -> Any:
    """Train a module that is none of transformers'."""
    torch.manual_seed(0)
    rows = [{"values": torch.randn(3), "labels": i % 2} for i in range(8)]
    return causal(
        folder,
        model=Points(),
        train_dataset=rows,
        eval_dataset=rows[:3],
        data_collator=hf.default_data_collator,
        arguments={**ACCUMULATED, **EVALUATED},
    )


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return a loss whose ignored label is -1, as no stock loss has it."""
    targets = torch.where(labels < 0, -1, labels)[:, 1:].flatten()
    scores = outputs.logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(scores, targets, ignore_index=-1, reduction="sum")
    return loss / num_items_in_batch


def lora(model: nn.Module, **more: Any) -> Any:
    """Return the model with a LoRA that drops out."""
    from peft import get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, lora_config(**more))


def lora_config(**more: Any) -> Any:
    """Return the settings of a LoRA."""
    from peft import LoraConfig

    settings = {"r": 2, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"], **more}
    return LoraConfig(**settings)


def lora_in_4_bit(folder: Path) -> Any:
    """Train a LoRA on a base in NF4, with checkpointing."""
    from npt.base.random_base import random_base

    model = lora(random_base(hf.LlamaConfig(**sizes(hidden_size=64)), device="cpu"))
    model.enable_input_require_grads()
    saved = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
    return causal(folder, model=model, arguments={**ACCUMULATED, **saved})


def transformers_own() -> list[Example]:
    """Return the examples of transformers and PEFT."""
    builds: dict[str, Any] = {
        "bert-classifier": classifier,
        "t5-seq2seq": translator,
        "vit": vit,
        "resnet": resnet,
        "resnet-channels-last": channels_last,
        "mixtral": experts,
        "own-module": of_ones_own,
        "own-loss": partial(causal, compute_loss_func=summed, arguments=ACCUMULATED),
        "lora": lambda folder: causal(folder, model=lora(llama()), arguments=ACCUMULATED),
        "lora-4-bit": lora_in_4_bit,
    }
    return [Example(name, "trainers", build) for name, build in builds.items()]


def trl_trainer(
    folder: Path,
    module: str,
    name: str,
    rows: Callable[[], list[Row]],
    *,
    model: Callable[[], Any] = llama,
    arguments: dict[str, Any] | None = None,
    **rest: Any,
) -> Any:
    """Return a Trainer of TRL, called `<name>Trainer` and configured by `<name>Config`."""
    import importlib

    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    disable_progress_bar()
    source = importlib.import_module(module)
    given = {**ARGUMENTS, "bf16": False, **ACCUMULATED, **EVALUATED, **(arguments or {})}
    return getattr(source, f"{name}Trainer")(
        model=model(),
        args=getattr(source, f"{name}Config")(str(folder), **given),
        train_dataset=Dataset.from_list(rows()),
        eval_dataset=Dataset.from_list(rows()[:3]),
        processing_class=tokenizer(),
        **rest,
    )


def texts() -> list[Row]:
    """Return plain texts."""
    return [{"text": sentence(i)} for i in range(ROWS)]


def chats() -> list[Row]:
    """Return chats of a question and an answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": "tell me"},
                {"role": "assistant", "content": sentence(i)},
            ]
        }
        for i in range(ROWS)
    ]


def answers() -> list[Row]:
    """Return prompts with completions, of which some are unwanted."""
    return [
        {"prompt": "tell me: ", "completion": sentence(i), "label": i % 2 == 0} for i in range(ROWS)
    ]


def pairs() -> list[Row]:
    """Return prompts with a better and a worse completion."""
    return [
        {"prompt": "tell me: ", "chosen": sentence(i), "rejected": sentence(i + 1)}
        for i in range(ROWS)
    ]


def whole_pairs() -> list[Row]:
    """Return pairs of whole texts."""
    return [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in pairs()]


def judge() -> nn.Module:
    """Return a model that gives a text one score."""
    return seeded(hf.LlamaForSequenceClassification, hf.LlamaConfig(**sizes(num_labels=1)))


def trls() -> list[Example]:
    """Return the examples of TRL."""
    accurate = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_mean_token_accuracy",
        "save_strategy": "steps",
        "save_steps": 1,
    }
    by_lora = {"arguments": {"learning_rate": 0.1}}
    generating = {"max_new_tokens": 4, "lmbda": 0.5}
    given: dict[str, tuple[str, str, Callable[[], list[Row]], dict[str, Any]]] = {
        "sft": ("trl", "SFT", texts, {"arguments": accurate}),
        "sft-packed": ("trl", "SFT", texts, {"arguments": {"packing": True, "max_length": 24}}),
        "sft-lora": ("trl", "SFT", texts, {"peft_config": lora_config, **by_lora}),
        "dpo": ("trl", "DPO", pairs, {"reference": llama}),
        "dpo-lora": ("trl", "DPO", pairs, {"peft_config": lora_config, **by_lora}),
        "reward": ("trl", "Reward", whole_pairs, {"model": judge}),
        "kto": ("trl", "KTO", answers, {"reference": llama}),
        "gkd": ("trl.experimental.gkd", "GKD", chats, {"teacher": llama, "arguments": generating}),
    }
    return [
        Example(name, "trainers", partial(built, module=module, name=kind, rows=rows, **rest))
        for name, (module, kind, rows, rest) in given.items()
    ]


def built(
    folder: Path,
    peft_config: Callable[[], Any] | None = None,
    reference: Callable[[], Any] | None = None,
    teacher: Callable[[], Any] | None = None,
    **given: Any,
) -> Any:
    """Return a Trainer of TRL, with what is made anew for each run."""
    made = {"peft_config": peft_config, "ref_model": reference, "teacher_model": teacher}
    given |= {name: make() for name, make in made.items() if make is not None}
    return trl_trainer(folder, **given)


def by_trainer() -> list[Example]:
    """Return the examples."""
    return transformers_own() + trls()
