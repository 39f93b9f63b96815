"""Find tensors in nested values, judge their numbers, and attach notes to their memory.

One storage may hold several tensors, such as rows of a buffer. So a note belongs to a stretch of a
storage. Every view of it finds the note, which ends when the stretch is overwritten or freed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from operator import mul
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

N = TypeVar("N")

# A method of tensors that wrap others.
_WRAPS = "__tensor_flatten__"
_FP16_LOWEST = torch.finfo(torch.float16).min


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for every tensor in nested tuples, lists, mappings and dataclasses, and
    for the parts of wrapper subclasses. Other objects, such as caches, are not searched.
    """
    if isinstance(value, Tensor) and not hasattr(value, _WRAPS):
        yield name, value
        return
    for key, item in parts_of(value):
        label = f"{name}.{key}".removeprefix(".")
        yield from tensors_in(item, label)


def parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what `tensors_in` searches in a value, with keys."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, tuple | list):
        return enumerate(value)
    return [(name, getattr(value, name)) for name in _attributes(value)]


def _attributes(value: Any) -> list[str]:
    wraps = isinstance(value, Tensor) and hasattr(value, _WRAPS)
    if wraps:
        names: list[str] = value.__tensor_flatten__()[0]
        return names
    is_data = is_dataclass(value) and not isinstance(value, type)
    return [field.name for field in fields(value)] if is_data else []


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
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    # packed 4-bit floats (x2) have no NaN
    if whole or "x2" in str(tensor.dtype) or _pretends(tensor):
        return None
    values = _values(tensor).detach()
    has_any = values.layout == torch.strided and values.numel()
    return values if has_any else None


def _pretends(tensor: Tensor) -> bool:
    has_no_memory = tensor.is_meta or tensor._is_zerotensor()
    return has_no_memory or isinstance(tensor, FakeTensor) or hasattr(tensor, _WRAPS)


def extent(values: Tensor) -> tuple[float, float]:
    """Return the lowest and highest number, or NaN twice if any is NaN. Waits for the device."""
    low, high = torch.stack(torch.aminmax(_reals(values))).tolist()
    return low, high


def judge(tensor: Tensor, limit: float = sys.float_info.max) -> Badness:
    """Judge a tensor of any dtype and layout; a finite number beyond `limit` is bad."""
    values = numbers(tensor)
    if values is None:
        return Badness.FINE
    low, high = extent(values)
    # a NaN fails every comparison
    if not high <= limit:
        return Badness.HARD
    return Badness.FINE if low >= -limit else Badness.SOFT


def first_bad(tensor: Tensor, limit: float = math.inf, soft: bool = True) -> tuple[int, ...]:
    """Return the index of the first bad element, or (); if `soft`, -Inf counts too."""
    values = numbers(tensor)
    if values is None:
        return ()
    parts = _reals(values)
    most = min(limit, torch.finfo(parts.dtype).max)
    # a NaN fails every comparison
    bad = ~(parts <= most)
    if soft:
        bad |= parts < -most
    if values.is_complex():
        bad = bad.any(dim=-1)
    indices = bad.nonzero()[:1].tolist()
    if not indices:
        return ()
    index = tuple(indices[0])
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
    values = numbers(tensor)
    if values is None:
        return _integer_absmax(tensor)
    finite = torch.nan_to_num(_reals(values), 0.0, 0.0, 0.0)
    return float(finite.abs().max())


def _integer_absmax(tensor: Tensor) -> float:
    fractional = tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized
    if fractional or tensor.is_meta or not tensor.numel():
        return 0.0
    return float(tensor.detach().to(torch.float64).abs().max())


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
    lowest = low <= -1e37 or low in (_FP16_LOWEST, _FP16_LOWEST / 2)
    return lowest or bool(((values == low) | (values == 0)).all())


def nears_minimum(tensor: Tensor) -> bool:
    """Tell if the lowest number is near the dtype's minimum, as a mask's is."""
    values = numbers(tensor)
    if values is None or values.is_complex() or values.dtype.itemsize == 1:
        return False
    lowest, _ = extent(values)
    return lowest <= 0.5 * torch.finfo(values.dtype).min


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

    def overlaps(self, other: Stretch) -> bool:
        return self.start < other.end and other.start < self.end

    def covers(self, other: Stretch) -> bool:
        """Tell if writing here overwrites all of another stretch of the same storage."""
        inside = self.dense and self.start <= other.start and other.end <= self.end
        return inside or (self.start, self.layout) == (other.start, other.layout)


_NO_MEMORY = Stretch(0, 0, 0, (), dense=False)


def stretch_of(tensor: Tensor) -> Stretch:
    """Return the stretch of a tensor, or of a sparse one's values; key 0 if it has no memory."""
    tensor = _values(tensor)
    if not tensor.numel():
        return _NO_MEMORY
    try:
        key = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return _NO_MEMORY
    strides = tensor.stride()
    layout = tuple(zip(tensor.shape, strides, strict=True))
    # in elements, from the first to the last
    last = sum(map(mul, tensor.shape, strides)) - sum(strides)
    length = last + 1
    dense = tensor.numel() == length
    size = tensor.dtype.itemsize
    offset = int(tensor.storage_offset())
    start = offset * size
    end = start + length * size
    return Stretch(key, start, end, layout, dense)


def storage_key(tensor: Tensor) -> int:
    """Return the id of a tensor's storage; 0 if it has no memory."""
    return stretch_of(tensor).key


class Memory(Generic[N]):
    """Notes by stretch of storage. Weak references keep a noted storage's id from being reused."""

    def __init__(self) -> None:
        self._notes: dict[int, list[tuple[StorageWeakRef, Stretch, N]]] = {}

    def of(self, tensor: Tensor) -> list[N]:
        """Return the notes on memory that the tensor overlaps, oldest first."""
        here = stretch_of(tensor)
        notes = self._live(here.key)
        return [note for _, there, note in notes if there.overlaps(here)]

    def add(self, tensor: Tensor, note: N) -> None:
        here = stretch_of(tensor)
        notes = self._live(here.key)
        known = any(other == note and stretch.covers(here) for _, stretch, other in notes)
        if here is not _NO_MEMORY and not known:
            storage = StorageWeakRef(_values(tensor).untyped_storage())
            self._notes[here.key] = [*notes, (storage, here, note)]

    def forget(self, tensor: Tensor) -> None:
        """Drop the notes on memory that writing to the tensor replaces."""
        here = stretch_of(tensor)
        notes = self._live(here.key)
        if notes:
            self._notes[here.key] = [entry for entry in notes if not here.covers(entry[1])]

    def _live(self, key: int) -> list[tuple[StorageWeakRef, Stretch, N]]:
        notes = self._notes.get(key, [])
        return [] if notes and notes[0][0].expired() else notes
