"""Versions of the packages that affect a run's numerics, for its records."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import cache

from npt.version import __version__

_PACKAGES = ("torch", "transformers", "bitsandbytes", "accelerate", "datasets", "safetensors")


def versions() -> dict[str, str]:
    """Return the versions of Python, npt and these packages."""
    return {
        "python": platform.python_version(),
        "npt": __version__,
        **{package: _version(package) for package in _PACKAGES},
    }


@cache
def _version(package: str) -> str:
    # cached, since every checkpoint calls it and reading metadata is slow
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
