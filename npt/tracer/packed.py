"""4-bit weights of a traced model.

bitsandbytes is used only if the program has loaded it. Without it no layer is of its classes, so a
plain torch model is traced with torch alone.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn


def packed_linears(model: nn.Module) -> list[tuple[str, Any]]:
    """Return (name, module) of every 4-bit linear layer, in module order."""
    if sys.modules.get("bitsandbytes") is None:
        return []
    from npt.base.linear import quantized_linears

    return list(quantized_linears(model))


def unpacked(linear: Any) -> Tensor:
    """Return the dequantised weight of a 4-bit linear layer, [out, in]."""
    from npt.base.linear import dense_weight

    return dense_weight(linear)
