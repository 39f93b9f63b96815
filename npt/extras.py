"""Packages that only some features need, and the extra of this distribution that installs each.

They are imported when they are used, so that the rest works without them.
"""

from __future__ import annotations

from importlib.util import find_spec

from npt.errors import ConfigError

EXTRAS = {
    "datasets": "hub",
    "gguf": "gguf",
    "optuna": "sweep",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""By importable package."""

DISTRIBUTION = "npt-distill"
"""What package indexes call this: `npt` is somebody else's there."""


def installed(package: str) -> bool:
    """Return whether a package can be imported, without importing it."""
    return find_spec(package) is not None


def install_command(extra: str) -> str:
    """Return the command that installs one of this distribution's extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def lacking(package: str) -> str:
    """Return the end of a message about a feature whose package is missing."""
    return f"needs {package}, which is not installed; {install_command(EXTRAS[package])}"


def require(package: str, feature: str) -> None:
    """Refuse a feature (the subject of the message) if its package is not installed.

    Raises:
        ConfigError: it is not.
    """
    if not installed(package):
        raise ConfigError(f"{feature} {lacking(package)}")
