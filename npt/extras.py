"""Optional packages, and the extra of this distribution that installs each.

They are imported when they are used, so that everything else works without them.
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
"""The extra that installs each importable package."""


def installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    return find_spec(package) is not None


def install_command(extra: str) -> str:
    """Return the command that installs an extra, and where to run it: NPT is on no package index,
    where `npt` is another project.
    """
    return f"pip install '.[{extra}]' in a clone of NPT"


def lacking(package: str) -> str:
    """Return the end of a message about a feature whose package is missing."""
    return f"needs {package}, which is not installed: {install_command(EXTRAS[package])}"


def require(package: str, feature: str) -> None:
    """Raise ConfigError if the package of a feature, the message's subject, is not installed."""
    if not installed(package):
        raise ConfigError(f"{feature} {lacking(package)}")
