"""The contents of a run's folder: checkpoints, adapters, figures, and its report."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from safetensors import SafetensorError

from npt.adapters.converted import is_sharded, npt_layers
from npt.adapters.files.run_layout import CHECKPOINTS
from npt.base.attention import attention_name
from npt.base.identity import BaseIdentity
from npt.calibration.report import Calibration
from npt.config import parse_steps
from npt.data.batch import batches
from npt.errors import AdapterFileError, CheckpointError, ConfigError, StoppedError
from npt.evaluation.evaluate import Fidelity
from npt.evaluation.metrics import Figures
from npt.evaluation.modulation import Modulation, measure_modulation
from npt.evaluation.modulation_map import modulation_map
from npt.runs.resume import plain_settings
from npt.runs.run_folder import EVENTS, METRICS, MODULATION, REPORT, RUN, RunFolder
from npt.runs.trackers import Trackers, known_run, undisturbed
from npt.stored import read_json
from npt.train.checkpoint_writer import CheckpointWriter, set_aside_unused
from npt.train.loop import Loop
from npt.train.memory_fit import MemoryFit
from npt.train.run_data import RunData
from npt.train.run_report import write_report
from npt.train.run_setup import RunSetup
from npt.train.tracker_samples import sample_texts

MODULATION_SAMPLES = 8
"""Evaluation samples on which the modulation is measured: thousands of multipliers a token."""

PASSAGE_TOKENS, PASSAGE_CELLS = 96, 1000
"""Of the text that the report shows token by token: its tokens, and tokens by layers, at most."""


class RunWriter:
    """Writes a run's folder, and tells its trackers."""

    def __init__(
        self,
        setup: RunSetup,
        data: RunData,
        base: BaseIdentity,
        initial: Fidelity,
        folder: RunFolder,
        trackers: Trackers,
    ):
        self._setup, self._data, self._base = setup, data, base
        self._initial, self._folder, self._trackers = initial, folder, trackers
        self._other_base: str | None = None
        self.checkpoints = CheckpointWriter(setup, data, base, initial, folder)

    def warn(self, message: str) -> None:
        """Print a warning and keep it as an event."""
        self._setup.say(f"warning: {message}")
        self._folder.event("warning", message=message)

    def begin(self, record: dict[str, Any], other_base: str | None) -> None:
        """Write `run.json`, before anything else is done.

        `other_base` is the base's difference from the resumed run's, if any.
        """
        setup, folder = self._setup, self._folder
        self._other_base = other_base
        if setup.resumed is not None:
            set_aside_unused(setup.resumed, folder, self.warn)
        earlier: dict[str, Any] = {}
        with contextlib.suppress(CheckpointError):
            earlier = read_json(folder.path / RUN, CheckpointError)
        known = known_run(folder.path) if setup.goes_on else None
        record["wandb_run"] = self._trackers.run_id or known
        if setup.checkpoint is not None and setup.goes_on:
            record["calibration"] = earlier.get("calibration")  # of the start that this run had
            record["other_base"] = other_base or earlier.get("other_base")
        try:
            folder.write(RUN, record)
        except OSError as error:
            folder.discard()
            raise ConfigError(
                f"--output_dir {folder.path} cannot be written: {error.strerror}; choose another"
                " folder"
            ) from error
        try:
            setup.stop.check()
        except StoppedError:
            folder.discard()
            raise
        self._trackers.warn = self.warn
        settings = plain_settings(setup.all_settings())
        self._trackers.describe({**settings, **setup.description(record)})
        initial, at = self._initial, 0 if setup.resumed is None else setup.resumed.step
        measured = {"floor": initial.floor, "teacher": initial.teacher, "initial": initial.aim}
        self._trackers.log(_by_name(measured), at)

    def report_start(
        self, total: int | None, calibration: Calibration | None, memory: MemoryFit
    ) -> None:
        """Write the first events, and warn of settings that will have no effect."""
        setup, config, folder = self._setup, self._setup.config, self._folder
        folder.event(
            "start", device=str(setup.device), total_steps=total, processes=setup.processes.size
        )
        memory.folder = folder
        if memory.plan is not None:
            folder.event("memory", max_memory=config.max_memory, **memory.plan.as_dict())
        memory.report()
        if calibration is not None:
            begun = self._data.start.begun
            folder.event("calibration", **calibration.as_dict(), passed_over=begun)
        self._report_resumed()
        if not setup.deterministic:
            self.warn(
                f"the backward of {attention_name(setup.model)} attention, as this base was loaded,"
                " may sum in another order each time: a run that is resumed will not equal this"
                " one bit for bit; npt.load_base in fp32 with --attn_implementation sdpa or eager"
                " does, and so does --strategy local"
            )
        if setup.schedule(total) != config.scheduler_type:
            self.warn(
                "the length of the stream is unknown, so the learning rate stays constant after"
                f" warm-up; --max_steps gives it its {config.scheduler_type} end"
            )
        if total is not None and config.warmup_steps > total:
            self.warn(
                f"--warmup_steps is {config.warmup_steps}, but the run has {total} steps: the"
                " learning rate will not reach --learning_rate"
            )
        if total is not None and config.trace_steps is not None:
            last = max(steps[-1] for steps in parse_steps(config.trace_steps))
            if last > total:
                self.warn(f"--trace_steps names step {last}, but the run has {total} steps")
        setup.say(f"run folder {folder.path}")

    def _report_resumed(self) -> None:
        setup, resumed, folder = self._setup, self._setup.resumed, self._folder
        if resumed is None:
            return
        checkpoint, path = resumed.checkpoint, None
        if checkpoint is None:
            setup.say(f"no checkpoint below {resumed.folder}; the run starts at step 1")
        else:
            path = str(checkpoint.folder)
            setup.say(f"continuing from {path} at step {checkpoint.step}")
            if self._other_base is not None:
                self.warn(f"--any_base: {path} was trained on another base: {self._other_base}")
        changed = {name: list(values) for name, values in setup.changed.items()}
        folder.event("resume", step=resumed.step, checkpoint=path, changed=changed)
        for name, (old, new) in setup.changed.items():
            setup.say(f"changed since: {name} was {old}, is {new}")

    def finish(self, loop: Loop, fidelity: Fidelity, seconds: float) -> None:
        """Write the figures and the final adapter of a run that came to its end."""
        folder, model = self._folder, self._setup.model
        heldout = self._data.heldout
        try:
            folder.write("fidelity.json", {**fidelity.as_dict(), "heldout": heldout})
        except OSError as error:
            self.warn(
                f"fidelity.json could not be written below {folder.path}: {error}; npt evaluate"
                " measures the adapter again"
            )
        try:
            folder.save_final(model, self._base, fidelity.as_dict())
        except (OSError, SafetensorError, AdapterFileError) as error:
            self.warn(
                f"the final adapter could not be written below {folder.path}: {error}; its numbers"
                f" are below {folder.path / CHECKPOINTS}"
            )
        if self._setup.config.eval_steps:
            loop.keep_if_best(fidelity)
        measured = {"eval": fidelity.student, "final": fidelity.aim}
        self._trackers.log(_by_name(measured), loop.steps)
        self._data.report(self._folder, self.warn, loop.position)
        asked = self._setup.config.max_steps
        if asked is not None and loop.steps < asked:
            self.warn(
                f"the data ended after {loop.steps} of --max_steps {asked} steps and cannot be read"
                " again; pass a list, which can"
            )
        loop.divergence.at_end(loop.steps, fidelity, self.measure_modulation(loop.steps))
        folder.event(
            "done",
            steps=loop.steps,
            tokens=loop.tokens,
            refused=loop.refusals.total,
            refused_by_kind=dict(loop.refusals.by_kind),
            diverged=loop.divergence.causes,
            seconds=round(seconds, 3),
        )

    def report(self) -> None:
        """Write `report.html`, however the run ended; a failure does not change that end."""
        if self._setup.processes.main and self._setup.options.report:
            self._observe(REPORT, lambda: write_report(self._folder.path))

    def measure_modulation(self, step: int) -> Modulation | None:
        """Write `modulation.json` for the report, from a few evaluation samples; return it if it
        was measured.
        """
        if not (self._setup.processes.main and self._setup.options.report):
            return None
        figures: dict[str, Any] = {"step": step, "heldout": self._data.heldout}
        found: Modulation | None = None

        def measure() -> None:
            nonlocal found
            with contextlib.suppress(StoppedError):  # the report can be made without it
                found = self._modulation(MODULATION_SAMPLES)
                figures.update(found.as_dict())
                self._folder.write(MODULATION, figures)

        def measure_passage() -> None:
            figures["passage"] = self._passage()
            self._folder.write(MODULATION, figures)

        self._observe(MODULATION, measure)
        if "layers" in figures and not is_sharded(self._setup.model):
            self._observe(f"the passage of {MODULATION}", measure_passage)
        return found

    def _modulation(self, samples: int) -> Modulation:
        """Return the modulation of the first so many evaluation samples."""
        setup = self._setup
        few = batches(self._data.eval_samples[:samples], setup.splitter.samples)
        return measure_modulation(setup.model, few, between=setup.stop.check)

    def _passage(self) -> dict[str, Any]:
        """Return the modulation along the beginning of the first evaluation sample."""
        model, sample = self._setup.model, self._data.eval_samples[0]
        ids = sample.input_ids[: sample.lengths[0] if sample.lengths else None]
        most = max(8, min(PASSAGE_TOKENS, PASSAGE_CELLS // len(npt_layers(model))))
        tokenizer = self._setup.tokenizer
        return modulation_map(model, list(ids[:most])).as_dict(tokenizer)

    def looks(self) -> Callable[[], Modulation] | None:
        """Return a function that measures the multipliers on a sample, in the main process, if
        there are any.
        """
        if not (self._setup.processes.main and self._setup.adapter_config.multiplicative):
            return None
        return partial(self._modulation, 1)

    def shows(self) -> Callable[[int], None]:
        """Return a function that logs texts and multipliers of the student at a step."""

        def show(step: int) -> None:
            if not self._trackers.active:
                return
            try:
                # the loop looks at the signal itself
                with undisturbed(), contextlib.suppress(StoppedError):
                    layers = self._modulation(MODULATION_SAMPLES).layers
                    self._trackers.log(
                        {
                            f"modulation/layers.{index}.{target}.saturated": found.saturated
                            for index, layer in layers.items()
                            for target, found in layer.targets.items()
                        },
                        step,
                    )
                    self._trackers.texts(sample_texts(self._setup, self._data.eval_samples), step)
            except Exception as error:  # an observer must not end the run that it looks at
                message = f"{type(error).__name__}: {error}"
                said = f"no texts and multipliers for the trackers at step {step}: {message}"
                self.warn(said[:500])

        return show

    def end_trackers(self, status: int, record: Mapping[str, Any]) -> None:
        """Close the trackers. They may wait for a network; a signal does not wait for them."""
        setup = self._setup
        if not self._trackers.active:
            return
        setup.stop.at_once = True
        try:
            settings = plain_settings(setup.all_settings())
            self._trackers.files({"settings": settings, **setup.description(record)})
            self._trackers.close(status)
        except StoppedError as signal:
            self.warn(
                f"signal {signal.exit_status - 128} ended the wait for trackers, which may lack the"
                " end of this run"
            )
        finally:
            setup.stop.at_once = False

    def report_lost_lines(self) -> None:
        """Warn of lines of logs that could not be written."""
        if self._folder.lines_lost:
            self.warn(
                f"{self._folder.lines_lost} lines of {METRICS} and {EVENTS} could not be written"
                f" below {self._folder.path}"
            )

    def _observe(self, name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # an observer must not end the run that it looks at
            said = f"{name} could not be written below {self._folder.path}: "
            self.warn(f"{said}{type(error).__name__}: {error}"[:500])


def _by_name(measured: Mapping[str, Figures]) -> dict[str, float]:
    return {
        f"{name}/{key}": value
        for name, figures in measured.items()
        for key, value in figures.as_dict().items()
    }
