"""Operations on many tensors in few launches, none of which reads a flag on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def alike(first: Sequence[Tensor], *others: Sequence[Any]) -> list[list[list[Any]]]:
    """Return lists in parts in which the tensors of the first are of one device and dtype, for
    which torch has operations on whole lists.
    """
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(first):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    return [[[each[i] for i in part] for each in (first, *others)] for part in places.values()]


def keep_(tensors: Sequence[Tensor], flag: Tensor, others: Sequence[Tensor] = ()) -> None:
    """Keep tensors of one device and dtype if the scalar bool `flag` is set; else let them be the
    others, or zero.

    Their bits are whole numbers here, whose sums and products are exact where those of NaN are not:
    (x - y) * flag + y is x or y, also where x - y leaves their range and comes back.
    """
    bits, instead = bits_of(tensors), bits_of(others)
    if instead:
        torch._foreach_sub_(bits, instead)
    torch._foreach_mul_(bits, flag.to(bits[0].device, bits[0].dtype))
    if instead:
        torch._foreach_add_(bits, instead)


def bits_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as whole numbers, which share their memory."""
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return [part.view(_INTEGERS[part.element_size()]) for part in parts]


def norms_of(
    tensors: Sequence[Tensor], order: float = 2.0, home: torch.device | None = None
) -> Tensor:
    """Return the norms [P]; NaN, Inf and overflowing squares of a tensor show in its norm. They lie
    on the first one's device, or at `home`: Adam's `step` is on the host unless it is fused.
    """
    home, norms = home or tensors[0].device, torch._foreach_norm([*tensors], order)
    return torch.stack([norm.to(device=home, dtype=torch.float32) for norm in norms])
