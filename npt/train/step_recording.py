"""The records of `--trace_steps` and `--trace_every`. They steer nothing.

A failure of the recorder is reported and ends nothing; the micro-batch is computed once in any
case.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from npt.data.batch import Batch
from npt.diagnostics.recorder.recorder import Recorder
from npt.diagnostics.recorder.recording import Recording, describe
from npt.train.run_context import RunContext


class StepRecording:
    """Records the first micro-batch that the main process computes of each chosen step."""

    def __init__(self, context: RunContext):
        self._model, self._folder, self._display = context.model, context.folder, context.display
        config = context.config
        self._recording = Recording(
            self._folder.path / "trace", config.trace_steps, config.trace_every
        )
        self._step: int | None = None  # the open window's, until its first micro-batch is recorded
        self._seconds = 0.0

    def announce(self) -> None:
        """Say what will be recorded."""
        self._display.say(str(self._recording))

    def open(self, step: int) -> None:
        """Begin a window that will be `step` if it is applied."""
        self._step = step if self._recording.wants(step) else None

    @contextmanager
    def observe(self, batch: Batch, index: int) -> Iterator[None]:
        """Record forward and backward of this micro-batch, if it is the one to record."""
        step, self._step = self._step, None
        recorder = None if step is None else self._recorder(batch, step)
        if recorder is None or step is None:
            yield
            return
        try:
            yield
        finally:
            recorder.__exit__()
        self._keep(recorder, step, index)

    def take_seconds(self) -> float:
        """Return the seconds spent on records since this was asked for the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def draw(self) -> None:
        """Draw pictures of the records, however the run ended."""
        files: list[str] = []
        try:
            pictures = self._recording.draw()
        except Exception as error:  # an observer must not end the run that it looks at
            message = (
                f"the records in {self._recording.folder} could not be drawn:"
                f" {type(error).__name__}: {error}"
            )
        else:
            if not pictures:
                return
            message = f"pictures of the recorded steps: {', '.join(str(path) for path in pictures)}"
            files = [str(path.relative_to(self._folder.path)) for path in pictures]
        self._report("pictures", message, files=files)

    def _recorder(self, batch: Batch, step: int) -> Recorder | None:
        """Return a recorder that is on, or None."""
        self._recording.begin(step)
        try:
            recorder = Recorder(
                self._model, valid=batch.attention_mask.bool() if batch.padded else None
            )
            recorder.__enter__()
        except Exception as error:
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
            self._report(
                "trace",
                describe(record, path),
                step=step,
                micro_batch=index,
                rank=0,
                file=str(path.relative_to(self._folder.path)),
                rows=len(record.rows),
                skipped=recorder.skipped,
            )
        except Exception as error:
            self._failed(step, error)
        self._seconds += time.perf_counter() - working_since

    def _failed(self, step: int, error: Exception) -> None:
        message = f"step {step} could not be recorded: {type(error).__name__}: {error}"
        self._report("trace", message, step=step, rank=0, file=None)

    def _report(self, kind: str, message: str, **values: Any) -> None:
        self._folder.event(kind, **values, message=message)
        self._display.say(message)
