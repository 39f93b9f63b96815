"""Frozen linear layers: their dense weight, and products with it.

The seam between the training code and bitsandbytes: nothing else in the package looks inside a
4-bit weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from npt.base.hooks import may_change
from npt.errors import ModelError

C = TypeVar("C", bound=type[nn.Module])

_KINDS: set[type[nn.Module]] = {nn.Linear, bnb.nn.Linear4bit}


def linear_kind(cls: C) -> C:
    """Declare that modules of exactly this class compute what `multiply` does."""
    _KINDS.add(cls)
    return cls


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer of a known class, whose weight, bias and rows are all
    there is to it. A LoRA around one, a parametrised weight and whatever else computes more is not,
    even where it has a `weight`."""
    return type(module) in _KINDS


def check_readable(name: str, module: nn.Module, use: str) -> None:
    """Refuse a module of which more than its dense weight would have to be known.

    Args:
        name: of the module, for the message.
        use: what needs the weight, likewise.

    Raises:
        ModelError: its class is not known, or somebody's hook may change what it gives.
    """
    if not is_plain_linear(module):
        raise ModelError(
            f"{name} is a {type(module).__module__}.{type(module).__qualname__}, and {use} needs a"
            " plain linear layer; merge what was put around it into the base (PEFT:"
            " merge_and_unload), or load a base without it"
        )
    if may_change(module):
        raise ModelError(
            f"{name} has hooks that may change what it gives, or another forward, and {use} needs"
            " its weight alone; remove them"
        )


def quantized_linears(model: nn.Module) -> list[tuple[str, bnb.nn.Linear4bit]]:
    """(name, module) of every 4-bit linear layer, in module order."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, bnb.nn.Linear4bit)
    ]


def statistics_of(module: bnb.nn.Linear4bit) -> dict[str, Tensor]:
    """Return the quantisation statistics of a 4-bit layer's weight by name: `absmax`, `code`, and
    of nested ones `offset`, `state2.absmax` and `state2.code`; nothing of a weight without storage.
    They are plain tensors that no walk over parameters or buffers meets."""
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return {}
    found = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
    if state.nested:
        found |= {"state2.absmax": state.state2.absmax, "state2.code": state.state2.code}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def dense_weight(module: Any) -> Tensor:
    """The frozen weight [out, in] of a plain linear layer: dequantised for a 4-bit layer (a fresh
    tensor), else as stored. Rows that a module has beside it (npt/base/rows.py) are not in it.

    Raises:
        ModelError: the module's class is not known, so that its weight may not be all there is to
            it.
    """
    if not is_plain_linear(module):
        check_readable("the layer", module, "this computation")
    if isinstance(module, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return module.weight


def product_weight(module: Any, dtype: torch.dtype) -> Tensor:
    """Return the dense weight [out, in] for `multiply` and `multiply_backward` with rows of
    `dtype`: in bf16 if the module is a 4-bit layer whose products are in bf16, else in `dtype`."""
    weight = dense_weight(module)
    return (
        weight
        if isinstance(module, bnb.nn.Linear4bit) and weight.dtype == torch.bfloat16
        else weight.to(dtype)
    )


def multiply(module: Any, weight: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """A frozen linear layer's product as its forward computes it, from its dense weight, so that
    this can serve more than once.

    Args:
        module: the layer, whose bias and rows (npt/base/rows.py) are applied; none of its hooks is
            called.
        weight: `product_weight` of it, [out, in]. In another dtype than x, x and the product are
            rounded to it.
        x: [N, in], without graph.
        out: [N, out], where to write, in the dtype of x.
    """
    if module.bias is None:
        product = _in_dtype_of(
            weight, x, out, lambda rows, into: torch.mm(rows, weight.t(), out=into)
        )
    else:
        bias = module.bias.to(weight.dtype)
        product = _in_dtype_of(
            weight, x, out, lambda rows, into: torch.addmm(bias, rows, weight.t(), out=into)
        )
    scale = getattr(module, "row_scale", None)
    return product if scale is None else product.mul_(scale).add_(module.row_bias)


def multiply_backward(
    module: Any, weight: Tensor, grad: Tensor, out: Tensor | None = None
) -> Tensor:
    """The gradient [N, in] of what `multiply` was given, from that [N, out] of what it gave."""
    scale = getattr(module, "row_scale", None)
    grad = grad if scale is None else grad * scale.to(grad.dtype)
    return _in_dtype_of(weight, grad, out, lambda rows, into: torch.mm(rows, weight, out=into))


def _in_dtype_of(
    weight: Tensor,
    x: Tensor,
    out: Tensor | None,
    product: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """A product of rows in the weight's dtype, given in that of the rows."""
    if weight.dtype == x.dtype:
        return product(x, out)
    found = product(x.to(weight.dtype), None)
    return found.to(x.dtype) if out is None else out.copy_(found)
