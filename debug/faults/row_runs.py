"""Training of other people's kind on rows with faults, guarded or not, and what it came to."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import LlamaConfig, Trainer, TrainingArguments

from faults.campaign import print_totals
from faults.row_cases import TENSOR, RowCase
from faults.row_faults import LENGTH, VOCABULARY, Row, plant, row
from faults.verdict import Verdict, verdict_of
from npt.base.random_base import random_base
from npt.errors import DataError
from npt.guard import Guard, Refusal, TrainerMixin
from npt.guard.trainer import refuse_bad_ids

RATE, MAX_NORM, WARMUP = 0.01, 0.1, 4

State = dict[str, Any]


@dataclass
class Trained:
    """The state that a run left, and the refusals of its windows."""

    state: State
    refusals: list[Refusal]


def student(case: RowCase, faulty: bool) -> nn.Module:
    """Return LoRA, with dropout, on a small Llama in NF4."""
    heads = {"num_attention_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, **heads)
    model = random_base(config, device="cpu")
    torch.manual_seed(0)
    lora = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, lora)
    if case.checkpointing:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.enable_input_require_grads()
    return plant(adapted, case.fault if faulty else None)


class SpoilingAdamW(torch.optim.AdamW):
    """AdamW whose step number `at` leaves a NaN in a weight or a moment."""

    def __init__(self, parameters: Any, at: int, where: str, **settings: Any):
        super().__init__(parameters, **settings)
        self._left, self._where = at, where

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, and spoil."""
        super().step()
        if self._left == 0:
            parameter = self.param_groups[0]["params"][0]
            moment = self.state[parameter]["exp_avg"]
            (parameter.data if self._where == "weight" else moment).view(-1)[0] = math.nan
        self._left -= 1


def optimizer_of(case: RowCase, faulty: bool) -> tuple[Any, dict[str, Any]]:
    """Return a class of optimizers and its arguments."""
    settings = {"lr": RATE, "weight_decay": 0.01}
    if faulty and case.spoilt_step is not None:
        at, where = case.spoilt_step
        return SpoilingAdamW, {"at": at, "where": where, **settings}
    return torch.optim.AdamW, settings


def rows_of(case: RowCase, faulty: bool) -> list[Row]:
    """Return an epoch's rows, the bad ones with their fault or not at all."""
    bad = case.bad
    if faulty:
        return [row(i, case.fault if i in bad else None) for i in range(case.rows)]
    return [row(i) for i in range(case.rows) if i not in bad]


def windows_of(case: RowCase, faulty: bool) -> list[list[Row]]:
    """Return the windows of a run; an epoch's last one may be smaller."""
    rows = rows_of(case, faulty)
    epoch = [rows[i : i + case.window] for i in range(0, len(rows), case.window)]
    steps = case.steps if faulty else case.steps - case.lost
    return [epoch[step % len(epoch)] for step in range(steps)]


def loop(case: RowCase, faulty: bool, guarded: bool, accelerator: Any = None) -> Trained:
    """Train in a loop as one writes it: summed losses, divided by the window's tokens."""
    model = student(case, faulty).train()
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
    torch.manual_seed(1)
    refusals: list[Refusal] = []
    for window in windows_of(case, faulty):
        total = 0
        for one in window:
            tokens = int((one["labels"][1:] != -100).sum())
            total += tokens
            if guard is None:
                backward(_summed_loss(given_model, one))
            else:
                with guard.micro_batch(tokens) as micro:
                    refuse_bad_ids(one, model)
                    micro.loss = loss = _summed_loss(given_model, one)
                    backward(loss)
        if guard is None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(torch.tensor(float(total)))
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            stepped.step()
            scheduled.step()
            stepped.zero_grad()
        else:
            refusals += guard.step().refused
    return Trained(_state(model, optimizer, scheduler), refusals)


def accelerated(case: RowCase, faulty: bool, guarded: bool) -> Trained:
    """Train in the same loop through accelerate, in one process."""
    AcceleratorState._reset_state(True)  # of the run before
    return loop(case, faulty, guarded, Accelerator(cpu=True))


def _summed_loss(model: nn.Module, one: Row) -> Tensor:
    logits = model(one["input_ids"][None]).logits
    labels = one["labels"][None, 1:]
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )


class InOrder(Trainer):
    """transformers' Trainer, rows in their order."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


class Safe(TrainerMixin, InOrder):
    """The same under a guard."""

    def on_refused(self, outcome: Any) -> None:
        """Keep the refusals."""
        self.refusals = [*getattr(self, "refusals", []), *outcome.refused]


def hf(case: RowCase, faulty: bool, guarded: bool) -> Trained:
    """Train with transformers' Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=case.window,
            max_steps=case.steps if faulty else case.steps - case.lost,
            learning_rate=RATE,
            max_grad_norm=MAX_NORM,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=WARMUP,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer: Any = (Safe if guarded else InOrder)(
            model=student(case, faulty),
            args=arguments,
            train_dataset=rows_of(case, faulty),
            optimizer_cls_and_kwargs=optimizer_of(case, faulty),
        )
        trainer.guard_settings = {"spike_sigmas": case.spike_sigmas}
        trainer.train()
    state = _state(trainer.model, trainer.optimizer, trainer.lr_scheduler)
    return Trained(state, getattr(trainer, "refusals", []))


TRAINERS: dict[str, Callable[[RowCase, bool, bool], Trained]] = {
    "loop": loop,
    "accelerate": accelerated,
    "hf": hf,
}


def _state(model: nn.Module, optimizer: Any, scheduler: Any) -> State:
    weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return {
        "weights": weights,
        "moments": optimizer.state_dict()["state"],
        "schedule": (scheduler.last_epoch, scheduler.get_last_lr()),
        "random": torch.get_rng_state(),
    }


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Return where two states differ in a bit, or None."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"the entries of {place}"
        found = (difference(one[key], other[key], f"{place} {key}".strip()) for key in one)
        return next((where for where in found if where is not None), None)
    same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
    return None if same else place


@dataclass(frozen=True)
class RowLine:
    """A judged case. unguarded: the fate of the same trainer without a guard."""

    case: RowCase
    verdict: Verdict
    unguarded: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        v = self.verdict
        return {
            "id": self.case.id,
            "name": self.case.name,
            "truth": self.case.truth,
            "verdict": v.verdict,
            "unguarded": self.unguarded,
            "located": v.located,
            "passed": v.passed,
            "false_alarms": v.false_alarms,
            "detail": v.detail,
            "seconds": round(self.seconds, 2),
        }


def judged(case: RowCase, trainer: str) -> RowLine:
    """Train three times, and compare."""
    started = time.perf_counter()
    train = TRAINERS[trainer]
    clean = train(case, False, False)
    try:
        bare = difference(train(case, True, False).state, clean.state)
        fate = "equal" if bare is None else "changed"
    except Exception as error:
        fate = f"ended by {type(error).__name__}"
    complaints, located, strangers = [], False, 0
    try:
        guarded = train(case, True, True)
    except Exception as error:
        complaints.append(f"{type(error).__name__}: {error}")
    else:
        where = difference(guarded.state, clean.state)
        if where is not None:
            complaints.append(f"{where} differs from the run without")
        located, strangers = _located(case, guarded.refusals)
    if fate == "equal":
        complaints.append("the fault does nothing to an unguarded run")
    verdict = verdict_of("survived", complaints, located, strangers)
    return RowLine(case, verdict, fate, time.perf_counter() - started)


def _located(case: RowCase, refusals: Sequence[Refusal]) -> tuple[bool, int]:
    """Return whether every refusal names what was planted, and the number of others."""
    fits = [r for r in refusals if r.kind == case.kind and r.micro_batch in case.refused]
    one = case.fault is not None and case.fault.startswith("tensor-")
    named = all(TENSOR in (refusal.tensor or "") for refusal in fits) if one else True
    said = [refusal.micro_batch for refusal in fits]
    return named and said == case.refused, len(refusals) - len(fits)


def print_lines(console: Console, lines: Sequence[RowLine], trainer: str) -> None:
    """Print the scorecard."""
    table = Table(title=f"faults in other people's trainers: {trainer}")
    for heading in ("case", "planted", "guarded", "located", "unguarded"):
        table.add_column(heading, overflow="fold")
    for line in lines:
        v = line.verdict
        said = v.verdict if v.passed else f"FAILED: {v.verdict}"
        located = "exactly" if v.located else "no"
        table.add_row(line.case.id, line.case.name, said, located, line.unguarded)
    console.print(table)
    print_totals(console, lines)
