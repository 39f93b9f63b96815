"""The device that is computed on if none was named: one decision, for every part of the package."""

from __future__ import annotations

import functools
import os
import re
import warnings
from pathlib import Path

import torch

from npt.errors import ConfigError

VARIABLE = "NPT_DEVICE"
"""Environment variable that names the default device, `cpu` or `cuda`."""

MINIMAL_DRIVERS = {12: 525, 13: 580}
"""The oldest NVIDIA driver on Linux for each major version of CUDA."""


def default_device() -> torch.device:
    """Return the first GPU that this process sees, else the CPU, unless `NPT_DEVICE` names one.

    Warns, once per process, if the machine has an NVIDIA GPU and torch was built for CUDA, but
    cannot use it.

    Raises:
        ConfigError: NPT_DEVICE names another device, or a GPU that cannot be used.
    """
    named = os.environ.get(VARIABLE, "")
    if named not in ("", "cpu", "cuda"):
        raise ConfigError(f"{VARIABLE} is {named!r}; set it to cpu or cuda, or unset it")
    if named == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if named == "cuda":
        raise ConfigError(
            f"{VARIABLE} is cuda, but {unusable_gpu() or 'torch sees no GPU here'}; set it to cpu,"
            " or unset it"
        )
    _warn_once()
    return torch.device("cpu")


def unusable_gpu(root: Path = Path("/")) -> str | None:
    """Return one line on why torch uses no GPU on a machine that has one, and the remedy.

    None if torch is built for the CPU, the machine has no GPU, or CUDA_VISIBLE_DEVICES hides it.
    """
    built = torch.version.cuda
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and (not visible.strip() or visible.strip().startswith("-"))
    driver = root / "proc/driver/nvidia"
    if built is None or hidden or not (driver.exists() or any(root.glob("dev/nvidia*"))):
        return None
    needed = MINIMAL_DRIVERS.get(int(built.split(".")[0]))
    wanted = "" if needed is None else f" {needed} or newer"
    found = _driver_version(driver / "version")
    if found is None:
        return (
            f"torch {torch.__version__} is built for CUDA {built} and finds no NVIDIA driver;"
            f" install driver{wanted}"
        )
    if needed is not None and int(found.split(".")[0]) < needed:
        return (
            f"torch {torch.__version__} is built for CUDA {built}, which takes NVIDIA"
            f" driver{wanted}, and the driver here is {found}; update the driver, or install a"
            " torch built for an older CUDA"
        )
    return (
        f"torch {torch.__version__}, built for CUDA {built}, cannot use the GPU with NVIDIA driver"
        f" {found}; see what nvidia-smi says"
    )


def _driver_version(path: Path) -> str | None:
    """Return the version of the loaded kernel module, such as `535.129.03`."""
    pattern = r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s"
    try:
        found = re.search(pattern, path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


@functools.cache
def _warn_once() -> None:
    reason = unusable_gpu()
    if reason is not None:
        warnings.warn(f"computing on the CPU: {reason}", stacklevel=3)


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
