"""Refusals of a run: counted, reported, diagnosed, and the end of a run with too many."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from npt.distill.splitting import MicroBatchSplitter
from npt.errors import TooManyRefusalsError
from npt.guard.guard import Guard
from npt.guard.outcome import MicroBatchRecord, Outcome
from npt.guard.schedule import kind_of_run, rate_at
from npt.guard.shared import gathered
from npt.guard.window import HISTORY
from npt.train.run_context import RunContext, Window

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
        steps: tuple[int, int | None],
        splitter: MicroBatchSplitter,
    ) -> None:
        """Write the post-mortem and raise.

        Args:
            reason: of the stop.
            last: the last window with a refusal, and its result.
            accepted: the last window without one.
            steps: applied by now, and planned.
            splitter: of micro-batches.
        """
        context, (window, result), (now, total) = self._context, last, steps
        self._gather_history()
        ending = f", the last: {result.refused[-1]}" if result.refused else ""
        message = f"stopped at step {now}: {reason}{ending}"

        def write() -> dict[str, Any]:
            from npt.forensics.bundle import write_postmortem  # few runs end so
            from npt.forensics.student import student_part

            path, config = context.folder.path, context.config
            step = now if result.snapshot is None else result.steps - result.applied
            kind, peak = kind_of_run(config.scheduler_type, total), config.learning_rate
            entry = {
                "settings": {**context.record["settings"], **asdict(config)},
                "samples_at_once": splitter.samples or config.batch_size,
                "rate": rate_at(step, peak, kind, config.warmup_steps, total),
            }
            batches = () if accepted is None else accepted.batches
            try:
                student = student_part(
                    context.model, window.batches, result.refused, batches, entry, context.record
                )
                written = write_postmortem(
                    path / "postmortem", self._guard, result, reason, step, student
                )
                return {"postmortem": str(written.relative_to(path.absolute()))}
            except Exception as error:  # the run reports its end either way
                return {"postmortem": None, "error": str(error)}

        bundle = context.processes.first(write)
        context.folder.event("stopped", step=now, reason=reason, **bundle)
        path = context.folder.path
        if bundle["postmortem"] is None:
            message += (
                f"; no post-mortem could be written below {path}: {bundle['error']}; free or choose"
                " a disk that can be written to"
            )
        else:
            message += f"; look into it with: npt replay {path / bundle['postmortem']}"
        raise context.processes.everywhere(TooManyRefusalsError(message))

    def _gather_history(self) -> None:
        """Remember the last micro-batches of every process, in their order."""
        processes, window = self._context.processes, self._guard.window
        if processes.size == 1:
            return
        records = gathered(window.history, MicroBatchRecord, processes)
        records.sort(key=lambda record: (record.window, record.micro_batch))
        window.history = deque(records, maxlen=HISTORY * processes.size)
