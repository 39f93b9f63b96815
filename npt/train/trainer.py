"""`Trainer`: from records to a trained adapter and its run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, attached_config, is_sharded
from npt.adapters.files.run_layout import CHECKPOINTS
from npt.base.identity import base_identity
from npt.calibration.report import Calibration
from npt.config import DataConfig, TrainConfig
from npt.data.report import no_sample
from npt.data.source import Record
from npt.diagnostics.guards import base_fault, require, tensor_fault
from npt.distill.step import check_unfrozen, student_guard
from npt.errors import ConfigError, DataError, StoppedError
from npt.evaluation.evaluate import Fidelity
from npt.guard.schedule import rate_table
from npt.random_state import set_random_state
from npt.runs.checkpoint import State
from npt.runs.run_folder import EVENTS, NullRunFolder, RunFolder
from npt.runs.trackers import Trackers, start_trackers
from npt.train.loop import Loop
from npt.train.memory_fit import MemoryFit
from npt.train.preparation import Preparation, run_record
from npt.train.progress import ProgressDisplay
from npt.train.run_checks import check_trainable
from npt.train.run_context import RunActions, RunContext
from npt.train.run_data import RunData
from npt.train.run_evaluation import RunEvaluator
from npt.train.run_setup import RunOptions, RunSetup
from npt.train.run_writer import RunWriter


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run.

    refused: micro-batches and windows. heldout: `fidelity` is of held-out text; False if there was
    too little of it. diverged: what shows that the run is ruined, though all of it is finite.
    signal: number of the signal that ended the run early, if one did.
    """

    folder: Path
    steps: int
    tokens: int
    refused: int
    micro_batches: int
    refused_by_kind: dict[str, int]
    seconds: float
    fidelity: Fidelity | None
    heldout: bool
    diverged: tuple[str, ...] = ()
    signal: int | None = None

    @property
    def refused_share(self) -> float:
        """Refusals per micro-batch that was tried."""
        return self.refused / max(1, self.micro_batches)

    @property
    def exit_status(self) -> int:
        """0, or 128 plus the number of the signal."""
        return 0 if self.signal is None else 128 + self.signal


class Trainer:
    """Distils the attached adapters of `model` from the model itself, or from a separate teacher.

    Settings and data that cannot work are refused before the run folder is made. Each of several
    processes makes a Trainer with the same arguments; they share every window, and the main one
    writes.

    Args:
        model: from `npt.load_base`, with `npt.attach` done.
        tokenizer: of the base model.
        data: records ({"text"}, {"prompt", "completion"} or {"input_ids"}): a list, a `datasets`
            object, a generator; None for the data set that `data_config` names.
        config: training settings.
        data_config: how `data` is cut to samples.
        teacher: from `npt.load_teacher`, an unquantised model to learn from; default the student's
            own base.
        options: any of
            eval_data: held-out records. Default: the built-in text's own held-out files if `data`
                is None and names it, else one sample in twenty of `data`, which training then
                leaves out.
            replay_data: records mixed in against forgetting, `replay_ratio` of all samples, over
                and over. They may be of another form than `data`. Default: the data set that
                `data_config` names, if any.
            settings: further settings to record in `run.json`.
            console: where to report; default standard output.
            processes: the processes that train together; default those that a launcher started
                with this one, or this one alone.
            any_base: resume a checkpoint of another base too, if its shapes fit; a warning and
                `run.json` say in what the two differ.
            trackers: from `start_trackers`, of this run; default the configuration's, which then
                start before the smoke test.
            report: write `report.html` and the figures for it; default True.

    Raises:
        ConfigError, DataError, PrecisionError: settings, data or a base that cannot work.
        ProcessError: another process failed or was lost.
        TypeError: an option that does not exist.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        data: Iterable[Record] | None = None,
        config: TrainConfig | None = None,
        *,
        data_config: DataConfig | None = None,
        teacher: PreTrainedModel | None = None,
        **options: Any,
    ):
        unknown = set(options) - {field.name for field in fields(RunOptions)}
        if unknown:
            raise TypeError(f"npt.Trainer has no option {', '.join(sorted(unknown))}")
        config, data_config = config or TrainConfig(), data_config or DataConfig()
        self.setup = RunSetup(model, tokenizer, teacher, config, data_config, RunOptions(**options))
        with self.setup.processes.member():
            named = data_config if data is None else None
            check_trainable(attached_config(model), named, teacher is not None)
            self.setup.check()
            self.data = RunData(self.setup, data)
            self.memory = MemoryFit(self.setup)
        self.calibration: Calibration | None = None
        self.evaluate = RunEvaluator(self.setup, self.data, self.memory)
        self._state: State | None = None  # that is resumed
        self._trained = False

    @property
    def folder_path(self) -> Path:
        """The run's folder."""
        return self.setup.folder_path

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run, None if unknown."""
        return self.data.total_steps

    @torch.inference_mode(False)  # whatever the caller is in
    def train(self) -> TrainResult:
        """Run smoke test, evaluation, loop, evaluation.

        Raises:
            NumericalError, SmokeTestError: the base or an adapter holds a non-finite number, or one
                batch shows that training cannot work; before anything is written.
            TooManyRefusalsError, DivergedError: with a post-mortem; as `stop_on_divergence` asks.
            ConfigError: the run folder cannot be written, or the processes of the run differ in
                something.
            ProcessError: another process failed or was lost.
        """
        if self._trained:
            raise ConfigError(
                "this Trainer has trained already; make a new one, its data and output folder are"
                " used up"
            )
        self._trained = True
        setup = self.setup
        setup.stop.at_once = True  # until the loop there is nothing to save
        with setup.processes.member(), setup.stop, contextlib.ExitStack() as stack:
            self._check_numbers()
            self.data.agree(self.base)  # all have read the checkpoint, before its folder changes
            trackers = setup.options.trackers
            if trackers is None:
                folder, at = setup.folder_path, setup.resume_step
                started = start_trackers(setup.processes, setup.config, folder, resume_at=at)
                trackers = stack.enter_context(started)
            self._prepare()
            result = self._run(trackers)
            stack.close()
            # A launcher may end the other processes when the first has ended, so wait for the main
            # one to write everything.
            setup.processes.wait()
            return result

    def _check_numbers(self) -> None:
        """Refuse non-finite numbers and another base; read the state to resume, if any."""
        setup = self.setup
        # Training does not draw from it; anything else that does draws the same in every process.
        torch.manual_seed(setup.config.seed)
        parameters = adapter_parameters(setup.model)
        check_unfrozen(parameters)
        require(tensor_fault(parameters))
        require(base_fault(setup.model))
        if setup.teacher is not None:
            require(base_fault(setup.teacher))
        self.base = base_identity(setup.model)
        self.other_base: str | None = None
        if setup.checkpoint is None:
            return
        any_base = setup.options.any_base
        if any_base:
            self.other_base = setup.checkpoint.base_mismatch(self.base)
        self._state = setup.checkpoint.state(setup.model, self.base, check_base=not any_base)

    def _prepare(self) -> None:
        """Make smoke test, start and first evaluation, before the run has a folder."""
        setup, resumed = self.setup, self.setup.checkpoint
        # A resumed run has passed the smoke test, and may next meet a batch that it will refuse.
        preparation = Preparation(setup, self.data, self.memory)
        if setup.config.smoke_test and resumed is None:
            setup.say(preparation.smoke_test(setup.config))
        if resumed is None and setup.adapter_config.init == "calibrated":
            self.calibration = preparation.calibrate()
            if self.calibration is not None:
                self.data.agree(self.base)
        note = self.memory.note()
        if note is not None:
            setup.say(note)
        setup.say(self.data.note())
        self.initial = self.evaluate() if resumed is None else resumed.initial
        self.record = run_record(setup, self.data, self.base) | {
            "other_base": self.other_base,
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
            "memory": None if self.memory.plan is None else self.memory.plan.as_dict(),
        }
        setup.stop.check()
        setup.stop.at_once = False  # from here on there is a folder to be left in order

    def _run(self, trackers: Trackers) -> TrainResult:
        """Open the folder, train, and leave it in order."""
        setup = self.setup
        folder: RunFolder = NullRunFolder(setup.folder_path)
        if setup.processes.main:
            folder = RunFolder(setup.folder_path, resume_at=setup.resume_step)
        writer = RunWriter(setup, self.data, self.base, self.initial, folder, trackers)
        status = 1
        try:
            writer.begin(self.record, self.other_base)
            try:
                writer.report_start(self.total_steps, self.calibration, self.memory)
                result = self._train(self._make_loop(folder, trackers, writer), writer)
                status = result.exit_status
                writer.report()
            except Exception as error:
                status = getattr(error, "exit_status", status)
                trackers.alert(f"npt gave up: {type(error).__name__}", str(error)[:1000])
                writer.report()
                raise
            finally:
                writer.end_trackers(status, self.record)
            return result
        finally:
            writer.report_lost_lines()
            folder.close()

    def _make_loop(self, folder: RunFolder, trackers: Trackers, writer: RunWriter) -> Loop:
        """Return the loop, in the state that is resumed, if any."""
        setup, c, total = self.setup, self.setup.config, self.total_steps
        first = 0 if setup.resumed is None else setup.resumed.step
        display = ProgressDisplay(total, setup.console, first=first)
        context = RunContext(
            setup.model, c, folder, trackers, display, setup.stop, self.record, setup.processes
        )
        rates = rate_table(c.learning_rate, setup.schedule(total), c.warmup_steps, total)
        # one process alone would wait for the others' parts of a base that they share
        traced = 0 if is_sharded(setup.model) else 1
        guard = student_guard(setup.model, c, rates, processes=setup.processes, trace=traced)
        saves = writer.checkpoints
        actions = RunActions(
            self.evaluate,
            lambda: saves.save(loop),
            lambda fidelity: saves.save_best(loop, fidelity),
            writer.looks(),
        )
        loop = Loop(context, guard, setup.strategy, setup.splitter, total, actions)
        if setup.checkpoint is not None and self._state is not None:
            self._state.restore(guard.window)
            loop.load_state(setup.checkpoint.record, saved=setup.goes_on)
            self.memory.recall(setup.checkpoint)
            # fewer processes may have saved
            set_random_state(self._state.random_states.get(setup.processes.index, {}))
            self._state = None  # a copy of everything
        return loop

    def _train(self, loop: Loop, writer: RunWriter) -> TrainResult:
        """Run the loop, save, and evaluate."""
        setup, folder = self.setup, loop.context.folder
        started = time.perf_counter()
        try:
            try:
                with contextlib.closing(self.data.windows()) as windows:
                    loop.run(windows)
            except BaseException as error:
                writer.checkpoints.rescue(loop, error, writer.measure_modulation)
                raise
            finally:
                loop.context.display.close()
            seconds = time.perf_counter() - started
            number = self._signal()
            if number is not None:
                self.data.report(folder, writer.warn, loop.position)
                folder.event("signal", number=number, step=loop.steps)
            elif loop.steps == 0:
                self._refuse_empty(loop)
            if loop.unsaved:
                writer.checkpoints.save(loop, last=True)
        finally:
            if loop.recording is not None:
                loop.recording.draw()  # pictures can wait until all is saved
        number, fidelity = self._signal(), None
        if number is None:
            fidelity, number = self._finish(loop, writer, seconds)
        else:
            setup.say(
                f"stopped by signal {number} at step {loop.steps}; the adapters are saved below"
                f" {folder.path / CHECKPOINTS}"
            )
        return TrainResult(
            folder=folder.path,
            steps=loop.steps,
            tokens=loop.tokens,
            refused=loop.refusals.total,
            micro_batches=loop.micro_batches,
            refused_by_kind=dict(loop.refusals.by_kind),
            seconds=seconds,
            fidelity=fidelity,
            heldout=self.data.heldout,
            diverged=tuple(loop.divergence.causes),
            signal=number,
        )

    def _refuse_empty(self, loop: Loop) -> None:
        """End a run without one applied step."""
        processes, folder = self.setup.processes, loop.context.folder
        folder.event("stopped", step=0, reason="no step was applied")
        if not loop.micro_batches:
            raise processes.everywhere(no_sample(self.data.loader.samples.counts))
        said = (
            f"the data ended without one applied step ({loop.refusals.total} refusals, see"
            f" {folder.path / EVENTS})"
        )
        raise processes.everywhere(DataError(said))

    def _finish(
        self, loop: Loop, writer: RunWriter, seconds: float
    ) -> tuple[Fidelity | None, int | None]:
        """Evaluate and write the final files; return the figures, and a signal that came."""
        fidelity = None
        with contextlib.suppress(StoppedError):  # everything is saved; only the figures are missing
            fidelity = self.evaluate().after(self.initial)
        number = self._signal()
        if fidelity is None or (number is not None and self.setup.processes.size > 1):
            loop.context.folder.event("signal", number=number, step=loop.steps)
            return None, number
        writer.finish(loop, fidelity, seconds)
        return fidelity, self._signal()

    def _signal(self) -> int | None:
        """Return the number of a signal that came to any process; every process must ask."""
        own = self.setup.stop.number
        numbers = [n for n in (own, *self.setup.processes.gather_json(own)) if n is not None]
        return numbers[0] if numbers else None
