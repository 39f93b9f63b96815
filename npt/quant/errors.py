"""How far one product of each kind lies from the exact one, on the device that it is computed on: what a precision setting costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.quant.linear import dense_weight

PRECISIONS = ("highest", "high")
ROWS, OUTPUTS = 64, 256
"""Rows of normal numbers that are multiplied, and outputs that are compared: enough for two digits of the error, of any model."""


@torch.no_grad()
def product_errors(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """The relative error of products of frozen weights against fp64, under each setting of torch's fp32 matmul precision.

    Measured on the first decoder layer's linear layers and on lm_head, each as the module itself computes, with the weight as it is
    stored (for a 4-bit one: as it is dequantised). The setting and the random state are left as they were. Where a device has no
    faster product for `high`, as most CPUs, both figures are the same.

    Args:
        model: whose weights are here, not sharded.

    Returns:
        Setting -> kind (`q_proj` and so on) -> ||y - exact|| / ||exact||.
    """
    parts: dict[str, nn.Module] = {
        name.rpartition(".")[2]: module
        for name, module in model.model.layers[0].named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("npt.")
    }
    parts["lm_head"] = model.lm_head
    before, found = torch.get_float32_matmul_precision(), {}
    try:
        for precision in PRECISIONS:
            torch.set_float32_matmul_precision(precision)
            found[precision] = {kind: _error(module) for kind, module in parts.items()}
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def _error(module: Any) -> float:
    weight = dense_weight(module)[:OUTPUTS].double()
    x = torch.randn(ROWS, module.in_features, generator=torch.Generator().manual_seed(0)).to(weight.device)
    if module.weight.dtype in (torch.float16, torch.bfloat16):
        x = x.to(module.weight.dtype)  # what a base in 16 bit is given; one that computes in fp32 takes it as well
    exact: Tensor = x.double() @ weight.T
    if module.bias is not None:
        exact = exact + module.bias[:OUTPUTS].double()
    scale = getattr(module, "row_scale", None)
    if scale is not None:
        exact = scale[:OUTPUTS].double() * exact + module.row_bias[:OUTPUTS].double()
    return float(torch.linalg.vector_norm(module(x)[:, :OUTPUTS].double() - exact) / torch.linalg.vector_norm(exact))
