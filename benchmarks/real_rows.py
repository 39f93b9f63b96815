"""The rows of `real.py`: what each converts, how it starts and is trained, and its figures.

All settings are in ROWS. Every row is made on the same base in the same process, and leaves it as
it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import npt
from cut import attention_cut, projections
from npt.adapters.converted import adapter_mode, adapter_parameters, adapters_disabled
from npt.adapters.fit import format_layers, resolve_layers
from npt.base.device import wait_for
from npt.base.linear import cast_once
from npt.base.load import load_teacher, read_config
from npt.config import NPTConfig
from npt.data.batch import Sample, batches
from npt.evaluation.attribution import Reference, reference_outputs
from npt.evaluation.metrics import (
    COLUMNS,
    compare_pairs,
    evaluating,
    figures,
    final_states,
    per_sample_sums,
    predicting,
)
from real_text import Text
from real_training import Learner, LoRA, Training, npt_learner, train

BATCH, STARTED_AT_ONCE = 4, 2
"""Samples of a batch in measuring and timing a forward pass, and in making a start."""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    kind: what is measured against the teacher, the base as it is loaded: `npt`, `lora` (in place of
        NPT, at its number of parameters), `floor` (attention dropped, nothing else), `cut`
        (attention cut by hooks, nothing else); or `quantization`, the base itself in NF4 against
        its 16-bit form.
    layers: converted; `all_but_first` besides what --layers takes.
    divisor: the rank is D over it.
    tokens: that the start is fitted to. Training takes all text that may be fitted, these last.
    start: by npt.calibrate; else random.
    form: of the adapter, other than the default.
    as_many: scale the rank to the number of parameters of the default form at this rank.
    training: in the minutes that the start has left.
    """

    name: str
    about: str
    kind: str = "npt"
    layers: str = "upper_half"
    divisor: int = 4
    tokens: int = 49152
    start: bool = True
    form: Mapping[str, Any] = field(default_factory=dict)
    as_many: bool = False
    training: Training | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all that the row's figures follow from."""
        settings = asdict(self)
        del settings["about"]
        return settings


CUT = {"targets": ("stream",)}
"""The form of the cut: A, and B of the stream."""
NEAR = Training((5e-5,), batch_size=1)
"""Training of a start near its teacher."""
FAR = replace(NEAR, rates=(3e-4, 1e-3))
"""Training of a start of a small rank, which bears more."""

ROWS = {
    row.name: row
    for row in (
        Row("nf4", "NF4 against the 16-bit model", "quantization"),
        Row("floor", "upper half without attention, nothing in its place", "floor"),
        Row("cut", "upper half, attention cut to D/4 directions by hooks, nothing else", "cut"),
        Row("start", "upper half, D/4 on average, the start alone", form=CUT),
        Row("best", "upper half, D/4 on average, trained", form=CUT, training=NEAR),
        Row(
            "best-small", "upper half, D/16 on average, trained", divisor=16, form=CUT, training=FAR
        ),
        Row(
            "all-but-first",
            "all layers but the first, D/4 on average, trained",
            layers="all_but_first",
            form=CUT,
            training=NEAR,
        ),
        Row(
            "original",
            "upper half, the first form: gate alone, half sigmoid, random start, layer by layer",
            start=False,
            form={"targets": ("gate",), "mult_form": "half_sigmoid", "additive_scale": 0.1},
            as_many=True,
            training=Training((5e-5,), strategy="local", hidden_weight=1.0, kl_weight=0.0),
        ),
        Row(
            "lora",
            "upper half without attention, LoRA on gate, up and down, KL with the teacher",
            "lora",
            start=False,
            training=Training((1e-3, 3e-3, 1e-2)),
        ),
    )
}
"""Every row by its name, in the order of the table."""

FORM: dict[str, Any] = {"additive_scale": 1.0}
"""Of every adapter, unless its row says otherwise."""

QUANTIZATION = "nf4"


@dataclass
class Bench:
    """The base of all rows, and the text that they are fitted to and measured on.

    minutes: of rows that train, the start included.
    """

    name: str
    model: Any
    tokenizer: Any
    text: Text
    minutes: float
    console: Console
    seed: int = 0

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        parts = {"heldout": self.text.heldout, "choosing": self.text.choosing}
        self._references = {name: self._reference(self.model, s) for name, s in parts.items()}
        self._forward: dict[int, float] = {}

    def make(self, row: Row) -> dict[str, Any]:
        """Return a row's figures, and leave the base unchanged."""
        makers = {
            "npt": self._npt,
            "lora": self._lora,
            "floor": self._floor,
            "cut": self._cut,
            "quantization": self._quantization,
        }
        return makers[row.kind](row)

    def fitted(self, tokens: int) -> list[Sample]:
        """Return the samples that a start from so many tokens is fitted to, the first ones."""
        found: list[Sample] = []
        left = tokens
        for sample in self.text.fitted:
            if left < 2:
                break
            found.append(Sample(sample.id, sample.input_ids[:left]))
            left -= len(found[-1].input_ids)
        return found

    def config(self, row: Row) -> NPTConfig:
        """Return the form of a row's adapters."""
        base = self.model.config
        layers = row.layers
        if layers == "all_but_first":
            layers = f"1-{base.num_hidden_layers - 1}"
        rank = max(1, base.hidden_size // row.divisor)
        start = {"init": "calibrated"} if row.start else {}
        if row.as_many:
            default = NPTConfig(rank=rank, layers=layers, **FORM)
            own = NPTConfig(rank=1, layers=layers, **{**FORM, **row.form})
            rank = round(self._parameters(default) / self._parameters(own))
        return NPTConfig(rank=rank, layers=layers, **{**FORM, **start, **row.form})

    def _parameters(self, config: NPTConfig) -> int:
        npt.attach(self.model, config)
        try:
            return sum(p.numel() for p in adapter_parameters(self.model).values())
        finally:
            npt.detach(self.model)

    def _npt(self, row: Row) -> dict[str, Any]:
        config, samples = self.config(row), self.fitted(row.tokens)
        npt.attach(self.model, config, seed=self.seed)
        try:
            found = self._about(config)
            if row.start:
                found |= self._start(samples)
            if row.training is not None:
                left = 60 * self.minutes - found.get("start_seconds", 0.0)
                learner = npt_learner(self.model, row.training)
                found |= self._train(learner, row, left)
            return found | self._cost(samples, found) | self.measure()
        finally:
            npt.detach(self.model)

    def _lora(self, row: Row) -> dict[str, Any]:
        config = self.config(row)
        layers = resolve_layers(config.layers, self.model.config.num_hidden_layers)
        lora = LoRA(self.model, layers, self._parameters(config), self.seed)
        try:
            found: dict[str, Any] = {"layers": format_layers(layers), "rank": lora.rank}
            found["parameters"] = lora.learner.size
            found |= self._train(lora.learner, row, 60 * self.minutes)
            found |= self.measure(lora.student)
        finally:
            lora.close()
        return found | self._cost(self.fitted(row.tokens), found)

    def _floor(self, row: Row) -> dict[str, Any]:
        config = self.config(row)
        npt.attach(self.model, config)
        try:
            found = {**self._about(config), "rank": None, "parameters": 0, "minutes": 0.0}
            return found | self.measure(lambda: adapter_mode(self.model, "floor"))
        finally:
            npt.detach(self.model)

    def _cut(self, row: Row) -> dict[str, Any]:
        config, samples = self.config(row), self.fitted(row.tokens)
        npt.attach(self.model, config)
        started = time.perf_counter()
        try:
            found = self._about(config)
            cut = projections(self.model, samples, config.rank, batch_size=BATCH, seed=self.seed)
        finally:
            npt.detach(self.model)
        found["start_seconds"] = time.perf_counter() - started
        found["parameters"] = sum(a.numel() + p.numel() for a, p in cut.values())
        measured = self.measure(lambda: attention_cut(self.model, cut))
        return found | self._cost(samples, found) | measured

    def _quantization(self, row: Row) -> dict[str, Any]:
        stored = getattr(read_config(self.name), "dtype", None)
        # a checkpoint in fp16 would lose bits as bf16
        precision = "bf16" if stored == torch.bfloat16 else "fp32"
        full = load_teacher(self.name, precision, device=self.device)
        reference = self._reference(full, self.text.heldout)
        del full
        return {"parameters": 0, "minutes": 0.0} | self.measure(reference=reference)

    def _about(self, config: NPTConfig) -> dict[str, Any]:
        layers = resolve_layers(config.layers, self.model.config.num_hidden_layers)
        parameters = sum(p.numel() for p in adapter_parameters(self.model).values())
        return {"layers": format_layers(layers), "rank": config.rank, "parameters": parameters}

    def _start(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Make the start, between two halves of a forward pass over the same tokens."""
        half, tokens = len(samples) // 2, sum(len(sample.input_ids) for sample in samples)
        forward = self.forward_seconds(samples[:half])
        started = time.perf_counter()
        npt.calibrate(
            self.model,
            self.tokenizer,
            samples,
            tokens,
            seed=self.seed,
            console=self.console,
            batch_size=STARTED_AT_ONCE,
        )
        wait_for(self.device)
        seconds = time.perf_counter() - started
        forward += self.forward_seconds(samples[half:])
        self._forward[tokens] = forward
        return {"start_seconds": seconds, "start_passes": seconds / forward}

    def _train(self, learner: Learner, row: Row, seconds: float) -> dict[str, Any]:
        """Train in the seconds that are left, if any."""
        assert row.training is not None
        if seconds <= 0:
            return {"trained": None}
        walked = len(self.fitted(row.tokens)) if row.start else 0
        started = time.perf_counter()
        found = self.train(learner, row.training, walked, seconds)
        return {"train_seconds": time.perf_counter() - started, "trained": found}

    def train(
        self, learner: Learner, training: Training, walked: int, seconds: float, seed: int = 0
    ) -> dict[str, Any]:
        """Train on all text that may be fitted, and return how that went.

        Args:
            learner, training, seconds: as of `real_training.train`.
            walked: samples that the start is fitted to, which come last.
            seed: how many thirds of the text are put off.
        """
        fitted = self.text.fitted
        samples = [*fitted[walked:], *fitted[:walked]]
        first = seed * len(samples) // 3
        return train(
            learner,
            training,
            [*samples[first:], *samples[:first]],
            lambda: self.measure(learner.student, "choosing")["figures"]["kl"],
            seconds,
        ).as_dict()

    def _cost(self, samples: Sequence[Sample], found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the minutes of a row, and how many forward passes over its tokens they are."""
        tokens = sum(len(sample.input_ids) for sample in samples)
        if tokens not in self._forward:
            self._forward[tokens] = self.forward_seconds(samples)
        forward = self._forward[tokens]
        seconds = found.get("start_seconds", 0.0) + found.get("train_seconds", 0.0)
        return {
            "tokens": tokens,
            "minutes": seconds / 60,
            "forward_seconds": forward,
            "forward_passes": seconds / forward,
        }

    @torch.no_grad()
    def forward_seconds(self, samples: Sequence[Sample]) -> float:
        """Return the time of one forward pass of the whole base, logits included."""
        wait_for(self.device)
        started = time.perf_counter()
        with evaluating(self.model), adapters_disabled(self.model), cast_once(self.model.lm_head):
            for batch in batches(samples, BATCH):
                states = final_states(self.model, batch.to(self.device))
                for rows in states.split(256):  # as logits of all would fill the memory
                    self.model.lm_head(rows)
        wait_for(self.device)
        return time.perf_counter() - started

    @torch.no_grad()
    def measure(
        self,
        student: Callable[[], AbstractContextManager[None]] = nullcontext,
        part: str = "heldout",
        reference: Reference | None = None,
    ) -> dict[str, Any]:
        """Return the figures of what the model computes in the context `student`, and the sums of
        each document that they are made of.

        Args:
            student: makes the context.
            part: of the text, `heldout` or `choosing`.
            reference: of another model than the base, on the same samples.
        """
        samples = self.text.heldout if part == "heldout" else self.text.choosing
        reference = self._references[part] if reference is None else reference
        heads = {"student": self.model.lm_head, "teacher": reference.head}
        pair = ("student", "teacher")
        sums: list[Tensor] = []
        done = 0
        with evaluating(self.model), student():
            for host in batches(samples, BATCH):
                batch = host.to(self.device)
                predicted = predicting(batch)
                taught = torch.cat(reference.states[done : done + len(predicted)])
                states = {
                    "student": final_states(self.model, batch),
                    "teacher": taught.to(self.device),
                }
                targets = batch.labels[:, 1:][predicted]
                per_token = compare_pairs(
                    states, heads, targets, self.model.config.vocab_size, [pair]
                )[pair]
                sums.append(per_sample_sums(per_token, predicted.nonzero()[:, 0], len(predicted)))
                done += len(predicted)
        return by_document(torch.cat(sums), samples)

    def _reference(self, model: Any, samples: Sequence[Sample]) -> Reference:
        return reference_outputs(model, samples, batch_size=BATCH)


def by_document(per_sample: Tensor, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return figures whose errors are over documents, from [C, len(COLUMNS)] sums by sample."""
    names = list(dict.fromkeys(sample.document for sample in samples))
    numbers = torch.tensor([names.index(sample.document) for sample in samples])
    sums = torch.zeros(len(names), per_sample.shape[1], dtype=per_sample.dtype)
    sums.index_add_(0, numbers, per_sample)
    documents = {
        name: dict(zip(COLUMNS, row, strict=True))
        for name, row in zip(names, sums.tolist(), strict=True)
    }
    return {"figures": figures(sums).as_dict(), "documents": documents}
