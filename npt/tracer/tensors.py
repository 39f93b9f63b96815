"""Find tensors in nested values, judge their numbers, and attach notes to their memory.

One storage may hold several tensors, such as rows of a buffer. So a note belongs to a stretch of a
storage. Every view of it finds the note, which ends when the stretch is overwritten or freed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

N = TypeVar("N")

_FP16_LOWEST = torch.finfo(torch.float16).min


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every tensor in nested tuples, lists, mappings and dataclasses, and
    for the parts of wrapper subclasses. Other objects, such as caches, are not searched.
    """
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            yield name, value
            return
        parts, _ = value.__tensor_flatten__()
        items = ((part, getattr(value, part)) for part in parts)
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
    for key, item in items:
        label = f"{name}.{key}" if name else str(key)
        yield from tensors_in(item, label)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def described(name: str, shape: Iterable[int], dtype: torch.dtype) -> str:
    return f"{name} {list(shape)} {dtype_name(dtype)}"


class Badness(IntEnum):
    """The badness of a tensor: SOFT if it may be a mask (-Inf or below -limit), HARD if it has NaN,
    +Inf or a value above the limit.
    """

    FINE = 0
    SOFT = 1
    HARD = 2


def numbers(tensor: Tensor) -> Tensor | None:
    """Return a view of a tensor's floating-point or complex numbers (of a sparse one, its values);
    None if it has none or no real memory.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    # packed 4-bit floats have no NaN
    if "x2" in str(tensor.dtype):
        return None
    pretends = isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor)
    if pretends or tensor.is_meta or tensor._is_zerotensor():
        return None
    values = _values(tensor).detach()
    if values.layout != torch.strided or not values.numel():
        return None
    return values


def extent(values: Tensor) -> tuple[float, float]:
    """Return the lowest and highest number, or NaN twice if any is NaN. Waits for the device."""
    low, high = torch.stack(torch.aminmax(_reals(values))).tolist()
    return low, high


def judge(tensor: Tensor, limit: float = math.inf) -> Badness:
    """Judge a tensor of any dtype and layout; a finite number beyond `limit` is bad."""
    values = numbers(tensor)
    if values is None:
        return Badness.FINE
    low, high = extent(values)
    if math.isnan(low) or high > limit or high == math.inf:
        return Badness.HARD
    if low < -limit or low == -math.inf:
        return Badness.SOFT
    return Badness.FINE


def first_bad(tensor: Tensor, limit: float = math.inf, soft: bool = True) -> tuple[int, ...]:
    """Return the index of the first bad element, or (); if `soft`, -Inf counts too."""
    values = numbers(tensor)
    if values is None:
        return ()
    parts = _reals(values)
    bad = torch.isnan(parts)
    bad |= parts == math.inf
    bad |= parts > limit
    if soft:
        bad |= parts == -math.inf
        bad |= parts < -limit
    if values.is_complex():
        bad = bad.any(dim=-1)
    indices = bad.nonzero()
    if not len(indices):
        return ()
    index = tuple(indices[0].tolist())
    if tensor.layout == torch.sparse_coo:
        place = tensor.detach()._indices()[:, index[0]]
        return (*place.tolist(), *index[1:])
    return index


def element(tensor: Tensor, index: tuple[int, ...]) -> float:
    """Return one element; for a complex one, the larger magnitude of its parts."""
    value = tensor.detach()[index]
    if value.is_complex():
        value = _reals(value).abs().max()
    return float(value)


def absmax(tensor: Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        if not tensor.numel() or tensor.is_quantized or tensor.is_meta:
            return 0.0
        return float(tensor.detach().to(torch.float64).abs().max())
    values = numbers(tensor)
    if values is None:
        return 0.0
    finite = torch.nan_to_num(_reals(values), 0.0, 0.0, 0.0)
    return float(finite.abs().max())


def count(tensor: Tensor) -> tuple[int, int]:
    values = numbers(tensor)
    if values is None:
        return 0, 0
    parts = _reals(values)
    return int(torch.isnan(parts).sum()), int(torch.isinf(parts).sum())


def looks_like_a_mask(tensor: Tensor) -> bool:
    """Tell if the lowest number is a mask's: -Inf, a dtype's minimum, or the only non-zero."""
    values = numbers(tensor)
    if values is None:
        return False
    low, _ = extent(values)
    if low <= -1e37 or low in (_FP16_LOWEST, _FP16_LOWEST / 2):
        return True
    return bool(((values == low) | (values == 0)).all())


def _reals(values: Tensor) -> Tensor:
    if values.is_complex():
        return torch.view_as_real(values.resolve_conj())
    # 8-bit floats have no reductions
    return values.to(torch.float32) if values.dtype.itemsize == 1 else values


def _values(tensor: Tensor) -> Tensor:
    return tensor.detach()._values() if tensor.layout == torch.sparse_coo else tensor


class Stretch(NamedTuple):
    """The bytes of storage `key` from a tensor's first element to its last; `layout` holds sizes
    and strides, and `dense` tells whether the tensor fills all bytes.
    """

    key: int
    start: int
    end: int
    layout: tuple[tuple[int, int], ...]
    dense: bool

    def covers(self, other: Stretch) -> bool:
        """Tell if writing here overwrites all of another stretch of the same storage."""
        inside = self.dense and self.start <= other.start and other.end <= self.end
        return inside or (self.start, self.layout) == (other.start, other.layout)


def stretch_of(tensor: Tensor) -> Stretch | None:
    """Return the stretch of a tensor, or of a sparse one's values; None if it has no memory."""
    tensor = _values(tensor)
    try:
        key = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    if tensor.numel() == 0:
        return None
    layout = tuple(zip(tensor.shape, tensor.stride(), strict=True))
    # in elements, from the first to the last
    length = 1 + sum((n - 1) * stride for n, stride in layout)
    size = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * size
    end = start + length * size
    return Stretch(key, start, end, layout, dense=tensor.numel() == length)


def storage_key(tensor: Tensor) -> int:
    """Return the id of a tensor's storage; 0 if it has no memory."""
    stretch = stretch_of(tensor)
    return stretch.key if stretch else 0


class Memory(Generic[N]):
    """Notes by stretch of storage. Weak references keep a noted storage's id from being reused."""

    def __init__(self) -> None:
        self._notes: dict[int, list[tuple[StorageWeakRef, Stretch, N]]] = {}

    def of(self, tensor: Tensor) -> list[N]:
        """Return the notes on memory that the tensor overlaps, oldest first."""
        here = stretch_of(tensor)
        if here is None:
            return []
        found = []
        for _, there, note in self._live(here.key):
            if there.start < here.end and here.start < there.end:
                found.append(note)
        return found

    def add(self, tensor: Tensor, note: N) -> None:
        here = stretch_of(tensor)
        if here is None:
            return
        notes = self._live(here.key)
        if not any(other == note and stretch.covers(here) for _, stretch, other in notes):
            storage = StorageWeakRef(_values(tensor).untyped_storage())
            self._notes[here.key] = [*notes, (storage, here, note)]

    def forget(self, tensor: Tensor) -> None:
        """Drop the notes on memory that writing to the tensor replaces."""
        here = stretch_of(tensor)
        if here is not None and here.key in self._notes:
            self._notes[here.key] = [
                entry for entry in self._live(here.key) if not here.covers(entry[1])
            ]

    def _live(self, key: int) -> list[tuple[StorageWeakRef, Stretch, N]]:
        notes = self._notes.get(key, [])
        return [] if notes and notes[0][0].expired() else notes
