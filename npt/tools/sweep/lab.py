"""Bases and samples that the trials of a study share in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.fit import check_fit
from npt.base.load import load_base, load_teacher, read_config
from npt.base.precision import compute_in
from npt.base.quantization_error import set_matmul_precision
from npt.calibration.calibrate import check_calibration
from npt.config import DataConfig
from npt.data.batch import Batch, Sample, collate
from npt.data.report import no_sample
from npt.data.samples import Samples
from npt.data.source import check_source, open_source, own_heldout
from npt.errors import NPTError
from npt.evaluation.attribution import Reference, reference_outputs
from npt.evaluation.heldout import evaluation_samples
from npt.tools.sweep.settings import Settings
from npt.tools.sweep.spec import Design
from npt.train.run_setup import check_trainable

BASES_BYTES = 2 << 30  # bytes of the bases that are kept together; the one in use is always kept

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Base:
    """A base without adapters, and its teacher if that is another model."""

    model: PreTrainedModel
    tokenizer: Any
    teacher: PreTrainedModel | None

    @property
    def bytes(self) -> int:
        models = [self.model] if self.teacher is None else [self.model, self.teacher]
        return sum(p.numel() * p.element_size() for model in models for p in model.parameters())


def check_design(design: Design) -> None:
    """Raise the error of the first trial that cannot work, with its place; no weights are read."""
    seen: set[DataConfig] = set()
    for trial in design.trials:
        s = trial.settings
        try:
            if s.data not in seen:
                check_source(s.data)
                seen.add(s.data)
            config = read_config(s.base.model_name)
            check_fit(s.adapter, config, s.data.max_length)
            check_calibration(s.adapter)
            check_trainable(s.adapter, s.data, s.base.teacher_precision is not None)
        except NPTError as error:
            place = trial.places[0]
            arm = f", arm {place.arm}" if place.arm else ""
            raise type(error)(f"part {place.part}{arm}: {error}") from error


class Lab:
    """Bases and samples by the settings that decide them. device: of the bases, by default the
    first GPU, else the CPU. say: told what takes time.
    """

    def __init__(self, device: Any = None, say: Callable[[str], None] = lambda line: None):
        self._device, self._say = device, say
        self._bases: dict[Any, Base] = {}  # the one used last is the last
        self._heldout: dict[Any, tuple[list[Sample], bool]] = {}
        self._training: dict[Any, list[Sample]] = {}
        self._references: dict[Any, Reference] = {}

    def base(self, settings: Settings) -> Base:
        """Return the base, without adapters; fp32 products are then as these settings want them."""
        key = _base_key(settings)
        found = self._bases.pop(key) if key in self._bases else self._load(settings)
        self._bases[key] = found
        while len(self._bases) > 1 and sum(b.bytes for b in self._bases.values()) > BASES_BYTES:
            del self._bases[next(iter(self._bases))]
        set_matmul_precision(settings.base.matmul_precision, found.model)
        return found

    def _load(self, settings: Settings) -> Base:
        wanted, dtype = settings.base, settings.probe.compute_dtype
        half = wanted.use_fp16 and not wanted.use_quantization
        self._say(
            f"loading {wanted.model_name}, {wanted.quantization or 'unquantised'}, computing in"
            f" {dtype or ('fp16' if half else 'fp32')}"
        )
        model, tokenizer = load_base(
            wanted.model_name,
            quantization=wanted.quantization,
            use_fp16=wanted.use_fp16 and dtype is None,
            device=self._device,
            attn_implementation=wanted.attn_implementation,
        )
        if dtype in _DTYPES:
            compute_in(model, _DTYPES[dtype])
        if wanted.teacher_precision is None:
            return Base(model, tokenizer, None)
        teacher = load_teacher(
            wanted.model_name,
            wanted.teacher_precision,
            device=model.device,
            attn_implementation=wanted.attn_implementation,
        )
        return Base(model, tokenizer, teacher)

    def windows(self, base: Base, settings: Settings) -> list[list[Batch]]:
        """Return the batches of every step, on the host."""
        training = settings.training
        assert training.max_steps is not None
        size, k = training.batch_size, training.gradient_accumulation_steps
        samples = self._samples(base, settings, training.max_steps * k * size)
        batches = [
            replace(collate(samples[i : i + size]), offset=i) for i in range(0, len(samples), size)
        ]
        return [batches[i : i + k] for i in range(0, len(batches), k)]

    def training_samples(self, base: Base, settings: Settings) -> Iterable[Sample]:
        """Return the data in the order of the run, for a calibrated start."""
        return self._source(base, settings).epoch(0)

    def heldout(self, base: Base, settings: Settings) -> tuple[list[Sample], bool]:
        """Return samples to evaluate on, the same ones in every run on these data, and whether they
        are held out.
        """
        key = (settings.data, settings.training.eval_samples, settings.base.model_name)
        if key not in self._heldout:
            vocabulary = base.model.config.vocab_size
            self._heldout[key] = evaluation_samples(
                open_source(settings.data), base.tokenizer, settings.data,
                settings.training.eval_samples, vocabulary, own_heldout(settings.data),
            )  # fmt: skip
        return self._heldout[key]

    def reference(self, base: Base, settings: Settings) -> Reference | None:
        """Return the outputs of a teacher of its own on the held-out samples; None without one."""
        samples, _ = self.heldout(base, settings)
        if base.teacher is None:
            return None
        key = (_base_key(settings), settings.data, len(samples))
        if key not in self._references:
            size = settings.training.batch_size
            self._references[key] = reference_outputs(base.teacher, samples, batch_size=size)
        return self._references[key]

    def _samples(self, base: Base, settings: Settings, count: int) -> list[Sample]:
        """Return the first `count` training samples, epoch after epoch."""
        training = settings.training
        key = (settings.data, training.seed, training.eval_samples, settings.base.model_name)
        if len(self._training.get(key, [])) < count:
            source, found = self._source(base, settings), list[Sample]()
            for epoch in itertools.count():
                before = len(found)
                found += itertools.islice(source.epoch(epoch), count - before)
                if len(found) == count:
                    break
                if len(found) == before:
                    raise no_sample(source.counts)
            self._training[key] = found
        return self._training[key][:count]

    def _source(self, base: Base, settings: Settings) -> Samples:
        _, heldout = self.heldout(base, settings)
        hold_out = heldout and own_heldout(settings.data) is None
        records, seed = open_source(settings.data), settings.training.seed
        return Samples(records, base.tokenizer, settings.data, seed=seed, hold_out=hold_out)


def _base_key(settings: Settings) -> Any:
    dtype = settings.probe.compute_dtype
    return settings.base, dtype if dtype in _DTYPES else None
