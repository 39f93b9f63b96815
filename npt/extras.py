"""Optional packages, and the extra of this distribution that installs each.

The guard and the tracer need torch and safetensors alone, so that they fit into any trainer.
Everything else is imported when it is used.
"""

from __future__ import annotations

from importlib.util import find_spec

from npt.errors import ConfigError

EXTRAS = {
    "accelerate": "distill",
    "bitsandbytes": "distill",
    "jinja2": "distill",
    "matplotlib": "distill",
    "rich": "distill",
    "tokenizers": "distill",
    "transformers": "distill",
    "yaml": "distill",
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


def install_command(extra: str, editable: bool = False) -> str:
    """Return the command that installs an extra, and where to run it: NPT is on no package index,
    where `npt` is another project.
    """
    option = "-e " if editable else ""
    return f"pip install {option}'.[{extra}]' in a clone of NPT"


def missing(package: str) -> str:
    """Return the end of a message about a feature whose package is missing."""
    return f"needs {package}, which is not installed: {install_command(EXTRAS[package])}"


def require(package: str, feature: str) -> None:
    """Raise ConfigError if the package of a feature, the message's subject, is not installed."""
    if not installed(package):
        raise ConfigError(f"{feature} {missing(package)}")


def require_extra(extra: str, feature: str) -> None:
    """Raise ConfigError if a package of an extra is not installed."""
    for package, needed_by in EXTRAS.items():
        if needed_by == extra:
            require(package, feature)
