"""The tracer's answer about a refused micro-batch, and how it is got: by computing it again.

`npt.tracer` and `npt.recorder` are imported at the first refusal that is asked about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from npt.guard.outcome import Refusal, Snapshot
from npt.guard.update import GuardedUpdate
from npt.random_state import kept_random_state, set_random_state

if TYPE_CHECKING:
    from npt.guard.forensics import Kept
    from npt.recorder.record import Record
    from npt.tracer.verdict import Verdict


@dataclass(frozen=True)
class Finding:
    """The tracer's answer about a refused micro-batch.

    Attributes:
        refusal: that was looked at.
        verdict: the operation that made the first bad number; None if none was found.
        why: then, why none; of a window that was refused for its size, which micro-batch was looked
            at.
        record: of every tensor, if the guard records.
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
