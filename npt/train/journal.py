"""The journal of a run: all that it writes to its folder, its trackers and the console.

The parts of a run depend on each other in one direction. `RunSetup` holds what is fixed before it
(setup.py), `RunData` what it reads (data.py), and `RunProgress` how far it has come. The journal
writes about these three. The loop advances the progress and tells the journal (loop.py), and the
Trainer makes them all (trainer.py).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from npt.adapters.files.run_layout import CHECKPOINTS
from npt.base.attention import attention_name
from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.batch import Batch
from npt.data.encoding import RecordCounts, lost, unused_columns
from npt.distill.logit_losses import is_close
from npt.errors import BundleError, CardError, CheckpointError, ProcessError, TooManyRefusalsError
from npt.figures import FIGURES
from npt.files import write_text
from npt.guard.guard import PlannedGuard
from npt.guard.outcome import Outcome
from npt.guard.watching import KEPT
from npt.manifest import POSTMORTEM
from npt.runs.checkpoint import write_checkpoint
from npt.runs.run_folder import EVENTS, METRICS, REPORT, RUN, RunFolder, writable
from npt.stored import read_json
from npt.train.data import RunData
from npt.train.setup import RunSetup
from npt.train.sources import FIRST, Source

if TYPE_CHECKING:
    from npt.evaluation.evaluate import Fidelity
    from npt.evaluation.metrics import Figures
    from npt.recorder.recording import Recording
    from npt.report.run import RunRecord
    from npt.runs.trackers import Trackers


@dataclass(eq=False)
class Journal:
    """Writes a run's folder and reports the same to its trackers. It needs no loop.

    Attributes:
        progress: how far the run has come; the loop advances it.
        record: content of `run.json`.
        measure: evaluates the student.
        initial: figures of the student before training.
        recording: health of the `--trace_steps` steps; main process only.
        diverged: why the last evaluation found the student worse than the floor, if it did.
    """

    setup: RunSetup
    data: RunData
    folder: RunFolder
    trackers: Trackers
    record: dict[str, Any]
    base: BaseIdentity
    measure: Callable[[], Fidelity]
    initial: Fidelity
    recording: Recording | None = None
    diverged: tuple[str, ...] = ()
    _warned: bool = False

    def __post_init__(self) -> None:
        self.progress = self.setup.origin.progress
        if not self.folder.has_best:  # a new folder has no best adapters yet
            self.progress.best_kl = math.inf

    def warn(self, message: str) -> None:
        """Print a warning and log it as an event."""
        self.setup.say(f"warning: {message}")
        self.folder.event("warning", message=message)

    def begin(self) -> None:
        """Write `run.json` and the first events, and warn about settings."""
        setup = self.setup
        folder = self.folder
        origin = setup.origin
        record = {**self.record, "wandb_run": self.trackers.run_id}
        if origin.goes_on:
            folder.set_aside_after(origin.step, origin.broken, self.warn)
            with contextlib.suppress(CheckpointError):
                earlier = read_json(folder.path / RUN, CheckpointError)
                record["wandb_run"] = record["wandb_run"] or earlier.get("wandb_run")
                if origin.checkpoint is not None:  # a resumed run is not calibrated again
                    record["calibration"] = earlier.get("calibration")
        else:
            for problem in origin.broken.values():
                self.warn(problem)
        self._write_first(record)
        self.trackers.warn = self.warn
        self.trackers.describe(_flat(record))
        initial = self.initial
        self._track({"floor/": initial.floor, "teacher/": initial.teacher, "initial/": initial.aim})
        folder.event(
            "start",
            device=str(setup.device),
            total_steps=self.data.total_steps,
            processes=setup.processes.size,
        )
        if origin.checkpoint is None and record["calibration"] is not None:
            folder.event("calibration", **record["calibration"], passed_over=self.data.start.begun)
        if setup.config.resume is not None:
            self._report_resumed()
        self._warn_beforehand()
        setup.say(f"run folder {folder.path}")
        if setup.processes.main and setup.config.trace_steps is not None:
            from npt.recorder.recording import Recording

            self.recording = Recording(folder.path / "trace", setup.config.trace_steps, setup.say)
            setup.say(str(self.recording))

    def _write_first(self, record: dict[str, Any]) -> None:
        """Write `run.json`, the first file: if that fails, or a signal comes, leave nothing."""
        try:
            with writable(self.folder.path):
                self.folder.write(RUN, record)
            self.setup.stop.check()
        except BaseException:
            self.folder.discard()
            raise

    def _track(self, measured: Mapping[str, Figures]) -> None:
        """Give figures to the trackers, by the start of their names."""
        figures: dict[str, float] = {}
        for start, model in measured.items():
            figures |= {f"{start}{key}": value for key, value in model.as_dict().items()}
        self.trackers.log(figures, self.progress.step)

    def _report_resumed(self) -> None:
        say = self.setup.say
        origin = self.setup.origin
        path = None
        if origin.checkpoint is None:
            say(f"no checkpoint in {origin.folder}: starting at step 1")
        else:
            path = str(origin.checkpoint.folder)
            say(f"resuming from {path} at step {origin.step}")
        changed = self.setup.changed
        self.folder.event("resume", step=origin.step, checkpoint=path, changed=changed)
        for name, (old, new) in changed.items():
            say(f"changed setting: {name} was {old}, is now {new}")

    def _warn_beforehand(self) -> None:
        """Warn of settings and data."""
        setup = self.setup
        config = setup.config
        total = self.data.total_steps
        if not setup.deterministic:
            self.warn(
                f"{attention_name(setup.model)} attention may not be deterministic in backward: a"
                " resumed run may differ from this one; for identical bits, use"
                " --attn_implementation eager, --strategy local, or --deterministic with an fp32"
                " base"
            )
        if total is None and config.scheduler_type != "constant":
            self.warn(
                "the length of the stream is unknown, so the learning rate stays constant after"
                f" warm-up; set --max_steps for the {config.scheduler_type} decay"
            )
        if total is not None and config.warmup_steps > total:
            self.warn(
                f"--warmup_steps {config.warmup_steps} is more than the run's {total} steps: the"
                " learning rate will not reach --learning_rate; lower --warmup_steps"
            )
        for warning in self.data.warnings():
            self.warn(f"data: {warning}")
        columns = self.data.columns_not_used()
        if columns:
            setup.say(columns)

    def evaluate(self) -> None:
        """Evaluate the student between two steps, report its figures and keep the best adapters."""
        fidelity = self.measure()
        step = self.progress.step
        self.progress.last_evaluation = step
        aim = fidelity.aim
        measured = {"eval/": fidelity.student}
        event = {"student": fidelity.student.as_dict()}
        if fidelity.attribution:
            measured["eval/unquantized_"] = aim
            event["unquantized"] = aim.as_dict()
        self.folder.event("evaluation", step=step, **event)
        self._track(measured)
        ratio = FIGURES["perplexity_ratio"].write(aim.perplexity_ratio, aim.perplexity_ratio_se)
        kl = FIGURES["kl"].write(aim.kl, aim.kl_se)
        self.setup.say(f"step {step}: held-out perplexity ratio {ratio}, KL {kl}")
        self._judge(fidelity)
        self._keep_if_best(fidelity)

    def _judge(self, fidelity: Fidelity) -> None:
        """Warn once if the student is worse than its floor by more than one standard error. With
        `residual="keep"` the floor is the base itself, and both are compared with the teacher.
        """
        figure = self.setup.config.judged_by
        judged = fidelity.student
        base = fidelity.floor
        if self.setup.settings["residual"] == "keep":
            judged = fidelity.aim
            base = fidelity.attribution["unquantized_to_4bit"]
        student = getattr(judged, figure)
        floor = getattr(base, figure)
        name = "KL to its teacher" if figure == "kl" else figure
        cause = f"the student's {name} is {student:.4g}, the floor's {floor:.4g}"
        worse = student - getattr(judged, f"{figure}_se") > floor
        self.diverged = (cause,) if worse else ()
        if worse and not self._warned:
            self._warned = True
            self.trackers.alert("npt: the run has diverged", cause)
            advice = "try a lower --learning_rate or a longer --warmup_steps"
            step = self.progress.step
            self.warn(f"step {step}: the run has diverged: {cause}; {advice}")

    def _keep_if_best(self, fidelity: Fidelity) -> None:
        """Save the adapters if the figure that judges them is the best so far."""
        figure = getattr(fidelity.aim, self.setup.config.judged_by)
        if figure < self.progress.best_kl:  # False for NaN
            self.progress.best_kl = figure
            with self._written("the best adapters", "training continues"):
                figures = {"step": self.progress.step, **fidelity.as_dict()}
                self.folder.save_best(self.setup.model, self.base, figures)

    def save(self, guard: PlannedGuard, last: bool = False) -> bool:
        """Write a checkpoint; return False if that fails but an older one lets the run continue.

        Raises:
            CheckpointError: the write failed, and there is no older checkpoint or `last` is set.
            ProcessError: another process is lost, or its adapters or moments differ.
        """
        model = self.setup.model
        processes = self.setup.processes
        audit_precision(model, policy_dtype(model))
        self.progress.in_a_row = guard.counts.in_a_row
        write = partial(self._write, guard, last)
        if processes.broken:  # the others are gone
            return processes.main and write([self.setup.splitter.shrunk_to])
        self._check_alike(guard)
        shrunk_to = processes.gather(self.setup.splitter.shrunk_to)
        return processes.first(lambda: write(shrunk_to))

    def _check_alike(self, guard: PlannedGuard) -> None:
        """Make sure that all processes hold the same, since one writes for all."""
        processes = self.setup.processes
        if processes.size == 1:
            return
        first, *others = processes.gather(guard.update.checksum())
        for process, checksum in enumerate(others, start=1):
            if checksum != first:
                error = ProcessError(
                    f"the adapters or moments of process {process} differ from those of process 0"
                    f" at step {self.progress.step} (checksums {checksum} and {first}), so nothing"
                    " was saved; check the hardware of both, then continue with --resume auto"
                )
                raise processes.everywhere(error)

    def _write(self, guard: PlannedGuard, last: bool, shrunk_to: list[int | None]) -> bool:
        setup = self.setup
        folder = self.folder
        step = self.progress.step
        record = {
            **self.progress.as_record(),
            **{name: self.record[name] for name in ("settings", "date", "base_hash", "versions")},
            "samples_at_once": shrunk_to,
            "counted_from": self.data.counted_from,
            "data": self.data.identity,
            "initial": {**self.initial.as_dict(), "samples": self.initial.samples},
        }
        try:
            path = folder.save_checkpoint(
                step,
                lambda path: write_checkpoint(path, setup.model, guard.window, record, self.base),
                setup.config.save_total_limit,
            )
        except (OSError, SafetensorError, CheckpointError) as error:
            older = folder.checkpoints()
            good = f"the last good one is {older[-1]}" if older else "there is no older one"
            self.failed("save_failed", error, f"{error}; {good}")
            if older and not last:
                message = f"no checkpoint at step {step}: {error}; {good}, training continues"
                setup.say(f"WARNING: {message}")
                return False
            raise CheckpointError(
                f"cannot write the checkpoint of step {step}: {error}; {good}; free disk space and"
                " continue with --resume auto"
            ) from error
        folder.event("save", step=step, folder=str(path.relative_to(folder.path)))
        return True

    def failed(self, event: str, error: BaseException, message: str) -> None:
        step = self.progress.step
        self.folder.event(event, step=step, error=type(error).__name__, message=message[:500])

    def give_up(
        self,
        guard: PlannedGuard,
        outcome: Outcome,
        reason: str,
        batches: Sequence[Batch],
        accepted: Sequence[Batch] = (),
    ) -> None:
        """Write the post-mortem and raise CardError or TooManyRefusalsError. If the GPU is lost,
        the post-mortem holds what is left on the host.

        Args:
            outcome: outcome of the last window with a refusal.
            batches: micro-batches of that window.
            accepted: micro-batches of the last window without a refusal.
        """
        from npt.forensics.bundle import write_postmortem  # few runs end so
        from npt.forensics.student import stored_batches, student_entry

        setup = self.setup
        path = self.folder.path
        seed = setup.config.seed
        steps = self.progress.step
        # a window's snapshot is from before its step
        at = steps if outcome.snapshot is None else outcome.steps - outcome.applied

        def write() -> dict[str, Any]:
            try:
                settings = {**self.record["settings"], **asdict(setup.config), "close": is_close()}
                bundle = write_postmortem(
                    path / "postmortem",
                    guard,
                    outcome,
                    reason,
                    at,
                    refused=stored_batches(batches, seed, outcome.refused),
                    accepted=stored_batches(accepted[:KEPT], seed),
                    student=student_entry(
                        setup.model, settings, self.record["base_hash"], setup.splitter.samples
                    ),
                )
            except Exception as error:  # the run must report why it stopped either way
                return {"postmortem": None, "error": str(error)}
            stated = read_json(bundle / POSTMORTEM, BundleError)["reason"]
            return {"postmortem": str(bundle.relative_to(path.absolute())), "reason": stated}

        # a lost process would never answer
        bundle = write() if setup.processes.broken else setup.processes.first(write)
        reason = bundle.pop("reason", reason)
        self.folder.event("stopped", step=steps, reason=reason, **self.progress.refusals, **bundle)
        gpu_lost = any(refusal.kind == "card" for refusal in outcome.refused)
        last = ""
        if outcome.refused and not gpu_lost:
            last = f", the last: {outcome.refused[-1]}"
        if bundle["postmortem"] is None:
            end = (
                f"cannot write a post-mortem in {path}: {bundle['error']}; free disk space or"
                " choose another --output_dir"
            )
        elif gpu_lost:
            older = self.folder.checkpoints()
            remedy = f"continue with --resume {older[-1]}" if older else "there is no checkpoint"
            end = f"batches and settings are in {path / bundle['postmortem']}; {remedy}"
        else:
            end = f"to find the cause, run: npt replay {path / bundle['postmortem']}"
        message = f"stopped at step {steps}: {reason}{last}; {end}"
        kind = CardError if gpu_lost else TooManyRefusalsError
        raise setup.processes.everywhere(kind(message))

    def finish(self, fidelity: Fidelity, seconds: float) -> None:
        """Write the figures and the final adapter of a completed run."""
        folder = self.folder
        config = self.setup.config
        progress = self.progress
        figures = fidelity.as_dict()
        # each write by itself: one that fails must not cost the next
        with self._written("fidelity.json", "to measure again, run npt evaluate"):
            folder.write("fidelity.json", {**figures, "heldout": self.data.heldout})
        with self._written("the final adapter", f"its weights are in {CHECKPOINTS}"):
            folder.save_final(self.setup.model, self.base, figures)
        if config.eval_steps:
            self._keep_if_best(fidelity)
        self._track({"eval/": fidelity.student, "final/": fidelity.aim})
        self.report_data()
        if config.max_steps is not None and progress.step < config.max_steps:
            self.warn(
                f"the data ended after {progress.step} of --max_steps {config.max_steps} steps and"
                " cannot be read again; pass a list instead of a generator"
            )
        self._judge(fidelity)
        folder.event(
            "done",
            steps=progress.step,
            tokens=progress.tokens,
            **progress.refusals,
            diverged=self.diverged,
            seconds=round(seconds, 3),
        )

    def report_data(self) -> None:
        """Report at the end of a run which records were cut, left out or not used, and in which
        epochs micro-batches were refused.
        """
        position = self.progress.position
        if position.place.epoch and self.progress.refused_by_epoch:
            by_epoch = sorted(self.progress.refused_by_epoch.items())
            epochs = ", ".join(f"{n} in epoch {epoch}" for epoch, n in by_epoch)
            self.setup.say(f"refused: {epochs} (the first is 0)")
        sources = self.data.sources
        loader = self.data.loader
        self._report_source(sources[0], loader.samples.counts, position.place.epoch)
        if loader.replay is not None:
            self._report_source(sources[1], loader.replay.counts, position.replay.epoch)

    def _report_source(self, source: Source, counts: RecordCounts, begun_again: int) -> None:
        label = source.label
        self.folder.event(
            "data", source=label, share=source.share, begun_again=begun_again, **counts.as_dict()
        )
        left_out = lost(counts)
        if left_out:
            self.warn(f"{label}: of {counts.records:,} records read, {left_out}")
        told_before = self.data.look.counts.unused if label == FIRST else {}
        if counts.unused.keys() - told_before:
            self.setup.say(f"{label}: columns not used: {unused_columns(counts)}")
        if begun_again and self.setup.config.max_steps is not None:
            self.setup.say(f"{label}: read again from the start (restarts: {begun_again})")

    @contextlib.contextmanager
    def reported(self, report: bool) -> Iterator[None]:
        """Write `report.html` at the end if `report` is set, unless a second signal interrupts."""
        try:
            yield
        except Exception as error:
            self.trackers.alert(f"npt failed: {type(error).__name__}", str(error)[:1000])
            self._close(report)
            raise
        self._close(report)

    def _close(self, report: bool) -> None:
        path = self.folder.path
        if self.recording is not None:
            self.recording.draw()
        if report and self.setup.processes.main:
            with self._written(REPORT):
                write_report(path)
        self.trackers.files(_flat(self.record))
        if lost := self.folder.lines_lost:
            self.warn(f"{lost} lines of {METRICS} and {EVENTS} could not be written to {path}")

    @contextlib.contextmanager
    def _written(self, name: str, remedy: str = "") -> Iterator[None]:
        """Turn a failed write into a warning, since checkpoints hold all that matters."""
        try:
            yield
        except Exception as error:
            end = f"; {remedy}" if remedy else ""
            why = f"{type(error).__name__}: {error}"
            failure = f"cannot write {name} in {self.folder.path}: {why}"
            self.warn(failure[:500] + end)


def write_report(folder: Path, output: Path | None = None) -> RunRecord:
    """Write the report of a run folder, by default as its `report.html`."""
    from npt.report.page import page
    from npt.report.run import RunRecord

    record = RunRecord(folder)
    output = output or folder / REPORT
    write_text(output, page(record, output))
    return record


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `run.json` with its settings beside it, for a tracker. What the run
    resolved, such as its `layers`, goes before the setting of the same name.
    """
    return {**record["settings"], **record}
