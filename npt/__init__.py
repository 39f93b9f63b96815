"""NPT: distil Neuro-Plastic adapters into quantised language models, with training steps that no
NaN can poison.

`__init__.pyi` lists the public names. They are imported when they are first used, so that `npt
--help` and a wrong flag do not wait for torch.
"""

from __future__ import annotations

import ast
import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from npt.version import __version__ as __version__

# Without the optional package `kernels`, whose CPU code is not used here, bitsandbytes warns at its
# import on some CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# bitsandbytes before 0.50 checks sizes by a function that torch has deprecated, in every call.
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
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
