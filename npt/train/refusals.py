"""Refusals of a run: counted, reported, diagnosed, and the end of a run with too many."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from npt.data.batch import Batch
from npt.distill.local import BatchSums
from npt.distill.splitting import MicroBatchSplitter
from npt.distill.step import forward_backward
from npt.distill.strategies import Strategy
from npt.errors import TooManyRefusalsError
from npt.guard.guard import Guard
from npt.guard.outcome import MicroBatchRecord, Outcome
from npt.guard.shared import gathered
from npt.guard.window import HISTORY
from npt.train.run_context import RunContext, Window

if TYPE_CHECKING:
    from npt.postmortem.write import Situation

REFUSED_SHARE = 0.2
"""A run stops when more of its micro-batches were refused."""

SHARE_COUNTS_FROM = 50
"""Micro-batches before the share counts: of fewer it says little."""


class Refusals:
    """Counts of a run's refused micro-batches and windows."""

    def __init__(self, context: RunContext, guard: Guard):
        self._context, self._guard = context, guard
        self.by_kind: Counter[str] = Counter()
        self.by_epoch: Counter[int] = Counter()
        self._diagnoses = 0

    @property
    def total(self) -> int:
        """Refused micro-batches and windows so far."""
        return self.by_kind.total()

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the refusals'."""
        return {
            "refused_by_kind": dict(self.by_kind),
            "refused_by_epoch": {str(epoch): count for epoch, count in self.by_epoch.items()},
            "in_a_row": self._guard.counts.in_a_row,
            "diagnoses": self._diagnoses,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.by_kind = Counter(state["refused_by_kind"])
        counts = {int(epoch): count for epoch, count in state["refused_by_epoch"].items()}
        self.by_epoch = Counter(counts)
        self._guard.counts.in_a_row, self._diagnoses = state["in_a_row"], state["diagnoses"]
        self._guard.count_findings(self._diagnoses)

    def add(self, window: Window, outcome: Outcome, step: int) -> None:
        """Count and report what was refused at a step, and what the tracer found of it."""
        context = self._context
        for refusal in outcome.refused:
            self.by_kind[refusal.kind] += 1
            self.by_epoch[window.epoch] += 1
            context.folder.event("refusal", step=step, epoch=window.epoch, **refusal.as_dict())
            context.say(f"refused at step {step}, {refusal}")
        if not outcome.refused:
            return
        traced = [(finding.refusal.micro_batch, finding.told) for finding in outcome.findings]
        for micro_batch, message in itertools.chain(*context.processes.gather_json(traced)):
            self._diagnoses += 1
            context.folder.event("diagnosis", step=step, micro_batch=micro_batch, message=message)
            context.say(f"  diagnosis: {message}")

    def excess(self, longest: int, micro_batches: int) -> str | None:
        """Return why the run must stop, or None: `longest` run of bad ones of `micro_batches`."""
        most = self._context.config.max_consecutive_bad
        if longest >= most:
            return f"{longest} refusals in a row (--max_consecutive_bad {most})"
        if micro_batches < SHARE_COUNTS_FROM or self.total <= REFUSED_SHARE * micro_batches:
            return None
        return f"{self.total} of {micro_batches} micro-batches refused, over {REFUSED_SHARE:.0%}"

    def report_epoch(self, epoch: int) -> None:
        """Report an epoch that has ended, if something was refused in it."""
        count, kinds = self.by_epoch.get(epoch, 0), dict(self.by_kind)
        if count:
            self._context.folder.event(
                "epoch", epoch=epoch, refused=count, refused_total=self.total, kinds=kinds
            )

    def stop(
        self,
        reason: str,
        last: tuple[Window, Outcome],
        accepted: Window | None,
        steps: tuple[int, int, int | None],
        counters: dict[str, int],
        strategy: Strategy,
        splitter: MicroBatchSplitter,
    ) -> None:
        """Write the post-mortem and raise.

        Args:
            reason: of the stop.
            last: the last window with a refusal, and its result.
            accepted: the last window without one.
            steps: applied by now, before that window, and planned.
            counters: of the run.
            strategy, splitter: that compute a micro-batch.
        """
        context, (window, result), (now, before, total) = self._context, last, steps
        self._gather_history()

        def fill(batch: Batch) -> BatchSums:
            return forward_backward(context.model, strategy, batch, context.config, splitter)

        from npt.postmortem.write import Situation  # it brings the tracer; few runs end so

        situation = Situation(
            model=context.model,
            gradients=self._guard.window,
            fill=fill,
            window=window.batches,
            result=result,
            accepted=() if accepted is None else accepted.batches,
            reason=reason,
            step=now if result.snapshot is None else before,
            total_steps=total,
            config=context.config,
            counters={
                "steps": now,
                **counters,
                "refused": dict(self.by_kind),
                "epoch": window.epoch,
                "in_a_row": self._guard.counts.in_a_row,
            },
            record=context.record,
            samples_at_once=splitter.samples,
        )
        ending = f", the last: {result.refused[-1]}" if result.refused else ""
        said = f"stopped at step {now}: {reason}{ending}"
        bundle = context.processes.first(lambda: self._write_postmortem(situation))
        context.folder.event("stopped", step=now, reason=reason, **bundle)
        path = context.folder.path
        if bundle["postmortem"] is None:
            said += (
                f"; no post-mortem could be written below {path}: {bundle['error']}; free or choose"
                " a disk that can be written to"
            )
        else:
            said += f"; look into it with: npt replay {path / bundle['postmortem']}"
        raise context.processes.everywhere(TooManyRefusalsError(said))

    def _write_postmortem(self, situation: Situation) -> dict[str, Any]:
        """Return the bundle's path, or why there is none; the run reports its end either way."""
        from npt.postmortem.write import write_postmortem

        path = self._context.folder.path
        try:
            return {"postmortem": str(write_postmortem(path, situation).relative_to(path))}
        except Exception as error:
            return {"postmortem": None, "error": str(error)}

    def _gather_history(self) -> None:
        """Remember the last micro-batches of every process, in their order."""
        processes, window = self._context.processes, self._guard.window
        if processes.size == 1:
            return
        records = gathered(window.history, MicroBatchRecord, processes)
        records.sort(key=lambda record: (record.window, record.micro_batch))
        window.history = deque(records, maxlen=HISTORY * processes.size)
