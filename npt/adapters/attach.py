"""Attach adapters to a model, set their values, and detach them.

Attaching converts decoder layers in place (npt/adapters/layer.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.adapters.converted import (
    STATE,
    Attached,
    adapter_parameters,
    adapter_tensors,
    attached,
    by_full_name,
    decoder_layers,
    is_attached,
    npt_layers,
    viewed,
)
from npt.adapters.fit import check_fit, config_by_layer, format_layers
from npt.adapters.layer import NPT_FORMS, NPTAdapter
from npt.base.families import MODEL_PARTS, check_layer, missing_parts
from npt.config import NPTConfig
from npt.errors import ModelError, kind_of
from npt.hooks import is_replaced


@dataclass(frozen=True)
class AttachReport:
    """The result of `attach`.

    Attributes:
        layers: indices of the converted layers.
        num_layers: number of layers of the model.
        trainable_parameters: parameters of the adapters.
        base_parameters: frozen parameters; a 4-bit weight counts unpacked.
    """

    layers: tuple[int, ...]
    num_layers: int
    trainable_parameters: int
    base_parameters: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttachReport:
        """Return the report on a model with adapters."""
        trainable = sum(p.numel() for p in adapter_parameters(model).values())
        everything = 0
        for parameter in model.parameters():
            # numel() of a 4-bit weight counts bytes, each of two parameters
            state = getattr(parameter, "quant_state", None)
            shape = parameter.shape if state is None else state.shape
            everything += shape.numel()
        layers = tuple(index for index, _ in npt_layers(model))
        return cls(layers, len(decoder_layers(model)), trainable, everything - trainable)

    def __str__(self) -> str:
        return (
            f"converted {len(self.layers)} of {self.num_layers} layers"
            f" ({format_layers(self.layers)}): {self.trainable_parameters:,} trainable parameters,"
            f" {self.base_parameters:,} frozen"
        )


def attach(
    model: PreTrainedModel, config: NPTConfig | None = None, *, seed: int = 0
) -> AttachReport:
    """Convert the chosen layers of `model` in place and freeze everything but their adapters.

    If it raises, the model is unchanged.

    Args:
        model: a causal language model of a supported family, quantised or not.
        config: the adapters' form; default `NPTConfig()`.
        seed: determines the random start, independently of any other random state.

    Raises:
        ConfigError: layers are out of range, or a rank exceeds the hidden size.
        ModelError: the model cannot be converted or has adapters already.
    """
    config = config or NPTConfig()
    model = viewed(model)
    # all checks come before the first change
    if is_attached(model):
        raise ModelError("the model already has NPT adapters: call npt.detach(model) first")
    layers = decoder_layers(model)
    if missing := missing_parts(model, MODEL_PARTS):
        raise ModelError(
            f"{type(model).__name__} has no {', '.join(missing)}: load it with npt.load_base or"
            " AutoModelForCausalLM"
        )
    real = (p for p in model.parameters() if not p.is_meta)  # meta: npt/base/layers.py
    devices = list(dict.fromkeys(str(parameter.device) for parameter in real)) or ["meta"]
    if len(devices) > 1:
        raise ModelError(
            f"the base is on {' and '.join(devices)}: load it on one device"
            " (npt.load_base(..., device=...)); if it does not fit, shard it with npt.shard_base"
        )
    chosen = check_fit(config, model.config)
    for index in chosen:
        check_layer(index, layers[index])
    # the class is swapped, which an instance's own forward would hide
    for index, decoder_layer in enumerate(layers):
        if is_replaced(decoder_layer):
            raise ModelError(
                f"the forward of layer {index} was replaced, so an adapter there would have no"
                " effect: load the model with npt.load_base"
            )
    sizes = model.config.hidden_size, model.config.intermediate_size
    adapters = {}
    with torch.inference_mode(False):  # inference tensors could not be trained
        for index, form in config_by_layer(config, chosen).items():
            # a seed per layer: its start does not depend on which others are converted
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            adapters[index] = NPTAdapter(form, *sizes, generator).to(devices[0])
    if config.active:
        shared = adapters[chosen[0]].log_tau
        for adapter in adapters.values():
            adapter.log_tau = shared
    trainable_before = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for index, adapter in adapters.items():
        layer: Any = layers[index]
        layer.npt = adapter
        layer.__class__ = NPT_FORMS[type(layer)]
    setattr(model, STATE, Attached(config, trainable_before))
    vars(model)["save_pretrained"] = _refuse_to_save
    return AttachReport.of(model)


def detach(model: PreTrainedModel) -> None:
    """Restore the base to its state before `attach`: classes, parameters, `requires_grad`.

    Do nothing if the model has no adapters.

    Raises:
        ModelError: a layer's class has changed since, as by sharding. The model is unchanged.
    """
    model = viewed(model)
    if not is_attached(model):
        return
    record = attached(model)
    converted = npt_layers(model)
    back = {npt_class: base_class for base_class, npt_class in NPT_FORMS.items()}
    for index, layer in converted:
        if type(layer) not in back:
            raise ModelError(
                f"layer {index} has become {kind_of(layer)} and cannot be restored: load the base"
                " again"
            )
    for _, layer in converted:
        del layer.npt
        layer.__class__ = back[type(layer)]  # type: ignore[assignment]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in record.trainable_before)
    delattr(model, STATE)
    vars(model).pop("save_pretrained", None)


def adapter_shapes(model: PreTrainedModel, config: NPTConfig) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that `attach` would make. Raises like `attach`."""
    sizes = model.config.hidden_size, model.config.intermediate_size
    forms = config_by_layer(config, check_fit(config, model.config))
    with torch.device("meta"):
        adapters = {index: NPTAdapter(form, *sizes) for index, form in forms.items()}
    tensors = by_full_name((index, a.state_dict().items()) for index, a in adapters.items())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def set_adapters(model: PreTrainedModel, config: NPTConfig, tensors: dict[str, Tensor]) -> None:
    """Set the values of the attached adapters, and the ranks of `config`.

    Training with `init="calibrated"` then starts from these values.

    Args:
        model: with adapters attached.
        config: the adapters' own, except for `ranks`.
        tensors: every tensor by its full name, in the shapes of `adapter_shapes`.
    """
    model = viewed(model)
    record = attached(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == adapter_shapes(model, config)
    assert replace(config, ranks=None) == replace(record.config, ranks=None)
    layers = dict(npt_layers(model))
    for index, form in config_by_layer(config, tuple(layers)).items():
        layers[index].npt.config = form
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in adapter_tensors(model).items():
            if tensor.shape != shapes[name]:
                fresh = tensor.new_empty(shapes[name])
                if isinstance(tensor, nn.Parameter):
                    fresh = nn.Parameter(fresh, tensor.requires_grad)
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, fresh)
                tensor = fresh
            tensor.copy_(tensors[name])
    record.config = config
    record.random_start = False


def add_multipliers(model: PreTrainedModel) -> None:
    """Give every product of additive adapters its M, all 0. m is then exactly 1, so the student's
    outputs keep their bits.
    """
    record = attached(model)
    assert record.config.modulation == "additive"
    record.config = replace(record.config, modulation="both")
    with torch.inference_mode(False):
        for _, layer in npt_layers(model):
            adapter = layer.npt
            adapter.config = replace(adapter.config, modulation="both")
            # as a dict, so that torch sorts them as it does in `attach`
            adapter.M.update({t: torch.zeros_like(adapter.B[t]) for t in adapter.config.multiplied})


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Replace `save_pretrained`, whose files would load as the base alone."""
    raise ModelError(
        "save_pretrained does not support a model with NPT adapters: save the student with"
        " npt.save_adapter(model, FOLDER), or call npt.detach(model) first to save the base"
    )
