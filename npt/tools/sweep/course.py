"""The course of a study's run: what its steps have come to so far."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from npt.step.window_result import WindowResult
from npt.tools.sweep.settings import Settings

CURVE = 64  # points of a loss curve that are kept

AROUND = 3
"""Steps before a fault, and at the end of a run, whose mean loss is the loss there."""

RECOVERED = 1.5
"""A run has recovered from a fault when its loss is at most this many times the loss before."""

Row = dict[str, Any]


@dataclass
class Course:
    """The steps of a run. losses, norms: None if nothing of a window was finite. reason: why the
    run must end, once it must. stage_from: a loss is compared with those of its own stage.
    """

    settings: Settings
    losses: list[float | None] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    applied: int = 0
    tokens: int = 0
    in_a_row: int = 0
    reason: str | None = None
    detail: str | None = None
    fault: Row = field(default_factory=dict)
    stage_from: int = 0

    def take(self, result: WindowResult[Any], faulted: bool) -> None:
        """Count a window; a faulted one's loss ends no run."""
        loss, norm = (
            x if x is not None and math.isfinite(x) else None
            for x in (result.loss, result.grad_norm)
        )
        self.losses.append(loss)
        self.norms.append(norm)
        self.refused.update(refusal.kind for refusal in result.refusals)
        self.applied += result.applied
        self.tokens += result.tokens
        longest, self.in_a_row = result.bad_in_a_row(self.in_a_row)
        most = self.settings.probe.divergence_factor
        first = next((loss for loss in self.losses[self.stage_from :] if loss is not None), None)
        if result.refusals:
            self.detail = str(result.refusals[-1])
        if longest >= self.settings.training.max_consecutive_bad:
            self.reason = f"{longest} refusals in a row"
        elif not faulted and loss is not None and first is not None and loss > most * first:
            self.reason, self.detail = "loss", f"loss {loss:.4g} after {first:.4g} at the start"

    def figures(self) -> Row:
        """Return the figures of a row."""
        losses = [loss for loss in self.losses if loss is not None]
        norms = [norm for norm in self.norms if norm is not None]
        quarter = max(1, len(norms) // 4)
        first = statistics.median(norms[:quarter]) if norms else None
        last = statistics.median(norms[-quarter:]) if norms else None
        count, kinds = len(self.losses), sorted(self.refused.items())
        points = list(range(count))
        if count > CURVE:  # the first and the last among them
            points = [round(i * (count - 1) / (CURVE - 1)) for i in range(CURVE)]
        return {
            "steps": count,
            "applied": self.applied,
            "refused": self.refused.total(),
            "refused_kinds": ",".join(f"{kind} {number}" for kind, number in kinds),
            "tokens": self.tokens,
            "loss_last": statistics.fmean(losses[-AROUND:]) if losses else None,
            "loss_max": max(losses, default=None),
            "grad_norm_first": first,
            "grad_norm_last": last,
            "grad_norm_max": max(norms, default=None),
            "grad_growth": last / first if first and last is not None else None,
            "curve": [self.losses[i] for i in points],
            **self._recovery(),
        }

    def _recovery(self) -> Row:
        """Return how the run took the fault: losses before and after it, and the steps until the
        loss was as before.
        """
        at = self.settings.probe.fault_step
        if at is None:
            return {}
        before = [x for x in self.losses[max(0, at - 1 - AROUND) : at - 1] if x is not None]
        after = [(i, loss) for i, loss in enumerate(self.losses[at:], 1) if loss is not None]
        if not before or not after:
            return self.fault
        usual = statistics.fmean(before)
        return {
            **self.fault,
            "loss_before_fault": usual,
            "loss_worst_behind": max(loss for _, loss in after),
            "loss_after_fault": statistics.fmean([loss for _, loss in after][-AROUND:]),
            "recovered_after": next((i for i, loss in after if loss <= RECOVERED * usual), None),
        }
