"""The devices that a base lies on: whole on its GPUs, every layer in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.base.device import default_device
from npt.base.linear import quantized_linears, statistics_of
from npt.config import DEVICE_MAPS
from npt.errors import ConfigError, ModelError


def device_map_of(
    device: str | torch.device | None, device_map: str | Mapping[str, Any] | None
) -> Any:
    """Return transformers' device map."""
    if device_map is None:
        return {"": torch.device(device) if device is not None else default_device()}
    if device is not None:
        raise ConfigError(f"device is {device} and device_map {device_map!r}; drop one of the two")
    if isinstance(device_map, Mapping):
        return dict(device_map)
    if device_map not in DEVICE_MAPS:
        raise ConfigError(
            f"device_map is {device_map!r}; choose from {', '.join(DEVICE_MAPS)}, or map module"
            " names to devices"
        )
    return device_map


def check_placed(name: str, model: PreTrainedModel) -> None:
    """Refuse weights that every step would fetch from disk or host.

    Parameters, buffers and the statistics of 4-bit weights are looked at, not the state dict, which
    has entries of bitsandbytes' own that it makes on the host.
    """
    places = {
        key: tensor.device for key, tensor in [*model.named_parameters(), *model.named_buffers()]
    }
    for key, module in quantized_linears(model):
        for part, tensor in statistics_of(module).items():
            places[f"{key}.weight.{part}"] = tensor.device
    on_gpu = any(place.type not in ("cpu", "meta") for place in places.values())
    fetched = ("meta", "cpu") if on_gpu else ("meta",)
    left = next((key for key, place in places.items() if place.type in fetched), None)
    if left is not None:
        raise ModelError(
            f"{name} is not all on the GPUs: {left} was left to the host or the disk; load it in 4"
            " bit, or take more GPUs"
        )


def check_pieces(name: str, model: PreTrainedModel) -> None:
    """Refuse layers on several devices, statistics of 4-bit weights included."""
    for index, layer in enumerate(model.model.layers):
        tensors: list[torch.Tensor] = list(layer.parameters())
        for _, module in quantized_linears(layer):
            tensors += statistics_of(module).values()
        devices = list(dict.fromkeys(str(tensor.device) for tensor in tensors))
        if len(devices) > 1:
            raise ModelError(
                f"{name}: device_map puts layer {index} on {' and '.join(devices)}; a layer must"
                " stay in one piece"
            )
