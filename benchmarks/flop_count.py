"""Count the arithmetic of a call, and measure a device's highest speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from npt.device import wait_for

ROOFLINE_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Sides of the square products by device type, large enough to be bound by arithmetic."""


def count_flops(act: Callable[[], Any]) -> int:
    """Return the floating-point operations of all matrix products of a call, backward included.

    Unlike torch's counter, this one also counts products of 4-bit weights and products added in
    place, half of the score matrix of causal attention, and attention's backward as twice its
    forward.
    """
    with FlopCounterMode(display=False, custom_mapping=formulas()) as counter:
        act()
    return int(counter.get_total_flops())


@dataclass(frozen=True)
class Roofline:
    """The highest speed of a matrix product, and the side of its matrices."""

    flops_per_second: float
    size: int


def matmul_roofline(
    device: torch.device | str,
    *,
    sizes: Iterable[int] | None = None,
    seconds: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Roofline:
    """Measure the device's speed on square products of `sizes`, with its current settings (threads,
    TF32). Each size runs for `seconds`, at least three times; the fastest counts, because other
    work only slows a product down.
    """
    device = torch.device(device)
    best = Roofline(0.0, 0)
    for size in ROOFLINE_SIZES[device.type] if sizes is None else sizes:
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty_like(a)
        spent: list[float] = []
        while len(spent) < 4 or sum(spent) < seconds:
            wait_for(device)
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            wait_for(device)
            spent.append(time.perf_counter() - started)
        speed = 2 * size**3 / min(spent[1:])  # the first product also selects its kernel
        best = max(best, Roofline(speed, size), key=lambda found: found.flops_per_second)
    return best


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def formulas() -> dict[Any, Callable[..., int]]:
    """Return a formula for each operator. A formula takes shapes; one marked raw takes tensors."""
    packed, aten = torch.ops.bitsandbytes, torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {packed.gemv_4bit: _packed_product}
    # bitsandbytes before 0.50 unpacks and multiplies in two operators
    if hasattr(packed, "gemm_4bit"):
        formulas[packed.gemm_4bit] = _packed_product
    formulas[aten.addmm_] = _added_product
    for name in _ATTENTION:
        for factor, full_name in ((1, name), (2, f"{name}_backward")):
            operator = getattr(aten, full_name)
            formulas[operator] = _attention(operator, factor)
    formulas[aten._efficient_attention_backward] = _attention_backward_by_token
    return formulas


def _packed_product(x: Sequence[int], packed: Any, shape: Sequence[int], *_: Any, **__: Any) -> int:
    """Count a product of rows [..., in] and a 4-bit weight [out, in]."""
    return 2 * math.prod(x[:-1]) * math.prod(shape)


def _added_product(total: Sequence[int], one: Sequence[int], other: Sequence[int], **_: Any) -> int:
    """Count a product that is added in place."""
    return 2 * math.prod(one) * other[1]


def _attention(operator: Any, factor: int) -> Callable[..., int]:
    """Return the formula of an attention operator. It takes tensors, because the position of
    `is_causal` among the arguments differs between operators.
    """
    names = [argument.name for argument in operator.default._schema.arguments]

    def formula(*arguments: Any, out_val: Any = None, **named: Any) -> int:
        values = dict(zip(names, arguments, strict=False)) | named
        query, key, value = values["query"], values["key"], values["value"]
        whole = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return factor * whole // (2 if values.get("is_causal", False) else 1)

    formula._get_raw = True  # type: ignore[attr-defined]
    return formula


def _attention_backward_by_token(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *rest: Any,
    **_: Any,
) -> int:
    """Count the memory-efficient kernel called directly, with tensors [B, T, H, d]."""
    rows, length, heads, width = query
    causal = rest[10]
    return 2 * 2 * rows * heads * length * key[1] * (width + value[-1]) // (2 if causal else 1)
