"""The arithmetic of a call, counted as it runs, and the speed that a device reaches at most."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from npt.base.device import wait_for

ROOFLINE_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Sides of the square products, by the device's type: large enough that only arithmetic counts."""


def count_flops(act: Callable[[], Any]) -> int:
    """Return the floating-point operations of all matrix products of a call, its backward passes
    included.

    As torch's counter, with these differences: products of packed 4-bit weights and products added
    in place are counted (the counter does not know their operators), causal attention counts half
    of its score matrix, and its backward twice its forward.
    """
    with FlopCounterMode(display=False, custom_mapping=formulas()) as counter:
        act()
    return int(counter.get_total_flops())


@dataclass(frozen=True)
class Roofline:
    """The highest speed of a plain matrix product, and the side of the matrices that reached it."""

    flops_per_second: float
    size: int


def matmul_roofline(
    device: torch.device | str,
    *,
    sizes: Iterable[int] | None = None,
    seconds: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Roofline:
    """Measure the speed that this device reaches, as it is set up now (threads, TF32), on square
    products of `sizes`, each for `seconds` and three times at least. The best is taken: other work
    can only make one slower.
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
        speed = 2 * size**3 / min(spent[1:])  # the first one also finds its kernel
        best = max(best, Roofline(speed, size), key=lambda found: found.flops_per_second)
    return best


_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def formulas() -> dict[Any, Callable[..., int]]:
    """Return a formula by operator. One that is not marked raw is given shapes, not tensors."""
    packed, aten = torch.ops.bitsandbytes, torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {packed.gemv_4bit: _packed_product}
    # bitsandbytes before 0.50 unpacks and multiplies, which is counted as such
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
    """Count rows [..., in] times a packed weight [out, in]."""
    return 2 * math.prod(x[:-1]) * math.prod(shape)


def _added_product(total: Sequence[int], one: Sequence[int], other: Sequence[int], **_: Any) -> int:
    """Count a product of two matrices that is added in place."""
    return 2 * math.prod(one) * other[1]


def _attention(operator: Any, factor: int) -> Callable[..., int]:
    """Return the formula of an attention operator. It is given tensors, since `is_causal` is among
    its arguments, at another place in each.
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
    """Count the memory-efficient kernel called by itself, whose tensors are [B, T, H, d]."""
    rows, length, heads, width = query
    causal = rest[10]
    return 2 * 2 * rows * heads * length * key[1] * (width + value[-1]) // (2 if causal else 1)
