"""Notes on tensors, kept by the memory that they lie in.

One storage may hold several tensors: rows of a buffer, all weights of a recurrent network. So a
note holds for a stretch of a storage, every view of it finds the note, and it ends when the stretch
is overwritten or freed.
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
    """The bytes of a storage from a tensor's first element to the end of its last. dense: the
    tensor fills them all.
    """

    key: int
    start: int
    end: int
    layout: tuple[int, ...]
    dense: bool

    def overlaps(self, other: Stretch) -> bool:
        return self.key == other.key and self.start < other.end and other.start < self.end

    def covers(self, other: Stretch) -> bool:
        """Tell if writing here leaves nothing of the other."""
        inside = self.dense and self.start <= other.start and other.end <= self.end
        return self.key == other.key and (inside or self.layout == other.layout)


def _values(tensor: Tensor) -> Tensor:
    return tensor.detach()._values() if tensor.layout == torch.sparse_coo else tensor


def stretch_of(tensor: Tensor) -> Stretch | None:
    """Return a tensor's stretch (of a sparse one, that of its values); None if it has no memory."""
    tensor = _values(tensor)
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


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage; 0 if it has no memory."""
    here = stretch_of(tensor)
    return 0 if here is None else here.key


class Memory(Generic[N]):
    """Notes by stretch of storage. The weak references keep a storage's identity from being given
    to another one while it is noted.
    """

    def __init__(self) -> None:
        self._notes: dict[int, list[tuple[StorageWeakRef, Stretch, N]]] = {}

    def of(self, tensor: Tensor) -> list[N]:
        """Return the notes on memory that the tensor shares, the oldest first."""
        here = stretch_of(tensor)
        if here is None:
            return []
        return [note for _, known, note in self._live(here.key) if known.overlaps(here)]

    def add(self, tensor: Tensor, note: N) -> None:
        here = stretch_of(tensor)
        if here is None:
            return
        notes = self._live(here.key)
        if not any(other == note and known.covers(here) for _, known, other in notes):
            storage = StorageWeakRef(_values(tensor).untyped_storage())
            self._notes[here.key] = [*notes, (storage, here, note)]

    def forget(self, tensor: Tensor) -> None:
        """Drop the notes on what writing to the tensor replaces."""
        here = stretch_of(tensor)
        if here is not None and here.key in self._notes:
            left = [entry for entry in self._live(here.key) if not here.covers(entry[1])]
            self._notes[here.key] = left

    def _live(self, key: int) -> list[tuple[StorageWeakRef, Stretch, N]]:
        notes = self._notes.get(key, [])
        return [] if notes and notes[0][0].expired() else notes
