"""Examples by the settings of TrainingArguments, on one causal model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from clean_runs.parts import Stream, called, causal, llama
from clean_runs.watched import Build, Example, train

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
SAVED = {"save_strategy": "steps", "save_steps": 1}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
EPOCHS = {"max_steps": -1, "num_train_epochs": 2}

SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accumulation": {"gradient_accumulation_steps": 4, **EPOCHS},
    "mean-per-micro-batch": {
        "gradient_accumulation_steps": 3,
        "average_tokens_across_devices": False,
    },
    "no-clipping": {"max_grad_norm": 0.0},
    "hard-clipping": {"max_grad_norm": 0.01, "gradient_accumulation_steps": 2},
    "cosine-with-warmup": {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 5},
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", **EVALUATED},
    "label-smoothing": {"label_smoothing_factor": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "checkpointing-reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "gradient_accumulation_steps": 2,
    },
    "bf16": {"bf16": True, "gradient_accumulation_steps": 2, "bf16_full_eval": True, **EVALUATED},
    "log-nothing": {"logging_strategy": "no", "gradient_accumulation_steps": 2},
    "best-at-end": {"eval_on_start": True, "save_total_limit": 1, **EVALUATED, **SAVED, **BEST},
    "by-epoch": {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_only_model": True,
        "eval_accumulation_steps": 1,
        **EPOCHS,
    },
    "workers": {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, **EPOCHS},
    "dispatched": {"accelerator_config": {"dispatch_batches": True, "even_batches": False}},
    "noisy-embeddings": {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 2},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "tokens-seen": {"include_num_input_tokens_seen": "non_padding", **EVALUATED},
}


def resumed(trainer: Any) -> Any:
    """Train for two of four steps, then resume from the checkpoint."""
    trainer.args.max_steps = 2
    trainer.train()
    trainer.args.max_steps = 4
    return trainer.train(resume_from_checkpoint=True).metrics


def evaluated(trainer: Any) -> Any:
    """Train, evaluate and predict."""
    trained = trainer.train().metrics
    prediction = trainer.predict(trainer.eval_dataset)
    return {**trained, **trainer.evaluate(), **prediction.metrics}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of correct tokens."""
    guessed = prediction.predictions.argmax(-1)[:, :-1]
    return {"accuracy": float((guessed == prediction.label_ids[:, 1:]).mean())}


def last_layer_alone() -> Any:
    """Return the model with only its head trainable."""
    model = llama(tie_word_embeddings=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    return model


class Halving(TrainerCallback):
    """Halve gradients before each step by replacing them, and lower the clipping norm."""

    def __init__(self, how: str):
        self.how = how

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the clipping norm of the step."""
        args.max_grad_norm = 0.5 / (1 + state.global_step)

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **_: Any
    ) -> None:
        """Replace gradients; drop the head's."""
        for name, parameter in model.named_parameters():
            if name == "lm_head.weight":
                parameter.grad = None
            elif self.how == "data":
                parameter.grad.data = parameter.grad.data * 0.5
            else:
                parameter.grad = parameter.grad * 0.5


def halving(how: str) -> dict[str, Any]:
    """Return arguments with a callback that halves gradients."""
    return {"arguments": {"gradient_accumulation_steps": 2}, "callbacks": [Halving(how)]}


STOPPED = {**EVALUATED, **SAVED, **BEST, "learning_rate": 1.0, "max_steps": 9}
MORE: dict[str, Callable[[], dict[str, Any]]] = {
    "resumed": lambda: {"arguments": {**SAVED, "gradient_accumulation_steps": 2}},
    "evaluated": lambda: {"compute_metrics": accuracy},
    "stopped-early": lambda: {"arguments": STOPPED, "callbacks": [EarlyStoppingCallback(1)]},
    "gradients-replaced-by-data": partial(halving, "data"),
    "gradients-replaced-by-assignment": partial(halving, "assignment"),
    "model-init": lambda: {"model_init": lambda: llama()},
    "bf16-weights": lambda: {"model": llama().to(torch.bfloat16)},
    "frozen": lambda: {"model": last_layer_alone()},
    "iterable": lambda: {"train_dataset": Stream(), "arguments": {"max_steps": 8}},
}
"""Other arguments of the Trainer, by example."""
RUNS = {"resumed": resumed, "evaluated": evaluated}
"""How the Trainer is used, by example (default: `train`)."""


def by_arguments() -> list[Example]:
    """Return the examples."""
    builds: dict[str, Build] = {
        name: partial(causal, arguments=given) for name, given in SETS.items()
    }
    builds |= {name: called(make) for name, make in MORE.items()}
    return [Example(name, "arguments", builds[name], RUNS.get(name, train)) for name in builds]
