"""The default device, and checks of a GPU."""

from __future__ import annotations

import functools
import os
import re
import warnings
from pathlib import Path

import torch

from npt.errors import ConfigError, first_line

VARIABLE = "NPT_DEVICE"
"""Environment variable for the default device, `cpu` or `cuda`."""

DRIVER = Path("/proc/driver/nvidia/version")
"""Exists if an NVIDIA driver is loaded."""


def default_device() -> torch.device:
    """Return the device of `NPT_DEVICE`, else the first GPU that torch sees, else the CPU. Warn of
    an NVIDIA GPU that torch cannot use.
    """
    has_gpu = torch.cuda.is_available()
    name = os.environ.get(VARIABLE) or ("cuda" if has_gpu else "cpu")
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"{VARIABLE} is {name!r}; set it to cpu or cuda, or unset it")
    if name == "cuda" and not has_gpu:
        raise ConfigError(f"{VARIABLE} is cuda, but torch sees no GPU; set it to cpu or unset it")
    if not has_gpu and VARIABLE not in os.environ:
        _warn_of_idle_gpu()
    return torch.device(name)


@functools.cache
def _warn_of_idle_gpu() -> None:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if DRIVER.exists() and not hidden:
        built = "the CPU alone" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
        warnings.warn(
            f"computing on the CPU: torch {torch.__version__}, built for {built}, cannot use the"
            " NVIDIA GPU; install a build for the CUDA version that nvidia-smi shows, or set"
            f" {VARIABLE}=cpu",
            stacklevel=3,
        )


def check_card(device: torch.device, *, bf16: bool = False, tf32: bool = False) -> None:
    """Raise ConfigError for a GPU that does not exist or that torch has no kernels for. Warn about
    bf16 or TF32 products on a GPU before Ampere (compute capability 8.0).
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f"there is no device {device} (torch sees {count} GPUs): pass another")
    major, minor = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    compiled = " ".join(torch.cuda.get_arch_list())
    codes = re.findall(r"(sm|compute)_(\d+)(\d)", compiled)
    # compiled code runs within a major version, portable code (PTX) on any later GPU
    runs = [(int(a), int(b)) for kind, a, b in codes if kind == "compute" or int(a) == major]
    if codes and not any(code <= (major, minor) for code in runs):
        raise ConfigError(
            f"torch {torch.__version__} has no kernels for {card}, only {compiled}: install a build"
            " that has them (below capability 7.5, the one for CUDA 12.6, from torch's index"
            f" whl/cu126), or set {VARIABLE}=cpu"
        )
    if bf16 and major < 8:
        warnings.warn(f"{card} emulates bf16, which is slow; compute in fp32", stacklevel=3)
    if tf32 and major < 8:
        warnings.warn(f"{card} has no TF32: remove --matmul_precision high", stacklevel=3)


def card_error(device: torch.device) -> str | None:
    """Return the first line of the CUDA error that stops a GPU from computing; None if it computes.

    Call it before bitsandbytes, whose C code ends the process on any pending error. A transient
    error is reported once, hence two checks.
    """
    message = None
    for _ in range(2 if device.type == "cuda" else 0):
        try:
            torch.cuda.synchronize(device)
            torch.ones((), device=device)  # a launch reports pending errors
        except torch.OutOfMemoryError:
            return None
        except RuntimeError as error:
            message = first_line(error)
        else:
            return None
    return message


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
