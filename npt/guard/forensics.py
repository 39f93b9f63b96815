"""What a guard keeps of a micro-batch, so that a refused one can be traced, in the run or later.

The model's calls are noted, not copied: overwrite no input before `guard.step()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from npt.guard.outcome import MicroBatchRecord, Outcome, Refusal
from npt.guard.parameters import unsynchronised, whole
from npt.guard.traces import States
from npt.random_state import kept_random_state, random_state, set_random_state

if TYPE_CHECKING:
    from npt.tracer.verdict import Verdict

KEPT = 4
"""Refused and accepted micro-batches at most that are kept for a post-mortem; of a window that was
refused as a whole, all.
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
    tokens: int = 1
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
        losses = [loss_in(result) for result in results]
        if len(results) == 1 or any(loss is None for loss in losses):
            return results[0] if len(results) == 1 else results
        return sum(losses)


@dataclass(frozen=True)
class Finding:
    """The tracer's answer about a refused micro-batch.

    Attributes:
        refusal: that was looked at.
        verdict: the operation that made the first bad number; None if none was found.
        why: then, why none; of a window that was refused for its size, which micro-batch was looked
            at.
    """

    refusal: Refusal
    verdict: Verdict | None
    why: str = ""

    @property
    def told(self) -> str:
        """The answer without the refusal."""
        return "\n".join(str(part) for part in (self.why, self.verdict) if part)

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        verdict = None if self.verdict is None else self.verdict.as_dict()
        return {"refusal": self.refusal.as_dict(), "verdict": verdict, "why": self.why}

    def __str__(self) -> str:
        return f"{self.refusal}\n{self.told}"


def loss_in(outcome: Any) -> Any:
    """Return the loss among a model's outputs, or None."""
    if isinstance(outcome, torch.Tensor):
        return outcome if outcome.dim() == 0 else None
    return outcome.get("loss") if isinstance(outcome, Mapping) else getattr(outcome, "loss", None)


def traced(model: nn.Module, refusal: Refusal, kept: Kept) -> Finding:
    """Compute a micro-batch once more under the tracer; nothing of it stays in the run."""
    if kept.run is None and not kept.calls and kept.inputs is None:
        return Finding(refusal, None, "the model was not called: there is nothing to compute again")
    outcome: Any = None

    def compute() -> Any:
        nonlocal outcome
        outcome = kept.compute(model)
        return outcome

    try:
        # only now: it needs transformers and bitsandbytes, which a guard does not
        from npt.tracer.trace import first_fault

        with kept_random_state():
            set_random_state(kept.random)
            verdict = first_fault(model, kept.batch, compute, exploded=True)
    except Exception as error:  # the run is more than its diagnosis
        return Finding(refusal, None, f"the tracer ended with {type(error).__name__}: {error}")
    if verdict is None:
        return Finding(refusal, None, _unexplained(refusal, outcome))
    ids = kept.batch.get("input_ids") if isinstance(kept.batch, Mapping) else None
    if verdict.row is not None and ids is not None and len(ids) == len(refusal.sample_ids):
        verdict = replace(verdict, sample=refusal.sample_ids[verdict.row])
    return Finding(refusal, verdict)


def _unexplained(refusal: Refusal, outcome: Any) -> str:
    """Return why no operation is named, though a micro-batch was computed again to `outcome`."""
    reason = "suspect the hardware or a race"
    if refusal.kind == "update":
        reason = f"the optimizer's step made the number, not a pass; {refusal.detail}"
    elif refusal.kind in ("norm", "spike"):
        reason = "the whole window was too large"
    elif loss_in(outcome) is None:
        reason = "the loss is made outside of the model; say how with micro_batch(run=...)"
    return f"computed again, all was finite: {reason}"


@contextmanager
def values_in(
    parameters: Mapping[str, nn.Parameter], values: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """Give parameters these values, and no gradients, within the context; their own are put back
    after it.
    """
    chosen = [(parameters[name], value) for name, value in values.items()]
    kept = [(parameter, parameter.detach().clone(), parameter.grad) for parameter, _ in chosen]
    try:
        with torch.no_grad():
            for parameter, value in chosen:
                parameter.copy_(value)
                parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for parameter, value, gradient in kept:
                parameter.copy_(value)
                parameter.grad = gradient


class Hook:
    """Record the model's calls. Holds the forensics weakly and unpickles to a no-op, so copying the
    model does not copy the guard.
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
        keep: micro-batches, for a post-mortem.

    Attributes:
        findings: all so far.
        left: refusals that may still be traced.
        suspects: the last refused micro-batches; if a step was made since, the next window with a
            refusal replaces them.
    """

    def __init__(self, model: nn.Module | None, traces: int, keep: bool = False):
        self.findings: list[Finding] = []
        self.left = traces
        self.suspects: list[tuple[Refusal, Kept]] = []
        self._stepped = False  # since the suspects were refused
        self._accepted: list[tuple[Kept, list[int]]] = []
        self._keep, self._parallel = keep, model
        self._model = model = None if model is None else whole(model)
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

    def note(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note a call of the model, if it is a micro-batch's."""
        if self._now is None:
            return
        if not self._now.calls and self._now.run is None:
            self._now.random = random_state()
        on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        autocast = {kind: torch.get_autocast_dtype(kind) for kind in on}
        self._now.calls.append(Call(arguments, named, autocast))

    def trace(self, window: int, refusals: Sequence[Refusal]) -> list[Finding]:
        """Trace the first of this process's refused micro-batches; nothing of it stays in the
        run.
        """
        places = [(refusal, (window, refusal.micro_batch)) for refusal in refusals]
        kept = [(refusal, self._open[at]) for refusal, at in places if at in self._open]
        return [self._traced(refusal, each) for refusal, each in kept[: self.left]]

    def trace_window(self, outcome: Outcome, history: Iterable[MicroBatchRecord]) -> list[Finding]:
        """Trace this process's micro-batch with the largest gradient, of those that counted in a
        window whose norm overflowed or spiked.

        A step that spoilt weights or moments is the optimizer's: no pass made the bad number.
        """
        size = next((r for r in outcome.refused if r.kind in ("norm", "spike")), None)
        records = [
            record
            for record in history
            if record.window == outcome.index and record.micro_batch in outcome.places
        ]
        if size is None or not records or not self.left:
            return []
        largest = max(records, key=lambda record: record.grad_norm)
        samples = f" (samples {', '.join(largest.sample_ids)})" if largest.sample_ids else ""
        why = (
            f"micro-batch {largest.micro_batch}{samples} has the largest gradient, of norm"
            f" {largest.grad_norm:.3g}"
        )
        return [self._traced(size, self._open[outcome.index, largest.micro_batch], why)]

    def _traced(self, refusal: Refusal, kept: Kept, why: str = "") -> Finding:
        assert self._model is not None
        self.left -= 1
        with unsynchronised(self._parallel):  # the other processes trace nothing, or their own
            finding = traced(self._model, refusal, kept)
        self.findings.append(replace(finding, why=why or finding.why))
        return self.findings[-1]

    def suspect(self, window: int, refusals: Sequence[Refusal]) -> None:
        """Set this process's refused micro-batches of a window aside, if they are to be kept."""
        if not self._keep or not refusals:
            return
        earlier = [] if self._stepped else self.suspects
        new = [
            # `run` may see other data later
            (refusal, replace(kept, run=None))
            for refusal in refusals
            for at, kept in self._open.items()
            if at[0] == window and refusal.micro_batch in (None, at[1])
        ]
        self.suspects, self._stepped = [*earlier, *new][-max(KEPT, len(new)) :], False

    def accept(self, outcome: Outcome) -> None:
        """Set the micro-batches that were stepped on aside, to be compared with."""
        if not self._keep or not outcome.applied:
            return
        self._stepped = True
        places = [(outcome.index, place) for place in outcome.places]
        kept = [replace(self._open[at], run=None) for at in places if at in self._open]
        new = [(each, _versions(each.batch)) for each in kept]
        self._accepted = [*self._accepted, *new][-KEPT:]

    @property
    def accepted(self) -> list[Kept]:
        """The last ones, but for what was overwritten since."""
        return [kept for kept, versions in self._accepted if versions == _versions(kept.batch)]

    def forget(self, window: int | None = None) -> None:
        """Forget the micro-batches of a window; default of all."""
        self._open = {at: kept for at, kept in self._open.items() if window not in (None, at[0])}

    def close(self) -> None:
        """Take the hook from the model."""
        if self._handle is not None:
            self._handle.remove()


def _versions(inputs: Any) -> list[int]:
    """Return how often each tensor was written to."""
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return [leaf._version for leaf in leaves if not leaf.is_inference()]
