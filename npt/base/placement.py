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


def check_placement(name: str, model: PreTrainedModel) -> None:
    """Refuse weights that every step would fetch from disk or host, and layers on several devices.

    Parameters, buffers and the statistics of 4-bit weights are looked at, not the state dict, which
    has entries of bitsandbytes' own that it makes on the host.
    """
    tensors: dict[str, torch.Tensor] = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
    }
    for key, module in quantized_linears(model):
        for part, tensor in statistics_of(module).items():
            tensors[f"{key}.weight.{part}"] = tensor
    on_gpu = any(tensor.device.type not in ("cpu", "meta") for tensor in tensors.values())
    devices: dict[str, str] = {}
    for key, tensor in tensors.items():
        if tensor.is_meta or (on_gpu and tensor.device.type == "cpu"):
            raise ModelError(
                f"{name} is not all on the GPUs: {key} was left to the host or the disk; load it in"
                " 4 bit, or take more GPUs"
            )
        layer, device = ".".join(key.split(".")[:3]), str(tensor.device)
        if layer.startswith("model.layers.") and devices.setdefault(layer, device) != device:
            raise ModelError(
                f"{name}: device_map puts {layer} on {devices[layer]} and {device}; a layer"
                " must stay in one piece"
            )
