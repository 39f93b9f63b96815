"""Refusals of a run: counted, reported, diagnosed, and the end of a run with too many."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from npt.data.batch import Batch
from npt.data.samples import Window
from npt.errors import TooManyRefusalsError
from npt.guard.forensics import KEPT
from npt.guard.guard import Guard
from npt.guard.outcome import Outcome
from npt.train.run import Run

REFUSED_SHARE = 0.2
"""A run stops when more of its micro-batches were refused."""

SHARE_COUNTS_FROM = 50
"""Micro-batches before the share counts: of fewer it says little."""


class Refusals:
    """Counts of a run's refused micro-batches and windows."""

    def __init__(self, run: Run, guard: Guard):
        self._run, self._guard = run, guard
        self.by_kind: Counter[str] = Counter()
        self._diagnoses = 0

    @property
    def total(self) -> int:
        """Refused micro-batches and windows so far."""
        return self.by_kind.total()

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the refusals'."""
        return {
            "refused_by_kind": dict(self.by_kind),
            "in_a_row": self._guard.counts.in_a_row,
            "diagnoses": self._diagnoses,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.by_kind = Counter(state["refused_by_kind"])
        self._guard.counts.in_a_row, self._diagnoses = state["in_a_row"], state["diagnoses"]
        self._guard.count_findings(self._diagnoses)

    def add(self, window: Window, outcome: Outcome, step: int) -> None:
        """Count and report what was refused at a step, and what the tracer found of it."""
        run = self._run
        for refusal in outcome.refused:
            self.by_kind[refusal.kind] += 1
            run.folder.event(
                "refusal", step=step, epoch=window.position.place.epoch, **refusal.as_dict()
            )
            run.say(f"refused at step {step}, {refusal}")
        if not outcome.refused:
            return
        traced = [(finding.refusal.micro_batch, finding.told) for finding in outcome.findings]
        for micro_batch, message in itertools.chain(*run.setup.processes.gather(traced)):
            self._diagnoses += 1
            run.folder.event("diagnosis", step=step, micro_batch=micro_batch, message=message)
            for line in f"diagnosis: {message}".splitlines():
                run.say(f"  {line}")

    def excess(self, longest: int, micro_batches: int) -> str | None:
        """Return why the run must stop, or None, after a longest run of refusals in a row."""
        most = self._run.setup.config.max_consecutive_bad
        if longest >= most:
            return f"{longest} refusals in a row (--max_consecutive_bad {most})"
        if micro_batches < SHARE_COUNTS_FROM or self.total <= REFUSED_SHARE * micro_batches:
            return None
        return f"{self.total} of {micro_batches} micro-batches refused, over {REFUSED_SHARE:.0%}"

    def stop(
        self, reason: str, last: tuple[Window, Outcome], accepted: Window | None, steps: int
    ) -> None:
        """Write the post-mortem and raise.

        Args:
            reason: of the stop.
            last: the last window with a refusal, and its result.
            accepted: the last window without one.
            steps: applied by now.
        """
        run, (window, result), processes = self._run, last, self._run.setup.processes
        ending = f", the last: {result.refused[-1]}" if result.refused else ""
        message = f"stopped at step {steps}: {reason}{ending}"
        batches = () if accepted is None else accepted.batches
        bundle = processes.first(lambda: self._bundle(reason, window, result, batches, steps))
        run.folder.event("stopped", step=steps, reason=reason, **bundle)
        path = run.folder.path
        if bundle["postmortem"] is None:
            message += (
                f"; no post-mortem could be written below {path}: {bundle['error']}; free or choose"
                " a disk that can be written to"
            )
        else:
            message += f"; look into it with: npt replay {path / bundle['postmortem']}"
        raise processes.everywhere(TooManyRefusalsError(message))

    def _bundle(
        self, reason: str, window: Window, result: Outcome, accepted: Sequence[Batch], steps: int
    ) -> dict[str, Any]:
        """Return the bundle's path, or why there is none; the run reports its end either way."""
        from npt.forensics.bundle import write_postmortem  # few runs end so
        from npt.forensics.student import stored_batches, student_entry

        setup, record, path = self._run.setup, self._run.record, self._run.folder.path
        step = steps if result.snapshot is None else result.steps - result.applied
        try:
            settings = {**record["settings"], **asdict(setup.config)}
            samples = setup.splitter.samples or setup.config.batch_size
            written = write_postmortem(
                path / "postmortem",
                self._guard,
                result,
                reason,
                step,
                refused=stored_batches(window.batches, settings["seed"], result.refused),
                accepted=stored_batches(accepted[:KEPT], settings["seed"]),
                student=student_entry(setup.model, settings, record["base_hash"], samples),
            )
            return {"postmortem": str(written.relative_to(path.absolute()))}
        except Exception as error:
            return {"postmortem": None, "error": str(error)}
