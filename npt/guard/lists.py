"""Operations on many tensors in few launches; none reads a flag on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def alike(first: Sequence[Tensor], *others: Sequence[Any]) -> list[list[list[Any]]]:
    """Split lists into parts of one device and dtype, going by the tensors in the first list."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(first):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    return [[[each[i] for i in part] for each in (first, *others)] for part in places.values()]


def keep_(tensors: Sequence[Tensor], flag: Tensor, others: Sequence[Tensor] = ()) -> None:
    """Keep tensors of one device and dtype if the scalar bool `flag` is set; otherwise replace
    them, in place, by the others, or by zero.

    Works on the bits as integers, since arithmetic would keep a NaN: (x - y) * flag + y is exactly
    x or y, even if x - y overflows.
    """
    bits, instead = bits_of(tensors), bits_of(others)
    if instead:
        torch._foreach_sub_(bits, instead)
    torch._foreach_mul_(bits, flag.to(bits[0].device, bits[0].dtype))
    if instead:
        torch._foreach_add_(bits, instead)


def bits_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return [part.view(_INTEGERS[part.element_size()]) for part in parts]


def norms_of(
    tensors: Sequence[Tensor], order: float = 2.0, home: torch.device | None = None
) -> Tensor:
    """Return the norms [P]; a tensor's NaN, Inf or overflowing squares show in its norm. They are
    on `home`, or on the first tensor's device: unless fused, Adam keeps `step` on the host.
    """
    home, norms = home or tensors[0].device, torch._foreach_norm([*tensors], order)
    return torch.stack([norm.to(device=home, dtype=torch.float32) for norm in norms])
