"""Watchdogs: pure observers that say exactly which number is bad, and where it stands.

Each looks at one kind of thing and returns a `Finding`, or None where nothing is wrong; `require`
raises it. The cheap look comes first: whatever costs a second pass, or memory of the size of what
is looked at, is paid only after something was found.

A 4-bit weight is judged by its statistics and by what it dequantises to, never by its packed bytes:
any byte pattern is a valid pair of codes, and read as floating-point numbers random bytes hold NaN.

Shapes: B batch, T time, V vocabulary; `...` is any leading shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npt.adapters.layer import in_parts, whole
from npt.adapters.sharding import is_share
from npt.base.linear import dense_weight, quantized_linears
from npt.data.batch import IGNORE_INDEX
from npt.errors import NumericalError

ADAPTER = ".npt."
"""What every adapter tensor has in its full name, and no tensor of the base."""

_STATISTICS = ("absmax", "offset", "code", "state2.absmax", "state2.offset", "state2.code")


@dataclass(frozen=True)
class Finding:
    """One bad thing: its name, the index of its first bad element, that element, and the sentence
    that says it all.
    """

    name: str
    index: tuple[int, ...]
    value: float
    message: str

    def __str__(self) -> str:
        return self.message


def require(finding: Finding | None) -> None:
    """Raise what was found.

    Raises:
        NumericalError: with the finding's message.
    """
    if finding is not None:
        raise NumericalError(finding.message)


def logits_fault(logits: Tensor, name: str = "logits") -> Finding | None:
    """NaN or +Inf among logits, or a position at which every logit is -Inf, so that its softmax is
    NaN.

    -Inf beside a finite logit is a mask that somebody meant. A logsumexp per position shows all of
    this and nothing else: finite logits have a finite one. The elements are looked at only where it
    does not.

    Args:
        logits: [B, T, V] or [..., V].
        name: for the message.
    """
    if logits.numel() == 0 or bool(torch.isfinite(torch.logsumexp(logits.detach(), dim=-1)).all()):
        return None
    values = logits.detach()
    empty = (values == -math.inf).all(dim=-1, keepdim=True)
    bad = torch.isnan(values) | (values == math.inf) | empty
    if not bool(bad.any()):
        # in fp16 the sum inside logsumexp can overflow over a large vocabulary of equal logits
        return None
    index = _first(bad)
    letters = ("b", "t", "v")[-values.ndim :] if values.ndim <= 3 else ("",) * values.ndim
    where = ", ".join(
        f"{letter}={i}" if letter else str(i) for letter, i in zip(letters, index, strict=True)
    )
    message = (
        f"{name} {list(values.shape)}: {_census(values)}; first bad at [{where}]:"
        f" {float(values[index]):g}; look for the first non-finite activation below them"
    )
    return Finding(name, index, float(values[index]), message)


def target_fault(
    targets: Tensor, vocab_size: int, ignore_index: int | None = IGNORE_INDEX, name: str = "target"
) -> Finding | None:
    """A target id that is neither in [0, V) nor `ignore_index`. On a GPU such an id is an assertion
    that kills the process.

    Args:
        targets: [B, T] or any shape, integers.
        vocab_size: V.
        ignore_index: an id that stands for nothing and is allowed; None where there is none.
    """
    bad = (targets < 0) | (targets >= vocab_size)
    if ignore_index is not None:
        bad &= targets != ignore_index
    if not bool(bad.any()):
        return None
    index = _first(bad)
    value = int(targets[index])
    where = (
        ", ".join(f"{letter}={i}" for letter, i in zip(("b", "t"), index, strict=True))
        if len(index) == 2
        else _plain(index)
    )
    spared = "" if ignore_index is None else f" and not {ignore_index}"
    message = (
        f"{name} id {value} at [{where}] is outside [0, {vocab_size}){spared} ({int(bad.sum())}"
        " such); check that the data was tokenised with the model's own tokenizer"
    )
    return Finding(name, index, float(value), message)


def tensor_fault(
    named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], limit: float = math.inf
) -> Finding | None:
    """The first of the named tensors that holds a non-finite element, or one larger than `limit` in
    size.

    One norm per tensor is taken and all are read at once, so the device is waited for once however
    many tensors there are.

    Args:
        named: trainable tensors, gradients, moments, whatever has to be finite.
        limit: a size that no element may exceed; a flipped exponent bit makes a finite number of
            1e36.
    """
    items = [
        (name, t.detach())
        for name, t in (named.items() if isinstance(named, Mapping) else named)
        if t.numel() > 0
    ]
    if not items:
        return None
    home = items[0][1].device
    largest = torch.stack(
        [
            norm.to(home, torch.float32)
            for norm in torch._foreach_norm([t for _, t in items], math.inf)
        ]
    )
    for (name, tensor), size in zip(items, largest.tolist(), strict=True):
        if not (math.isfinite(size) and size <= limit):
            return _element(name, tensor, limit)
    return None


def moments_fault(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Finding | None:
    """An optimizer's state that no step can be taken from: not finite, or a second moment below
    zero, whose root is NaN.
    """
    state = {
        f"{key} of {name}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    finding = tensor_fault(state)
    if finding is not None:
        return finding
    for name, value in state.items():
        if name.startswith("exp_avg_sq of ") and bool((value < 0).any()):
            return _element(
                name, value, math.inf, value < 0, "a mean of squares cannot be negative"
            )
    return None


def base_fault(model: nn.Module) -> Finding | None:
    """A frozen weight that holds, or dequantises to, a non-finite value, by the name of its module.

    Reads the whole base once; meant for the start of a run and for a post-mortem.

    Args:
        model: quantised, partly or not at all; adapters are left to `tensor_fault`.
    """
    for name, layer in model.named_modules():
        if in_parts(layer):
            with whole(layer):
                finding = _fault_of(layer, f"{name}.")
            if finding is not None:
                return finding
    return _fault_of(model, "")


def _fault_of(model: nn.Module, prefix: str) -> Finding | None:
    """What `base_fault` finds among the tensors that are whole here, as they are called behind
    `prefix`.
    """
    packed: set[int] = set()
    for name, module in quantized_linears(model):
        if is_share(module.weight):
            continue
        name = f"{prefix}{name}"
        packed.add(id(module.weight))
        finding = tensor_fault(_statistics(name, module)) or tensor_fault(
            {f"{name}: dequantised weight": dense_weight(module)}
        )
        if finding is not None:
            return finding
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if (
            id(tensor) not in packed
            and ADAPTER not in f".{name}"
            and tensor.is_floating_point()
            and not is_share(tensor)
        ):
            finding = tensor_fault({f"{prefix}{name}": tensor})
            if finding is not None:
                return finding
    return None


def _statistics(name: str, module: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point statistics of a 4-bit weight. Where they are quantised themselves,
    `absmax` is codes: no numbers.
    """
    for statistic in _STATISTICS:
        value: Any = module.weight.quant_state
        for part in statistic.split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            yield f"{name}: {statistic}", value


def quantization_statistics(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the floating-point statistics of every 4-bit weight, named `module: absmax`
    and the like.
    """
    for name, module in quantized_linears(model):
        yield from _statistics(name, module)


def _element(
    name: str, tensor: Tensor, limit: float, bad: Tensor | None = None, why: str = ""
) -> Finding:
    """The first bad element of `tensor`."""
    bad = ~torch.isfinite(tensor) | (tensor.abs() > limit) if bad is None else bad
    index = _first(bad)
    value = float(tensor[index])
    if not why:
        why = f"larger than {limit:g}" if math.isfinite(value) else _census(tensor)
    message = (
        f"{name}{_plain(index)} is {value:g} ({int(bad.sum())} of {tensor.numel()} elements bad:"
        f" {why});"
        f" {'load the base again' if ADAPTER not in name else 'go back to the last checkpoint'}"
    )
    return Finding(name, index, value, message)


def _census(values: Tensor) -> str:
    finite = values[torch.isfinite(values)]
    extent = (
        f"finite values from {float(finite.min()):g} to {float(finite.max()):g}"
        if finite.numel()
        else "no finite value"
    )
    nan, up, down = (
        int(torch.isnan(values).sum()),
        int((values == math.inf).sum()),
        int((values == -math.inf).sum()),
    )
    return f"{nan} NaN, {up} +Inf, {down} -Inf, {extent}"


def _first(bad: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in bad.nonzero()[0])


def _plain(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""
