"""A converted model: its layers, its adapters, and what they compute at the moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from npt.adapters.layer import NPT_FORMS, Mode, NPTLayer, in_parts
from npt.base.families import check_layer
from npt.config import NPTConfig
from npt.errors import ModelError

STATE = "_npt_state"
VIEWED = "_npt_viewed"
"""Attribute under which a view (npt/evaluation/view.py) keeps the model that it shows."""


@dataclass
class Attached:
    """A model's record of its adapters. trainable_before: names of the base's trainable parameters.
    random_start: the adapters are as `attach` made them."""

    config: NPTConfig
    trainable_before: frozenset[str]
    random_start: bool = True
    overrides: list[Override] = field(default_factory=list)


@dataclass(eq=False)
class Override:
    """A mode that holds until it is released. before: each layer's mode until then."""

    mode: Mode
    before: list[tuple[NPTLayer, Mode]]


def viewed(model: Any) -> Any:
    """Return the model that a view shows, any other model itself: the one that keeps records."""
    return vars(model).get(VIEWED, model)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal language model.

    Raises:
        ModelError: it has none, or they are of a family that cannot be converted.
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


def npt_layers(model: PreTrainedModel) -> list[tuple[int, NPTLayer]]:
    """Return (index, layer) of the converted layers, in order of depth."""
    return [
        (index, layer)
        for index, layer in enumerate(decoder_layers(model))
        if isinstance(layer, NPTLayer)
    ]


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by their full name in the model, in a fixed order."""
    return {
        f"model.layers.{index}.npt.{name}": parameter
        for index, layer in npt_layers(model)
        for name, parameter in layer.npt.named_parameters()
    }


def is_attached(model: PreTrainedModel) -> bool:
    return hasattr(viewed(model), STATE)


def attached(model: PreTrainedModel) -> Attached:
    """Return the record that `attach` left on a model.

    Raises:
        ModelError: no adapters are attached.
    """
    if not is_attached(model):
        raise ModelError(
            "the model has no NPT adapters; call npt.attach(model, npt.NPTConfig(...)) first"
        )
    return getattr(viewed(model), STATE)


def attached_config(model: PreTrainedModel) -> NPTConfig:
    """Return the configuration of a model's adapters; ModelError if it has none."""
    return attached(model).config


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether the decoder layers are sharded."""
    return any(in_parts(layer) for layer in decoder_layers(model))


def override_mode(model: PreTrainedModel, mode: Mode) -> Override:
    """Let every converted layer compute `mode` until this is released."""
    override = Override(mode, [(layer, layer.npt.mode) for _, layer in npt_layers(model)])
    record: Attached | None = getattr(viewed(model), STATE, None)
    if record is not None:
        record.overrides.append(override)
    for layer, _ in override.before:
        layer.npt.mode = mode
    return override


def release_mode(model: PreTrainedModel, override: Override) -> None:
    """End an override: the layers compute what they did before it, or what a later one asks for."""
    record: Attached | None = getattr(viewed(model), STATE, None)
    if record is None or override not in record.overrides:  # the adapters were detached
        return
    overrides = record.overrides
    place = overrides.index(override)
    overrides.remove(override)
    if place < len(overrides):
        overrides[place].before = override.before
        return
    for layer, before in override.before:
        layer.npt.mode = before


@contextmanager
def adapter_mode(model: PreTrainedModel, mode: Mode) -> Iterator[None]:
    """Let every converted layer of the model compute `mode` within the context: `student`,
    `teacher` or `floor`, which drops attention.
    """
    override = override_mode(model, mode)
    try:
        yield
    finally:
        release_mode(model, override)


def adapters_disabled(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Make the model its own teacher within the context: the base, bit for bit."""
    return adapter_mode(model, "teacher")
