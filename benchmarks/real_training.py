"""What `real.py` trains, and the loop that does it: the same one for every kind of student.

A learner is a student's parameters and the backward pass of its loss. The loop has a deadline: the
learning rate falls to 0 on a cosine by the clock. At the start and four times on the way the
student's KL is taken on the documents that choose, and the nearest is what remains; so training
never ends with less than it began with, by that measure. Rates are chosen by it too, in short
trainings from the same start.

`LoRA` is the rival: the same layers without attention, their MLPs with LoRA on gate, up and down,
with KL(teacher, student) on the logits. In those layers it sees no context, and can but repair in
each token what the layers below have brought there.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.base.device import wait_for
from npt.config import TrainConfig
from npt.data.batch import Batch, Sample, batches
from npt.distill.logit_losses import forward_kl, through_head
from npt.distill.step import ADAM_BETAS
from npt.distill.strategies import STRATEGIES
from npt.errors import ConfigError, NumericalError
from npt.evaluation.metrics import final_states, predicting
from npt.extras import install_command
from npt.guard.schedule import learning_rate_scale

CHECKS = 4
"""Times that a training looks at the documents that choose, after the start."""
TRIAL = 0.08
"""Share of a training's time in which one of several rates is tried."""


@dataclass(frozen=True)
class Training:
    """Settings of a training. rates: of learning; of several each is tried, and the one that is
    nearest on the documents that choose is taken. hidden_weight, kl_weight: of the losses; LoRA has
    the latter alone. share: of its time that the rate rises in.
    """

    rates: tuple[float, ...]
    strategy: str = "end_to_end"
    hidden_weight: float = 0.0
    kl_weight: float = 1.0
    batch_size: int = 2
    share: float = 0.05
    max_grad_norm: float = 0.5


@dataclass(frozen=True)
class Learner:
    """A student in training. backward: adds the gradient of a batch's mean loss to `.grad`, and
    returns the loss. student: a context in which the model computes as the student.
    """

    parameters: list[nn.Parameter]
    backward: Callable[[Batch], Tensor]
    student: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


@dataclass(frozen=True)
class Trained:
    """Outcome of a training. trials: KL that a short training with each rate ended with.
    choosing_kl: at the start and at each check. kept: number of the check whose parameters remain,
    0 for the start.
    """

    rate: float
    trials: dict[str, float]
    steps: int
    tokens: int
    choosing_kl: list[float]
    kept: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def train(
    learner: Learner,
    settings: Training,
    samples: Sequence[Sample],
    choosing_kl: Callable[[], float],
    seconds: float,
) -> Trained:
    """Train until the time is over, and keep what was nearest at a check.

    Args:
        learner: the student.
        settings: of the optimizer.
        samples: taken in order, over and over.
        choosing_kl: the student's KL on the documents that choose.
        seconds: in all, trials and checks included. At least one step is made.

    Raises:
        NumericalError: a loss that is not finite.
    """
    started = time.perf_counter()
    start = _copies(learner)
    trials: dict[str, float] = {}
    for rate in settings.rates if len(settings.rates) > 1 else ():
        try:
            kls, _, _ = _run(
                learner, settings, rate, samples, choosing_kl, TRIAL * seconds, checks=1
            )
            trials[f"{rate:g}"] = kls[-1] if math.isfinite(kls[-1]) else math.inf
        except NumericalError:
            trials[f"{rate:g}"] = math.inf
        for parameter in learner.parameters:
            parameter.grad = None
        _write(learner, start)
    nearest = min(settings.rates, key=lambda rate: trials.get(f"{rate:g}", 0.0))
    left = seconds - (time.perf_counter() - started)
    kls, steps, tokens = _run(learner, settings, nearest, samples, choosing_kl, left, CHECKS)
    return Trained(nearest, trials, steps, tokens, kls, kls.index(min(kls)))


def _run(
    learner: Learner,
    settings: Training,
    rate: float,
    samples: Sequence[Sample],
    choosing_kl: Callable[[], float],
    seconds: float,
    checks: int,
) -> tuple[list[float], int, int]:
    """Train with one rate; return the KL at the start and at each check, steps and tokens."""
    started = time.perf_counter()
    parameters = learner.parameters
    device = parameters[0].device
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, betas=ADAM_BETAS, weight_decay=0.0, fused=True
    )
    found, best = [choosing_kl()], _copies(learner)
    steps = tokens = 0
    rows = _forever(samples, settings.batch_size)
    passed = 0.0
    while passed < 1.0:
        # in thousandths of the time, of which the schedule's steps are made
        warmup = max(1, int(1000 * settings.share))
        scale = learning_rate_scale(int(1000 * passed), "cosine", warmup, 1000)
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        batch = next(rows)
        loss = learner.backward(batch.to(device))
        if not math.isfinite(float(loss)):
            raise NumericalError(
                f"the loss is {float(loss)} at step {steps + 1} with rate {rate:g}; lower it"
            )
        nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps, tokens = steps + 1, tokens + batch.tokens
        wait_for(device)
        passed = (time.perf_counter() - started) / max(seconds, 1e-9)
        if passed >= len(found) / checks:
            found.append(choosing_kl())
            if found[-1] < min(found[:-1]):
                best = _copies(learner)
    _write(learner, best)
    return found, steps, tokens


def _copies(learner: Learner) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in learner.parameters]


@torch.no_grad()
def _write(learner: Learner, values: list[Tensor]) -> None:
    for parameter, value in zip(learner.parameters, values, strict=True):
        parameter.copy_(value)


def _forever(samples: Sequence[Sample], batch_size: int) -> Iterator[Batch]:
    while True:
        yield from batches(samples, batch_size)


def npt_learner(model: Any, settings: Training) -> Learner:
    """Return the learner of a model's adapters."""
    config = TrainConfig(
        strategy=settings.strategy,
        hidden_weight=settings.hidden_weight,
        logit_kl_weight=settings.kl_weight,
    )
    parameters = list(adapter_parameters(model).values())

    def backward(batch: Batch) -> Tensor:
        sums = STRATEGIES[config.strategy](model, batch, config)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(sums.tokens)
        return sums.loss / sums.tokens

    return Learner(parameters, backward)


class LoRA:
    """LoRA on the MLPs of layers without attention, in place in a base; `close` takes it off.

    At its start it computes the floor, the same layers with attention dropped and nothing else.

    Args:
        model: a base without adapters.
        layers: those without attention.
        parameters: to have about; the rank follows.
        seed: of the random start.

    Raises:
        ConfigError: PEFT is not installed.
    """

    def __init__(self, model: Any, layers: Sequence[int], parameters: int, seed: int = 0):
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise ConfigError(f"the row lora needs PEFT: {install_command('peft')}") from error
        self.base, self.layers = model, layers
        hidden, ffn = model.config.hidden_size, model.config.intermediate_size
        # A and B of three products, each of which has D on one side and F on the other
        self.rank = max(1, round(parameters / (3 * (hidden + ffn) * len(layers))))
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.rank,
            lora_dropout=0.0,
            target_modules=["gate_proj", "up_proj", "down_proj"],
            layers_to_transform=list(layers),
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            # PEFT asks transformers for an old name of checkpointing
            warnings.simplefilter("ignore", FutureWarning)
            torch.manual_seed(seed)
            self.model = get_peft_model(model, config)
        self.model.eval()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]

    @property
    def learner(self) -> Learner:
        return Learner(self.parameters, self._backward, self.student)

    @contextmanager
    def student(self) -> Iterator[None]:
        """Drop the attention output of the layers within the context."""
        decoder: Any = decoder_layers(self.base)
        handles = [
            decoder[index].self_attn.register_forward_hook(_dropped) for index in self.layers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def close(self) -> None:
        """Take LoRA off the base again."""
        self.model.unload()
        if hasattr(self.base, "peft_config"):
            del self.base.peft_config

    def _backward(self, batch: Batch) -> Tensor:
        with torch.no_grad(), self.model.disable_adapter():
            taught = final_states(self.base, batch)
        with self.student():
            states = final_states(self.base, batch)
        loss = through_head(
            self.base.lm_head, forward_kl, states, taught, self.base.config.vocab_size
        )
        loss = loss / int(predicting(batch).sum())
        loss.backward()
        return loss.detach()


def _dropped(module: nn.Module, arguments: Any, output: Any) -> Any:
    """Return zeros for an attention's output."""
    return torch.zeros_like(output[0]), *output[1:]
