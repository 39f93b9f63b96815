"""Train in other trainers on rows with faults, guarded or not, and return the state."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler
from transformers import LlamaConfig, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from faults import row_generating
from faults.row_cases import RowCase
from faults.row_faults import LENGTH, VOCABULARY, Row, plant, row
from npt.base.source import EMBEDDED_FOLDER
from npt.errors import DataError
from npt.guard import Guard, Refusal, TrainerMixin
from npt.guard.ids import refuse_bad_ids
from npt.guard.parallel import full, local
from random_base import random_base, shard

RATE, MAX_NORM, WARMUP = 0.01, 0.1, 4

State = dict[str, Any]


@dataclass
class Trained:
    """The state after a run, and the refusals of its windows."""

    state: State
    refusals: list[Refusal]


def student(case: RowCase, faulty: bool, vocabulary: int = VOCABULARY) -> nn.Module:
    """Return a small Llama in NF4 with a LoRA that has dropout."""
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=64, intermediate_size=64, **heads)
    model = random_base(config, device="cpu")
    torch.manual_seed(0)
    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, lora)
    if case.checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.enable_input_require_grads()
    return plant(adapted, case.fault if faulty else None)


class SpoilingAdamW(torch.optim.AdamW):
    """AdamW that writes NaN into a weight or moment in step `at`."""

    def __init__(self, parameters: Any, at: int, where: str, **settings: Any):
        super().__init__(parameters, **settings)
        # an iterator, because a number would be restored with the step
        self._steps, self._at, self._where = itertools.count(), at, where

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, and write the NaN if its time has come."""
        super().step()
        if next(self._steps) == self._at:
            parameter = self.param_groups[0]["params"][0]
            moment = self.state[parameter]["exp_avg"]
            spoilt = parameter.detach() if self._where == "weight" else moment
            local(spoilt).view(-1)[0] = math.nan


def optimizer_of(case: RowCase, faulty: bool) -> tuple[Any, dict[str, Any]]:
    """Return an optimizer class and its arguments."""
    settings = {"lr": RATE, "weight_decay": 0.01}
    if faulty and case.spoilt_step is not None:
        at, where = case.spoilt_step
        return SpoilingAdamW, {"at": at, "where": where, **settings}
    return torch.optim.AdamW, settings


def epoch_of(
    case: RowCase, faulty: bool, process: int = 0, stand_ins: bool = False
) -> list[list[Row | None]]:
    """Return a process's windows of an epoch: the bad rows with their fault, or without these rows.

    stand_ins: leave None for each dropped row, so that the other process does not wait.
    """
    made = []
    for start in range(0, case.rows, case.size):
        every = range(start, min(start + case.size, case.rows))
        lost = {start + i for i in case.dropped([i - start for i in every if i in case.bad])}
        if faulty or any(i not in lost for i in every):
            ours = every[process :: case.processes]
            kept = [i for i in ours if faulty or stand_ins or i not in lost]
            made.append(
                [
                    None
                    if not faulty and i in lost
                    else row(i, case.fault if i in case.bad else None)
                    for i in kept
                ]
            )
    return made


def windows_of(case: RowCase, faulty: bool, process: int = 0, *rest: Any) -> list[list[Row | None]]:
    """Return the windows of a run from those of `epoch_of`."""
    epoch = epoch_of(case, faulty, process, *rest)
    steps = case.steps if faulty else case.steps - case.lost
    return [epoch[step % len(epoch)] for step in range(steps)]


def loop(
    case: RowCase, faulty: bool, guarded: bool, accelerator: Any = None, sharded: bool = False
) -> Trained:
    """Train in a plain loop: summed losses, divided by the window's tokens.

    sharded: shard the base with FSDP2, and with `case.together` the trained parameters too.
    """
    model = student(case, faulty).train()
    if sharded:
        shard(model, [] if case.together else [p for p in model.parameters() if p.requires_grad])
    kind, settings = optimizer_of(case, faulty)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **settings)
    warm = lambda step: min(1.0, (step + 1) / WARMUP)  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm)
    given_model, stepped, scheduled = model, optimizer, scheduler
    backward: Callable[[Tensor], Any] = Tensor.backward
    if accelerator is not None:
        given_model, stepped, scheduled = accelerator.prepare(model, optimizer, scheduler)
        backward = accelerator.backward
    guard = None
    if guarded:
        refuse = (FloatingPointError, DataError)
        given: dict[str, Any] = {"refuse": refuse, "spike_sigmas": case.spike_sigmas}
        guard = Guard(given_model, stepped, scheduled, max_grad_norm=MAX_NORM, **given)
    process = 0 if case.processes == 1 else dist.get_rank()
    torch.manual_seed(1 + process)
    refusals: list[Refusal] = []
    for window in windows_of(case, faulty, process, sharded and not case.together):
        total = 0
        for one in window:
            if one is None:
                compute_aside(model)
                continue
            tokens = int((one["labels"][1:] != -100).sum())
            total += tokens
            if guard is None:
                backward(_summed_loss(model, one))  # its gradients are summed below
            else:
                with guard.micro_batch(tokens) as micro, refuse_bad_ids(one, model):
                    micro.loss = loss = _summed_loss(given_model, one)
                    backward(loss)
        if guard is None:
            parameters = [p for p in model.parameters() if p.requires_grad]
            for gradient, divisor in _summed(parameters, total, case):
                gradient.div_(divisor)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            stepped.step()
            scheduled.step()
            stepped.zero_grad()
        else:
            refusals += guard.step().refused
    return Trained(_state(model, optimizer, scheduler), refusals)


def _summed(
    parameters: Iterable[nn.Parameter], total: int, case: RowCase
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gradients with a window's tokens, both summed over the processes."""
    tokens = torch.tensor(float(total))
    if case.processes > 1:
        dist.all_reduce(tokens)
    for parameter in parameters:
        if case.processes > 1 and not case.together:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        if parameter.grad is not None:
            yield parameter.grad, tokens


def compute_aside(model: nn.Module) -> None:
    """Compute a row only so that the other process does not wait; restore gradients and random
    state.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    random, kept = (
        torch.get_rng_state(),
        [None if p.grad is None else p.grad.clone() for p in trained],
    )
    _summed_loss(model, row(0)).backward()
    torch.set_rng_state(random)
    for parameter, gradient in zip(trained, kept, strict=True):
        parameter.grad = gradient


def accelerated(case: RowCase, faulty: bool, guarded: bool) -> Trained:
    """Train in the plain loop through accelerate."""
    AcceleratorState._reset_state(True)  # the last run's
    return loop(case, faulty, guarded, Accelerator(cpu=True))


def _summed_loss(model: nn.Module, one: Row) -> Tensor:
    logits = model(one["input_ids"][None]).logits
    labels = one["labels"][None, 1:]
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )


class RowsInOrder:
    """Mixin for Trainers that take each process's rows in order."""

    train_dataset: Any
    data_collator: Any

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader for one process; else the rows, already dealt out."""
        if dist.is_initialized():
            return DataLoader(self.train_dataset, batch_size=1, collate_fn=self.data_collator)
        return super().get_train_dataloader()  # type: ignore[misc]

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


@cache
def kinds(own: type, rows: type = RowsInOrder) -> tuple[type, type]:
    """Return the Trainer class with a mixin for its rows, without a guard and with one."""

    class Given(rows, own):
        pass

    class Safe(TrainerMixin, Given):
        def on_refused(self, outcome: Any) -> None:
            """Keep the refusals."""
            self.refusals = [*getattr(self, "refusals", []), *outcome.refused]

    return Given, Safe


def rows_of(case: RowCase, faulty: bool) -> list[Row]:
    """Return this process's rows of an epoch."""
    process = 0 if case.processes == 1 else dist.get_rank()
    return [one for window in epoch_of(case, faulty, process) for one in window if one]


def hf(case: RowCase, faulty: bool, guarded: bool) -> Trained:
    """Train with transformers' Trainer."""
    rows = rows_of(case, faulty)
    return by_library(Trainer, TrainingArguments, rows, case, faulty, guarded)


def trl(case: RowCase, faulty: bool, guarded: bool) -> Trained:
    """Train with TRL's SFTTrainer, whose dataset needs lists."""
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    disable_progress_bar()
    logging.set_verbosity_error()  # about special tokens, in each run
    rows = [{name: ids.tolist() for name, ids in one.items()} for one in rows_of(case, faulty)]
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    arguments = partial(
        SFTConfig,
        max_length=None,
        bf16=False,
        gradient_checkpointing=case.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    data = Dataset.from_list(rows)
    return by_library(
        SFTTrainer, arguments, data, case, faulty, guarded, processing_class=tokenizer
    )


def grpo(case: RowCase, faulty: bool, guarded: bool) -> Trained:
    """Train with TRL's GRPOTrainer. The run without the bad slices generates them too."""
    from datasets.utils.logging import disable_progress_bar
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bar()
    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(str(EMBEDDED_FOLDER))
    trainer = row_generating.trainer_of(
        kinds(GRPOTrainer, row_generating.Slices)[guarded],
        GRPOConfig,
        student(case, faulty, len(tokenizer)),
        tokenizer,
        case.rows,
        gradient_checkpointing=case.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=case.steps,
        optimizer_cls_and_kwargs=optimizer_of(case, faulty),
        **arguments_of(case),
    )
    trainer.bad, trainer.passes = case.bad, not faulty
    return run(trainer, case)


def arguments_of(case: RowCase) -> dict[str, Any]:
    """Return the arguments that all Trainers share."""
    return {
        "gradient_accumulation_steps": case.window,
        "learning_rate": RATE,
        "max_grad_norm": MAX_NORM,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": WARMUP,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def by_library(
    kind: type,
    arguments: Callable[..., Any],
    data: Any,
    case: RowCase,
    faulty: bool,
    guarded: bool,
    **rest: Any,
) -> Trained:
    """Train with transformers' Trainer or a subclass.

    Args:
        kind: the class.
        arguments: makes its arguments.
        rest: arguments besides model, arguments, data and optimizer.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = kinds(kind)[guarded](
            model=student(case, faulty),
            args=arguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                max_steps=case.steps if faulty else case.steps - case.lost,
                **arguments_of(case),
            ),
            train_dataset=data,
            optimizer_cls_and_kwargs=optimizer_of(case, faulty),
            **rest,
        )
        return run(trainer, case)


def run(trainer: Any, case: RowCase) -> Trained:
    """Train and return the state."""
    trainer.guard_settings = {"spike_sigmas": case.spike_sigmas}
    trainer.remove_callback(PrinterCallback)  # standard output belongs to the scorecard
    trainer.train()
    state = _state(trainer.model, trainer.optimizer, trainer.lr_scheduler)
    return Trained(state, getattr(trainer, "refusals", []))


TRAINERS: dict[str, Callable[[RowCase, bool, bool], Trained]] = {
    "loop": loop,
    "accelerate": accelerated,
    "trl": trl,
    "grpo": grpo,
    "hf": hf,
    "fsdp": partial(loop, sharded=True),
    "fsdp_sharded": partial(loop, sharded=True),
}


def _state(model: nn.Module, optimizer: Any, scheduler: Any) -> State:
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    moments = optimizer.state_dict()["state"]
    return {
        "weights": {name: full(p) for name, p in trained.items()},
        "moments": {i: {key: full(v) for key, v in own.items()} for i, own in moments.items()},
        "schedule": (scheduler.last_epoch, scheduler.get_last_lr()),
        "random": torch.get_rng_state(),
    }
