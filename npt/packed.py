"""4-bit weights of a model: the layers that hold them, and their values.

bitsandbytes is used only if the program has loaded it. Without it no layer is of its classes, so a
plain torch model is traced with torch alone.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def quantized_linears(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of every 4-bit linear layer, in module order."""
    bitsandbytes = sys.modules.get("bitsandbytes")
    if bitsandbytes is None:
        return []
    kind = bitsandbytes.nn.Linear4bit
    return [(name, module) for name, module in model.named_modules() if isinstance(module, kind)]


def unpacked(linear: Any) -> Tensor:
    """Return the dequantised weight of a 4-bit linear layer, [out, in]."""
    weight = linear.weight
    dequantize = sys.modules["bitsandbytes"].functional.dequantize_4bit
    return dequantize(weight.data, weight.quant_state)
