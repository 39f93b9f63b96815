"""What a guard keeps of a micro-batch, so that a refused one can be traced, in the run or later.

Inputs are referenced, not copied: do not overwrite them before their window's outcome is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from npt.device import card_error
from npt.errors import let_go
from npt.guard.refusal import Refusal
from npt.random_state import kept_random_state, set_random_state

if TYPE_CHECKING:
    from npt.tracer.verdict import Verdict


@dataclass
class StoredMicroBatch:
    """A stored micro-batch, to compute it again in this process or elsewhere.

    Attributes:
        inputs: nested tensors and plain values; those of the model's first call, unless the loop
            passed others.
        sample_ids: the ids of its samples.
        tokens: its weight.
        refusal: why it, or its whole window, was refused; None if it counted.
        random: the random state that it was computed from.
        autocast: the dtype of each device type that autocast was on for.
        run: computes the loss, in this process.
        calls: the model's calls, which can be repeated in this process.
        given: the inputs of each, if the loop passed none.
    """

    inputs: Any = None
    sample_ids: tuple[str, ...] = ()
    tokens: int = 1
    refusal: Refusal | None = None
    random: Mapping[str, Tensor] = field(default_factory=dict)
    autocast: Mapping[str, torch.dtype] = field(default_factory=dict)
    run: Callable[[], object] | None = None
    calls: list[Callable[[], object]] = field(default_factory=list)
    given: list[object] = field(default_factory=list)

    def compute(self) -> object:
        """Compute it again; return the loss, or the model's outputs if they hold none."""
        if self.run is not None:
            return self.run()
        results = [call() for call in self.calls]
        if len(results) == 1:
            return results[0]
        losses = [loss for loss in map(loss_in, results) if loss is not None]
        return results if len(losses) < len(results) else sum(losses)


def autocast_now() -> dict[str, torch.dtype]:
    """Return the dtype of each device type that autocast is on for."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return {kind: torch.get_autocast_dtype(kind) for kind in on}


@contextmanager
def autocast(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Turn autocast on within the context, with a dtype per device type."""
    with ExitStack() as stack:
        for kind, dtype in dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype))
        yield


@dataclass(frozen=True)
class Finding:
    """The tracer's finding about a refused micro-batch.

    Attributes:
        refusal: the refusal that was traced.
        verdict: the operation that made the NaN or Inf; None if none was found.
        why: why there is no verdict, or where the micro-batch raises its exception again.
    """

    refusal: Refusal
    verdict: Verdict | None
    why: str = ""

    @property
    def told(self) -> str:
        """The finding as text, without the refusal."""
        return "\n".join(str(part) for part in (self.why, self.verdict) if part)

    def as_dict(self) -> dict[str, object]:
        """Return it for JSON."""
        verdict = None if self.verdict is None else self.verdict.as_dict()
        return {"refusal": self.refusal.as_dict(), "verdict": verdict, "why": self.why}

    def __str__(self) -> str:
        return f"{self.refusal}\n{self.told}"


def loss_in(outcome: object) -> Tensor | None:
    """Return the loss among a model's outputs, or None."""
    if isinstance(outcome, Tensor):
        return outcome if outcome.dim() == 0 else None
    named = outcome if isinstance(outcome, Mapping) else {"loss": getattr(outcome, "loss", None)}
    loss = named.get("loss")
    return loss if isinstance(loss, Tensor) else None  # it may be a number, or losses by name


def traced(model: nn.Module, stored: StoredMicroBatch) -> Finding:
    """Compute a refused micro-batch again under the tracer, without changing the run."""
    refusal = stored.refusal
    # a loop over samples calls the model for each
    inputs = stored.given if len(stored.given) > 1 else stored.inputs
    assert refusal is not None
    if stored.run is None and not stored.calls:
        return Finding(refusal, None, "the model was not called, so there is nothing to trace")
    if (lost := card_error(next(model.parameters()).device)) is not None:
        return Finding(refusal, None, f"not traced: {lost}")
    outcome: object = None
    raised = ""

    def compute() -> object:
        nonlocal outcome, raised
        try:
            outcome = stored.compute()
        except Exception as error:
            if refusal.kind != "error" or f"{type(error).__name__}: {error}" != refusal.detail:
                raise
            # a NaN that led to it is in a variable of a frame that it passed
            raised, outcome = raised_at(error)
            let_go(error)
        return outcome

    try:
        # imported late: a run without refusals does not need it
        from npt.tracer.source_location import raised_at
        from npt.tracer.trace import first_fault

        with kept_random_state():
            set_random_state(stored.random)
            verdict = first_fault(model, inputs, compute, refusal.sample_ids)
    except Exception as error:  # a failed diagnosis must not end the run
        return Finding(refusal, None, f"the tracer failed with {type(error).__name__}: {error}")
    raised = raised and f"the micro-batch raises the same again: {raised}"
    if verdict is None and raised:
        return Finding(refusal, None, f"{raised}; no NaN or Inf came before it")
    if verdict is None:
        reason = "suspect the hardware or a race"
        if loss_in(outcome) is None:
            reason = "the loss is computed outside the model: pass micro_batch(run=...)"
        elif stored.run is None:
            reason += ", or what is added to the model's loss outside the model"
        return Finding(refusal, None, f"computed again, everything was finite; {reason}")
    return Finding(refusal, verdict, raised)


@contextmanager
def values_in(
    parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]
) -> Iterator[None]:
    """Set parameters to these values, without gradients, within the context."""
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
