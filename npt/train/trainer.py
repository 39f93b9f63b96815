"""`Trainer`: from records to a trained adapter and its run folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, attached_config, is_sharded
from npt.adapters.files.run_layout import CHECKPOINTS
from npt.base.identity import BaseIdentity, base_identity
from npt.config import DataConfig, TrainConfig
from npt.console import make_console, silent_console
from npt.data.encoding import no_sample
from npt.data.source import Record
from npt.distill.step import MicroBatchSplitter, check_unfrozen, student_guard
from npt.distill.strategies import STRATEGIES, Strategy
from npt.distributed.join import join_processes, processes_of
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, DataError, StoppedError
from npt.guard.schedule import rate_table
from npt.random_state import set_random_state
from npt.runs.checkpoint import State
from npt.runs.run_folder import EVENTS, NullRunFolder, RunFolder
from npt.tracer.watchdogs import base_fault, require, tensor_fault
from npt.train.loop import Loop
from npt.train.preparation import calibrated, evaluator, fitting, run_record, smoke_test
from npt.train.run import Run
from npt.train.run_data import RunData
from npt.train.run_setup import RunSetup, check_trainable, checked

if TYPE_CHECKING:
    from npt.calibration.report import Calibration
    from npt.evaluation.evaluate import Fidelity


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run.

    Attributes:
        refused: micro-batches and windows.
        heldout: `fidelity` is of held-out text; False if there was too little of it.
        diverged: why the student is worse than one without adapters, though all is finite.
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
        eval_data: held-out records. Default: the built-in text's own held-out files if `data` is
            None and names it, else one sample in twenty of `data`, which training then leaves out.
        replay_data: records mixed in against forgetting, `replay_ratio` of all samples, over and
            over. They may be of another form than `data`. Default: the data set that `data_config`
            names, if any.
        settings: further settings to record in `run.json`.
        console: where to report; default standard output.
        processes: the processes that train together; default those that a launcher started with
            this one, or this one alone.
        any_base: resume a checkpoint of another base too, if its shapes fit; a warning and
            `run.json` say in what the two differ.
        report: write `report.html`.

    Raises:
        ConfigError, DataError, PrecisionError: settings, data or a base that cannot work.
        ProcessError: another process failed or was lost.
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
        eval_data: Iterable[Record] | None = None,
        replay_data: Iterable[Record] | None = None,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
        processes: ProcessGroup | None = None,
        any_base: bool = False,
        report: bool = True,
    ):
        config, data_config = config or TrainConfig(), data_config or DataConfig()
        self.report, self._any_base = report, any_base
        processes = processes_of(model) or processes or join_processes()
        with processes.member():
            named = data_config if data is None else None
            check_trainable(attached_config(model), named, teacher is not None)
            setup = RunSetup(
                model,
                tokenizer,
                teacher,
                config,
                data_config,
                processes,
                (console or make_console()) if processes.main else silent_console(),
                MicroBatchSplitter(config.batch_size),
                settings or {},
            )
            self.setup = setup = checked(setup)
            self.data = RunData(setup, data, eval_data, replay_data)
        self.strategy: Strategy = STRATEGIES[config.strategy]
        if teacher is not None:
            self.strategy = partial(self.strategy, teacher=teacher)
        self.evaluate = evaluator(setup, self.data)
        self.calibration: Calibration | None = None
        self._state: State | None = None  # that is resumed
        self._trained = False

    @property
    def folder_path(self) -> Path:
        """The run's folder."""
        return self.setup.folder

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
            TooManyRefusalsError: with a post-mortem.
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
        from npt.runs.trackers import start_trackers

        with setup.processes.member(), setup.stop:
            base = self._checked_base()
            self.data.agree(base)  # all have read the checkpoint, before its folder changes
            with start_trackers(
                setup.processes, setup.config, setup.folder, resume_at=setup.resume_at
            ) as trackers:
                self.initial = self._prepare(base)
                record = run_record(setup, self.data, base, self.calibration)
                record["other_base"] = None
                if setup.checkpoint is not None and self._any_base:
                    record["other_base"] = setup.checkpoint.base_mismatch(base)
                setup.stop.check()
                setup.stop.at_once = False  # from here on there is a folder to be left in order
                folder: RunFolder = NullRunFolder(setup.folder)
                if setup.processes.main:
                    folder = RunFolder(setup.folder, resume_at=setup.resume_at)
                with contextlib.closing(folder):
                    parts = (setup, self.data, folder, trackers, record)
                    result = self._run(Run(*parts, base, self.evaluate, self.initial))
            # A launcher may end the other processes when the first has ended, so wait for the main
            # one to write everything.
            setup.processes.wait()
            return result

    def _checked_base(self) -> BaseIdentity:
        """Refuse non-finite numbers and another base; read the state to resume, if any."""
        setup = self.setup
        # micro-batches are seeded one by one; this makes all other draws agree across processes
        torch.manual_seed(setup.config.seed)
        parameters = adapter_parameters(setup.model)
        check_unfrozen(parameters)
        require(tensor_fault(parameters))
        require(base_fault(setup.model))
        if setup.teacher is not None:
            require(base_fault(setup.teacher))
        base, checkpoint = base_identity(setup.model), setup.checkpoint
        if checkpoint is not None:
            self._state = checkpoint.state(setup.model, base, check_base=not self._any_base)
        return base

    def _prepare(self, base: BaseIdentity) -> Fidelity:
        """Make smoke test, start and first evaluation, before the run has a folder."""
        setup, data, resumed = self.setup, self.data, self.setup.checkpoint
        # a resumed run has passed the smoke test, and may next meet a batch that it will refuse
        if setup.config.smoke_test and resumed is None:
            batch = data.first_batch()

            def test() -> str:
                part = setup.splitter.parts(batch)[0]
                return smoke_test(setup.model, part, self.strategy, setup.config)

            setup.say(fitting(setup, test, setup.splitter, batch, "the smoke test"))
        if resumed is None:
            self.calibration = calibrated(setup, data)
            if self.calibration is not None:
                data.agree(base)
        setup.say(data.note())
        return self.evaluate() if resumed is None else resumed.initial

    def _run(self, run: Run) -> TrainResult:
        """Train, and leave the folder in order."""
        run.begin()
        status = None
        try:
            run.report_start(self.calibration)
            result = self._train(run, self._make_loop(run))
            status = result.exit_status
        except Exception as error:
            status = getattr(error, "exit_status", 1)
            run.trackers.alert(f"npt gave up: {type(error).__name__}", str(error)[:1000])
            raise
        finally:
            run.close(status, self.report)
        return result

    def _make_loop(self, run: Run) -> Loop:
        """Return the loop, in the state that is resumed, if any."""
        setup, c, total = self.setup, self.setup.config, self.total_steps
        rates = rate_table(c.learning_rate, c.scheduler_type, c.warmup_steps, total)
        # one process alone would wait for the others' parts of a base that they share
        traced = 0 if is_sharded(setup.model) else 1
        guard = student_guard(setup.model, c, rates, processes=setup.processes, trace=traced)
        loop = Loop(run, guard, self.strategy)
        if setup.checkpoint is not None and self._state is not None:
            self._state.restore(guard.window)
            loop.load_state(setup.checkpoint.record, setup.resume_at is not None)
            index, splitter = setup.processes.index, setup.splitter
            at_once = dict(enumerate(setup.checkpoint.record.get("samples_at_once", [])))
            if (samples := at_once.get(index)) is not None:
                splitter.samples = splitter.shrunk_to = min(splitter.samples, samples)
            states = self._state.random_states  # earlier versions wrote one for each process
            set_random_state(states.get(index, states[0]))
            self._state = None  # a copy of everything
        return loop

    def _train(self, run: Run, loop: Loop) -> TrainResult:
        """Run the loop, save, and evaluate."""
        setup, folder = self.setup, run.folder
        started = time.perf_counter()
        try:
            try:
                with contextlib.closing(self.data.windows()) as windows:
                    loop.train(windows)
            except BaseException as error:
                run.rescue(loop, error)
                raise
            seconds = time.perf_counter() - started
            number = self._signal()
            if number is not None:
                run.report_data(loop.position)
                folder.event("signal", number=number, step=loop.steps)
            elif loop.steps == 0:
                self._refuse_empty(loop)
            if loop.unsaved:
                run.save(loop, last=True)
        finally:
            loop.guard.close()  # the model is as it was found, and evaluated without its buffers
            if loop.recording is not None:
                loop.recording.draw()  # pictures can wait until all is saved
        number, fidelity = self._signal(), None
        if number is not None:
            setup.say(
                f"stopped by signal {number} at step {loop.steps}; the adapters are saved below"
                f" {folder.path / CHECKPOINTS}"
            )
        else:
            with contextlib.suppress(StoppedError):  # all is saved; only the figures are missing
                fidelity = self.evaluate().after(self.initial)
            number = self._signal()
            if number is not None and setup.processes.size > 1:
                fidelity = None
            if fidelity is None:
                folder.event("signal", number=number, step=loop.steps)
            else:
                run.finish(loop, fidelity, seconds)
                number = self._signal()
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
            diverged=run.diverged,
            signal=number,
        )

    def _refuse_empty(self, loop: Loop) -> None:
        """End a run without one applied step."""
        folder = loop.run.folder
        folder.event("stopped", step=0, reason="no step was applied")
        error = no_sample(self.data.loader.samples.counts)
        if loop.micro_batches:
            error = DataError(
                f"the data ended without one applied step ({loop.refusals.total} refusals, see"
                f" {folder.path / EVENTS})"
            )
        raise self.setup.processes.everywhere(error)

    def _signal(self) -> int | None:
        """Return the number of a signal that came to any process; every process must ask."""
        number = self.setup.stop.number
        numbers = [n for n in (number, *self.setup.processes.gather(number)) if n is not None]
        return numbers[0] if numbers else None
