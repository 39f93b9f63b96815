"""How far one product of each kind lies from the exact one, on the device that it is computed on,
and how fast it is: what a precision setting costs and gives, and the choice of one by its error."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.base.linear import dense_weight

PRECISIONS = ("highest", "high")
ROWS, OUTPUTS = 64, 256
"""Rows of normal numbers that are multiplied, and outputs that are compared: enough for two digits
of the error, of any model.
"""


LARGEST_ERROR = 1e-3
"""Relative error of a product below which `auto` takes the faster setting. TF32 rounds each operand
to 11 bits, so that a product of normal numbers is off by some 3e-4, in fp32's range; bf16 with its
8 bits is off by 2e-3 and is not taken. The weights themselves are off by 9e-2 in NF4 and, as most
checkpoints are stored in bf16, by 2e-3 without quantisation."""

REPEATS = 5
"""Timed products of a kind, of which the fastest counts, after one that finds its kernel."""


@torch.no_grad()
def product_errors(model: PreTrainedModel) -> dict[str, dict[str, float]]:
    """The relative error of products of frozen weights against fp64, under each setting of torch's
    fp32 matmul precision.

    Measured on the first decoder layer's linear layers and on lm_head, each as the module itself
    computes, with the weight as it is stored (for a 4-bit one: as it is dequantised). The setting
    and the random state are left as they were. Where a device has no faster product for `high`, as
    most CPUs, both figures are the same.

    Args:
        model: whose weights are here, not sharded.

    Returns:
        Setting -> kind (`q_proj` and so on) -> ||y - exact|| / ||exact||.
    """
    found = {}
    for precision in PRECISIONS:
        with fp32_products(precision):
            found[precision] = {
                kind: _error(module) for kind, module in product_kinds(model).items()
            }
    return found


@torch.no_grad()
def product_seconds(model: PreTrainedModel, rows: int) -> dict[str, dict[str, float]]:
    """Measure how long one product of each kind takes, under each setting of torch's fp32 matmul
    precision.

    Of the modules as they compute, dequantising included, without graph. The setting and the random
    state are left as they were.

    Args:
        model: as for `product_errors`.
        rows: tokens that are multiplied at once.

    Returns:
        Setting -> kind -> seconds.
    """
    found = {}
    for precision in PRECISIONS:
        with fp32_products(precision):
            found[precision] = {
                kind: _seconds(module, rows) for kind, module in product_kinds(model).items()
            }
    return found


def product_kinds(model: PreTrainedModel) -> dict[str, Any]:
    """Return the linear layers that stand for the model's: those of the first decoder layer by
    their last name, and lm_head.
    """
    parts: dict[str, Any] = {
        name.rpartition(".")[2]: module
        for name, module in model.model.layers[0].named_modules()
        if isinstance(module, nn.Linear) and not name.startswith("npt.")
    }
    return {**parts, "lm_head": model.lm_head}


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """Within the context torch computes fp32 products at this precision; afterwards as before."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def set_matmul_precision(asked: str, model: PreTrainedModel) -> str | None:
    """Set torch's fp32 matmul precision to what was asked for; `auto` chooses by
    `choose_precision`.

    Args:
        asked: highest, high or auto.
        model: whose products it is for.

    Returns:
        A line that says what `auto` took and why, None if there was nothing to choose: another
            setting, or a model on the CPU, which
        computes at `highest` under `auto`.
    """
    if asked != "auto":
        torch.set_float32_matmul_precision(asked)
        return None
    if any(parameter.device.type != "cuda" for parameter in model.parameters()):
        torch.set_float32_matmul_precision("highest")
        return None
    taken, why = choose_precision(product_errors(model))
    torch.set_float32_matmul_precision(taken)
    return f"--matmul_precision auto takes {taken}: {why}"


def choose_precision(errors: dict[str, dict[str, float]]) -> tuple[str, str]:
    """Choose `high` if it changes a product and every product stays within LARGEST_ERROR, else
    `highest`.

    By errors alone: they are the same at every start of a run, which times are not.

    Args:
        errors: of `product_errors`.

    Returns:
        The setting and the reason.
    """
    exact, fast = errors["highest"], errors["high"]
    changed = {kind: error for kind, error in fast.items() if error != exact[kind]}
    if not changed:
        return "highest", "the device has no faster product for high"
    worst = max(changed, key=lambda kind: math.inf if math.isnan(changed[kind]) else changed[kind])
    if not changed[worst] <= LARGEST_ERROR:
        return (
            "highest",
            (
                f"under high a product of {worst} is off by {changed[worst]:.1e} of its size, more"
                f" than {LARGEST_ERROR:.0e}"
            ),
        )
    return (
        "high",
        (
            f"products are off by at most {changed[worst]:.1e} of their size ({exact[worst]:.1e}"
            " under highest)"
        ),
    )


def _seconds(module: Any, rows: int) -> float:
    device = module.weight.device
    x = _rows(module, rows, device)
    spent = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        module(x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - started)
    return min(spent[1:])


def _rows(module: Any, count: int, device: torch.device) -> Tensor:
    """Normal numbers, [count, in]: in 16 bit for a base that is stored so, which one that computes
    in fp32 takes as well.
    """
    x = torch.randn(count, module.in_features, generator=torch.Generator().manual_seed(0)).to(
        device
    )
    return (
        x.to(module.weight.dtype) if module.weight.dtype in (torch.float16, torch.bfloat16) else x
    )


def _stored_weight(module: Any) -> Tensor:
    """The weight as it is stored, of a 4-bit layer dequantised in fp32 whatever its products are
    in.
    """
    if not isinstance(module, bnb.nn.Linear4bit):
        return dense_weight(module)
    state = copy.copy(module.weight.quant_state)
    state.dtype = torch.float32
    return bnb.functional.dequantize_4bit(module.weight.data, state)


def _error(module: Any) -> float:
    weight = _stored_weight(module)[:OUTPUTS].double()
    x = _rows(module, ROWS, weight.device)
    exact: Tensor = x.double() @ weight.T
    if module.bias is not None:
        exact = exact + module.bias[:OUTPUTS].double()
    scale = getattr(module, "row_scale", None)
    if scale is not None:
        exact = scale[:OUTPUTS].double() * exact + module.row_bias[:OUTPUTS].double()
    return float(
        torch.linalg.vector_norm(module(x)[:, :OUTPUTS].double() - exact)
        / torch.linalg.vector_norm(exact)
    )
