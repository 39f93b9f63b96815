"""The device that is computed on if none was named: one decision, for every part of the package."""

from __future__ import annotations

import os

import torch

from npt.errors import ConfigError

VARIABLE = "NPT_DEVICE"
"""Environment variable that names the default device, `cpu` or `cuda`."""


def default_device() -> torch.device:
    """Return the first GPU that this process sees, else the CPU, unless `NPT_DEVICE` names one."""
    has_gpu = torch.cuda.is_available()
    name = os.environ.get(VARIABLE) or ("cuda" if has_gpu else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"{VARIABLE} is {name!r}; set it to cpu or cuda, or unset it")
    if name == "cuda" and not has_gpu:
        raise ConfigError(f"{VARIABLE} is cuda, but torch sees no GPU; set it to cpu, or unset it")
    return torch.device(name)


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
