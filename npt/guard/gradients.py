"""Gradients in a few flat buffers: scratch for one micro-batch, and the sums of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class FlatGradients:
    """The gradients of a window, and scratch for those of one micro-batch.

    Scratch and sums are flat, one buffer per device and dtype, so that a micro-batch is judged and
    added in a few operations. A parameter's `.grad` is a view of them.

    Args:
        parameters: by name; their `.grad` belongs to this object from now on.
        track: notice which parameters take part in a backward, so that the others keep the `.grad`
            None that makes an optimizer leave them alone.

    Attributes:
        scratch_views: of each parameter, in scratch; `.grad` is a fresh view of the same numbers.
        sum_views: likewise in the sums.
        reached: places of the parameters that the micro-batch's backward reached; None: not
            tracked.
        clipped: the parameters whose norm is a window's, in the order of summation.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], track: bool = False):
        self.names: tuple[str, ...] = ()
        self.parameters: tuple[nn.Parameter, ...] = ()
        self.scratch: list[Tensor] = []
        self.scratch_views: list[Tensor] = []
        self.sums: list[Tensor] = []
        self.sum_views: list[Tensor] = []
        self.reached: set[int] | None = set() if track else None
        self._stale = False
        self._handles: list[Any] = []
        self.extend(parameters)
        self.clipped: tuple[nn.Parameter, ...] = self.parameters

    def extend(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Hold the gradients of further parameters too, from the next micro-batch on."""
        new = tuple(parameters.values())
        for flats, views in ((self.scratch, self.scratch_views), (self.sums, self.sum_views)):
            more_flats, more_views = _flat_like(new)
            flats += more_flats
            views += more_views
        if self.reached is not None:
            self._handles += [
                p.register_post_accumulate_grad_hook(partial(_note, self.reached, i))
                for i, p in enumerate(new, start=len(self.parameters))
            ]
        self.names += tuple(parameters)
        self.parameters += new

    def begin(self) -> None:
        """Point every `.grad` at empty scratch, for one forward and backward."""
        for flat in self.scratch:
            flat.zero_()
        if self.reached is not None:
            self.reached.clear()
        self._point(self.scratch_views)

    def collect(self) -> None:
        """Take gradients into scratch that were made elsewhere: `.grad` was replaced, or None.

        What was assigned counts as reached, though no hook saw it; what was dropped does not.
        """
        reached = set() if self.reached is None else self.reached
        for place, (p, view) in enumerate(zip(self.parameters, self.scratch_views, strict=True)):
            if p.grad is None:
                view.zero_()
                reached.discard(place)
            elif p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad)
                reached.add(place)

    def withdraw(self) -> None:
        """Leave the parameters without gradients; the window keeps its sums."""
        for parameter in self.parameters:
            parameter.grad = None

    def scale(self, factor: float) -> None:
        """Multiply the micro-batch's gradients."""
        for flat in self.scratch:
            flat.mul_(factor)

    def add(self, flag: Tensor) -> None:
        """Add the scratch to the sums if the scalar bool `flag` is set, without reading it.

        In place, for a third tensor of this size would be the guard's largest.
        """
        self._renew()
        for total, scratch in zip(self.sums, self.scratch, strict=True):
            nothing = torch.zeros((), dtype=scratch.dtype, device=scratch.device)
            torch.where(flag.to(scratch.device), scratch, nothing, out=scratch)
            total += scratch

    def expose(self, unreached: Sequence[int] = ()) -> None:
        """Point `.grad` at the window's sums, but leave those parameters without one."""
        self._renew()
        self._point(self.sum_views)
        for place in unreached:
            self.parameters[place].grad = None

    def clear(self) -> None:
        """Forget the window, by nothing that could fail: its step may be made already."""
        self._stale = True
        self.withdraw()

    def close(self) -> None:
        """Leave the parameters as they were found, without a gradient, and free the buffers."""
        self.withdraw()
        for handle in self._handles:
            handle.remove()
        self.scratch, self.scratch_views, self.sums, self.sum_views = [], [], [], []

    def _point(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view.detach()  # fresh: somebody may move it by `p.grad.data = ...`

    def _renew(self) -> None:
        """Let the sums be zero if they are still a forgotten window's."""
        if self._stale:
            for flat in self.sums:
                flat.zero_()
            self._stale = False


def _note(reached: set[int], place: int, _parameter: Tensor) -> None:
    reached.add(place)


def _flat_like(parameters: tuple[nn.Parameter, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return a flat buffer of zeros per device and dtype, and each parameter's view of one.

    A view has its parameter's strides, as a gradient of autograd's has: a norm adds in that order.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(parameters):
        groups.setdefault((p.device, p.dtype), []).append(i)
    flats: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for (device, dtype), members in groups.items():
        sizes = [parameters[i].numel() for i in members]
        flats.append(torch.zeros(sum(sizes), device=device, dtype=dtype))
        for i, part in zip(members, flats[-1].split(sizes), strict=True):
            like = torch.empty_like(parameters[i], device="meta")
            views[i] = part.as_strided(like.shape, like.stride(), part.storage_offset())
    return flats, [views[i] for i in range(len(parameters))]
