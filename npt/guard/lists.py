"""Many tensors at once: in few launches, and without asking twice what the same ones have told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter, eq
from typing import Any

import torch
from torch import Tensor

SMALL = 2**12
"""The most elements of a tensor whose check takes longer to start than to run."""

WRAPPER = "__tensor_flatten__"
"""The attribute of a tensor that is made of others."""

_SHAPE = attrgetter("shape")
_KIND = attrgetter("device", "dtype")
_KIND_AND_SHAPE = attrgetter("device", "dtype", "shape")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def alike(first: Sequence[Tensor], *others: Sequence[Any]) -> list[list[list[Any]]]:
    """Split lists into parts of one device and dtype, going by the tensors in the first list."""
    parts = _grouped(range(len(first)), map(_KIND, first))
    return [[*map(partial(_at, part), (first, *others))] for part in parts]


def _grouped(values: Iterable[Any], forms: Iterable[object]) -> list[list[Any]]:
    """Return the values of each form, given the form of each."""
    groups: dict[object, list[Any]] = {}
    for value, form in zip(values, forms, strict=True):
        groups.setdefault(form, []).append(value)
    return [*groups.values()]


def _at(places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    return [values[place] for place in places]


def keep_(tensors: Sequence[Tensor], flag: Tensor, others: Sequence[Tensor] = ()) -> None:
    """Keep tensors of one device and dtype if the scalar bool `flag` is set; otherwise replace
    them, in place, by the others, or by zero.

    Works on the bits as integers, since arithmetic would keep a NaN: (x - y) * flag + y is exactly
    x or y, even if x - y overflows.
    """
    bits = bits_of(tensors)
    instead = bits_of(others)
    if instead:
        torch._foreach_sub_(bits, instead)
    torch._foreach_mul_(bits, flag.to(bits[0].device, bits[0].dtype))
    if instead:
        torch._foreach_add_(bits, instead)


def bits_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    return [part.view(_INTEGERS[part.element_size()]) for part in parts]


class Forms:
    """Which tensors there were, with which memory and shapes: other code may replace or resize one.

    Written without a call for each tensor: an optimizer has three for each parameter.

    Attributes:
        plain: whether none is made of others; only then they have addresses to compare.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._tensors = [*tensors]
        self._shapes = [*map(_SHAPE, tensors)]
        self.plain = all(map(is_plain, tensors))
        self._addresses = [*map(Tensor.data_ptr, tensors)] if self.plain else []

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the same tensors, with the same memory and shapes."""
        if [*map(id, tensors)] != [*map(id, self._tensors)]:
            return False
        if self.plain and [*map(Tensor.data_ptr, tensors)] != self._addresses:
            return False
        return all(map(eq, map(_SHAPE, tensors), self._shapes))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal bit for bit, NaN included."""
    first, second = bits_of([one, other])
    return torch.equal(first, second)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has strides, and is not made of others."""
    return tensor.layout == torch.strided and not hasattr(tensor, WRAPPER)


def norms_of(
    tensors: Sequence[Tensor], order: float = 2.0, home: torch.device | None = None
) -> Tensor:
    """Return the norms [P]; a tensor's NaN, Inf or overflowing squares show in its norm. They are
    on `home`, or on the first tensor's device: unless fused, Adam keeps `step` on the host.
    """
    home = home or tensors[0].device
    norms = list(torch._foreach_norm([*tensors], order))
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device=home, dtype=torch.float32) for norm in norms]
    return torch.stack(norms).to(device=home, dtype=torch.float32)


class FiniteCheck:
    """Whether every number of some tensors is finite, asked again and again of the same ones, which
    are sorted once.
    """

    def __init__(self) -> None:
        self._forms = Forms([])
        self._large: list[Tensor] = []
        self._small: list[list[Tensor]] = []  # of one shape, device and dtype

    @torch.no_grad()
    def __call__(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether they are finite. False may also mean that squares overflow: on a CPU an L2
        norm takes a tenth of the time of a maximum.
        """
        now = [*tensors]
        if not self._forms.are_those_of(now):
            self._sort(now)
        parts = self._large + [torch.stack(group) for group in self._small]
        return not parts or bool(norms_of(parts).isfinite().all())

    def _sort(self, tensors: list[Tensor]) -> None:
        numbers = [tensor for tensor in tensors if has_norm(tensor) and tensor.numel()]
        small = [tensor for tensor in numbers if tensor.numel() <= SMALL]
        self._forms = Forms(tensors)
        self._large = [tensor for tensor in numbers if tensor.numel() > SMALL]
        self._small = _grouped(small, map(_KIND_AND_SHAPE, small))


def has_norm(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@torch.no_grad()
def copied(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies, made in few launches on a GPU."""
    copies: list[Tensor] = []
    together: list[Tensor] = []
    pieces: list[Tensor] = []
    for tensor in tensors:
        if is_plain(tensor):
            copies.append(torch.empty_like(tensor))
            together.append(tensor)
            pieces.append(copies[-1])
        else:
            copies.append(tensor.clone())
    for alike_pieces, group in alike(pieces, together):
        torch._foreach_copy_(alike_pieces, group)
    return copies
