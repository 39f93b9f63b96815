"""Refusals of a run: counted, reported, diagnosed, and the end of a run with too many."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from npt.data.batch import Batch
from npt.diagnostics.guards import diagnose
from npt.distill.local import MicroBatch
from npt.distill.stages import Stage
from npt.errors import TooManyRefusalsError
from npt.postmortem.write import Situation, write_postmortem
from npt.step.gradient_window import HISTORY
from npt.step.shared_window import gathered
from npt.step.train_step import TrainStep
from npt.step.window_result import MicroBatchRecord, Refusal, WindowResult
from npt.train.run_context import RunContext, Window

SHARE_COUNTS_FROM = 50
"""Micro-batches before `max_refused_share` is applied: a share of fewer says little."""

DIAGNOSES = 5
"""Refusals of a run that are diagnosed; later ones have the same cause as a rule."""


class Refusals:
    """Counts of a run's refused micro-batches and windows."""

    def __init__(self, context: RunContext, step: TrainStep):
        self._context, self._step = context, step
        self.by_kind: Counter[str] = Counter()
        self.by_epoch: Counter[int] = Counter()
        self.in_a_row = self._diagnoses = 0

    @property
    def total(self) -> int:
        """Refused micro-batches and windows so far."""
        return self.by_kind.total()

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the refusals'."""
        return {
            "refused_by_kind": dict(self.by_kind),
            "refused_by_epoch": {str(epoch): count for epoch, count in self.by_epoch.items()},
            "in_a_row": self.in_a_row,
            "diagnoses": self._diagnoses,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.by_kind = Counter(state["refused_by_kind"])
        counts = {int(epoch): count for epoch, count in state["refused_by_epoch"].items()}
        self.by_epoch = Counter(counts)
        self.in_a_row, self._diagnoses = state["in_a_row"], state["diagnoses"]

    def add(self, window: Window, result: WindowResult[MicroBatch], step: int) -> int:
        """Count and report refusals at a step; return the longest run of bad micro-batches."""
        for refusal in result.refusals:
            self.by_kind[refusal.kind] += 1
            self.by_epoch[window.epoch] += 1
            values = refusal.as_dict()
            self._context.folder.event("refusal", step=step, epoch=window.epoch, **values)
            self._context.say(f"refused at step {step}, {refusal}")
            self._diagnose(window.batches, refusal, step)
        longest, self.in_a_row = result.bad_in_a_row(self.in_a_row)
        return longest

    def excess(self, longest: int, micro_batches: int) -> str | None:
        """Return why the run must stop, or None: `longest` run of bad ones of `micro_batches`."""
        c = self._context.config
        if longest >= c.max_consecutive_bad:
            return f"{longest} refusals in a row (--max_consecutive_bad {c.max_consecutive_bad})"
        if micro_batches < SHARE_COUNTS_FROM or self.total <= c.max_refused_share * micro_batches:
            return None
        share = f"{self.total} of {micro_batches} micro-batches refused"
        return f"{share} (--max_refused_share {c.max_refused_share:g})"

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
        last: tuple[Window, WindowResult[MicroBatch], Stage],
        accepted: Window | None,
        steps: tuple[int, int, int | None],
        counters: dict[str, int],
    ) -> None:
        """Write the post-mortem and raise.

        Args:
            reason: of the stop.
            last: the last window with a refusal, its result and stage.
            accepted: the last window without one.
            steps: applied by now, before that window, and planned.
            counters: of the run.
        """
        context, (window, result, stage), (now, before, total) = self._context, last, steps
        self._gather_history()
        self._step.config = stage.config
        situation = Situation(
            model=context.model,
            gradients=self._step.window,
            fill=self._step.forward_backward,
            window=window.batches,
            result=result,
            accepted=() if accepted is None else accepted.batches,
            reason=reason,
            step=now if result.snapshot is None else before,
            total_steps=total,
            config=stage.config,
            counters={
                "steps": now,
                **counters,
                "refused": dict(self.by_kind),
                "epoch": window.epoch,
                "in_a_row": self.in_a_row,
            },
            record=context.record,
            samples_at_once=self._step.splitter.samples,
        )
        ending = f", the last: {result.refusals[-1]}" if result.refusals else ""
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
        path = self._context.folder.path
        try:
            return {"postmortem": str(write_postmortem(path, situation).relative_to(path))}
        except Exception as error:
            return {"postmortem": None, "error": str(error)}

    def _gather_history(self) -> None:
        """Remember the last micro-batches of every process, in their order."""
        processes, window = self._context.processes, self._step.window
        if processes.size == 1:
            return
        records = gathered(window.history, MicroBatchRecord, processes)
        records.sort(key=lambda record: (record.window, record.micro_batch))
        window.history = deque(records, maxlen=HISTORY * processes.size)

    def _diagnose(self, batches: list[Batch], refusal: Refusal, step: int) -> None:
        """Name the bad number, for the first few refusals of sound data; two forward passes."""
        if refusal.micro_batch is None or refusal.kind == "data" or self._diagnoses == DIAGNOSES:
            return
        self._diagnoses += 1
        if not self._context.processes.main:
            return
        message = "no bad number in adapters, base or logits now"
        try:
            parts = self._step.splitter.parts(batches[refusal.micro_batch])
            findings = (diagnose(self._context.model, part) for part in parts)
            message = next((str(found) for found in findings if found is not None), message)
        except Exception as error:  # an observer must not end the run that it looks at
            message = f"failed: {type(error).__name__}: {error}"
        self._context.folder.event(
            "diagnosis", step=step, micro_batch=refusal.micro_batch, message=message
        )
        self._context.say(f"  diagnosis: {message}")
