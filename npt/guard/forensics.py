"""What a guard keeps of an open window, so that a refused micro-batch can be looked at again.

The model's calls are noted, not copied: overwrite no input before `guard.step()`.
`npt.tracer` and `npt.recorder` are imported at the first refusal that is asked about.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from npt.guard.outcome import MicroBatchRecord, Refusal, Snapshot
from npt.guard.parameters import unsynchronised, whole
from npt.guard.traces import States
from npt.guard.update import GuardedUpdate
from npt.random_state import kept_random_state, random_state, set_random_state

if TYPE_CHECKING:
    from npt.recorder.record import Record
    from npt.tracer.verdict import Verdict

SUSPECTS = ACCEPTED = 4
"""Micro-batches at most that are kept for a post-mortem; of a window that was refused as a whole,
all.
"""


@dataclass(frozen=True)
class Finding:
    """The tracer's answer about a refused micro-batch.

    verdict: the operation that made the first bad number, None if none was found. why: then, why;
    of a window that was refused for its size, which micro-batch was looked at. record: of every
    tensor, if the guard records.
    """

    refusal: Refusal
    verdict: Verdict | None
    why: str = ""
    record: Record | None = None

    @property
    def told(self) -> str:
        """The answer without the refusal."""
        return "\n".join(str(part) for part in (self.why, self.verdict) if part)

    def __str__(self) -> str:
        return f"{self.refusal}\n{self.told}"


@dataclass(frozen=True)
class Call:
    """A call of the model. autocast: by device type, the dtype of one that was on."""

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
        found = self._traced(size, kept, step)
        said = "no number in it is bad" if found.verdict is None else ""
        self.findings.append(replace(found, why=f"{why}; {said}" if said else why))
        return self.findings[-1:]

    def _traced(self, refusal: Refusal, kept: Kept, step: int) -> Finding:
        assert self._model is not None
        self.left -= 1
        with unsynchronised(self._parallel):  # the other processes trace nothing, or their own
            found = traced(self._model, refusal, kept)
            if self._record:
                found = replace(found, record=recorded(self._model, kept, step))
        return found

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


@contextmanager
def weights_of(snapshot: Snapshot | None, update: GuardedUpdate) -> Iterator[None]:
    """Give the parameters the values of a snapshot within the context; None leaves them."""
    if snapshot is None:
        yield
        return
    parameters = dict(zip(update.names, update.parameters, strict=True))
    now = {name: p.detach().clone() for name, p in parameters.items()}
    with torch.no_grad():
        for name, (value, _) in snapshot.items():
            parameters[name].copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in now.items():
                parameters[name].copy_(value)


def traced(model: nn.Module, refusal: Refusal, kept: Kept, exploded: bool = True) -> Finding:
    """Compute a micro-batch once more under the tracer; nothing of it stays in the run.

    exploded: look also for a finite number too large to be squared.
    """
    if kept.run is None and not kept.calls and kept.inputs is None:
        return Finding(refusal, None, "the model was not called: there is nothing to compute again")
    outcomes: list[Any] = []

    def compute() -> Any:
        outcomes.append(kept.compute(model))
        return outcomes[-1]

    try:
        # only now: it needs transformers and bitsandbytes, which a guard does not
        from npt.tracer.trace import first_fault

        with kept_random_state():
            set_random_state(kept.random)
            verdict = first_fault(model, kept.batch, compute, exploded=exploded)
    except Exception as error:  # the run is more than its diagnosis
        return Finding(refusal, None, f"the tracer ended with {type(error).__name__}: {error}")
    if verdict is not None:
        return Finding(refusal, _named(verdict, refusal, kept.batch))
    return Finding(refusal, None, _unexplained(refusal, outcomes[-1] if outcomes else None))


def _unexplained(refusal: Refusal, outcome: Any) -> str:
    """Return why no operation is named, though a micro-batch was computed again to `outcome`."""
    finite = "computed again, all was finite"
    if refusal.kind == "update":
        return f"{finite}: the optimizer's step made the number, not a pass; {refusal.detail}"
    if refusal.kind in ("norm", "spike"):
        return f"{finite}, as it was: the whole window was too large"
    loss = outcome.get("loss") if isinstance(outcome, Mapping) else getattr(outcome, "loss", None)
    if loss is None and not (isinstance(outcome, torch.Tensor) and outcome.dim() == 0):
        return (
            f"{finite}, without a loss: it is made outside of the model; say how with"
            " micro_batch(run=...), or replay(..., loss=...)"
        )
    return f"{finite}: suspect the hardware or a race"


def _named(verdict: Verdict, refusal: Refusal, batch: Any) -> Verdict:
    """Return a verdict that names the sample of its row, if each row has a name."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if verdict.row is None or ids is None or len(ids) != len(refusal.sample_ids):
        return verdict
    return replace(verdict, sample=refusal.sample_ids[verdict.row])


def recorded(model: nn.Module, kept: Kept, step: int) -> Record | None:
    """Compute a micro-batch once more under a Recorder; None if it ends in an error."""
    try:
        from npt.recorder.recorder import Recorder
        from npt.tracer.passes import sinks_of, untouched

        with kept_random_state(), untouched(model, kept.batch):
            set_random_state(kept.random)
            recorder = Recorder(model)
            with recorder:
                sinks_of(model, kept.batch, kept.compute(model))
            return recorder.record(step)
    except Exception:  # the tracer has met it too, and said so
        return None
