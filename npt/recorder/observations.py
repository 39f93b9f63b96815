"""The rows of a pass so far: tensors reduced on their device, whose numbers are not read yet."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npt.errors import kind_of
from npt.recorder.record import Direction, Row
from npt.recorder.sites import Site
from npt.recorder.statistics import FIELDS, share_beyond, summarise
from npt.tracer.tensors import dtype_name


@dataclass
class Entry:
    """A row whose numbers have not been read yet.

    Attributes:
        summary: index of its statistics among the vectors of numbers.
        saturation: index of its share of saturated multipliers.
        update: indices of the statistics of its addition to the state, and of the state.
    """

    site: Site
    stage: str
    direction: Direction
    shape: tuple[int, ...]
    dtype: str
    summary: int
    source: int | None = None
    saturation: int | None = None
    update: tuple[int, int] | None = None


@dataclass
class Reduced:
    """A reduced tensor. Its numbers hold while it lives with the same version.

    Attributes:
        summary: index of its numbers.
        entries: indices of its rows.
    """

    reference: weakref.ref[Tensor]
    version: int
    summary: int
    entries: list[int] = field(default_factory=list)

    def unchanged(self) -> Tensor | None:
        tensor = self.reference()
        return tensor if tensor is not None and _version(tensor) == self.version else None


class Observations:
    """Rows in the order of the pass.

    Attributes:
        valid: [B, T] bool, True at the tokens that count; None for all.
    """

    def __init__(self, valid: Tensor | None):
        self.valid = valid
        self.entries: list[Entry] = []
        self._numbers: list[Tensor] = []
        self._reduced: dict[tuple[object, ...], Reduced] = {}
        self._calls: Counter[tuple[str, str, Direction]] = Counter()
        self._updates: dict[tuple[int, int], int] = {}

    def find(self, tensor: Tensor) -> Reduced | None:
        """Return the reduced tensor with these numbers: the same memory and shape, unchanged since.
        An inference tensor does not count its changes, so it is always new.
        """
        reduced = self._reduced.get(_memory(tensor))
        if reduced is None or tensor.is_inference() or reduced.unchanged() is None:
            return None
        return reduced

    def reduce(self, tensor: Tensor) -> Reduced:
        summary = self.summarise(tensor, self.valid)
        reduced = Reduced(weakref.ref(tensor), _version(tensor), summary)
        self._reduced[_memory(tensor)] = reduced
        return reduced

    def add(
        self, site: Site, stage: str, tensor: Tensor, reduced: Reduced, source: int | None
    ) -> None:
        """Add a forward row for a reduced tensor."""
        reduced.entries.append(len(self.entries))
        self._append(site, stage, "forward", tensor, reduced.summary).source = source

    def add_gradient(self, site: Site, stage: str, gradient: Tensor, summary: int) -> None:
        self._append(site, stage, "gradient", gradient, summary)

    def _append(
        self, site: Site, stage: str, direction: Direction, tensor: Tensor, summary: int
    ) -> Entry:
        place = site.name, stage, direction
        self._calls[place] += 1
        call = self._calls[place]
        if call > 1:
            mark = "#" if direction == "forward" else "@"
            stage = f"{stage}{mark}{call}"
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype)
        entry = Entry(site, stage, direction, shape, dtype, summary)
        self.entries.append(entry)
        return entry

    def add_update(self, reduced: Reduced, after: Tensor, state: Reduced) -> None:
        """Note in a tensor's last row what it adds to the state that it was made from."""
        tensor = state.unchanged()
        if tensor is None or not after.is_floating_point():
            return
        if after.shape != tensor.shape or after.device != tensor.device:
            return
        pair = (reduced.summary, state.summary)
        if pair not in self._updates:
            added = after.detach() - tensor.detach()
            self._updates[pair] = self.summarise(added, self.valid)
        self.entries[reduced.entries[-1]].update = self._updates[pair], state.summary

    def add_saturation(
        self, reduced: Reduced, tensor: Tensor, centre: float, distance: float
    ) -> None:
        """Note in a tensor's last row the share of its elements this far from the centre."""
        share = share_beyond(tensor, centre, distance, self.valid)
        self.entries[reduced.entries[-1]].saturation = self._keep(share)

    def summarise(self, tensor: Tensor, valid: Tensor | None) -> int:
        """Reduce a tensor; return the index of its numbers."""
        wrapped = is_traceable_wrapper_subclass(tensor)
        if tensor.layout != torch.strided or tensor.is_meta or wrapped:
            where = f"{tensor.layout} on {tensor.device}"
            raise TypeError(f"{kind_of(tensor)} of layout {where} is not supported")
        return self._keep(summarise(tensor, valid))

    def _keep(self, numbers: Tensor) -> int:
        self._numbers.append(numbers)
        return len(self._numbers) - 1

    def rows(self) -> tuple[Row, ...]:
        """Read the numbers, with one transfer for each device."""
        numbers: list[list[float]] = [[] for _ in self._numbers]
        for device in dict.fromkeys(vector.device for vector in self._numbers):
            here = [i for i, vector in enumerate(self._numbers) if vector.device == device]
            read = iter(torch.cat([self._numbers[i] for i in here]).tolist())
            for i in here:
                numbers[i] = list(itertools.islice(read, self._numbers[i].numel()))
        return tuple(_row(entry, numbers) for entry in self.entries)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that views of the same memory in the same shape share."""
    at = tensor.data_ptr() or id(tensor)
    return at, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def _version(tensor: Tensor) -> int:
    """Return the number of in-place changes, which an inference tensor does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _row(entry: Entry, numbers: list[list[float]]) -> Row:
    values: dict[str, Any] = dict(zip(FIELDS, numbers[entry.summary], strict=True))
    counts = {name: int(values.pop(name)) for name in FIELDS[:4]}
    finite = counts["count"] - counts["nan"] - counts["pos_inf"] - counts["neg_inf"]
    values["absmax"] = max(abs(values["min"]), abs(values["max"]))
    # the statistics of no element are NaN, which JSON does not have
    if not finite:
        values = dict.fromkeys(values)
    ratio = None
    if entry.update is not None:
        added, state = (numbers[summary][-1] for summary in entry.update)  # the RMS
        ratio = added / state if state > 0 and added >= 0 else None  # None if one is NaN
    return Row(
        module=entry.site.name,
        layer=entry.site.layer,
        stage=entry.stage,
        direction=entry.direction,
        shape=entry.shape,
        dtype=entry.dtype,
        finite_share=finite / counts["count"] if counts["count"] else 1.0,
        saturation=None if entry.saturation is None else numbers[entry.saturation][0],
        update_ratio=ratio,
        source=entry.source,
        **counts,
        **values,
    )
