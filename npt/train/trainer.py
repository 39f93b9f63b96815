"""`Trainer`: train adapters on records and write a run folder."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_parameters, attached_config, is_sharded, npt_layers
from npt.base.attention import attention_name
from npt.base.identity import BaseIdentity, base_identity
from npt.base.precision import matmul_precision
from npt.config import DataConfig, TrainConfig
from npt.console import make_console, silent_console
from npt.data.encoding import no_sample
from npt.data.source import Given
from npt.distill.logit_losses import SAMPLED_BELOW, sampling_words
from npt.distill.step import check_unfrozen, nowhere, student_guard
from npt.distill.strategies import STRATEGIES, Strategy
from npt.distributed.join import join_processes
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, DataError, StoppedError
from npt.guard.guard import PlannedGuard
from npt.guard.schedule import rate_table
from npt.guard.spikes import SpikeGuard
from npt.runs.checkpoint import State
from npt.runs.run_folder import EVENTS, NullRunFolder, RunFolder
from npt.tracer.watchdogs import base_fault, require, tensor_fault
from npt.train.data import RunData
from npt.train.journal import Journal
from npt.train.loop import Loop
from npt.train.setup import check_trainable, make_setup
from npt.train.smoke import smoke_test
from npt.train.start import calibrated, evaluator, run_record
from npt.train.states import STATES, KeptStates

if TYPE_CHECKING:
    from npt.calibration.report import Calibration
    from npt.evaluation.evaluate import Fidelity


@dataclass(frozen=True)
class TrainResult:
    """The outcome of a run.

    Attributes:
        refused: number of refused micro-batches and windows.
        fidelity: final figures; None if a signal ended the run.
        heldout: `fidelity` was measured on held-out text; False if there was too little data.
        diverged: why the student is worse than its floor although all numbers are finite.
        signal: number of the signal that ended the run early, if any.
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
    diverged: tuple[str, ...]
    signal: int | None

    @property
    def exit_status(self) -> int:
        """0, or 128 plus the signal's number."""
        return 0 if self.signal is None else 128 + self.signal


class Trainer:
    """Train the adapters of `model` to reproduce their teacher: the base, or a separate model.

    Settings and data are checked before the run folder is made. With several processes, make a
    Trainer with the same arguments in each. They share every window, and only the main process
    writes.

    Args:
        model: from `npt.load_base`, with adapters attached by `npt.attach`.
        tokenizer: tokenizer of the base.
        data: records ({"text"}, {"prompt", "completion"} or {"input_ids"}) in a list, a `datasets`
            object, a DataFrame or a generator; a function that yields them at every pass; or what
            `--dataset_name` takes. None loads the dataset that `data_config` names.
        config: training settings.
        data_config: how to cut `data` into samples.
        teacher: an unquantised model from `npt.load_teacher`; default: the student's own base.
        eval_data: held-out records in the same forms, or the path of a file of them. Default: the
            held-out files of the built-in text if you train on it, else one sample in twenty of
            `data`, which training leaves out.
        settings: more settings to record in `run.json`.
        console: where to print progress; default: standard output.
        processes: the processes that train together; default: those that the launcher started.
        report: write `report.html`.

    Raises:
        ConfigError: settings do not work together.
        DataError: the data give no sample to train or evaluate on.
        PrecisionError: a module of the base would not compute in the precision asked for.
        ProcessError: another process failed or was lost.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        data: Given | None = None,
        config: TrainConfig | None = None,
        *,
        data_config: DataConfig | None = None,
        teacher: PreTrainedModel | None = None,
        eval_data: Given | None = None,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
        processes: ProcessGroup | None = None,
        report: bool = True,
    ):
        config = config or TrainConfig()
        data_config = data_config or DataConfig()
        if isinstance(data, str | os.PathLike):
            data_config = replace(data_config, dataset_name=os.fspath(data))
            data = None
        processes = processes or join_processes()
        # an error from here on must not leave the other processes waiting
        with processes.member():
            named = data_config if data is None else None
            check_trainable(attached_config(model), named, teacher is not None)
            console = (console or make_console()) if processes.main else silent_console()
            self.setup = make_setup(
                model, tokenizer, teacher, config, data_config, processes, console, settings or {}
            )
            self.data = RunData(self.setup, data, eval_data)
        self.strategy: Strategy = STRATEGIES[config.strategy]
        if teacher is not None:
            self.strategy = partial(self.strategy, teacher=teacher)
        self.report = report
        self._trained = False
        self.evaluate = evaluator(self.setup, self.data)
        self.calibration: Calibration | None = None
        self._state: State | None = None  # to restore when resuming

    @torch.inference_mode(False)  # even if the caller is in inference mode
    def train(self) -> TrainResult:
        """Run the smoke test, evaluate, train, evaluate again and write the run folder.

        Raises:
            NumericalError: the base or an adapter holds NaN or Inf; nothing is written.
            SmokeTestError: the first batch shows that training cannot work; nothing is written.
            TooManyRefusalsError: too many micro-batches were refused; a post-mortem is written.
            ConfigError: the run folder cannot be written, or the processes of the run differ.
            ProcessError: another process failed or was lost.
        """
        if self._trained:
            raise ConfigError("this Trainer has already trained; make a new Trainer")
        self._trained = True
        setup = self.setup
        setup.stop.at_once = True  # there is nothing to save before the loop
        from npt.runs.trackers import start_trackers

        with setup.processes.member(), setup.processes.exchanging(), setup.stop:
            base = self._checked_base()
            path = setup.origin.folder
            resume_at = setup.origin.resume_at
            with start_trackers(
                setup.processes, setup.config, path, resume_at=resume_at
            ) as trackers:
                self.initial = self._prepare()
                record = run_record(setup, self.data, base, self.calibration)
                setup.stop.check()
                setup.stop.at_once = False  # from now on a signal must leave the folder in order
                folder: RunFolder = NullRunFolder(path)
                if setup.processes.main:
                    folder = RunFolder(path, resume_at=resume_at)
                with contextlib.closing(folder):
                    journal = Journal(
                        setup=setup,
                        data=self.data,
                        folder=folder,
                        trackers=trackers,
                        record=record,
                        base=base,
                        measure=self.evaluate,
                        initial=self.initial,
                    )
                    journal.begin()
                    with journal.reported(self.report):
                        result = self._train(journal)
                trackers.close(result.exit_status)
            # A launcher may kill the others once one process ends, so wait until the main process
            # has written everything.
            setup.processes.wait()
            return result

    def _checked_base(self) -> BaseIdentity:
        """Refuse a non-finite base or adapter; read the state to resume, checking its base."""
        setup = self.setup
        # Micro-batches are seeded individually; this makes all other draws agree across processes.
        torch.manual_seed(setup.config.seed)
        parameters = adapter_parameters(setup.model)
        check_unfrozen(parameters)
        require(tensor_fault(parameters))
        require(base_fault(setup.model))
        if setup.teacher is not None:
            require(base_fault(setup.teacher))
        base = base_identity(setup.model)
        checkpoint = setup.origin.checkpoint
        if checkpoint is not None:
            self._state = checkpoint.state(setup.model, base)
        # all must read the checkpoint before its folder changes
        setup.agree(
            {
                "a base of hash": base.strict,
                **self.data.identity,
                "steps": self.data.total_steps,
                "evaluation samples": len(self.data.eval_samples),
            }
        )
        return base

    def _prepare(self) -> Fidelity:
        setup = self.setup
        data = self.data
        resumed = setup.origin.checkpoint
        if resumed is not None:
            # The run passed its smoke test; the next batch may be one to refuse.
            setup.say(data.note())
            return resumed.initial
        if setup.config.smoke_test:
            setup.splitter.report = partial(setup.say_lack, "the smoke test")
            verdict = smoke_test(
                setup.model,
                data.first_batch(),
                self.strategy,
                setup.config,
                setup.splitter,
                setup.processes,
            )
            setup.say(verdict)
        self.calibration = calibrated(setup, data)
        if self.calibration is not None:
            setup.agree({})
        setup.say(data.note())
        return self.evaluate()

    def _restore(self, guard: PlannedGuard) -> None:
        state = self._state
        checkpoint = self.setup.origin.checkpoint
        if state is None or checkpoint is None:
            return
        self._state = None  # free this copy of all tensors
        state.restore(self.setup.model, guard.window)
        # losses of another strategy differ in size
        if guard.window.spikes is not None and "strategy" in self.setup.changed:
            guard.window.spikes = SpikeGuard()
        index = self.setup.processes.index
        samples_at_once = checkpoint.record["samples_at_once"]
        samples = samples_at_once[index] if index < len(samples_at_once) else None
        # on a sharded base all processes must split a micro-batch alike
        if samples is not None and not is_sharded(self.setup.model):
            splitter = self.setup.splitter
            splitter.samples = splitter.shrunk_to = min(splitter.samples, samples)

    def _train(self, journal: Journal) -> TrainResult:
        setup = self.setup
        config = setup.config
        folder = journal.folder
        progress = journal.progress
        rates = rate_table(
            config.learning_rate, config.scheduler_type, config.warmup_steps, self.data.total_steps
        )
        # closing the guard frees its buffers before the evaluation
        guarded = student_guard(setup.model, config, rates, processes=setup.processes, trace=1)
        close = self.initial.student.kl < SAMPLED_BELOW
        with guarded as guard, sampling_words(close):
            self._restore(guard)
            kept = self._kept_states(journal)
            loop = Loop(journal, guard, self.strategy, kept)
            started = time.perf_counter()
            try:
                with contextlib.closing(self.data.windows()) as windows:
                    loop.train(windows)
            except BaseException as error:
                loop.rescue(error)
                raise
            finally:
                if kept is not None:
                    kept.close()
            seconds = time.perf_counter() - started
            number = setup.signal()
            if number is not None:
                journal.report_data()
                folder.event("signal", number=number, step=progress.step)
            elif progress.step == 0:
                self._refuse_empty(journal)
            if loop.unsaved:
                loop.save(last=True)
            if number is None:
                with contextlib.suppress(OSError):
                    (folder.path / STATES).unlink()
        setup.splitter.report = nowhere  # or it would keep the loop and the guard in memory
        fidelity = None
        if number is not None:
            setup.say(
                f"stopped by signal {number} at step {progress.step} after saving a checkpoint;"
                f" continue with --resume {folder.path}"
            )
        else:
            with contextlib.suppress(StoppedError):  # the checkpoint is saved already
                fidelity = self.evaluate().after(self.initial, setup.config.judged_by)
            number = setup.signal()
            # another process may have stopped within its evaluation
            if number is not None and setup.processes.size > 1:
                fidelity = None
            if fidelity is None:
                folder.event("signal", number=number, step=progress.step)
            else:
                journal.finish(fidelity, seconds)
                number = setup.signal()
        return TrainResult(
            folder=folder.path,
            steps=progress.step,
            tokens=progress.tokens,
            refused=progress.refused,
            micro_batches=progress.micro_batches,
            refused_by_kind=dict(progress.refused_by_kind),
            seconds=seconds,
            fidelity=fidelity,
            heldout=self.data.heldout,
            diverged=journal.diverged,
            signal=number,
        )

    def _kept_states(self, journal: Journal) -> KeptStates | None:
        """Return the states to keep of text that the run reads again; None if it reads none again,
        or on a GPU, with several processes or a separate teacher. `--recheck` computes all again.
        """
        setup = self.setup
        config = setup.config
        alone = setup.processes.size == 1 and setup.teacher is None and setup.device.type == "cpu"
        if config.recheck or not (alone and self.data.reads_again):
            return None
        first, _ = npt_layers(setup.model)[0]
        parts = (setup.settings.get("compute_dtype"), attention_name(setup.model), first)
        about = f"{journal.base.strict} {matmul_precision()} {parts}"
        kept = KeptStates(journal.folder.path / STATES, about, journal.warn)
        setup.say(
            f"{kept.path} keeps states of text that is read again, at most"
            f" {kept.room / 2**30:.1f} GiB more"
        )
        return kept

    def _refuse_empty(self, journal: Journal) -> None:
        folder = journal.folder
        folder.event("stopped", step=0, reason="no step was applied")
        error = no_sample(self.data.loader.samples.counts)
        if journal.progress.micro_batches:
            error = DataError(
                "the data ended before any step was applied"
                f" ({journal.progress.refused} refusals, see {folder.path / EVENTS})"
            )
        raise self.setup.processes.everywhere(error)
