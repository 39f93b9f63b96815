"""A run that is planned: a base's configuration, the settings of the run, and small models of the
same layers."""

from __future__ import annotations

import copy
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from npt.adapters.fit import resolve_layers
from npt.base.device import default_device
from npt.base.load import COMPUTE
from npt.config import BaseConfig, NPTConfig, TrainConfig
from npt.errors import ConfigError
from npt.planning.shape import Shape


@dataclass(frozen=True)
class Depth:
    """Numbers of layers: `before` the first converted one, `converted` ones, others `between`
    these, and `after` the last.
    """

    before: int
    converted: int
    between: int
    after: int

    @classmethod
    def of(cls, converted: tuple[int, ...], layers: int) -> Depth:
        first, last = converted[0], converted[-1]
        return cls(first, len(converted), last + 1 - first - len(converted), layers - 1 - last)

    @property
    def layers(self) -> int:
        return self.before + self.converted + self.between + self.after

    @property
    def indices(self) -> tuple[int, ...]:
        """Of the converted layers; those between come after the first one."""
        first, rest = self.before, self.before + 1 + self.between
        return (first, *range(rest, rest + self.converted - 1))


@dataclass(frozen=True)
class Workload:
    """A run that is planned.

    config: of the base. length: tokens of a row. quantization: nf4, fp4 or None. stored: dtype of
    what is not packed. teacher: dtype of a teacher of its own, None if the base teaches. processes:
    that share a window. attn_implementation: as in `load_base`. compute_dtype: of products of
    packed weights. teacher_attention: of such a teacher, None for the student's.
    """

    config: PreTrainedConfig
    adapter: NPTConfig
    training: TrainConfig
    length: int
    quantization: str | None = None
    stored: torch.dtype = torch.float32
    teacher: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    processes: int = 1
    attn_implementation: str = "sdpa"
    compute_dtype: torch.dtype = torch.float32
    teacher_attention: str | None = None

    @classmethod
    def of(
        cls,
        base: BaseConfig,
        config: PreTrainedConfig,
        adapter: NPTConfig,
        training: TrainConfig,
        length: int,
        device: torch.device | None = None,
        *,
        stored: torch.dtype | None = None,
        processes: int = 1,
    ) -> Workload:
        """Return the run that settings ask for.

        config: of the base. device: default the GPU, if there is one. stored: dtype of a packed
        base's other weights, default that of its configuration.

        Raises:
            ConfigError: the base is spread over several devices.
        """
        for flag in ("device_map", "shard_base"):
            if getattr(base, flag):
                raise ConfigError(
                    f"--{flag} spreads the base over several devices, and memory is planned for"
                    " one; leave one of the two out"
                )
        packed = getattr(config, "quantization_config", None) is not None
        quantization = base.quant_type if packed else base.quantization
        if quantization is None:
            stored = torch.float16 if base.use_fp16 else torch.float32
        elif stored is None:
            stored = getattr(config, "dtype", None) or torch.float32
        return cls(
            config,
            adapter,
            training,
            length,
            quantization,
            stored,
            None if base.teacher_precision is None else COMPUTE[base.teacher_precision],
            default_device() if device is None else device,
            processes,
            base.attn_implementation,
            COMPUTE[base.compute_dtype],
        )

    @property
    def shape(self) -> Shape:
        return Shape.of(self.config)

    @property
    def depth(self) -> Depth:
        """Of the whole model."""
        layers = self.config.num_hidden_layers
        return Depth.of(resolve_layers(self.adapter.layers, layers), layers)

    @property
    def stages(self) -> dict[str, TrainConfig]:
        """The settings of each stage by its strategy."""
        return {name: self.training.in_stage(name) for name, _ in self.training.stage_shares}

    @property
    def approximate(self) -> bool:
        """A budget of ranks is still to be spent, by the calibration."""
        budget = self.training.rank_budget is not None and self.adapter.ranks is None
        return budget or self.adapter.spends_ranks

    @property
    def form(self) -> NPTConfig:
        """The adapters as planned: of a budget that is still to be spent, every layer has an even
        share, rounded up.
        """
        budget = self.training.rank_budget
        if budget is None or self.adapter.ranks is not None:
            return self.adapter
        return replace(self.adapter, rank=-(-budget // self.depth.converted))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of each converted layer, as planned."""
        return self.form.ranks_of(self.depth.converted)

    @property
    def mean_rank(self) -> int:
        return max(1, round(statistics.mean(self.ranks)))

    def small_adapter(self, depth: Depth, rank: int) -> NPTConfig:
        """Return the adapters' form on the converted layers of a small model."""
        layers = ",".join(map(str, depth.indices))
        return replace(self.form, layers=layers, rank=rank, ranks=None, init="random")

    def small_config(self, layers: int, vocab: int | None = None) -> PreTrainedConfig:
        """Return the base's configuration with other numbers of layers and tokens."""
        small: Any = copy.deepcopy(self.config)
        small.num_hidden_layers = layers
        for name in ("layer_types", "no_rope_layers"):
            kinds = getattr(small, name, None)
            if kinds is not None:
                setattr(small, name, (list(kinds) * layers)[:layers])
        if vocab is not None:
            small.vocab_size = vocab
        small.pad_token_id = None
        return small

    def narrowed(self, share: int) -> Workload | None:
        """Return the workload on a base of 1/`share` of the width: of D, F, heads and vocabulary,
        with heads as wide as they are. None if these cannot be divided so often."""
        shape, narrow = self.shape, copy.deepcopy(self.config)
        heads, kv_heads = shape.heads // share, max(1, shape.kv_heads // share)
        if (
            any(size % share for size in (shape.hidden, shape.ffn, shape.heads))
            or max(self.ranks) > shape.hidden // share
            or heads % kv_heads
        ):
            return None
        narrow.hidden_size, narrow.intermediate_size = shape.hidden // share, shape.ffn // share
        narrow.num_attention_heads, narrow.num_key_value_heads = heads, kv_heads
        narrow.head_dim, narrow.vocab_size = shape.head_dim, max(1, shape.vocab // share)
        return replace(self, config=narrow)
