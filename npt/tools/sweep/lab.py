"""What the trials of a study share in one process: bases, each loaded once, and the samples cut
from the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.attach import check_fit
from npt.base.half import compute_in
from npt.base.load import load_base, load_teacher, read_config
from npt.base.quantization_error import set_matmul_precision
from npt.calibration.calibrate import check_calibration
from npt.config import DataConfig
from npt.data.batch import Batch, collate, pad_id_of
from npt.data.sample import Sample
from npt.data.samples import Samples, evaluation_samples, no_sample
from npt.data.source import check_source, open_source, own_heldout
from npt.distill.loss_weights import layer_weights
from npt.distill.stages import stages_of
from npt.errors import NPTError
from npt.evaluation.attribution import Reference, refer
from npt.tools.sweep.settings import Settings
from npt.tools.sweep.spec import Design
from npt.train.run_checks import check_trainable

BASES_BYTES = 2 << 30
"""Bases are kept while they take no more than this together; the one that is in use is kept in any
case.
"""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Base:
    """A base without adapters, and its teacher where that is another model."""

    model: PreTrainedModel
    tokenizer: Any
    teacher: PreTrainedModel | None

    @property
    def bytes(self) -> int:
        models = [self.model] if self.teacher is None else [self.model, self.teacher]
        return sum(p.numel() * p.element_size() for model in models for p in model.parameters())


def check_design(design: Design) -> None:
    """Refuse what no run could start with, before anything runs; no weights are read.

    Raises:
        ConfigError, DataError, ModelError: the first trial that cannot work, by its place.
    """
    seen: set[Any] = set()
    for trial in design.trials:
        s = trial.settings
        try:
            if _data_key(s.data) not in seen:
                check_source(s.data)
                seen.add(_data_key(s.data))
            config = read_config(s.base.model_name)
            layers = check_fit(s.adapter, config, s.data.max_length)
            check_calibration(s.adapter, None, len(layers), config.hidden_size)
            check_trainable(s.adapter, s.data, s.base.teacher_precision is not None)
            layer_weights(s.training, len(layers))
            stages_of(s.training, s.training.max_steps)
        except NPTError as error:
            place = trial.places[0]
            raise type(error)(
                f"part {place.part}{f', arm {place.arm}' if place.arm else ''}: {error}"
            ) from error


class Lab:
    """Bases and samples by the settings that decide them.

    Args:
        device: of the bases; default the first GPU, else the CPU.
        say: told what takes time.
    """

    def __init__(self, device: Any = None, say: Callable[[str], None] = lambda line: None):
        self._device, self._say = device, say
        self._bases: dict[Any, Base] = {}  # the one used last stands last
        self._heldout: dict[Any, tuple[list[Sample], bool]] = {}
        self._training: dict[Any, list[Sample]] = {}
        self._references: dict[Any, Reference] = {}

    def loaded(self, settings: Settings) -> bool:
        """Whether the base is here already."""
        return _base_key(settings) in self._bases

    def base(self, settings: Settings) -> Base:
        """The base, without adapters; fp32 products are from here on as these settings want them."""
        found = self._base(settings)
        set_matmul_precision(settings.base.matmul_precision, found.model)
        return found

    def _base(self, settings: Settings) -> Base:
        key = _base_key(settings)
        if key in self._bases:
            found = self._bases[key] = self._bases.pop(key)
            return found
        wanted, dtype = settings.base, settings.probe.compute_dtype
        self._say(
            f"loading {wanted.model_name}, {wanted.quantization or 'unquantised'}, computing in"
            f" {_dtype_name(settings)}"
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
        teacher = None
        if wanted.teacher_precision is not None:
            attention = wanted.attn_implementation
            teacher = load_teacher(
                wanted.model_name,
                wanted.teacher_precision,
                device=model.device,
                attn_implementation=attention,
            )
        base = self._bases[key] = Base(model, tokenizer, teacher)
        while len(self._bases) > 1 and sum(b.bytes for b in self._bases.values()) > BASES_BYTES:
            del self._bases[next(iter(self._bases))]
        return base

    def windows(self, base: Base, settings: Settings) -> list[list[Batch]]:
        """The batches of every step, on the host."""
        training = settings.training
        assert training.max_steps is not None
        size = training.batch_size
        count = training.max_steps * training.gradient_accumulation_steps * size
        samples = self._samples(base, settings, count)
        pad = pad_id_of(base.tokenizer)
        side = settings.data.padding_side
        batches = [
            replace(collate(samples[i : i + size], pad, side=side), offset=i)
            for i in range(0, count, size)
        ]
        k = training.gradient_accumulation_steps
        return [batches[i : i + k] for i in range(0, len(batches), k)]

    def training_samples(self, base: Base, settings: Settings) -> Iterable[Sample]:
        """The data in the order of the run, for a calibrated start."""
        return self._source(base, settings).epoch(0)

    def heldout(self, base: Base, settings: Settings) -> tuple[list[Sample], bool]:
        """Samples to evaluate on, the same ones in every run on these data, and whether they are
        held out.
        """
        key = (_data_key(settings.data), settings.training.eval_samples, settings.base.model_name)
        if key not in self._heldout:
            records = open_source(settings.data)
            self._heldout[key] = evaluation_samples(
                records,
                base.tokenizer,
                settings.data,
                settings.training.eval_samples,
                base.model.config.vocab_size,
                own_heldout(settings.data),
            )
        return self._heldout[key]

    def reference(self, base: Base, settings: Settings) -> Reference | None:
        """What a teacher of its own says of the held-out samples."""
        samples, _ = self.heldout(base, settings)
        if base.teacher is None:
            return None
        key = (_base_key(settings), _data_key(settings.data), len(samples))
        if key not in self._references:
            size, pad = settings.training.batch_size, pad_id_of(base.tokenizer)
            self._references[key] = refer(base.teacher, samples, batch_size=size, pad_id=pad)
        return self._references[key]

    def _samples(self, base: Base, settings: Settings, count: int) -> list[Sample]:
        """The first `count` training samples, epoch after epoch."""
        key = (
            _data_key(settings.data),
            settings.training.seed,
            settings.training.eval_samples,
            settings.base.model_name,
        )
        found = self._training.get(key, [])
        if len(found) < count:
            source = self._source(base, settings)
            found = []
            for epoch in itertools.count():
                before = len(found)
                found += itertools.islice(source.epoch(epoch), count - before)
                if len(found) == count:
                    break
                if len(found) == before:
                    raise no_sample(source.counts)
            self._training[key] = found
        return found[:count]

    def _source(self, base: Base, settings: Settings) -> Samples:
        _, heldout = self.heldout(base, settings)
        own = own_heldout(settings.data) is not None
        return Samples(
            open_source(settings.data),
            base.tokenizer,
            settings.data,
            seed=settings.training.seed,
            hold_out=heldout and not own,
        )


def _base_key(settings: Settings) -> Any:
    dtype = settings.probe.compute_dtype
    return settings.base, dtype if dtype in _DTYPES else None


def _data_key(config: DataConfig) -> Any:
    return config


def _dtype_name(settings: Settings) -> str:
    return settings.probe.compute_dtype or (
        "fp16" if settings.base.use_fp16 and not settings.base.use_quantization else "fp32"
    )
