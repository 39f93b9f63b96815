"""Products of 4-bit layers as a GPU makes them of bf16 operands with a result in fp32
(`torch.mm(..., out_dtype=torch.float32)`), emulated on any machine.

bf16 keeps 8 bits of a number, so the product of two of them is exact in fp32, and only the order of
the sum is another one.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from npt.base.linear import quantized_linears


def rounded(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16).to(torch.float32)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: bnb.nn.Linear4bit) -> Tensor:
        ctx.linear = linear
        return rounded(x) @ linear.operand().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return rounded(grad) @ ctx.linear.operand(), None


class RoundedLinear(bnb.nn.Linear4bit):
    """A 4-bit layer, unpacked at every product, that rounds both operands."""

    def operand(self) -> Tensor:
        return rounded(bnb.functional.dequantize_4bit(self.weight.data, self.weight.quant_state))

    def forward(self, x: Tensor) -> Tensor:
        product = _Product.apply(x, self)
        return product if self.bias is None else product + self.bias


def round_operands(model: nn.Module) -> None:
    """Let every 4-bit layer of a model round its operands, in place."""
    for _, module in quantized_linears(model):
        module.__class__ = RoundedLinear
