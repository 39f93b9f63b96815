"""Convert decoder layers to NPT form in place, and back; switch the whole model between student, teacher and floor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedConfig

from npt.adapters.adapter import Mode, NPTAdapter
from npt.adapters.layer import FAMILIES, NPTLayer
from npt.config import NPTConfig
from npt.errors import ConfigError, ModelError

_STATE = "_npt_state"


@dataclass(frozen=True)
class AttachReport:
    """What `attach` did."""

    layers: tuple[int, ...]
    num_layers: int
    trainable_parameters: int
    base_parameters: int

    def __str__(self) -> str:
        return (
            f"converted {len(self.layers)} of {self.num_layers} layers ({format_layers(self.layers)}): "
            f"{self.trainable_parameters:,} trainable parameters beside {self.base_parameters:,} frozen"
        )


@dataclass(frozen=True)
class _State:
    config: NPTConfig
    layers: tuple[int, ...]
    trainable_before: frozenset[str]
    random_start: bool = True


def decoder_layers(model: LlamaForCausalLM) -> nn.ModuleList:
    """The decoder layers of a causal language model.

    Raises:
        ModelError: there are none, or they are of a family that cannot be converted.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ModelError(f"{type(model).__name__} has no decoder layers at model.layers; load a Llama for causal language modelling")
    known = tuple(FAMILIES)
    for index, layer in enumerate(layers):
        if not isinstance(layer, known):
            names = ", ".join(c.__name__ for c in known)
            raise ModelError(f"layer {index} is a {type(layer).__name__}; only {names} can be converted")
    return layers


def resolve_layers(spec: str, num_layers: int) -> tuple[int, ...]:
    """Indices of `upper_half`, `all`, a range `8-15` (both ends included), a list `3,5,7`, or a mix `0,4-7`.

    Raises:
        ConfigError: not of that form, or an index outside the model.
    """
    text = spec.strip()
    if text == "all":
        return tuple(range(num_layers))
    if text == "upper_half":
        return tuple(range(num_layers // 2, num_layers))
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
        if not match:
            raise ConfigError(f"--layers is {spec!r}; write upper_half, all, a range like 8-15 or a list like 3,5,7")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ConfigError(f"--layers has the range {part.strip()}, which runs backwards; write {last}-{first}")
        if last >= num_layers:
            raise ConfigError(f"--layers names layer {last}, but the model has layers 0 to {num_layers - 1}")
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def check_fit(config: NPTConfig, model_config: PreTrainedConfig, max_length: int | None = None) -> tuple[int, ...]:
    """The layers that `config` means on a model of this configuration; needs no weights.

    Args:
        config: of the adapters.
        model_config: of the base.
        max_length: tokens of a sample, where known.

    Raises:
        ConfigError: layers out of range, samples longer than the model has positions, or a rank larger than the hidden size,
            from where on the code z = A a holds nothing that a does not.
    """
    chosen = resolve_layers(config.layers, model_config.num_hidden_layers)
    flag = "adapter_rank" if config.ranks is None else "ranks"
    if max(config.ranks_of(len(chosen))) > model_config.hidden_size:
        largest = max(config.ranks_of(len(chosen)))
        raise ConfigError(f"--{flag} is {largest}, larger than the model's hidden size {model_config.hidden_size}; lower it")
    check_length(max_length or 0, model_config)
    return chosen


def check_length(max_length: int, model_config: PreTrainedConfig) -> None:
    """Refuse samples that are longer than the positions that the model was made for.

    Raises:
        ConfigError: both numbers.
    """
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(f"--max_length is {max_length}, the model has {positions} positions; lower it")


def format_layers(layers: tuple[int, ...]) -> str:
    """Indices as ranges: (4, 5, 6, 9) -> '4-6,9'. The inverse of `resolve_layers`."""
    runs: list[list[int]] = []
    for index in layers:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def attach(model: LlamaForCausalLM, config: NPTConfig | None = None, *, seed: int = 0) -> AttachReport:
    """Convert the chosen layers of `model` in place and freeze everything but their adapters.

    All is checked before the first layer is touched, so a refused call changes nothing.

    Args:
        model: a Llama for causal language modelling, quantised or not.
        config: the adapters' form; default `NPTConfig()`.
        seed: fixes the random start, independently of any other random state.

    Raises:
        ConfigError: layers out of range, or a rank larger than the hidden size.
        ModelError: not a model that can be converted, or adapters are attached already.
    """
    config = config if config is not None else NPTConfig()
    if is_attached(model):
        raise ModelError("the model has NPT adapters already; call npt.detach(model) first")
    layers = decoder_layers(model)
    chosen = check_fit(config, model.config)
    hidden_size, ffn_size = model.config.hidden_size, model.config.intermediate_size
    adapters = {
        index: NPTAdapter(own, hidden_size, ffn_size, torch.Generator().manual_seed(seed * 1_000_003 + index))
        for index, own in _config_by_layer(config, chosen).items()
    }
    base_parameters = _logical_parameters(model)
    trainable_before = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for index, adapter in adapters.items():
        layer: Any = layers[index]
        adapter.to(layer.input_layernorm.weight.device)
        layer.npt = adapter
        layer.__class__ = FAMILIES[type(layer)]
    setattr(model, _STATE, _State(config, chosen, trainable_before))
    trainable = sum(p.numel() for p in adapter_parameters(model).values())
    return AttachReport(chosen, len(layers), trainable, base_parameters)


def detach(model: LlamaForCausalLM) -> None:
    """Give the base model back as it was before `attach`: classes, parameters, `requires_grad`. Without adapters: nothing."""
    if not is_attached(model):
        return
    state: _State = getattr(model, _STATE)
    back = {npt_class: base_class for base_class, npt_class in FAMILIES.items()}
    for _, layer in npt_layers(model):
        del layer.npt
        cast(Any, layer).__class__ = back[type(layer)]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in state.trainable_before)
    delattr(model, _STATE)


def is_attached(model: LlamaForCausalLM) -> bool:
    return hasattr(model, _STATE)


def attached_config(model: LlamaForCausalLM) -> NPTConfig:
    """The configuration that `attach` was given.

    Raises:
        ModelError: no adapters are attached.
    """
    if not is_attached(model):
        raise ModelError("the model has no NPT adapters; call npt.attach(model, npt.NPTConfig(...)) first")
    return getattr(model, _STATE).config


def npt_layers(model: LlamaForCausalLM) -> list[tuple[int, NPTLayer]]:
    """(index, layer) of the converted layers, in order of depth."""
    return [(index, layer) for index, layer in enumerate(decoder_layers(model)) if isinstance(layer, NPTLayer)]


def adapter_parameters(model: LlamaForCausalLM) -> dict[str, nn.Parameter]:
    """The trainable parameters by their full name in the model, in a fixed order."""
    return {
        f"model.layers.{index}.npt.{name}": parameter
        for index, layer in npt_layers(model)
        for name, parameter in layer.npt.named_parameters()
    }


def adapter_shapes(model: LlamaForCausalLM, config: NPTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that `attach` with this configuration would make; nothing is allocated.

    Raises:
        ConfigError, ModelError: as `attach`.
    """
    decoder_layers(model)
    chosen = check_fit(config, model.config)
    with torch.device("meta"):
        adapters = {
            index: NPTAdapter(own, model.config.hidden_size, model.config.intermediate_size)
            for index, own in _config_by_layer(config, chosen).items()
        }
    return {
        f"model.layers.{index}.npt.{name}": tuple(parameter.shape)
        for index, adapter in adapters.items()
        for name, parameter in adapter.named_parameters()
    }


def set_adapters(model: LlamaForCausalLM, config: NPTConfig, tensors: dict[str, Tensor]) -> None:
    """Give the attached adapters these numbers, and the ranks that `config` says; nothing else of their form may differ.

    From then on they count as started: a run whose `init` is calibrated trains them as they are.

    Args:
        model: with adapters attached.
        config: theirs, but for `ranks`.
        tensors: every parameter by its full name, of the shapes that `adapter_shapes` gives.
    """
    state: _State = getattr(model, _STATE)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == adapter_shapes(model, config)
    assert replace(config, ranks=None) == replace(state.config, ranks=None)
    if config != state.config:
        for index, own in _config_by_layer(config, state.layers).items():
            layer: Any = decoder_layers(model)[index]
            adapter = NPTAdapter(own, model.config.hidden_size, model.config.intermediate_size)
            adapter.mode, adapter.observer = layer.npt.mode, layer.npt.observer
            layer.npt = adapter.to(layer.npt.A.device)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            parameter.copy_(tensors[name])
    setattr(model, _STATE, replace(state, config=config, random_start=False))


def at_random_start(model: LlamaForCausalLM) -> bool:
    """Whether the adapters are as `attach` made them, not solved or loaded since. What an optimizer does to them does not count."""
    attached_config(model)
    return getattr(model, _STATE).random_start


@contextmanager
def adapter_mode(model: LlamaForCausalLM, mode: Mode) -> Iterator[None]:
    """Within the context every converted layer computes `student`, `teacher` or `floor`; then what it did before."""
    adapters = [layer.npt for _, layer in npt_layers(model)]
    before = [adapter.mode for adapter in adapters]
    try:
        for adapter in adapters:
            adapter.mode = mode
        yield
    finally:
        for adapter, old in zip(adapters, before, strict=True):
            adapter.mode = old


def adapters_disabled(model: LlamaForCausalLM):
    """Within the context the model is its own teacher: the base, bit for bit."""
    return adapter_mode(model, "teacher")


def _config_by_layer(config: NPTConfig, layers: tuple[int, ...]) -> dict[int, NPTConfig]:
    """Each layer's own configuration: that of all, with its own rank."""
    return {index: replace(config, rank=rank, ranks=None) for index, rank in zip(layers, config.ranks_of(len(layers)), strict=True)}


def _logical_parameters(model: LlamaForCausalLM) -> int:
    """Parameters of the model before packing: a 4-bit weight stores two in a byte."""
    total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        total += state.shape.numel() if state is not None else parameter.numel()
    return total
