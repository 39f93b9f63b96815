"""Optional packages, and the extra of this distribution that installs each.

The guard and the tracer need torch and safetensors alone, so that they fit into any trainer.
Everything else is imported when it is used.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


class PublicNames:
    """The public names of a package, each imported on first use. The package's `__init__.pyi` is
    the only list of them.

    Attributes:
        homes: the module of each name.
    """

    def __init__(self, package: str, file: str):
        self._package = package
        stub = Path(file).with_name("__init__.pyi").read_text(encoding="utf-8")
        self.homes = {
            alias.name: str(node.module)
            for node in ast.parse(stub).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def read(self, name: str) -> Any:
        """Import a name: the package's `__getattr__`."""
        if name not in self.homes:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(self.homes[name]), name)
        except ModuleNotFoundError as error:
            lacking = str(error.name).partition(".")[0]
            if lacking not in EXTRAS:
                raise
            message = f"{self._package}.{name} {missing(lacking)}"
            raise ModuleNotFoundError(message, name=lacking) from error
        setattr(sys.modules[self._package], name, value)
        return value

    def listed(self) -> list[str]:
        """Return what the package has, imported or not: its `__dir__`."""
        return sorted({*vars(sys.modules[self._package]), *self.homes})
