"""A converted model: its layers, its adapters, and the mode they compute in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.layer import Mode, NPTLayer
from npt.config import NPTConfig
from npt.errors import ModelError
from npt.hooks import in_parts

T = TypeVar("T")

STATE = "_npt_state"
VIEWED = "_npt_viewed"
"""Attribute of a view (npt/evaluation/view.py): the model that it shows."""


@dataclass
class Attached:
    """A model's record of its adapters.

    Attributes:
        config: their form.
        trainable_before: names of the parameters that were trainable before `attach`.
        random_start: whether they were neither calibrated nor loaded, trained or not.
    """

    config: NPTConfig
    trainable_before: frozenset[str]
    random_start: bool = True


def viewed(model: Any) -> Any:
    """Return the model that a view shows, which keeps the state; any other model itself."""
    return vars(model).get(VIEWED, model)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a causal language model; raise ModelError if it has none."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
        raise ModelError(
            f"{type(model).__name__} has no decoder layers at model.layers: load a causal language"
            " model of a supported family with npt.load_base"
        )
    return layers


def npt_layers(model: PreTrainedModel) -> list[tuple[int, NPTLayer]]:
    """Return (index, layer) of the converted layers, in order of depth."""
    return [
        (index, layer)
        for index, layer in enumerate(decoder_layers(model))
        if isinstance(layer, NPTLayer)
    ]


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the adapters' parameters by their full name in the model, in a fixed order. Layers
    share log_tau, which has the name of the first one.
    """
    return by_full_name((i, layer.npt.named_parameters()) for i, layer in npt_layers(model))


def adapter_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return all that a saved adapter holds: `adapter_parameters`, and what is not trained."""
    adapters = [(index, layer.npt) for index, layer in npt_layers(model)]
    return by_full_name((i, chain(a.named_parameters(), a.named_buffers())) for i, a in adapters)


def by_full_name(layers: Iterable[tuple[int, Iterable[tuple[str, T]]]]) -> dict[str, T]:
    """Return what each converted layer's adapter has, by its full name in the model."""
    named: dict[str, T] = {}
    for number, (index, of_adapter) in enumerate(layers):
        for name, value in of_adapter:
            if number == 0 or name != "log_tau":
                named[f"model.layers.{index}.npt.{name}"] = value
    return named


def is_attached(model: PreTrainedModel) -> bool:
    return hasattr(viewed(model), STATE)


def attached(model: PreTrainedModel) -> Attached:
    """Return the record that `attach` left on a model; raise ModelError if it has none."""
    if not is_attached(model):
        raise ModelError(
            "the model has no NPT adapters: call npt.attach(model, npt.NPTConfig(...)) first"
        )
    return getattr(viewed(model), STATE)


def attached_config(model: PreTrainedModel) -> NPTConfig:
    """Return the configuration of a model's adapters; raise ModelError if it has none."""
    return attached(model).config


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether the decoder layers are sharded."""
    return any(in_parts(layer) for layer in decoder_layers(model))


@contextmanager
def attribute_set(name: str, values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Within the context, set an attribute of each object to the value beside it."""
    outer = [(owner, getattr(owner, name)) for owner, _ in values]
    try:
        for owner, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, value in outer:
            setattr(owner, name, value)


def adapter_mode(model: PreTrainedModel, mode: Mode) -> AbstractContextManager[None]:
    """Within the context, make every converted layer of a model compute in a mode: `student`,
    `teacher` or `floor`. Contexts nest.
    """
    return attribute_set("mode", [(layer.npt, mode) for _, layer in npt_layers(model)])


def adapters_disabled(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Within the context, make the model compute as its base, the teacher, bit for bit."""
    return adapter_mode(model, "teacher")


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Set a model to evaluation mode within the context, then restore each module's mode."""
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
