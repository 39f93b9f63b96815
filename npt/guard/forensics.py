"""What a guard keeps of an open window, so that a refused micro-batch can be looked at again.

The model's calls are noted, not copied: overwrite no input before `guard.step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from npt.guard.finding import Finding, recorded, traced
from npt.guard.outcome import MicroBatchRecord, Refusal
from npt.guard.parameters import unsynchronised, whole
from npt.guard.traces import States
from npt.random_state import random_state

SUSPECTS = ACCEPTED = 4
"""Micro-batches at most that are kept for a post-mortem; of a window that was refused as a whole,
all.
"""


@dataclass(frozen=True)
class Call:
    """A call of the model.

    Attributes:
        arguments, named: its inputs.
        autocast: by device type, the dtype of one that was on.
    """

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    autocast: dict[str, torch.dtype]

    @property
    def inputs(self) -> Any:
        """The tensors that the tracer names."""
        return self.named if not self.arguments else (*self.arguments, *self.named.values())

    def again(self, model: nn.Module) -> Any:
        """Call the model once more."""
        with ExitStack() as stack:
            for kind, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            return model(*self.arguments, **self.named)


@dataclass
class Kept:
    """All that is needed to compute a micro-batch again.

    Attributes:
        random: the state that it was computed from.
        inputs, run, ids, tokens: as given to `Guard.micro_batch`.
        calls: of the model, noted meanwhile.
    """

    random: States
    inputs: Any = None
    run: Callable[[], Any] | None = None
    ids: tuple[str, ...] = ()
    tokens: float = 1
    calls: list[Call] = field(default_factory=list)

    @property
    def batch(self) -> Any:
        """The inputs of the model, as far as they are known."""
        return self.calls[0].inputs if self.calls else self.inputs

    def compute(self, model: nn.Module) -> Any:
        """Return the loss, or the model's outputs if it has none."""
        if self.run is not None:
            return self.run()
        results = [call.again(model) for call in self.calls]
        if len(results) == 1:
            return results[0]
        losses = [getattr(result, "loss", None) for result in results]
        return results if any(loss is None for loss in losses) else sum(losses)


class Hook:
    """A hook of a model that notes its calls; a copy of the model, or a stored one, has an idle one
    and drags no guard along.
    """

    def __init__(self, forensics: Forensics | None = None):
        self._forensics = (lambda: None) if forensics is None else weakref.ref(forensics)

    def __call__(self, _module: nn.Module, arguments: tuple[Any, ...], named: Any) -> None:
        forensics = self._forensics()
        if forensics is not None:
            forensics.note(arguments, named)

    def __reduce__(self) -> Any:
        return Hook, ()


class Forensics:
    """Notes the calls of a guarded model, and has refused micro-batches traced.

    Args:
        model: also in DistributedDataParallel; None if the guard knows parameters only.
        traces: refusals to trace.
        keep: the last refused micro-batches, for a post-mortem.
        record: what is traced.

    Attributes:
        suspects: those, since the last window without a refusal.
    """

    def __init__(
        self, model: nn.Module | None, traces: int, keep: bool = False, record: bool = False
    ):
        self.findings: list[Finding] = []
        self.suspects: list[tuple[Refusal, Kept]] = []
        self._accepted: list[tuple[Kept, list[int]]] = []
        self._keep, self._record = keep, record
        self._parallel = model
        self._model = model = None if model is None else whole(model)
        self.left = traces  # refusals that may still be traced
        self._open: dict[tuple[int, int], Kept] = {}  # by window and place
        self._now: Kept | None = None
        self._handle = None
        if model is not None and (traces or keep):
            self._handle = model.register_forward_pre_hook(
                Hook(self), with_kwargs=True, prepend=True
            )

    @contextmanager
    def watching(self, place: tuple[int, int], kept: Kept) -> Iterator[None]:
        """Note the model's calls in the micro-batch of that window and place."""
        if not self._keep and not self.left:
            yield
            return
        self._now = self._open[place] = kept
        try:
            yield
        finally:
            self._now = None

    def trace(self, window: int, refusals: Sequence[Refusal], step: int) -> list[Finding]:
        """Trace the first of this process's refusals; nothing of it stays in the run."""
        findings: list[Finding] = []
        for refusal in refusals:
            kept = self._kept(window, refusal.micro_batch)
            if kept is not None and self.left:
                findings.append(self._traced(refusal, kept, step))
        self.findings += findings
        return findings

    def _kept(self, window: int, place: int | None) -> Kept | None:
        return None if place is None else self._open.get((window, place))

    def trace_window(
        self, window: int, refusals: Sequence[Refusal], largest: MicroBatchRecord | None, step: int
    ) -> list[Finding]:
        """Trace the largest micro-batch of a window whose norm overflowed or spiked.

        A step that spoilt weights or moments is the optimizer's: no pass made the bad number.
        """
        size = next((r for r in refusals if r.kind in ("norm", "spike")), None)
        if size is None or largest is None or not self.left:
            return []
        kept = self._kept(window, largest.micro_batch)
        if kept is None:
            return []
        samples = f" (samples {', '.join(largest.sample_ids)})" if largest.sample_ids else ""
        why = (
            f"micro-batch {largest.micro_batch}{samples} has the largest gradient, of norm"
            f" {largest.grad_norm:.3g}"
        )
        finding = self._traced(size, kept, step)
        why += "; no number in it is bad" if finding.verdict is None else ""
        self.findings.append(replace(finding, why=why))
        return self.findings[-1:]

    def _traced(self, refusal: Refusal, kept: Kept, step: int) -> Finding:
        assert self._model is not None
        self.left -= 1
        with unsynchronised(self._parallel):  # the other processes trace nothing, or their own
            finding = traced(self._model, refusal, kept)
            if self._record:
                finding = replace(finding, record=recorded(self._model, kept, step))
        return finding

    def settle(self, window: int, refusals: Sequence[Refusal]) -> None:
        """Set this process's refused micro-batches of a window aside, if they are to be kept."""
        for refusal in refusals if self._keep else ():
            new = [(refusal, kept) for kept in self._closed(window, refusal.micro_batch)]
            self.suspects = [*self.suspects, *new][-max(SUSPECTS, len(new)) :]

    def accept(self, window: int) -> None:
        """Set the micro-batches of a window without refusals aside, to be compared with."""
        self.suspects = []
        if self._keep:
            kept = self._closed(window, None)[:ACCEPTED]
            self._accepted = [(each, _versions(each.batch)) for each in kept]

    @property
    def accepted(self) -> list[Kept]:
        """Those, but for what was overwritten since."""
        return [kept for kept, versions in self._accepted if versions == _versions(kept.batch)]

    def _closed(self, window: int, place: int | None) -> list[Kept]:
        """Return what was kept at a place of a window, or at all; `run` may see other data now."""
        kept = [(at, each) for at, each in self._open.items() if at[0] == window]
        return [replace(each, run=None) for at, each in kept if place in (None, at[1])]

    def forget(self, window: int | None = None) -> None:
        """Forget the micro-batches of a window; default of all."""
        self._open = {at: kept for at, kept in self._open.items() if window not in (None, at[0])}

    def close(self) -> None:
        """Take the hook from the model."""
        if self._handle is not None:
            self._handle.remove()

    def note(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note a call of the model, if it is a micro-batch's."""
        if self._now is None:
            return
        if not self._now.calls and self._now.run is None:
            self._now.random = random_state()
        on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in on}
        self._now.calls.append(Call(arguments, named, autocast))


def _versions(inputs: Any) -> list[int]:
    """Return how often each tensor was written to."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return [leaf._version for leaf in leaves if not leaf.is_inference()]
