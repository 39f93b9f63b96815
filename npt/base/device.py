"""The device that is computed on if none was named: one decision, for every part of the package."""

from __future__ import annotations

import os
import re
import warnings

import torch

from npt.errors import ConfigError, first_line

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


def check_card(device: torch.device, *, bf16: bool = False, tf32: bool = False) -> None:
    """Refuse a card that is not there, or that torch has no kernels for (ConfigError); warn if
    products in bf16 or TF32 are asked of one before Ampere (compute capability 8.0).
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigError(f"there is no device {device}, torch sees {count} GPUs; name another")
    major, minor = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    compiled = " ".join(torch.cuda.get_arch_list())
    codes = re.findall(r"(sm|compute)_(\d+)(\d)", compiled)
    runs = [(int(a), int(b)) for kind, a, b in codes if kind == "compute" or int(a) == major]
    if codes and not any(code <= (major, minor) for code in runs):
        raise ConfigError(
            f"torch {torch.__version__} has no kernels for {card}, only {compiled}; install one"
            " that has (before 7.5 that for CUDA 12.6, from torch's index whl/cu126), or set"
            f" {VARIABLE}=cpu"
        )
    if bf16 and major < 8:
        warnings.warn(f"{card} emulates bf16: right but slow; compute in fp32", stacklevel=3)
    if tf32 and major < 8:
        warnings.warn(f"{card} has no TF32; drop --matmul_precision high", stacklevel=3)


def card_error(device: torch.device) -> str | None:
    """Return the first line of the CUDA error that a card is left with, None if it computes.

    To be asked after an error, before bitsandbytes is: its C code ends the process at any error
    that is pending. One that passes is reported once.
    """
    message = None
    for _ in range(2 if device.type == "cuda" else 0):
        try:
            torch.cuda.synchronize(device)
            torch.ones((), device=device)  # a launch reports what others have left
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            message = first_line(error)
        else:
            return None
    return message


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
