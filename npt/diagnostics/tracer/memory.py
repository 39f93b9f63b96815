"""Notes on tensors, kept by the memory that they stand in: every view of it finds them, and they go
when it is freed.

A tensor is a view of a storage, and one storage may hold several: rows of a preallocated buffer,
all weights of a recurrent network. So a note holds for a stretch of a storage, and ends where the
stretch is overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

N = TypeVar("N")


@dataclass(frozen=True)
class Stretch:
    """The bytes of a storage from a tensor's first element to behind its last. dense: it fills them
    all.
    """

    key: int
    start: int
    end: int
    layout: tuple[int, ...]
    dense: bool

    def overlaps(self, other: Stretch) -> bool:
        return self.key == other.key and self.start < other.end and other.start < self.end

    def covers(self, other: Stretch) -> bool:
        """Whether writing here leaves nothing of the other."""
        inside = self.dense and self.start <= other.start and other.end <= self.end
        return self.key == other.key and (inside or self.layout == other.layout)


def stretch_of(tensor: Tensor) -> Stretch | None:
    """None for a tensor without memory of its own. Of a sparse one it is that of its values."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.detach()._values()
    try:
        key = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None
    if tensor.numel() == 0:
        return None
    size = tensor.dtype.itemsize
    shape, strides = tuple(tensor.shape), [int(stride) for stride in tensor.stride()]
    start = int(tensor.storage_offset()) * size
    end = start + (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * size
    return Stretch(key, start, end, (start, *shape, *strides), tensor.numel() * size == end - start)


@dataclass(frozen=True)
class _Note(Generic[N]):
    storage: StorageWeakRef
    stretch: Stretch
    note: N


class Memory(Generic[N]):
    """Notes by stretch of storage. A weak reference keeps a storage's identity from being given to
    another while it is noted.
    """

    def __init__(self) -> None:
        self._notes: dict[int, list[_Note[N]]] = {}

    def of(self, tensor: Tensor) -> list[N]:
        """The notes on memory that the tensor shares, the older in front."""
        here = stretch_of(tensor)
        if here is None:
            return []
        return [known.note for known in self._live(here.key) if known.stretch.overlaps(here)]

    def add(self, tensor: Tensor, note: N) -> None:
        here = stretch_of(tensor)
        if here is None:
            return
        notes = self._live(here.key)
        if not any(known.note == note and known.stretch.covers(here) for known in notes):
            values = tensor.detach()._values() if tensor.layout == torch.sparse_coo else tensor
            self._notes[here.key] = [
                *notes,
                _Note(StorageWeakRef(values.untyped_storage()), here, note),
            ]

    def forget(self, tensor: Tensor) -> None:
        """Drop the notes on what writing to the tensor replaces."""
        here = stretch_of(tensor)
        if here is not None and here.key in self._notes:
            left = [known for known in self._live(here.key) if not here.covers(known.stretch)]
            self._notes[here.key] = left

    def _live(self, key: int) -> list[_Note[N]]:
        notes = self._notes.get(key, [])
        return notes if not notes or not notes[0].storage.expired() else []
