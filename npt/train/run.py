"""A run around its loop: what goes into its folder and to its trackers, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from npt.adapters.files.run_layout import CHECKPOINTS
from npt.base.attention import attention_name
from npt.base.device import card_error
from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.data.batch import Batch
from npt.data.encoding import lost
from npt.data.samples import Position
from npt.errors import BundleError, CardError, CheckpointError, ProcessError, TooManyRefusalsError
from npt.files import write_text
from npt.guard.forensics import KEPT
from npt.guard.guard import Guard
from npt.guard.outcome import Outcome
from npt.guard.refusal import Refusal
from npt.manifest import POSTMORTEM
from npt.random_state import random_state
from npt.runs.checkpoint import write_checkpoint
from npt.runs.run_folder import EVENTS, METRICS, REPORT, RUN, RunFolder, writable
from npt.stored import read_json
from npt.train.data import RunData
from npt.train.setup import RunSetup

if TYPE_CHECKING:
    from npt.evaluation.evaluate import Fidelity
    from npt.evaluation.metrics import Figures
    from npt.recorder.recording import Recording
    from npt.report.run import RunRecord
    from npt.runs.trackers import Trackers
    from npt.train.loop import Loop


@dataclass(eq=False)
class Run:
    """A run: its folder, and the trackers that are told the same.

    Attributes:
        record: the content of `run.json`.
        measure: evaluates the student as it is.
        initial: figures of the student before training.
        recording: of the steps of `--trace_steps`, on the main process.
        diverged: why the student is worse than having no adapters, by the last evaluation.
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

    def warn(self, message: str) -> None:
        """Print a warning and keep it as an event."""
        self.setup.say(f"warning: {message}")
        self.folder.event("warning", message=message)

    def begin(self) -> None:
        """Write `run.json` and the first events, and warn of what will not be as asked for."""
        setup, folder, origin = self.setup, self.folder, self.setup.origin
        record = {**self.record, "wandb_run": self.trackers.run_id}
        if not origin.goes_on:
            for problem in origin.broken.values():
                self.warn(problem)
        else:
            folder.set_aside_after(origin.step, origin.broken, self.warn)
            with contextlib.suppress(CheckpointError):
                earlier = read_json(folder.path / RUN, CheckpointError)
                record["wandb_run"] = record["wandb_run"] or earlier.get("wandb_run")
                if origin.checkpoint is not None:  # its start is the one that it had
                    record["calibration"] = earlier.get("calibration")
        try:
            with writable(folder.path):
                folder.write(RUN, record)
            setup.stop.check()
        except BaseException:
            folder.discard()
            raise
        self.trackers.warn = self.warn
        self.trackers.describe({**record, **record["settings"]})
        initial = self.initial
        measured = {"floor": initial.floor, "teacher": initial.teacher, "initial": initial.aim}
        self.trackers.log(_by_name(measured), origin.step)
        device, size = str(setup.device), setup.processes.size
        folder.event("start", device=device, total_steps=self.data.total_steps, processes=size)
        if origin.checkpoint is None and record["calibration"] is not None:
            passed_over = self.data.start.begun
            folder.event("calibration", **record["calibration"], passed_over=passed_over)
        if setup.config.resume is not None:
            self._report_resumed()
        self._warn_of_settings()
        setup.say(f"run folder {folder.path}")
        if setup.processes.main and setup.config.trace_steps is not None:
            from npt.recorder.recording import Recording

            self.recording = Recording(folder.path / "trace", setup.config.trace_steps, setup.say)
            setup.say(str(self.recording))

    def _report_resumed(self) -> None:
        say, origin, path = self.setup.say, self.setup.origin, None
        if origin.checkpoint is None:
            say(f"no checkpoint below {origin.folder}; the run starts at step 1")
        else:
            path = str(origin.checkpoint.folder)
            say(f"continuing from {path} at step {origin.step}")
        changed = {name: list(values) for name, values in self.setup.changed.items()}
        self.folder.event("resume", step=origin.step, checkpoint=path, changed=changed)
        for name, (old, new) in changed.items():
            say(f"changed since: {name} was {old}, is {new}")

    def _warn_of_settings(self) -> None:
        setup, config, total = self.setup, self.setup.config, self.data.total_steps
        if not setup.deterministic:
            self.warn(
                f"the backward of {attention_name(setup.model)} attention may sum in another order"
                " each time: a run that is resumed, or passed over what this one refuses, will not"
                " equal it bit for bit; it does with --deterministic on a base in fp32, with"
                " --attn_implementation eager, and with --strategy local"
            )
        if total is None and config.scheduler_type != "constant":
            self.warn(
                "the length of the stream is unknown, so the learning rate stays constant after"
                f" warm-up; --max_steps gives it its {config.scheduler_type} end"
            )
        if total is not None and config.warmup_steps > total:
            self.warn(
                f"--warmup_steps is {config.warmup_steps}, but the run has {total} steps: the"
                " learning rate will not reach --learning_rate"
            )

    def evaluate(self, step: int) -> Fidelity:
        """Evaluate the student during the run, and report its figures."""
        fidelity = self.measure()
        student, aim = fidelity.student.as_dict(), fidelity.aim
        against = {"unquantized": aim.as_dict()} if fidelity.attribution else {}
        self.folder.event("evaluation", step=step, student=student, **against)
        logged = {f"eval/{key}": value for key, value in student.items()}
        for name, figures in against.items():
            logged |= {f"eval/{name}_{key}": value for key, value in figures.items()}
        self.trackers.log(logged, step)
        ratio = f"held-out perplexity ratio {aim.perplexity_ratio:.4f}"
        self.setup.say(f"step {step}: {ratio}, KL {aim.kl:.4f}")
        self._judge(step, fidelity)
        return fidelity

    def _judge(self, step: int, fidelity: Fidelity) -> None:
        """Warn once if the student is worse than its floor, without adapters, by over one standard
        error: the run is ruined although all of its numbers are finite.
        """
        figure = self.setup.config.judged_by
        student, floor = (getattr(f, figure) for f in (fidelity.student, fidelity.floor))
        name = "KL to its teacher" if figure == "kl" else figure
        cause = f"the student's {name} is {student:.4g}, the floor's {floor:.4g}"
        worse = student - getattr(fidelity.student, f"{figure}_se") > floor
        self.diverged = (cause,) if worse else ()
        if worse and not self._warned:
            self._warned = True
            self.trackers.alert("npt: the run has diverged", cause)
            advice = "a smaller --learning_rate or a longer --warmup_steps helps as a rule"
            self.warn(f"step {step}: the run has diverged: {cause}; {advice}")

    def save(self, guard: Guard, state: Mapping[str, Any], last: bool = False) -> bool:
        """Write a checkpoint of all processes' state. False if it could not be written, an older
        one exists, and the run continues; at the `last` that is a CheckpointError.

        ProcessError if another process is lost, or holds other adapters or moments.
        """
        model, processes = self.setup.model, self.setup.processes
        audit_precision(model, policy_dtype(model))
        shrunk_to = [self.setup.splitter.shrunk_to]
        if processes.broken:  # the others are gone
            return processes.main and self._write(guard, state, shrunk_to, last)
        if processes.size > 1:
            shrunk_to = processes.gather(*shrunk_to)
            first, *others = processes.gather(guard.update.checksum())
            for process, checksum in enumerate(others, start=1):
                if checksum != first:
                    raise processes.everywhere(
                        ProcessError(
                            f"process {process} holds other adapters or moments than process 0 at"
                            f" step {state['step']} (checksums {checksum} and {first}); nothing was"
                            " saved: look at the hardware of these processes, then continue with"
                            " --resume auto"
                        )
                    )
        return processes.first(lambda: self._write(guard, state, shrunk_to, last))

    def _write(
        self, guard: Guard, state: Mapping[str, Any], shrunk_to: list[int | None], last: bool
    ) -> bool:
        setup, folder, step = self.setup, self.folder, state["step"]
        record = {
            **state,
            **{name: self.record[name] for name in ("settings", "date", "base_hash", "versions")},
            "samples_at_once": shrunk_to,
            "counted_from": self.data.counted_from,
            "data": self.data.identity,
            "initial": self.initial.as_dict(),
        }

        def write(path: Path) -> None:
            # micro-batches are seeded one by one; all other draws agree across processes
            states = {0: random_state()}
            write_checkpoint(path, setup.model, guard.window, record, self.base, states)

        try:
            path = folder.save_checkpoint(step, write, setup.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointError) as error:
            older = folder.checkpoints()
            good = f"the last good one is {older[-1]}" if older else "there is no other"
            self._failed("save_failed", step, error, f"{error}; {good}")
            if older and not last:
                message = f"no checkpoint at step {step}: {error}; {good}, training continues"
                setup.say(f"WARNING: {message}")
                return False
            raise CheckpointError(
                f"no checkpoint could be written at step {step}: {error}; {good}; make room and"
                " continue with --resume"
            ) from error
        folder.event("save", step=step, folder=str(path.relative_to(folder.path)))
        return True

    def save_best(self, step: int, fidelity: Fidelity) -> None:
        """Keep the adapters as the best so far; if that fails, say so."""
        with self._written("the best adapters", "training continues"):
            figures = {"step": step, **fidelity.as_dict()}
            self.folder.save_best(self.setup.model, self.base, figures)

    def _failed(self, event: str, step: int, error: BaseException, message: str) -> None:
        self.folder.event(event, step=step, error=type(error).__name__, message=message[:500])

    def give_up(
        self, guard: Guard, outcome: Outcome, reason: str, steps: int, *batches: Sequence[Batch]
    ) -> None:
        """Write the post-mortem and raise. Of a card that is lost it has what the host holds.

        The outcome is that of the last window with a refusal, batches are its own and those of the
        last one without, `steps` are applied by now.
        """
        from npt.forensics.bundle import write_postmortem  # few runs end so
        from npt.forensics.student import stored_batches, student_entry

        setup, path, record = self.setup, self.folder.path, self.record
        seed, (refused, accepted) = setup.config.seed, batches

        def write() -> dict[str, Any]:
            try:
                settings = {**record["settings"], **asdict(setup.config)}
                bundle = write_postmortem(
                    path / "postmortem",
                    guard,
                    outcome,
                    reason,
                    steps if outcome.snapshot is None else outcome.steps - outcome.applied,
                    refused=stored_batches(refused, seed, outcome.refused),
                    accepted=stored_batches(accepted[:KEPT], seed),
                    student=student_entry(
                        setup.model, settings, record["base_hash"], setup.splitter.samples
                    ),
                )
            except Exception as error:  # the run reports its end either way
                return {"postmortem": None, "error": str(error)}
            stated = read_json(bundle / POSTMORTEM, BundleError)["reason"]
            return {"postmortem": str(bundle.relative_to(path.absolute())), "reason": stated}

        bundle = write() if setup.processes.broken else setup.processes.first(write)
        reason = bundle.pop("reason", reason)
        self.folder.event("stopped", step=steps, reason=reason, **bundle)
        of_card = any(refusal.kind == "card" for refusal in outcome.refused)
        ending = f", the last: {outcome.refused[-1]}" if outcome.refused and not of_card else ""
        if bundle["postmortem"] is None:
            end = (
                f"no post-mortem could be written below {path}: {bundle['error']}; free or choose a"
                " disk that can be written to"
            )
        elif of_card:
            older = self.folder.checkpoints()
            remedy = f"continue with --resume {older[-1]}" if older else "there is no checkpoint"
            end = f"batches and settings are in {path / bundle['postmortem']}; {remedy}"
        else:
            end = f"look into it with: npt replay {path / bundle['postmortem']}"
        message = f"stopped at step {steps}: {reason}{ending}; {end}"
        kind = CardError if of_card else TooManyRefusalsError
        raise setup.processes.everywhere(kind(message))

    def rescue(self, loop: Loop, error: BaseException) -> None:
        """Save the steps before an error that ended the loop; a second signal does not wait."""
        processes = self.setup.processes
        if isinstance(error, KeyboardInterrupt) and self.setup.stop.number is not None:
            return
        if not isinstance(error, TooManyRefusalsError):
            self._failed("error", loop.steps, error, str(error))
        # the others are elsewhere: leave out whatever would wait for them
        if not processes.met_by_all(error):
            processes.leave()
        if isinstance(error, RuntimeError) and (why := card_error(self.setup.device)) is not None:
            batches, steps = loop.open_batches, loop.steps
            outcome = Outcome(loop.guard.window.committed, len(batches), False, steps)
            outcome.refused = (Refusal("card", why),)
            self.give_up(loop.guard, outcome, why, steps, batches, ())
        try:
            loop.settle()  # a checkpoint bears the step of its weights
            if processes.broken and loop.guard.window.applied_steps != loop.steps:
                return  # the weights are of a step whose result the others did not tell
            if loop.steps and loop.unsaved:
                loop.save(last=True)
        except Exception as second:  # the first error is the one to be seen
            self._failed("error", loop.steps, second, f"not saved: {second}")

    def finish(self, loop: Loop, fidelity: Fidelity, seconds: float) -> None:
        """Write the figures and the final adapter of a run that came to its end."""
        folder, config, figures = self.folder, self.setup.config, fidelity.as_dict()
        with self._written("fidelity.json", "npt evaluate measures the adapter again"):
            folder.write("fidelity.json", {**figures, "heldout": self.data.heldout})
        with self._written("the final adapter", f"its numbers are in {CHECKPOINTS}"):
            folder.save_final(self.setup.model, self.base, figures)
        if config.eval_steps:
            loop.keep_if_best(fidelity)
        measured = {"eval": fidelity.student, "final": fidelity.aim}
        self.trackers.log(_by_name(measured), loop.steps)
        self.report_data(loop.position)
        if config.max_steps is not None and loop.steps < config.max_steps:
            self.warn(
                f"the data ended after {loop.steps} of --max_steps {config.max_steps} steps and"
                " cannot be read again; pass a list, which can"
            )
        self._judge(loop.steps, fidelity)
        folder.event(
            "done",
            steps=loop.steps,
            tokens=loop.tokens,
            refused=loop.refused.total(),
            refused_by_kind=dict(loop.refused),
            diverged=list(self.diverged),
            seconds=round(seconds, 3),
        )

    def report_data(self, position: Position) -> None:
        """Report which records were cut, left out or not used, at the run's end."""
        data = self.data
        read = [(data.loader.samples, position.place.epoch)]
        if data.loader.replay is not None:
            read.append((data.loader.replay, position.replay.epoch))
        for source, (samples, begun_again) in zip(data.sources, read, strict=True):
            counts, label = samples.counts, source.label
            told = {"source": label, "share": source.share, "begun_again": begun_again}
            self.folder.event("data", **told, **counts.as_dict())
            if left_out := lost(counts):
                self.warn(f"{label}: of {counts.records:,} records read, {left_out}")
            if begun_again and self.setup.config.max_steps is not None:
                self.setup.say(f"{label}: came to its end and was begun again {begun_again} times")

    @contextlib.contextmanager
    def reported(self, report: bool) -> Iterator[None]:
        """Write `report.html` at the end, if asked for and unless a second signal interrupts."""
        try:
            yield
        except Exception as error:
            self.trackers.alert(f"npt gave up: {type(error).__name__}", str(error)[:1000])
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
        self.trackers.files({**self.record, **self.record["settings"]})
        if lost := self.folder.lines_lost:
            self.warn(f"{lost} lines of {METRICS} and {EVENTS} could not be written below {path}")

    @contextlib.contextmanager
    def _written(self, name: str, remedy: str = "") -> Iterator[None]:
        """Warn of what could not be written: all that matters is in the checkpoints."""
        try:
            yield
        except Exception as error:
            end = f"; {remedy}" if remedy else ""
            why = f"{type(error).__name__}: {error}"
            failure = f"{name} could not be written below {self.folder.path}: {why}"
            self.warn(failure[:500] + end)


def write_report(folder: Path, output: Path | None = None) -> RunRecord:
    """Read the run folder and write the page about it, by default as `report.html` in it."""
    from npt.report.page import page
    from npt.report.run import RunRecord

    record = RunRecord(folder)
    output = folder / REPORT if output is None else output
    write_text(output, page(record, output))
    return record


def _by_name(measured: Mapping[str, Figures]) -> dict[str, float]:
    return {
        f"{name}/{key}": value
        for name, figures in measured.items()
        for key, value in figures.as_dict().items()
    }
