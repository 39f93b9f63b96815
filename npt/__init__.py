"""NPT (Neuro-Plastic Transformer): distil adapters into quantised language models, with a guard
that keeps NaN and Inf out of the weights.

`__init__.pyi` lists the public names. They are imported on first use, so that `npt --help` and a
wrong flag do not wait for torch.
"""

from __future__ import annotations

import ast
import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from npt.extras import EXTRAS, missing
from npt.version import __version__ as __version__

# On some CPUs bitsandbytes warns that the optional package `kernels`, unused here, is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# bitsandbytes before 0.50 calls a function that torch has deprecated, in every product.
warnings.filterwarnings("ignore", message="_check_is_size will be removed", category=FutureWarning)

_STUB = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
_HOME = {
    alias.name: str(node.module)
    for node in ast.parse(_STUB).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'npt' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ModuleNotFoundError(f"npt.{name} {missing(package)}", name=package) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
