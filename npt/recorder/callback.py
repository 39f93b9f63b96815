"""`RecorderCallback`: the recorder inside transformers' Trainer, for any model that it trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from npt.recorder.recorder import Recorder
from npt.recorder.recording import Recording, describe

_log = logging.getLogger(__name__)


class RecorderCallback(TrainerCallback):
    """Records chosen steps of a `transformers.Trainer`: the first micro-batch of each, on the first
    process.

    A file `step-XXXXXXXX.json` per step goes into the folder, and pictures of them all when
    training ends. Between chosen steps no hook is on the model. An error here is logged as a
    warning and never ends the training.

    Args:
        folder: of the files.
        steps: chosen optimizer steps, counted from 1: `1,2,3`, `1-5` or a mix.
        every: also every so many steps.
        say: gets each line about a recorded step or its files.

    Raises:
        ConfigError: steps that cannot be read.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        steps: str | None = None,
        every: int | None = None,
        say: Callable[[str], None] = print,
    ):
        self.recording = Recording(folder, steps, every)
        self._say = say
        self._recorder: Recorder | None = None
        self._step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which steps are recorded."""
        self._drop()  # of a training that ended in the middle of a step
        if state.is_world_process_zero:
            self._say(str(self.recording))

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Put hooks on the model, if this step is recorded."""
        step = state.global_step + 1
        if model is None or not state.is_world_process_zero or not self.recording.wants(step):
            return
        self._drop()
        self._step = step
        self.recording.begin(step)
        try:
            self._recorder = Recorder(model).__enter__()
        except Exception as error:
            self._warn("record", error)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the record of the first micro-batch, which is over."""
        recorder = self._drop()
        if recorder is None:
            return
        try:
            record = recorder.record(self._step)
            self._say(describe(record, self.recording.keep(record)))
        except Exception as error:
            self._warn("record", error)

    on_step_end = on_substep_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the pictures of all recorded steps."""
        self._drop()
        try:
            pictures = self.recording.draw()
        except Exception as error:
            self._warn("draw the records", error)
        else:
            if pictures:
                self._say(f"pictures of the recorded steps: {', '.join(map(str, pictures))}")

    def _drop(self) -> Recorder | None:
        """Take the hooks off, if any are on."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__()
        return recorder

    def _warn(self, deed: str, error: Exception) -> None:
        name = type(error).__name__
        _log.warning("could not %s at step %d: %s: %s", deed, self._step, name, error)
