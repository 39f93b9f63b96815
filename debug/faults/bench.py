"""Train a small student on the embedded 4-bit model for a few windows with faults in them.

A `Run` drives strategies and the guarded step as the training loop does. Its outcome holds
everything that a fault could change; outcomes are compared bit for bit.

Shapes: K micro-batches of a window; B rows, T tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.attach import attach, detach
from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.base.load import load_base
from npt.batch import Batch, Sample, collate, find_fault
from npt.config import NPTConfig, TrainConfig
from npt.distill.local import BatchSums
from npt.distill.step import ADAM_BETAS, forward_backward, student_guard, summed
from npt.distill.strategies import STRATEGIES
from npt.guard.guard import Guard
from npt.guard.outcome import Outcome as WindowOutcome
from npt.guard.outcome import Refusal
from npt.guard.schedule import rate_table
from npt.guard.spikes import HISTORY

PAD_ID = 2
FIRST_ID = 3
"""Smallest token id of samples: below are the start, end and padding tokens."""

Place = tuple[int, int]
"""A micro-batch: window, index in the window."""


@dataclass(frozen=True)
class Setting:
    """The student and the training.

    Attributes:
        late: the guarded step reads its flags one window late.
        layers: converted layers.
        targets: targets of the adapters.
        size: K.
        padding: side of the padding.
        rates: rate of each step (default: falling linearly from `learning_rate`).
        spike_history: accepted steps that the spike guard remembers.
        vocabulary: V (default: the embedded model's).
        base_layers: layers of the embedded model that are used.
        change: applied to the copy of the embedded model first.
    """

    late: bool = False
    strategy: str = "local"
    logit_kl_weight: float = 0.0
    layers: str = "1,2"
    targets: tuple[str, ...] = ("stream", "gate", "up", "down")
    windows: int = 3
    size: int = 3
    rows: int = 2
    length: int = 16
    padding: str = "right"
    spikes: bool = False
    learning_rate: float = 1e-2
    rates: tuple[float, ...] | None = None
    spike_history: int = HISTORY
    vocabulary: int | None = None
    base_layers: int = 6
    change: Callable[[PreTrainedModel], None] | None = None

    @property
    def train_config(self) -> TrainConfig:
        return TrainConfig(
            strategy=self.strategy,
            logit_kl_weight=self.logit_kl_weight,
            learning_rate=self.learning_rate,
            weight_decay=0.01,
            gradient_accumulation_steps=self.size,
            skip_spikes=self.spikes,
        )

    def batch(self, place: Place) -> Batch:
        """Return the micro-batch at a place. Its random tokens depend only on the place; the last
        of several rows is padded.
        """
        window, micro = place
        generator = torch.Generator().manual_seed(10_007 * window + micro)
        vocabulary = self.vocabulary or embedded(self.base_layers).config.vocab_size
        lengths = [self.length] * self.rows
        if self.rows > 1:
            lengths[-1] -= self.length // 4
        samples = [
            Sample(
                f"w{window}-m{micro}-r{row}",
                tuple(torch.randint(FIRST_ID, vocabulary, (n,), generator=generator).tolist()),
            )
            for row, n in enumerate(lengths)
        ]
        return collate(samples, pad_id=PAD_ID, side=self.padding)


SMALL = Setting()
"""Two converted layers, three windows of three micro-batches."""


@functools.cache
def embedded(layers: int = SMALL.base_layers) -> PreTrainedModel:
    """Return the first layers of the embedded model in NF4, loaded once. Do not change it."""
    model = load_base("tiny", quantization="nf4", device="cpu")[0]
    model.config.num_hidden_layers = layers
    decoder: Any = model.model
    decoder.layers = decoder.layers[:layers]
    return model


def let_draw(model: PreTrainedModel) -> None:
    """Add permanent hooks: dropout after every attention in every mode, noise on embeddings."""

    def drop(_module: nn.Module, _inputs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (nn.functional.dropout(output[0], 0.1, training=True), *output[1:])

    for index in range(len(decoder_layers(model))):
        model.get_submodule(f"model.layers.{index}.self_attn").register_forward_hook(drop)
    model.get_input_embeddings().register_forward_hook(
        lambda _module, _inputs, output: output + 0.01 * torch.randn_like(output)
    )


class Around(nn.Module):
    """A frozen linear layer with a LoRA, like PEFT's: `weight` is the base's weight."""

    def __init__(self, base_layer: Any, seed: int, rank: int = 4):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        a = torch.randn(rank, self.in_features, generator=generator) / self.in_features**0.5
        b = 0.3 * torch.randn(self.out_features, rank, generator=generator)
        self.lora_A = nn.Parameter(a, requires_grad=False)
        self.lora_B = nn.Parameter(b, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + (x @ self.lora_A.T) @ self.lora_B.T


def put_around(model: PreTrainedModel) -> None:
    """Put a LoRA around every projection of every MLP."""
    for index, layer in enumerate(decoder_layers(model)):
        mlp: Any = layer.mlp
        for place, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            setattr(mlp, name, Around(getattr(mlp, name), 10 * index + place))


def let_change(model: PreTrainedModel) -> None:
    """Add permanent hooks that change the outputs of MLPs, their down_proj and whole layers."""
    for layer in decoder_layers(model):
        mlp: Any = layer.mlp
        mlp.down_proj.register_forward_hook(
            lambda _module, _inputs, output: output + 0.3 * torch.sin(3 * output)
        )
        mlp.register_forward_pre_hook(lambda _module, inputs: (1.1 * inputs[0],))
        layer.register_forward_hook(lambda _module, _inputs, output: output + 0.01)


@dataclass(frozen=True)
class Base:
    """A model for students instead of a copy of the embedded one, and how to train them. It has one
    student at a time; a new student replaces the last.
    """

    model: PreTrainedModel
    adapter: NPTConfig
    config: TrainConfig


class Student:
    """A new student with its optimizer."""

    def __init__(self, setting: Setting, base: Base | None = None):
        torch.manual_seed(0)
        if base is None:
            adapter = NPTConfig(rank=4, layers=setting.layers, targets=setting.targets)
            base = Base(copy.deepcopy(embedded(setting.base_layers)), adapter, setting.train_config)
            if setting.change is not None:
                setting.change(base.model)
        self.setting, self.config, self.model = setting, base.config, base.model
        detach(self.model)
        attach(self.model, base.adapter)
        self.parameters = adapter_parameters(self.model)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=setting.learning_rate,
            betas=ADAM_BETAS,
            weight_decay=self.config.weight_decay,
            fused=True,
        )

    def fill(self, batch: Batch) -> BatchSums:
        """Add one micro-batch's gradients to `.grad` and return its sums."""
        strategy = STRATEGIES[self.config.strategy]
        return forward_backward(self.model, strategy, batch, self.config)

    def state(self) -> dict[str, Tensor]:
        """Return weights, moments and step counts as bytes: NaN equals itself, 0 is not -0."""
        tensors: dict[str, Tensor] = {name: p.detach() for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            tensors |= {
                f"{key} of {name}": torch.as_tensor(value)
                for key, value in self.optimizer.state.get(p, {}).items()
            }
        return {
            name: t.contiguous().reshape(-1).view(torch.uint8).clone()
            for name, t in tensors.items()
        }


Fill = Callable[[], BatchSums]
Fault = Callable[[Student, Batch], AbstractContextManager[tuple[Batch, Fill | None]]]
"""A transient fault: the context of one micro-batch. It yields the batch to use and, optionally, a
function that fills the gradients instead."""


@contextmanager
def no_fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
    yield batch, None


@dataclass
class Outcome:
    """The result of a run. rng: the CPU's random state."""

    state: dict[str, Tensor]
    rng: Tensor
    results: list[WindowOutcome] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        return [r.rate for r in self.results if r.applied and r.rate is not None]

    @property
    def steps(self) -> int:
        return self.results[-1].steps if self.results else 0

    @property
    def refusals(self) -> list[tuple[int, Refusal]]:
        """Return (window, refusal) of every refusal."""
        return [(r.index, refusal) for r in self.results for refusal in r.refused]

    def difference(self, other: Outcome) -> str | None:
        """Return the name of the first difference from another outcome, None if all bits agree."""
        for what in ("rates", "steps"):
            if getattr(self, what) != getattr(other, what):
                return f"{what}: {getattr(self, what)} and {getattr(other, what)}"
        if not torch.equal(self.rng, other.rng):
            return "the random state"
        return difference(self.state, other.state)


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Return the first path at which two nested states differ in a bit, or None."""
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return f"the entries of {place or 'the state'}"
        places = (difference(one[key], other[key], f"{place} {key}".strip()) for key in one)
        return next((place for place in places if place is not None), None)
    same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
    return None if same else place


def add_batch(guard: Guard[Any], batch: Batch, compute: Any, vocab_size: int | None) -> None:
    """Add a micro-batch to the guard's window or refuse it, as the training loop does. `compute`
    returns its sums. Without `vocab_size` the batch is not checked.
    """
    fault = None if vocab_size is None else find_fault(batch, vocab_size)
    if fault is not None:
        guard.refuse(fault, batch.sample_ids)
        return
    again, ids = partial(compute, batch), batch.sample_ids
    with guard.micro_batch(batch.tokens, ids, batch, again, offset=batch.offset) as micro:
        sums = compute(batch)
        micro.loss, micro.tokens, micro.report = sums.loss, sums.tokens, sums.report


class Run(Student):
    """A student trained through the guarded step, like in `npt.train.loop`."""

    def __init__(self, setting: Setting, base: Base | None = None):
        super().__init__(setting, base)
        # every step has another rate, so that a schedule off by one step shows
        rates = setting.rates or rate_table(setting.learning_rate, "linear", 0, 2 * setting.windows)
        strategy = STRATEGIES[self.config.strategy]
        with mock.patch("npt.guard.spikes.HISTORY", setting.spike_history):
            self.guard = student_guard(self.model, self.config, rates, late=setting.late)
        self.compute = partial(summed, self.model, strategy, config=self.config)
        self.optimizer = self.guard.update.optimizer
        self.results: list[WindowOutcome] = []

    def micro_batch(self, batch: Batch, fill: Fill | None = None) -> None:
        compute = self.compute if fill is None else lambda _: fill()
        add_batch(self.guard, batch, compute, self.model.config.vocab_size)

    def window(
        self,
        number: int,
        faults: Mapping[Place, Fault] | None = None,
        absent: frozenset[Place] = frozenset(),
    ) -> None:
        for place in ((number, micro) for micro in range(self.setting.size)):
            if place not in absent:
                fault = (faults or {}).get(place, no_fault)
                with fault(self, self.setting.batch(place)) as (batch, fill):
                    self.micro_batch(batch, fill)
        self.results += self.guard.step()

    def outcome(self) -> Outcome:
        """Return the state once every window's result is known."""
        self.results += self.guard.flush()
        return Outcome(self.state(), torch.get_rng_state(), list(self.results))


Act = Callable[[Run], Any]


def run(
    setting: Setting,
    base: Base | None = None,
    *,
    faults: Mapping[Place, Fault] | None = None,
    absent: Iterable[Place] = (),
    before: Mapping[int, Act] | None = None,
) -> tuple[Run, Outcome]:
    """Train a new student.

    Args:
        setting: the student and the training.
        base: model to train on (default: the embedded one).
        faults: transient faults by micro-batch.
        absent: micro-batches that this run never sees.
        before: by window, applied to the run before it.
    """
    made, missing = Run(setting, base), frozenset(absent)
    for number in range(setting.windows):
        if before and number in before:
            before[number](made)
        made.window(number, faults, missing)
    return made, made.outcome()


def clean_run(setting: Setting, absent: Iterable[Place] = ()) -> Outcome:
    """Return the outcome of a run without faults that never saw the micro-batches `absent`.

    A clean run is the same in both modes, so only the one that reads flags at once is made.
    """
    return _clean_run(replace(setting, late=False), frozenset(absent))


@functools.lru_cache(maxsize=64)
def _clean_run(setting: Setting, absent: frozenset[Place]) -> Outcome:
    return run(setting, absent=absent)[1]


def whole_window(setting: Setting, number: int) -> list[Place]:
    return [(number, micro) for micro in range(setting.size)]


def module_of(student: Student, name: str) -> Any:
    return student.model.get_submodule(name)
