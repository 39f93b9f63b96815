"""Convert decoder layers to NPT form in place, and back; switch the whole model between student,
teacher and floor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from npt.adapters.adapter import Mode, NPTAdapter
from npt.adapters.layer import NPT_FORMS, NPTLayer, device_of
from npt.base.families import MODEL_PARTS, check_layer, missing_parts
from npt.config import NPTConfig
from npt.errors import ConfigError, ModelError, kind_of

_STATE = "_npt_state"

VIEWED = "_npt_viewed"
"""Where a view (npt/evaluation/view.py) keeps the model that it shows."""

_FORWARDS = ("_old_forward", "forward")
"""Where a module may keep a forward of its own: under accelerate's hook, or in front of its
class's.
"""


@dataclass(frozen=True)
class AttachReport:
    """What `attach` did."""

    layers: tuple[int, ...]
    num_layers: int
    trainable_parameters: int
    base_parameters: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttachReport:
        """Of a model that has adapters."""
        layers, trainable = (
            npt_layers(model),
            sum(p.numel() for p in adapter_parameters(model).values()),
        )
        return cls(
            tuple(i for i, _ in layers),
            len(decoder_layers(model)),
            trainable,
            _logical_parameters(model) - trainable,
        )

    def __str__(self) -> str:
        return (
            f"converted {len(self.layers)} of {self.num_layers} layers"
            f" ({format_layers(self.layers)}): {self.trainable_parameters:,} trainable parameters"
            f" beside {self.base_parameters:,} frozen"
        )


@dataclass(frozen=True)
class _State:
    config: NPTConfig
    layers: tuple[int, ...]
    trainable_before: frozenset[str]
    random_start: bool = True
    overrides: list[Override] = field(default_factory=list)


@dataclass(eq=False)
class Override:
    """A mode that holds until it is released. before: the mode that each layer had until then."""

    mode: Mode
    before: list[tuple[NPTLayer, Mode]]


def viewed(model: Any) -> Any:
    """The model that a view shows; any other model itself. What is recorded of a model is recorded
    there.
    """
    return vars(model).get(VIEWED, model)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a causal language model.

    Raises:
        ModelError: there are none, or they are of a family that cannot be converted.
    """
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ModelError(
            f"{type(model).__name__} has no decoder layers at model.layers; load a Llama or the"
            " like for causal language modelling"
        )
    for index, layer in enumerate(layers):
        if not isinstance(layer, tuple(NPT_FORMS)):
            check_layer(index, layer)
    return layers


def resolve_layers(spec: str, num_layers: int) -> tuple[int, ...]:
    """Indices of `upper_half`, `all`, a range `8-15` (both ends included), a list `3,5,7`, or a mix
    `0,4-7`.

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
            raise ConfigError(
                f"--layers is {spec!r}; write upper_half, all, a range like 8-15 or a list like"
                " 3,5,7"
            )
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ConfigError(
                f"--layers has the range {part.strip()}, which runs backwards; write {last}-{first}"
            )
        if last >= num_layers:
            raise ConfigError(
                f"--layers names layer {last}, but the model has layers 0 to {num_layers - 1}"
            )
        chosen.update(range(first, last + 1))
    return tuple(sorted(chosen))


def check_fit(
    config: NPTConfig, model_config: PreTrainedConfig, max_length: int | None = None
) -> tuple[int, ...]:
    """The layers that `config` means on a model of this configuration; needs no weights.

    Args:
        config: of the adapters.
        model_config: of the base.
        max_length: tokens of a sample, where known.

    Raises:
        ConfigError: layers out of range, samples longer than the model has positions, or a rank
            larger than the hidden size, from where on the code z = A a holds nothing that a does
            not.
    """
    chosen = resolve_layers(config.layers, model_config.num_hidden_layers)
    flag = "adapter_rank" if config.ranks is None else "ranks"
    if max(config.ranks_of(len(chosen))) > model_config.hidden_size:
        largest = max(config.ranks_of(len(chosen)))
        raise ConfigError(
            f"--{flag} is {largest}, larger than the model's hidden size"
            f" {model_config.hidden_size}; lower it"
        )
    check_length(max_length or 0, model_config)
    return chosen


def check_length(max_length: int, model_config: PreTrainedConfig) -> None:
    """Refuse samples that are longer than the positions that the model was made for.

    Raises:
        ConfigError: both numbers.
    """
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(
            f"--max_length is {max_length}, the model has {positions} positions; lower it"
        )


def format_layers(layers: tuple[int, ...]) -> str:
    """Indices as ranges: (4, 5, 6, 9) -> '4-6,9'. The inverse of `resolve_layers`."""
    runs: list[list[int]] = []
    for index in layers:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def attach(
    model: PreTrainedModel, config: NPTConfig | None = None, *, seed: int = 0
) -> AttachReport:
    """Convert the chosen layers of `model` in place and freeze everything but their adapters.

    All is checked before the first layer is touched, so a refused call changes nothing.

    Args:
        model: a causal language model of a known family, quantised or not.
        config: the adapters' form; default `NPTConfig()`.
        seed: fixes the random start, independently of any other random state.

    Raises:
        ConfigError: layers out of range, or a rank larger than the hidden size.
        ModelError: not a model that can be converted, or adapters are attached already.
    """
    config = config if config is not None else NPTConfig()
    model = viewed(model)
    if is_attached(model):
        raise ModelError("the model has NPT adapters already; call npt.detach(model) first")
    layers = decoder_layers(model)
    missing = missing_parts(model, MODEL_PARTS)
    if missing:
        raise ModelError(
            f"{type(model).__name__} has no {', '.join(missing)}; load it for causal language"
            " modelling"
        )
    chosen = check_fit(config, model.config)
    for index in chosen:
        check_layer(index, layers[index])
    _check_forwards(layers)
    hidden_size, ffn_size = model.config.hidden_size, model.config.intermediate_size
    with torch.inference_mode(False):  # whatever the caller is in: they are to be trained
        adapters = {
            index: (
                NPTAdapter(
                    own,
                    hidden_size,
                    ffn_size,
                    torch.Generator().manual_seed(seed * 1_000_003 + index),
                ).to(device_of(layers[index]))
            )
            for index, own in _config_by_layer(config, chosen).items()
        }
    trainable_before = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for index, adapter in adapters.items():
        layer: Any = layers[index]
        layer.npt = adapter
        _become(layer, NPT_FORMS[type(layer)])
    setattr(model, _STATE, _State(config, chosen, trainable_before))
    vars(model)["save_pretrained"] = _refuse_to_save
    return AttachReport.of(model)


def detach(model: PreTrainedModel) -> None:
    """Give the base model back as it was before `attach`: classes, parameters, `requires_grad`.
    Without adapters: nothing. A view's are its model's.

    Raises:
        ModelError: somebody else has changed the class of a layer since, as sharding does; nothing
            is changed.
    """
    model = viewed(model)
    if not is_attached(model):
        return
    state: _State = getattr(model, _STATE)
    back = {npt_class: base_class for base_class, npt_class in NPT_FORMS.items()}
    for index, layer in npt_layers(model):
        if type(layer) not in back:
            raise ModelError(
                f"layer {index} has become {kind_of(layer)} and cannot be given back; load the base"
                " again"
            )
    for _, layer in npt_layers(model):
        del layer.npt
        _become(layer, back[type(layer)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in state.trainable_before)
    delattr(model, _STATE)
    vars(model).pop("save_pretrained", None)


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """In the place of transformers' own: what that writes of a converted model loads as the
    teacher, with a warning.

    Raises:
        ModelError: in any case.
    """
    raise ModelError(
        "a model with NPT adapters cannot be saved as a whole: it would load as its base;"
        " npt.save_adapter(model, FOLDER) saves the student, and behind npt.detach(model) the base"
        " can be saved"
    )


def _become(layer: Any, cls: type) -> None:
    """Give a layer another class. Where a forward is kept on the layer itself it is that of the
    class before, and would be called in its place for ever: so accelerate's hooks keep it, which
    carry tensors between the devices of a model that is spread over several.
    """
    before = type(layer).forward
    layer.__class__ = cls
    for name in _FORWARDS:
        if getattr(vars(layer).get(name), "__func__", None) is before:
            setattr(layer, name, MethodType(cls.forward, layer))  # type: ignore[attr-defined]


def _check_forwards(layers: nn.ModuleList) -> None:
    """Refuse layers whose own forward hides that of their class."""
    for index, layer in enumerate(layers):
        kept = [vars(layer)[name] for name in _FORWARDS if name in vars(layer)]
        if kept and not any(
            getattr(forward, "__func__", None) is type(layer).forward for forward in kept
        ):
            raise ModelError(
                f"the forward of layer {index} was replaced, so no adapter could take part in it;"
                " load the model with npt.load_base"
            )


def is_attached(model: PreTrainedModel) -> bool:
    return hasattr(viewed(model), _STATE)


def attached_config(model: PreTrainedModel) -> NPTConfig:
    """The configuration that `attach` was given.

    Raises:
        ModelError: no adapters are attached.
    """
    if not is_attached(model):
        raise ModelError(
            "the model has no NPT adapters; call npt.attach(model, npt.NPTConfig(...)) first"
        )
    return getattr(viewed(model), _STATE).config


def npt_layers(model: PreTrainedModel) -> list[tuple[int, NPTLayer]]:
    """(index, layer) of the converted layers, in order of depth."""
    return [
        (index, layer)
        for index, layer in enumerate(decoder_layers(model))
        if isinstance(layer, NPTLayer)
    ]


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The trainable parameters by their full name in the model, in a fixed order."""
    return {
        f"model.layers.{index}.npt.{name}": parameter
        for index, layer in npt_layers(model)
        for name, parameter in layer.npt.named_parameters()
    }


def adapter_shapes(model: PreTrainedModel, config: NPTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters that `attach` with this configuration would make; nothing
    is allocated.

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


def set_adapters(model: PreTrainedModel, config: NPTConfig, tensors: dict[str, Tensor]) -> None:
    """Give the attached adapters these numbers, and the ranks that `config` says; nothing else of
    their form may differ.

    From then on they count as started: a run whose `init` is calibrated trains them as they are.

    Args:
        model: with adapters attached.
        config: theirs, but for `ranks`.
        tensors: every parameter by its full name, of the shapes that `adapter_shapes` gives.
    """
    model = viewed(model)
    state: _State = getattr(model, _STATE)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == adapter_shapes(
        model, config
    )
    assert replace(config, ranks=None) == replace(state.config, ranks=None)
    if config != state.config:
        sizes = model.config.hidden_size, model.config.intermediate_size
        with torch.inference_mode(False):
            resized = {
                index: NPTAdapter(own, *sizes)
                for index, own in _config_by_layer(config, state.layers).items()
            }
            for index, layer in npt_layers(model):
                layer.npt.resize(resized[index])
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            parameter.copy_(tensors[name])
    setattr(model, _STATE, replace(state, config=config, random_start=False))


def at_random_start(model: PreTrainedModel) -> bool:
    """Whether the adapters are as `attach` made them, not solved or loaded since. What an optimizer
    does to them does not count.
    """
    attached_config(model)
    return getattr(viewed(model), _STATE).random_start


def override_mode(model: PreTrainedModel, mode: Mode) -> Override:
    """Let every converted layer compute `mode` until this is released."""
    asked = Override(mode, [(layer, layer.npt.mode) for _, layer in npt_layers(model)])
    if is_attached(model):
        getattr(viewed(model), _STATE).overrides.append(asked)
    for layer, _ in asked.before:
        layer.npt.mode = mode
    return asked


def release_mode(model: PreTrainedModel, asked: Override) -> None:
    """End an override: the layers compute what they did before it, or go on with what was asked for
    later and is not released yet.

    Adapters that were detached since have nothing to come back to.
    """
    overrides = getattr(viewed(model), _STATE).overrides if is_attached(model) else []
    if asked not in overrides:
        return
    place = overrides.index(asked)
    overrides.remove(asked)
    if place < len(overrides):
        overrides[place].before = asked.before
        return
    for layer, before in asked.before:
        layer.npt.mode = before


@contextmanager
def adapter_mode(model: PreTrainedModel, mode: Mode) -> Iterator[None]:
    """Within the context every converted layer computes `student`, `teacher` or `floor`; then what
    it did before.
    """
    asked = override_mode(model, mode)
    try:
        yield
    finally:
        release_mode(model, asked)


def adapters_disabled(model: PreTrainedModel):
    """Within the context the model is its own teacher: the base, bit for bit."""
    return adapter_mode(model, "teacher")


def _config_by_layer(config: NPTConfig, layers: tuple[int, ...]) -> dict[int, NPTConfig]:
    """Each layer's own configuration: that of all, with its own rank."""
    return {
        index: replace(config, rank=rank, ranks=None)
        for index, rank in zip(layers, config.ranks_of(len(layers)), strict=True)
    }


def _logical_parameters(model: PreTrainedModel) -> int:
    """Parameters of the model before packing: a 4-bit weight stores two in a byte."""
    total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        total += state.shape.numel() if state is not None else parameter.numel()
    return total
