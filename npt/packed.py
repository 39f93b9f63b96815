"""4-bit weights of a model: the layers that hold them, and their values.

bitsandbytes is used only if the program has loaded it. Without it no layer is of its classes, so a
plain torch model is traced with torch alone.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from npt.errors import ModelError


def quantized_linears(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of every 4-bit linear layer, in module order."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return []
    kind = bitsandbytes.nn.Linear4bit
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def unpacked(linear: Any) -> Tensor:
    """Return the dequantised weight of a 4-bit linear layer, [out, in], without its patch
    (npt/base/patched.py).

    Raises:
        ModelError: the layer's class has a forward of its own, so that the weight does not tell
            what the layer computes.
    """
    bitsandbytes = sys.modules["bitsandbytes"]
    kind = type(linear)
    own = kind.forward is not bitsandbytes.nn.Linear4bit.forward
    if own and "patch" not in vars(linear):
        raise ModelError(
            f"the layer is a {kind.__module__}.{kind.__qualname__}, whose own forward may do more"
            " than multiply with its 4-bit weight: merge it into the base, or load a base without"
            " it"
        )
    weight = linear.weight
    return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
