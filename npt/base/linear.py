"""Frozen linear layers: their dense weight, 4-bit or not, and products with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from npt.errors import ModelError
from npt.packed import quantized_linears

C = TypeVar("C", bound=type[nn.Module])

Patch = tuple[Tensor, Tensor]
"""outer [out, n] and inner [n, in] of a patch (npt/base/patched.py), fp32."""

_KINDS: set[type[nn.Module]] = {nn.Linear, bnb.nn.Linear4bit}


def linear_kind(cls: C) -> C:
    """Declare that modules of exactly this class compute the same as `multiply`."""
    _KINDS.add(cls)
    return cls


class UpcastEmbedding(nn.Embedding):
    """An embedding stored in 16 bits with fp32 output. The lookup is exact."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(torch.float32)


@linear_kind
class UpcastLinear(nn.Linear):
    """A linear layer stored in 16 bits that multiplies in fp32. See `cast_once`."""

    kept: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight.to(torch.float32) if self.kept is None else self.kept
        bias = None if self.bias is None else self.bias.to(torch.float32)
        return F.linear(input.to(torch.float32), weight, bias)


@contextmanager
def cast_once(*modules: nn.Module) -> Iterator[None]:
    """Within the context, keep the fp32 weight of each frozen `UpcastLinear`.

    Otherwise every product casts the weight: for a head with V = 128k and D = 4,096 that moves 3 GB
    per chunk of logits and per generated token. Bits are the same; contexts may be nested. Do not
    write the weights meanwhile.
    """
    upcast = {module for module in modules if isinstance(module, UpcastLinear)}
    frozen = [m for m in upcast if m.kept is None and not m.weight.requires_grad]
    for module in frozen:
        module.kept = module.weight.detach().to(torch.float32)
    try:
        yield
    finally:
        for module in frozen:
            del module.kept


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module's class is exactly a known linear layer, not a LoRA around one."""
    return type(module) in _KINDS


def quant_types(model: nn.Module) -> set[str]:
    """Return the kinds of 4-bit weights in a model, of 'nf4' and 'fp4'."""
    return {module.weight.quant_type for _, module in quantized_linears(model)}


def refuse_unread(model: nn.Module) -> None:
    """Raise ModelError if layers of the base are still in their files (npt/base/layers.py)."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            "layers of the base are still in their files (layers_later=True): call"
            " npt.shard_base(model) to read them"
        )


def short_name(dtype: torch.dtype) -> str:
    """Return 'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def effective_dtype(module: Any) -> str:
    """Return the dtype that a linear or embedding layer computes in, or why it is not fixed."""
    if isinstance(module, UpcastEmbedding | UpcastLinear):
        return "float32"
    if not isinstance(module, bnb.nn.Linear4bit):
        return short_name(module.weight.dtype)
    state = module.weight.quant_state
    if state is None:
        return "an unknown dtype until it is quantised"
    repacked = getattr(state, "packing_format_for_cpu", False)
    will_be = module.weight.device.type == "cpu" and module.support_avx512bf16_for_cpu
    if repacked or will_be:
        return "bfloat16 (CPU repacking)"
    if not module.compute_type_is_set or module.compute_dtype is None:
        return "the dtype of its first input"
    if state.dtype != module.compute_dtype:
        return f"{short_name(module.compute_dtype)} forward, {short_name(state.dtype)} backward"
    return short_name(module.compute_dtype)


def dense_weight(module: Any) -> Tensor:
    """Return the weight [out, in] of a plain linear layer, without its patch (npt/base/patched.py).

    A 4-bit weight is dequantised to a new tensor; any other is returned as stored. Raises
    ModelError if the layer is not plain.
    """
    if type(module) not in _KINDS:
        raise ModelError(
            f"the layer is a {type(module).__module__}.{type(module).__qualname__}, not a plain"
            " linear layer: merge the wrapper into the base (PEFT: merge_and_unload), or load a"
            " base without it"
        )
    if isinstance(module, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return module.weight


def product_weight(module: Any, dtype: torch.dtype) -> Tensor:
    """Return the dense weight [out, in] for `multiply`: bf16 for 4-bit layers with bf16 products,
    else `dtype`, the dtype of the rows.
    """
    weight = dense_weight(module)
    packed = isinstance(module, bnb.nn.Linear4bit)
    return weight if packed and weight.dtype == torch.bfloat16 else weight.to(dtype)


def multiply(module: Any, weight: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return what a plain linear layer's forward returns, from its dense weight.

    Bias and patch (npt/base/patched.py) are applied. Hooks are not called.

    Args:
        module: the layer.
        weight: its `product_weight`, [out, in]. x is rounded to the weight's dtype, and so is the
            product, except on CUDA.
        x: [N, in].
        out: [N, out], buffer for the result, in the dtype of x, without a graph.
    """
    product = _product(x.to(weight.dtype), weight.t(), x.dtype, out, module.bias)
    patch = patch_of(module)
    return product if patch is None else product.add_(patch_term(patch, x))


def multiply_backward(
    module: Any, weight: Tensor, grad: Tensor, out: Tensor | None = None
) -> Tensor:
    """Return the gradient [N, in] at the input of `multiply` from that [N, out] at its output."""
    product = _product(grad.to(weight.dtype), weight, grad.dtype, out)
    patch = patch_of(module)
    if patch is None:
        return product
    outer, inner = patch
    return product.add_(patch_term((inner.t(), outer.t()), grad))


def patch_of(module: Any) -> Patch | None:
    """Return the patch of a layer; None if it has none."""
    return vars(module).get("patch")


def patch_term(patch: Patch, x: Tensor) -> Tensor:
    """Return outer (inner x), [..., in] -> [..., out], in fp32."""
    outer, inner = patch
    return F.linear(F.linear(x.to(torch.float32), inner), outer)


def _product(
    one: Tensor, other: Tensor, dtype: torch.dtype, out: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Return a product in `dtype`. CUDA sums 16-bit operands to fp32, without rounding sums."""
    multiply = torch.mm if bias is None else partial(torch.addmm, bias.to(one.dtype))
    if one.dtype == dtype:
        return multiply(one, other, out=out)
    if bias is None and one.device.type == "cuda" and dtype == torch.float32:
        return torch.mm(one, other, out_dtype=dtype, out=out)
    found = multiply(one, other)
    return found.to(dtype) if out is None else out.copy_(found)
