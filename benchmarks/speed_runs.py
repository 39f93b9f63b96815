"""The runs of `speed.py`: a training step of each kind, on bases with the same weights and tokens.

NPT's runs use `npt.distill.strategies`. The others are what one writes without NPT, with nothing
that slows them down: the same SDPA attention, 4-bit weights, fp32 products and clipping, no
padding, fused AdamW, one backward, and no value read back from the device.

    local                   each layer receives the teacher's state and keeps its gradient; NMSE of
                            every layer
    end_to_end              gradients through the whole student, NMSE of every layer, no logits
    end_to_end_kl           the same with KL(teacher, student) on the logits of every token
    kl_close                KL alone, as NPT trains students that start close to their teacher: on
                            sampled words
    kl_again                the same on text that the run has read before, with its kept states
    two_model               two models; the student runs through transformers' forward with
                            `output_hidden_states`; NMSE of every layer and KL(teacher, student) on
                            the logits
    peft_lora_distill       PEFT LoRA on gate, up and down of the same layers, teacher by
                            `disable_adapter`, KL on the logits
    peft_lora_ce            the same adapters on next-token cross-entropy, without a teacher

transformers applies the final norm to its last hidden state, so `two_model` compares the last layer
after it. LoRA has NPT's rank and starts at random: at its usual start the student equals its
teacher and the gradient is zero. Three bases with the same weights are in memory: the teacher of
`two_model`, one with NPT adapters, and one inside PEFT. Each run has its own optimizer; runs with
the same adapters train them in turn.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

import npt
from npt.adapters.converted import adapter_parameters, npt_layers
from npt.base.load import COMPUTE
from npt.batch import Batch, batch_from_tensors
from npt.console import complain
from npt.distill.hidden_losses import nmse_per_token
from npt.distill.logit_losses import sampling_words
from npt.distill.strategies import STRATEGIES
from npt.doctor.shape import SHAPES, llama_config
from npt.extras import install_command
from npt.train.states import STATES, KeptStates
from random_base import random_base

CLOSE = ("kl_close", "kl_again")
OURS = ("local", "end_to_end", "end_to_end_kl", *CLOSE)
PEFT = ("peft_lora_distill", "peft_lora_ce")
RUNS = (*OURS, "two_model", *PEFT)

LEARNING_RATE = 1e-5
MAX_GRAD_NORM = 0.5


@dataclass(frozen=True)
class Setting:
    """The base of all runs."""

    shape: str
    layers: str
    rank: int
    batch_size: int
    length: int
    quantization: str | None = "nf4"
    device: str = "cpu"
    seed: int = 0
    compute_dtype: str = "fp32"

    @property
    def tokens(self) -> int:
        return self.batch_size * self.length

    @property
    def form(self) -> npt.NPTConfig:
        """Return the settings of NPT's adapters, on the modules that LoRA adapts."""
        return npt.NPTConfig(rank=self.rank, layers=self.layers, targets=("gate", "up", "down"))


@dataclass
class Run:
    """A kind of training step.

    Attributes:
        step: forward, backward and the optimizer's step on a batch; drops the gradients and returns
            the loss on the device.
        holds: everything that this run alone needs in memory, without the batch.
        trainable: parameters of its optimizer.
    """

    name: str
    step: Callable[[Batch], Tensor]
    holds: tuple[Any, ...]
    trainable: list[nn.Parameter]

    def forget(self) -> None:
        """Drop the gradients of a step that failed."""
        for parameter in self.trainable:
            parameter.grad = None


def make_base(setting: Setting) -> Any:
    """Return a new base; equal settings give equal weights."""
    config = llama_config(SHAPES[setting.shape], setting.length)
    return random_base(
        config,
        quantization=setting.quantization,
        device=setting.device,
        seed=setting.seed,
        compute_dtype=COMPUTE[setting.compute_dtype],
    )


def make_batch(setting: Setting) -> Batch:
    """Return full rows of random tokens."""
    generator = torch.Generator().manual_seed(setting.seed)
    ids = torch.randint(
        SHAPES[setting.shape].vocab, (setting.batch_size, setting.length), generator=generator
    )
    return batch_from_tensors(ids, torch.ones_like(ids)).to(torch.device(setting.device))


class Student:
    """A base with NPT adapters, and the steps that train them.

    Args:
        setting: of all runs.
        teacher: a second base without adapters, for `two_model`.
        base: gets the adapters and loses any that it has (default: a new base).
    """

    def __init__(self, setting: Setting, teacher: Any = None, base: Any = None):
        self.setting = setting
        self.model, self.teacher = make_base(setting) if base is None else base, teacher
        npt.detach(self.model)
        npt.attach(self.model, setting.form)
        self.parameters = list(adapter_parameters(self.model).values())
        self.converted = [index for index, _ in npt_layers(self.model)]

    def run(self, name: str) -> Run:
        """Return one of OURS or two_model."""
        optimizer = _optimizer(self.parameters)
        if name in OURS:
            return Run(
                name, self._strategy_step(name, optimizer), (self.model, optimizer), self.parameters
            )
        holds = self.model, self.teacher, optimizer
        return Run(name, self._two_model_step(optimizer), holds, self.parameters)

    def _strategy_step(self, name: str, optimizer: AdamW) -> Callable[[Batch], Tensor]:
        strategy = "local" if name == "local" else "end_to_end"
        config = npt.TrainConfig(
            strategy=strategy,
            hidden_weight=float(name not in CLOSE),
            logit_kl_weight=float("kl" in name),
        )
        kept: KeptStates | None = None

        def step(batch: Batch) -> Tensor:
            read = batch if kept is None else kept.of(batch)
            with sampling_words(name in CLOSE):
                sums = STRATEGIES[strategy](self.model, read, config)
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            torch._foreach_div_(gradients, sums.tokens)
            return _finish(sums.loss / sums.tokens, self.parameters, optimizer)

        if name == "kl_again":
            self._folder = tempfile.TemporaryDirectory()
            kept = KeptStates(Path(self._folder.name, STATES), name, complain)
            step(make_batch(self.setting))
        return step

    def _two_model_step(self, optimizer: AdamW) -> Callable[[Batch], Tensor]:
        def step(batch: Batch) -> Tensor:
            wanted = {"use_cache": False, "output_hidden_states": True}
            with torch.no_grad():
                taught = self.teacher(batch.input_ids, **wanted)
            learnt = self.model(batch.input_ids, **wanted)
            losses = []
            for i in self.converted:
                pair = (each.hidden_states[i + 1].flatten(0, 1) for each in (learnt, taught))
                losses.append(nmse_per_token(*pair).sum() / batch.tokens)
            loss = torch.stack(losses).mean() + _kl(learnt.logits, taught.logits)
            loss.backward()
            return _finish(loss.detach(), self.parameters, optimizer)

        return step


def lora_runs(setting: Setting, converted: list[int]) -> dict[str, Run]:
    """Return the runs of a base inside PEFT; raise an ImportError without PEFT."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=setting.rank,
        lora_alpha=setting.rank,
        init_lora_weights=False,
        target_modules=["gate_proj", "up_proj", "down_proj"],
        layers_to_transform=converted,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # PEFT uses a deprecated name of transformers
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(make_base(setting), config)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def distilled(batch: Batch) -> Tensor:
        with torch.no_grad(), model.disable_adapter():
            taught = model(input_ids=batch.input_ids, use_cache=False).logits
        return _kl(model(input_ids=batch.input_ids, use_cache=False).logits, taught)

    def cross_entropy(batch: Batch) -> Tensor:
        return model(input_ids=batch.input_ids, labels=batch.input_ids, use_cache=False).loss

    def run(name: str, loss_of: Callable[[Batch], Tensor]) -> Run:
        optimizer = _optimizer(parameters)

        def step(batch: Batch) -> Tensor:
            loss = loss_of(batch)
            loss.backward()
            return _finish(loss.detach(), parameters, optimizer)

        return Run(name, step, (model, optimizer), parameters)

    return dict(zip(PEFT, map(run, PEFT, (distilled, cross_entropy)), strict=True))


def make_runs(setting: Setting, names: tuple[str, ...] = RUNS) -> tuple[list[Run], dict[str, str]]:
    """Return the named runs in order, and a reason for each run that is impossible here."""
    student = Student(setting, make_base(setting) if "two_model" in names else None)
    runs = {name: student.run(name) for name in names if name not in PEFT}
    missing: dict[str, str] = {}
    if wanted := [name for name in names if name in PEFT]:
        try:
            runs |= lora_runs(setting, student.converted)
        except ImportError:
            reason = f"PEFT is not installed: {install_command('peft')}"
            missing = dict.fromkeys(wanted, reason)
    return [runs[name] for name in names if name in runs], missing


def _optimizer(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def _finish(loss: Tensor, parameters: list[nn.Parameter], optimizer: AdamW) -> Tensor:
    nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Return torch's KL(teacher || student) per token, over all logits at once."""
    student, teacher = (
        F.log_softmax(logits.flatten(0, 1).float(), dim=-1) for logits in (student, teacher)
    )
    return F.kl_div(student, teacher, log_target=True, reduction="batchmean")
