"""Frozen linear layers: their dense weight, products with it, and the stacked product of teacher and student rows.

The seam between the training code and bitsandbytes: nothing else in the package looks inside a 4-bit weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def quantized_linears(model: nn.Module) -> list[tuple[str, bnb.nn.Linear4bit]]:
    """(name, module) of every 4-bit linear layer, in module order."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)]


def statistics_of(module: bnb.nn.Linear4bit) -> dict[str, Tensor]:
    """Return the quantisation statistics of a 4-bit layer's weight by name: `absmax`, `code`, and of nested ones `offset`,
    `state2.absmax` and `state2.code`; nothing of a weight without storage. They are plain tensors that no walk over parameters or buffers
    meets."""
    state = getattr(module.weight, "quant_state", None)
    if state is None:
        return {}
    found = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
    if state.nested:
        found |= {"state2.absmax": state.state2.absmax, "state2.code": state.state2.code}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def dense_weight(module: Any) -> Tensor:
    """The frozen weight [out, in] of the module: dequantised for a 4-bit layer (a fresh tensor), else as stored. Rows that a module has
    beside it (npt/quant/rows.py) are not in it."""
    if isinstance(module, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return module.weight


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at, or changes, what goes into a module or comes out of it: only a call of the module itself will do then."""
    replaced = "forward" in vars(module) and not _only_placed(module)
    return bool(module._forward_hooks or module._forward_pre_hooks or replaced)


def _only_placed(module: Any) -> bool:
    """Whether what replaces the module's forward is accelerate's wrapper that `device_map` puts around every layer, in a form that brings
    inputs to the weight's device and does nothing else. One that also brings in weights, or that wraps something else, does more."""
    forward, hook, wrapped = vars(module)["forward"], getattr(module, "_hf_hook", None), getattr(module, "_old_forward", None)
    function = getattr(forward, "func", None)
    return (
        (getattr(function, "__module__", None), getattr(function, "__name__", None)) == ("accelerate.hooks", "new_forward")
        and (type(hook).__module__, type(hook).__name__) == ("accelerate.hooks", "AlignDevicesHook")
        and not getattr(hook, "offload", True)
        and getattr(wrapped, "__func__", None) is type(module).forward
    )


def product_weight(module: Any, dtype: torch.dtype) -> Tensor:
    """Return the dense weight [out, in] for `multiply` and `multiply_backward` with rows of `dtype`: in bf16 if the module is a 4-bit
    layer whose products are in bf16, else in `dtype`."""
    weight = dense_weight(module)
    return weight if isinstance(module, bnb.nn.Linear4bit) and weight.dtype == torch.bfloat16 else weight.to(dtype)


def multiply(module: Any, weight: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """A frozen linear layer's product as its forward computes it, from its dense weight, so that this can serve more than once.

    Args:
        module: the layer, whose bias and rows (npt/quant/rows.py) are applied; none of its hooks is called.
        weight: `product_weight` of it, [out, in]. In another dtype than x, x and the product are rounded to it.
        x: [N, in], without graph.
        out: [N, out], where to write, in the dtype of x.
    """
    if module.bias is None:
        product = _in_dtype_of(weight, x, out, lambda rows, into: torch.mm(rows, weight.t(), out=into))
    else:
        bias = module.bias.to(weight.dtype)
        product = _in_dtype_of(weight, x, out, lambda rows, into: torch.addmm(bias, rows, weight.t(), out=into))
    scale = getattr(module, "row_scale", None)
    return product if scale is None else product.mul_(scale).add_(module.row_bias)


def multiply_backward(module: Any, weight: Tensor, grad: Tensor, out: Tensor | None = None) -> Tensor:
    """The gradient [N, in] of what `multiply` was given, from that [N, out] of what it gave."""
    scale = getattr(module, "row_scale", None)
    grad = grad if scale is None else grad * scale.to(grad.dtype)
    return _in_dtype_of(weight, grad, out, lambda rows, into: torch.mm(rows, weight, out=into))


def _in_dtype_of(weight: Tensor, x: Tensor, out: Tensor | None, product: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
    """A product of rows in the weight's dtype, given in that of the rows."""
    if weight.dtype == x.dtype:
        return product(x, out)
    found = product(x.to(weight.dtype), None)
    return found.to(x.dtype) if out is None else out.copy_(found)


class _StackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        ctx.module = module
        product = module(torch.cat([student, teacher]))
        of_student, of_teacher = product.split([len(student), len(teacher)])
        ctx.mark_non_differentiable(of_teacher)
        return of_student, of_teacher

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_student: Tensor, grad_teacher: Tensor) -> tuple[Tensor, None, None]:
        return multiply_backward(ctx.module, product_weight(ctx.module, grad_student.dtype), grad_student), None, None


def stacked_product(module: nn.Module, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """`module` applied to student and teacher rows in one product, differentiable in the student's rows only.

    One call reads (for a 4-bit weight: dequantises) the weight once for both. Backward multiplies the student's rows alone:
    automatic differentiation of the stacked call would push the teacher's zeros through the weight as well.

    Args:
        module: a frozen linear layer, [out, in].
        student: [N, in].
        teacher: [N, in]; no gradient reaches it.

    Returns:
        The student's and the teacher's products, [N, out] each.
    """
    return _StackedProduct.apply(student, teacher, module)
