"""Frozen linear layers: their dense weight, and the stacked product of teacher and student rows.

The seam between the training code and bitsandbytes: nothing else in the package looks inside a 4-bit weight.
"""

from __future__ import annotations

import logging
from typing import Any

# Without the optional package `kernels`, whose CPU code we do not use, bitsandbytes warns at import on some CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import bitsandbytes as bnb  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.autograd.function import once_differentiable  # noqa: E402


def quantized_linears(model: nn.Module) -> list[tuple[str, bnb.nn.Linear4bit]]:
    """(name, module) of every 4-bit linear layer, in module order."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, bnb.nn.Linear4bit)]


def dense_weight(module: Any) -> Tensor:
    """The frozen weight [out, in] of the module: dequantised for a 4-bit layer (a fresh tensor), else as stored. Rows that a module has
    beside it (npt/quant/rows.py) are not in it."""
    if isinstance(module, bnb.nn.Linear4bit):
        return bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
    return module.weight


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
        scale = getattr(ctx.module, "row_scale", None)  # of a layer with rows (npt/quant/rows.py)
        grad = grad_student if scale is None else grad_student * scale.to(grad_student.dtype)
        return grad @ dense_weight(ctx.module).to(grad.dtype), None, None


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
