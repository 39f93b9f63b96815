"""Recording chosen steps of a run: the recorder around a micro-batch, and what is said of it. It
steers nothing.

Whatever goes wrong with the recorder is said and ends nothing; the micro-batch is computed once in
any case.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.diagnostics.recorder.recorder import Recorder
from npt.diagnostics.recorder.recording import Recording, describe
from npt.runs.run_folder import RunFolder
from npt.train.progress import ProgressDisplay


class StepRecording:
    """The records of `--trace_steps` and `--trace_every`: of each chosen step the first micro-batch
    that is computed, on process 0.

    Args:
        model: what is recorded.
        folder, display: where to report.
        config: which steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: RunFolder,
        display: ProgressDisplay,
        config: TrainConfig,
    ):
        self._model = model
        self._folder, self._display = folder, display
        self._recording = Recording(folder.path / "trace", config.trace_steps, config.trace_every)
        self._wanted = config.trace_steps is not None or config.trace_every is not None
        self._step: int | None = None  # the open window's, until its first micro-batch is recorded
        self._seconds = 0.0

    def announce(self) -> None:
        """Say what will be recorded, if anything."""
        if self._wanted:
            self._display.say(str(self._recording))

    def open(self, step: int) -> None:
        """A window begins that will be `step` if it is applied."""
        self._step = (
            step if self._wanted and self._recording.wants(step) and _process() == 0 else None
        )

    @contextmanager
    def observe(self, batch: Batch, index: int) -> Iterator[None]:
        """Record forward and backward of this micro-batch, if it is the one to record."""
        recorder = self._recorder(batch)
        if recorder is None:
            yield
            return
        step, self._step = self._step or 0, None
        try:
            yield
        finally:
            recorder.__exit__()
        self._keep(recorder, step, index)

    def take_seconds(self) -> float:
        """Seconds spent on reading and writing records since this was asked for the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def draw(self) -> None:
        """Pictures of what was recorded, however the run ended."""
        try:
            pictures = self._recording.draw()
        except Exception as error:  # an observer must not end the run that it looks at
            message = (
                f"the records in {self._recording.folder} could not be drawn:"
                f" {type(error).__name__}: {error}"
            )
            self._folder.event("pictures", files=[], message=message)
        else:
            if not pictures:
                return
            message = f"pictures of the recorded steps: {', '.join(str(path) for path in pictures)}"
            self._folder.event(
                "pictures",
                files=[str(path.relative_to(self._folder.path)) for path in pictures],
                message=message,
            )
        self._display.say(message)

    def _recorder(self, batch: Batch) -> Recorder | None:
        """Return a recorder that is on, or None."""
        step = self._step
        if step is None:
            return None
        self._recording.begin(step)
        try:
            valid = batch.attention_mask.bool() if batch.padded else None
            recorder = Recorder(self._model, valid=valid)
            recorder.__enter__()
        except Exception as error:
            self._step = None
            self._failed(step, error)
            return None
        return recorder

    def _keep(self, recorder: Recorder, step: int, index: int) -> None:
        working_since = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the event tells what was skipped
                record = recorder.record(step, index)
            path = self._recording.keep(record)
            line, file = describe(record, path), str(path.relative_to(self._folder.path))
            self._folder.event(
                "trace",
                step=step,
                micro_batch=index,
                rank=0,
                file=file,
                rows=len(record.rows),
                skipped=recorder.skipped,
                message=line,
            )
            self._display.say(line)
        except Exception as error:
            self._failed(step, error)
        self._seconds += time.perf_counter() - working_since

    def _failed(self, step: int, error: Exception) -> None:
        message = f"step {step} could not be recorded: {type(error).__name__}: {error}"
        self._folder.event("trace", step=step, rank=0, file=None, message=message)
        self._display.say(message)


def _process() -> int:
    return (
        torch.distributed.get_rank()
        if torch.distributed.is_available() and torch.distributed.is_initialized()
        else 0
    )
