"""Watchdogs: checks that name the first bad element of weights, moments or the base.

Each returns a `BadNumber` or None; `require` raises it. A cheap check comes first, and only if it
fails is a second pass or more memory spent.

A 4-bit weight is judged by its statistics and dequantised values, never by its packed bytes, since
every byte pattern is valid.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from npt.distributed.processes import is_sharded
from npt.errors import NumericalError
from npt.hooks import in_parts, within
from npt.packed import quantized_linears, unpacked

ADAPTER = ".npt."
"""Part of the full name of every adapter tensor, and of no other."""

_STATISTICS = ("absmax", "offset", "code", "state2.absmax", "state2.offset", "state2.code")


@dataclass(frozen=True)
class BadNumber:
    """A tensor's first bad element, and a sentence about it."""

    name: str
    index: tuple[int, ...]
    value: float
    message: str

    def __str__(self) -> str:
        return self.message


def require(finding: BadNumber | None) -> None:
    """Raise a finding as a `NumericalError`."""
    if finding is not None:
        raise NumericalError(finding.message)


def tensor_fault(named: Mapping[str, Tensor], limit: float = math.inf) -> BadNumber | None:
    """Find the first tensor with an element that is not finite, or is larger than `limit`: a
    flipped exponent bit can make a finite 1e36. Waits for the device once.
    """
    tensors = {name: tensor.detach() for name, tensor in named.items() if tensor.numel()}
    if not tensors:
        return None
    norms = torch._foreach_norm(list(tensors.values()), math.inf)
    home = norms[0].device
    largest = torch.stack([norm.to(home, torch.float32) for norm in norms])
    for name, size in zip(tensors, largest.tolist(), strict=True):
        if not math.isfinite(size) or size > limit:
            return _element(name, tensors[name], limit)
    return None


def moments_fault(moments: Mapping[str, Tensor]) -> BadNumber | None:
    """Find a moment that is not finite, or a second moment below 0, whose square root is NaN."""
    finding = tensor_fault(moments)
    if finding is not None:
        return finding
    for name, value in moments.items():
        negative = value < 0
        if name.startswith("exp_avg_sq of ") and bool(negative.any()):
            why = "a mean of squares cannot be negative"
            return _element(name, value, math.inf, negative, why)
    return None


def base_fault(model: nn.Module) -> BadNumber | None:
    """Find a frozen weight that holds, or dequantises to, a non-finite value.

    Reads the whole base: call it at the start of a run or for a post-mortem. Skips adapters, which
    `tensor_fault` checks.
    """
    findings = []
    for name, layer in model.named_modules():
        if in_parts(layer):
            findings.append(within(layer, partial(_whole_fault, layer, f"{name}.")))
    findings.append(_whole_fault(model, ""))
    return next(filter(None, findings), None)


def _whole_fault(model: nn.Module, prefix: str) -> BadNumber | None:
    return next(filter(None, map(tensor_fault, _whole_tensors(model, prefix))), None)


def _whole_tensors(model: nn.Module, prefix: str) -> Iterator[dict[str, Tensor]]:
    packed = set()
    for name, module in quantized_linears(model):
        packed.add(id(module.weight))
        if not is_sharded(module.weight):
            name = f"{prefix}{name}"
            yield dict(_statistics(name, module))
            yield {f"{name}: dequantised weight": unpacked(module)}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        if id(tensor) in packed or is_sharded(tensor):
            continue
        of_adapter = ADAPTER in f".{name}"
        if tensor.is_floating_point() and not of_adapter:
            yield {f"{prefix}{name}": tensor}


def quantization_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in quantized_linears(model):
        yield from _statistics(name, module)


def _statistics(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield one weight's statistics; `absmax` is skipped if it is itself quantised."""
    for statistic in _STATISTICS:
        value: Any = module.weight.quant_state
        for part in statistic.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            yield f"{name}: {statistic}", value


def _element(
    name: str, tensor: Tensor, limit: float, bad: Tensor | None = None, why: str = ""
) -> BadNumber:
    if bad is None:
        bad = ~torch.isfinite(tensor) | (tensor.abs() > limit)
    first = bad.nonzero()[0]
    index = tuple(first.tolist())
    value = float(tensor[index])
    if not why:
        why = f"larger than {limit:g}" if math.isfinite(value) else "not finite"
    remedy = "go back to the last checkpoint" if ADAPTER in name else "reload it from a checkpoint"
    at = list(index) if index else ""
    message = (
        f"{name}{at} is {value:g} ({int(bad.sum())} of {tensor.numel()} elements: {why}); {remedy}"
    )
    return BadNumber(name, index, value, message)
