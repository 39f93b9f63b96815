"""A run around its loop: what goes into its folder and to its trackers, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from npt.adapters.files.run_layout import CHECKPOINTS
from npt.base.attention import attention_name
from npt.base.identity import BaseIdentity
from npt.base.precision import audit_precision, policy_dtype
from npt.base.recipe import Recipe
from npt.data.encoding import lost
from npt.data.samples import Position
from npt.errors import (
    CheckpointError,
    ConfigError,
    ProcessError,
    StoppedError,
    TooManyRefusalsError,
)
from npt.files import write_text
from npt.random_state import random_state
from npt.runs.checkpoint import write_checkpoint
from npt.runs.resume import Resumed, plain_settings
from npt.runs.run_folder import BROKEN, EVENTS, METRICS, REPORT, RUN, SUPERSEDED, RunFolder
from npt.stored import read_json
from npt.train.run_data import RunData
from npt.train.run_setup import RunSetup
from npt.versions import versions

if TYPE_CHECKING:
    from npt.calibration.report import Calibration
    from npt.evaluation.evaluate import Fidelity
    from npt.evaluation.metrics import Figures
    from npt.report.run import RunRecord
    from npt.runs.trackers import Trackers
    from npt.train.loop import Loop

DESCRIBED = ("base_hash", "precision", "versions", "device", "processes", "trainable_parameters")
"""Entries of `run.json` that trackers are told, besides the settings."""


class Run:
    """A run: its folder, and the trackers that are told the same.

    Args:
        setup: of the run.
        data: of the run.
        folder: that it writes.
        trackers: that are told.
        record: the content of `run.json`.
        base: the identity of the student's base.
        measure: evaluates the student as it is.
        initial: figures of the student before training.

    Attributes:
        total_steps: of the run, None if unknown.
        diverged: why the student is worse than having no adapters, by the last evaluation.
    """

    def __init__(
        self,
        setup: RunSetup,
        data: RunData,
        folder: RunFolder,
        trackers: Trackers,
        record: Mapping[str, Any],
        base: BaseIdentity,
        measure: Callable[[], Fidelity],
        initial: Fidelity,
    ):
        self.setup, self.folder, self.trackers, self.record = setup, folder, trackers, record
        self._data, self._base, self._measure, self._initial = data, base, measure, initial
        self.total_steps = data.total_steps
        self.diverged: tuple[str, ...] = ()
        self._warned = False

    def say(self, message: str) -> None:
        self.setup.say(message)

    def warn(self, message: str) -> None:
        """Print a warning and keep it as an event."""
        self.say(f"warning: {message}")
        self.folder.event("warning", message=message)

    def begin(self) -> None:
        """Write `run.json`, before anything else is done."""
        setup, folder, warn = self.setup, self.folder, self.warn
        record = {**self.record, "wandb_run": self.trackers.run_id}
        if setup.resumed is not None:
            set_aside_unused(setup.resumed, folder, warn)
        if setup.resume_at is not None:
            from npt.runs.trackers import known_run

            record["wandb_run"] = self.trackers.run_id or known_run(folder.path)
            if setup.checkpoint is not None:
                with contextlib.suppress(CheckpointError):
                    earlier = read_json(folder.path / RUN, CheckpointError)
                    record["calibration"] = earlier.get("calibration")  # of the start that it had
                    record["other_base"] = record["other_base"] or earlier.get("other_base")
        try:
            folder.write(RUN, record)
            setup.stop.check()
        except (OSError, StoppedError) as error:
            folder.discard()
            if isinstance(error, StoppedError):
                raise
            raise ConfigError(
                f"--output_dir {folder.path} cannot be written: {error.strerror}; choose another"
                " folder"
            ) from error
        recipe = Recipe.of(setup.model)
        self._facts = {
            **plain_settings(record["settings"]),
            **{name: record[name] for name in DESCRIBED},
            "base_loading": None if recipe is None else asdict(recipe),
            "converted_layers": record["layers"],
            "folder": str(folder.path),
        }
        self.trackers.warn = warn
        self.trackers.describe(self._facts)
        initial = self._initial
        measured = {"floor": initial.floor, "teacher": initial.teacher, "initial": initial.aim}
        self.trackers.log(_by_name(measured), setup.first_step)

    def report_start(self, calibration: Calibration | None) -> None:
        """Write the first events, and warn of settings that will have no effect."""
        setup, folder, warn = self.setup, self.folder, self.warn
        config, total, size = setup.config, self.total_steps, setup.processes.size
        folder.event("start", device=str(setup.device), total_steps=total, processes=size)
        if calibration is not None:
            begun = self._data.start.begun
            folder.event("calibration", **calibration.as_dict(), passed_over=begun)
        if setup.resumed is not None:
            self._report_resumed(setup.resumed)
        if not setup.deterministic:
            warn(
                f"the backward of {attention_name(setup.model)} attention, as this base was loaded,"
                " may sum in another order each time: a run that is resumed will not equal this"
                " one bit for bit; npt.load_base in fp32 with --attn_implementation sdpa or eager"
                " does, and so does --strategy local"
            )
        if total is None and config.scheduler_type != "constant":
            warn(
                "the length of the stream is unknown, so the learning rate stays constant after"
                f" warm-up; --max_steps gives it its {config.scheduler_type} end"
            )
        if total is not None and config.warmup_steps > total:
            warn(
                f"--warmup_steps is {config.warmup_steps}, but the run has {total} steps: the"
                " learning rate will not reach --learning_rate"
            )
        setup.say(f"run folder {folder.path}")

    def _report_resumed(self, resumed: Resumed) -> None:
        say, checkpoint, path = self.setup.say, resumed.checkpoint, None
        if checkpoint is None:
            say(f"no checkpoint below {resumed.folder}; the run starts at step 1")
        else:
            path = str(checkpoint.folder)
            say(f"continuing from {path} at step {checkpoint.step}")
            if (other_base := self.record["other_base"]) is not None:
                self.warn(f"--any_base: {path} was trained on another base: {other_base}")
        changed = {name: list(values) for name, values in self.setup.changed.items()}
        self.folder.event("resume", step=resumed.step, checkpoint=path, changed=changed)
        for name, (old, new) in changed.items():
            say(f"changed since: {name} was {old}, is {new}")

    def evaluate(self, step: int) -> Fidelity:
        """Evaluate the student during the run, and report its figures."""
        fidelity = self._measure()
        student, aim = fidelity.student.as_dict(), fidelity.aim
        against = {"unquantized": aim.as_dict()} if fidelity.attribution else {}
        self.folder.event("evaluation", step=step, student=student, **against)
        logged = {f"eval/{key}": value for key, value in student.items()}
        for key, value in against.get("unquantized", {}).items():
            logged[f"eval/unquantized_{key}"] = value
        self.trackers.log(logged, step)
        ratio = f"held-out perplexity ratio {aim.perplexity_ratio:.4f}"
        self.setup.say(f"step {step}: {ratio}, KL {aim.kl:.4f}")
        self._judge(step, fidelity)
        return fidelity

    def _judge(self, step: int, fidelity: Fidelity) -> None:
        """Warn once if the student is worse than its floor, which has no adapters, beyond one
        standard error: the run is ruined although all of its numbers are finite.
        """
        figure = self.setup.config.judged_by
        student, floor = (getattr(f, figure) for f in (fidelity.student, fidelity.floor))
        name = "KL to its teacher" if figure == "kl" else figure
        cause = f"the student's {name} is {student:.4g}, the floor's {floor:.4g}"
        worse = student - getattr(fidelity.student, f"{figure}_se") > floor
        self.diverged = (cause,) if worse else ()
        if worse and not self._warned:
            self._warned = True
            advice = "a smaller --learning_rate or a longer --warmup_steps helps as a rule"
            self.warn(f"step {step}: the run has diverged: {cause}; {advice}")
            self.trackers.alert("npt: the run has diverged", cause)

    def save(self, loop: Loop, last: bool = False) -> bool:
        """Write a checkpoint of all processes' state.

        ProcessError if another process is lost, or holds other adapters or moments.

        Args:
            loop: to be saved.
            last: the run is over, so nothing would be written later.

        Returns:
            False if it could not be written, an older one exists, and the run continues; else that
            is a CheckpointError.
        """
        model, processes, splitter = self.setup.model, self.setup.processes, self.setup.splitter
        audit_precision(model, policy_dtype(model))
        shrunk_to = [splitter.shrunk_to]
        if processes.broken:  # the others are gone
            return processes.main and self._write(loop, shrunk_to, last)
        if processes.size > 1:
            self._compare_processes(loop)
            shrunk_to = processes.gather(splitter.shrunk_to)
        return processes.first(lambda: self._write(loop, shrunk_to, last))

    def save_best(self, loop: Loop, fidelity: Fidelity) -> None:
        """Keep the adapters as the best so far; if that fails, say so."""
        figures = {"step": loop.steps, **fidelity.as_dict()}
        try:
            self.folder.save_best(self.setup.model, self._base, figures)
        except (OSError, SafetensorError) as error:
            self._failed("save_failed", loop, error, f"best: {error}")
            self.setup.say(
                f"WARNING: the best adapters could not be kept at step {loop.steps}: {error}"
            )

    def _compare_processes(self, loop: Loop) -> None:
        """Refuse to save if processes hold different adapters or moments."""
        processes = self.setup.processes
        first, *others = processes.gather(loop.guard.update.checksum())
        for process, checksum in enumerate(others, start=1):
            if checksum != first:
                raise processes.everywhere(
                    ProcessError(
                        f"process {process} holds other adapters or moments than process 0 at step"
                        f" {loop.steps} (checksums {checksum} and {first}); nothing was saved: look"
                        " at the hardware of these processes, then continue with --resume auto"
                    )
                )

    def _write(self, loop: Loop, shrunk_to: list[int | None], last: bool) -> bool:
        setup, folder, step = self.setup, self.folder, loop.steps
        record = {
            **loop.state(),
            "samples_at_once": shrunk_to,
            "counted_from": self._data.counted_from,
            "settings": plain_settings(setup.all_settings()),
            "data": self._data.identity,
            "date": setup.date,
            "initial": self._initial.as_dict(),
            "base_hash": self._base.strict,
            "versions": versions(),
        }

        def write(path: Path) -> None:
            # micro-batches are seeded one by one; all other draws agree across processes
            states = {0: random_state()}
            write_checkpoint(path, setup.model, loop.guard.window, record, self._base, states)

        try:
            path = folder.save_checkpoint(step, write, setup.config.save_total_limit)
        except (OSError, SafetensorError, CheckpointError) as error:
            older = folder.checkpoints()
            good = f"the last good one is {older[-1]}" if older else "there is no other"
            self._failed("save_failed", loop, error, f"{error}; {good}")
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

    def _failed(self, event: str, loop: Loop, error: BaseException, message: str) -> None:
        kind = type(error).__name__
        self.folder.event(event, step=loop.steps, error=kind, message=message[:500])

    def rescue(self, loop: Loop, error: BaseException) -> None:
        """Save the steps before an error that ended the loop; a second signal does not wait."""
        processes = self.setup.processes
        if isinstance(error, KeyboardInterrupt) and self.setup.stop.number is not None:
            return
        if not isinstance(error, TooManyRefusalsError):
            self._failed("error", loop, error, str(error))
        # the others are elsewhere: leave out whatever would wait for them
        if not processes.met_by_all(error):
            processes.leave()
        try:
            loop.settle()  # a checkpoint bears the step of its weights
            if processes.broken and loop.guard.window.applied_steps != loop.steps:
                return  # the weights are of a step whose result the others did not tell
            if loop.steps and loop.unsaved:
                self.save(loop, last=True)
        except Exception as second:  # the first error is the one to be seen
            self._failed("error", loop, second, f"not saved: {second}")

    def finish(self, loop: Loop, fidelity: Fidelity, seconds: float) -> None:
        """Write the figures and the final adapter of a run that came to its end."""
        folder, config, figures = self.folder, self.setup.config, fidelity.as_dict()
        with self._written("fidelity.json", "npt evaluate measures the adapter again"):
            folder.write("fidelity.json", {**figures, "heldout": self._data.heldout})
        with self._written("the final adapter", f"its numbers are in {CHECKPOINTS}"):
            folder.save_final(self.setup.model, self._base, figures)
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
            refused=loop.refusals.total,
            refused_by_kind=dict(loop.refusals.by_kind),
            diverged=list(self.diverged),
            seconds=round(seconds, 3),
        )

    def report_data(self, position: Position) -> None:
        """Report which records were cut, left out or not used, at the run's end."""
        data = self._data
        read = [(data.loader.samples, position.place.epoch)]
        if data.loader.replay is not None:
            read.append((data.loader.replay, position.replay.epoch))
        for source, (samples, begun_again) in zip(data.sources, read, strict=True):
            counts, label = samples.counts, source.label
            share = {"share": source.share} if len(data.sources) > 1 else {}
            self.folder.event(
                "data", source=label, **share, begun_again=begun_again, **counts.as_dict()
            )
            if left_out := lost(counts):
                self.warn(f"{label}: of {counts.records:,} records read, {left_out}")
            if begun_again and self.setup.config.max_steps is not None:
                self.say(f"{label}: came to its end and was begun again {begun_again} times")

    def close(self, status: int | None, report: bool) -> None:
        """Write `report.html`, and close the trackers; neither changes how the run ended.

        Args:
            status: of the run; None if a second signal interrupted it, which waits for no report.
            report: write one.
        """
        path = self.folder.path
        if report and status is not None and self.setup.processes.main:
            with self._written(REPORT):
                write_report(path)
        if lost := self.folder.lines_lost:
            self.warn(f"{lost} lines of {METRICS} and {EVENTS} could not be written below {path}")
        if not self.trackers.active:
            return
        self.setup.stop.at_once = True  # trackers may wait for a network
        try:
            self.trackers.files(self._facts)
            self.trackers.close(1 if status is None else status)
        except StoppedError as signal:
            self.warn(
                f"signal {signal.exit_status - 128} ended the wait for trackers, which may lack the"
                " end of this run"
            )
        finally:
            self.setup.stop.at_once = False

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
    """Read the run folder and write the page about it, by default as `report.html` in the folder;
    OSError if it cannot be written.
    """
    from npt.report.page import page
    from npt.report.run import RunRecord

    record = RunRecord(folder)
    output = folder / REPORT if output is None else output
    write_text(output, page(record, output))
    return record


def set_aside_unused(resumed: Resumed, folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Set aside checkpoints that do not verify, and those after the one that is resumed.

    ConfigError if there are others than when the checkpoint was chosen.
    """
    if not resumed.goes_on:
        for problem in resumed.broken.values():
            warn(problem)
        return
    if tuple(path.name for path in folder.checkpoints()) != resumed.seen:
        raise ConfigError(
            f"another process has written to {folder.path} since its checkpoints were read;"
            " start again"
        )
    for path, problem in resumed.broken.items():
        warn(f"{problem}; set aside as {folder.set_aside(path, BROKEN).name}")
    for path in folder.checkpoints():
        step = int(path.name.removeprefix("step-"))
        if resumed.checkpoint is not None and step > resumed.step:
            aside = folder.set_aside(path, SUPERSEDED).name
            warn(f"the run continues from step {resumed.step}; {path.name} is set aside as {aside}")


def _by_name(measured: Mapping[str, Figures]) -> dict[str, float]:
    return {
        f"{name}/{key}": value
        for name, figures in measured.items()
        for key, value in figures.as_dict().items()
    }
