"""The micro-batches that a guard keeps: to trace one that is refused, and for a post-mortem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from npt.guard.forensics import Finding, StoredMicroBatch, autocast, autocast_now, traced
from npt.guard.outcome import MicroBatch, Outcome
from npt.guard.parallel import unsynchronised, whole
from npt.random_state import random_state

KEPT = 4
"""The most refused, and accepted, micro-batches kept for a post-mortem. If a whole window was
refused, all of it is kept.
"""

SHARDED = (
    "not traced, because the layers are sharded and this process cannot compute alone; load the"
    " model in one process and call npt.trace(model, batch)"
)


class Hook:
    """Record the model's calls. A copied or unpickled hook does nothing, so that copying the model
    does not copy the guard."""

    def __init__(self, note: Callable[..., None] | None = None):
        self._note = note

    def __call__(self, _module: nn.Module, *values: object) -> None:
        if self._note is not None:
            self._note(*values)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Forensics:
    """Record a guarded model's calls, and trace refused micro-batches.

    Args:
        model: the guarded model, perhaps in DistributedDataParallel.
        traces: how many refusals to trace.
        keep: whether to keep micro-batches for a post-mortem.
        together: whether layers are sharded, so that processes compute only together.
        again: returns whether the open window will be computed again.

    Attributes:
        left: how many refusals may still be traced.
        refused: the last refused micro-batches; the first refusal after a step replaces them.
        accepted: the last micro-batches that counted in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        traces: int,
        keep: bool = False,
        together: bool = False,
        again: Callable[[], bool] = lambda: False,
    ):
        self.findings: list[Finding] = []
        self.left = traces
        self.refused: list[StoredMicroBatch] = []
        self._stepped = False  # since they were refused
        self.accepted: list[StoredMicroBatch] = []
        self._keep = keep
        self._parallel = model
        self._together = together
        self._again = again
        self._model = whole(model)
        self._open: StoredMicroBatch | None = None

    @contextmanager
    def watching(self, micro: MicroBatch, stored: StoredMicroBatch) -> Iterator[None]:
        """Record the model's calls in a micro-batch, if it may have to be computed again."""
        if not (self._keep or self.left or self._again()):
            yield
            return
        micro.stored = self._open = stored
        hook = Hook(self._note)
        handle = self._model.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        try:
            yield
        finally:
            handle.remove()
            self._open = None

    def _note(self, arguments: tuple[object, ...], named: dict[str, object]) -> None:
        stored = self._open
        if stored is None or not torch.is_grad_enabled():  # a teacher's call, or a generation
            return
        dtypes = autocast_now()
        if not stored.calls:
            stored.autocast = dtypes
            if stored.run is None:
                stored.random = random_state()
        if stored.inputs is None or stored.given:
            stored.given.append((*arguments, *named.values()) if arguments else named)
            stored.inputs = stored.given[0]
        stored.calls.append(partial(self._call, dtypes, arguments, named))

    def _call(
        self,
        dtypes: Mapping[str, torch.dtype],
        arguments: tuple[object, ...],
        named: Mapping[str, object],
    ) -> object:
        with autocast(dtypes):
            return self._model(*arguments, **named)

    def trace(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Trace the first refused micro-batches, except those refused before any computation."""
        for micro in micro_batches:
            # without a limit, `left` is negative
            if micro.finding or not (self.left and micro.refusal and micro.stored):
                continue
            self.left -= 1
            micro.stored.refusal = micro.refusal
            if self._together:  # a pass would need all processes
                micro.finding = Finding(micro.refusal, None, SHARDED)
            else:
                with unsynchronised(self._parallel):  # other processes do not join in
                    micro.finding = traced(self._model, micro.stored)
            self.findings.append(micro.finding)

    def keep(self, outcome: Outcome) -> None:
        """Keep some of a window's micro-batches for a post-mortem, and drop the others."""
        whole_window = next((r for r in outcome.refused if r.micro_batch is None), None)
        kept = [(micro, micro.stored) for micro in outcome.own if micro.stored is not None]
        for micro, stored in kept:
            stored.refusal = micro.refusal or whole_window
            micro.stored = None
        if not self._keep:
            return
        places = set(outcome.places)  # without those refused with another process's
        accepted = [each for micro, each in kept if micro.index in places and not each.refusal]
        refused = [stored for _, stored in kept if stored.refusal]
        if refused:
            # a step between them would make the earlier ones a matter of other weights
            earlier = [] if self._stepped else self.refused
            most = max(KEPT, len(refused))
            self.refused = [*earlier, *map(_copied, refused)][-most:]
            self._stepped = False
        if outcome.applied:
            self._stepped = True
            self.accepted = [*self.accepted, *map(_copied, accepted[-KEPT:])][-KEPT:]


def _copied(stored: StoredMicroBatch) -> StoredMicroBatch:
    return replace(stored, inputs=_cloned(stored.inputs), run=None, calls=[], given=[])


def _cloned(inputs: object) -> object:
    if isinstance(inputs, Tensor):
        return inputs.detach().clone()
    if isinstance(inputs, Mapping):
        return {key: _cloned(value) for key, value in inputs.items()}
    return [*map(_cloned, inputs)] if isinstance(inputs, list | tuple) else inputs
