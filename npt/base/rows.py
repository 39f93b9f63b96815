"""Rows: a scale and a bias for each row of a frozen linear layer, exact on a 4-bit base.

    y = scale * (W x + b) + bias

W is not written. The layer's class is swapped for a subclass, and the two vectors are buffers
outside the state dict, so the base keeps its names and its hash.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from npt.base.linear import UpcastLinear, linear_kind
from npt.errors import ModelError, kind_of

Rows = tuple[Tensor, Tensor]
"""Scale and bias, [out] each, fp32."""


class RowScaled(nn.Module):
    """Mix-in, placed before the layer's class, that applies rows to its product."""

    row_scale: Tensor
    row_bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] from [..., in], in the dtype of the layer's product."""
        y = super().forward(x)
        with torch.autocast(y.device.type, enabled=False):
            return (self.row_scale * y.to(torch.float32) + self.row_bias).to(y.dtype)


@linear_kind
class RowScaledLinear4bit(RowScaled, bnb.nn.Linear4bit): ...


@linear_kind
class RowScaledUpcastLinear(RowScaled, UpcastLinear): ...


@linear_kind
class RowScaledLinear(RowScaled, nn.Linear): ...


_FORMS: dict[type[nn.Module], type[RowScaled]] = {
    cls.__bases__[1]: cls for cls in (RowScaledLinear4bit, RowScaledUpcastLinear, RowScaledLinear)
}


def set_rows(module: Any, rows: Rows | None) -> None:
    """Set the rows of a linear layer; None removes them. Raise ModelError if it supports none."""
    check_row_scalable(module)
    if isinstance(module, RowScaled):
        module.__class__ = type(module).__bases__[1]
        del module.row_scale, module.row_bias
    if rows is not None:
        scale, bias = (part.to(module.weight.device, torch.float32) for part in rows)
        assert scale.shape == bias.shape == (module.out_features,)
        module.register_buffer("row_scale", scale, persistent=False)
        module.register_buffer("row_bias", bias, persistent=False)
        module.__class__ = _FORMS[type(module)]


def check_row_scalable(module: Any) -> None:
    """Raise ModelError for a layer that does not support rows."""
    if type(module) not in _FORMS and not isinstance(module, RowScaled):
        names = ", ".join(c.__name__ for c in _FORMS)
        raise ModelError(f"{kind_of(module)} does not support scale and bias by row; {names} do")


def rows_of(module: Any) -> Rows | None:
    """Return the rows of a layer; None if it has none."""
    return (module.row_scale, module.row_bias) if isinstance(module, RowScaled) else None
