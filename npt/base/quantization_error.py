"""Error of fp32 products under each precision setting of torch, and the choice of one."""

from __future__ import annotations

import copy
import math
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.base.linear import dense_weight
from npt.base.precision import fp32_products
from npt.base.rows import rows_of

PRECISIONS = ("highest", "high")
ROWS, OUTPUTS = 64, 256
"""Rows of normal numbers that are multiplied, and outputs that are compared: enough for two digits
of the error, of any model."""

LARGEST_ERROR = 1e-3
"""Relative error of a product up to which `auto` takes the faster setting. TF32 is off by some
3e-4, in fp32's range; bf16 by 2e-3. The weights themselves are off by 9e-2 in NF4."""


@torch.no_grad()
def product_errors(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """Return the relative error of products against fp64: setting -> kind (`q_proj` and so on) ->
    ||y - exact|| / ||exact||.

    Of the first decoder layer's linear layers and lm_head, as the modules compute, with the weight
    as stored (a 4-bit one dequantised). Setting and random state are left as they were. On a device
    without a faster product for `high`, as most CPUs, both figures are the same.
    """
    kinds: dict[str, Any] = {
        name.rpartition(".")[2]: module
        for name, module in model.model.layers[0].named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("npt.")
    }
    kinds["lm_head"], errors = model.lm_head, {}
    for precision in PRECISIONS:
        with fp32_products(precision):
            errors[precision] = {kind: _error(module) for kind, module in kinds.items()}
    return errors


def set_matmul_precision(asked: str, model: PreTrainedModel) -> str | None:
    """Set torch's fp32 matmul precision: highest, high, or by `choose_precision` for auto, which is
    highest on the CPU. Return a line that says why `auto` took a setting on a GPU.
    """
    reason = None
    if asked == "auto":
        asked = "highest"
        if all(parameter.device.type == "cuda" for parameter in model.parameters()):
            asked, reason = choose_precision(product_errors(model))
    torch.set_float32_matmul_precision(asked)
    return reason and f"--matmul_precision auto takes {asked}: {reason}"


def choose_precision(errors: dict[str, dict[str, float]]) -> tuple[str, str]:
    """Return `high` if it changes a product and all stay within LARGEST_ERROR, else `highest`; and
    the reason. By errors alone: unlike times they are the same at every start of a run.
    """
    exact, fast = errors["highest"], errors["high"]
    changed = {kind: error for kind, error in fast.items() if error != exact[kind]}
    if not changed:
        return "highest", "the device has no faster product for high"
    worst = max(changed, key=lambda kind: math.inf if math.isnan(changed[kind]) else changed[kind])
    if not changed[worst] <= LARGEST_ERROR:
        return "highest", (
            f"under high a product of {worst} is off by {changed[worst]:.1e} of its size, more than"
            f" {LARGEST_ERROR:.0e}"
        )
    return "high", (
        f"products are off by at most {changed[worst]:.1e} of their size ({exact[worst]:.1e} under"
        " highest)"
    )


def _error(module: Any) -> float:
    weight = dense_weight(module)
    if isinstance(module, bnb.nn.Linear4bit):  # whose products may be in bf16
        state = copy.copy(module.weight.quant_state)
        state.dtype = torch.float32
        weight = bnb.functional.dequantize_4bit(module.weight.data, state)
    weight = weight[:OUTPUTS].double()
    x = torch.randn(ROWS, module.in_features, generator=torch.Generator().manual_seed(0))
    half = module.weight.dtype in (torch.float16, torch.bfloat16)
    x = x.to(weight.device, module.weight.dtype if half else x.dtype)
    exact: Tensor = x.double() @ weight.T
    if module.bias is not None:
        exact = exact + module.bias[:OUTPUTS].double()
    if (rows := rows_of(module)) is not None:
        exact = rows[0][:OUTPUTS].double() * exact + rows[1][:OUTPUTS].double()
    difference = torch.linalg.vector_norm(module(x)[:, :OUTPUTS].double() - exact)
    return float(difference / torch.linalg.vector_norm(exact))
