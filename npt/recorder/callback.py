"""`RecorderCallback`: the recorder for transformers' Trainer and any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from npt.recorder.recording import Recording


class RecorderCallback(TrainerCallback):
    """Records the first micro-batch of chosen steps of a `transformers.Trainer`, on process 0.

    Writes `step-XXXXXXXX.json` for each step, and draws pictures when training ends. Between chosen
    steps the model has no hooks. A failure to record prints a line and does not end the training.

    Args:
        folder: where the files go.
        steps: optimizer steps, counted from 1: `1,2,3`, `1-5`, `/10` for every tenth, or a mix.
        say: called with each line about a recorded step or its files.

    Raises:
        ConfigError: `steps` has another form.
    """

    def __init__(self, folder: str | Path, *, steps: str, say: Callable[[str], None] = print):
        self.recording = Recording(folder, steps, say)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which steps are recorded."""
        self.recording.stop()  # a training may have ended in the middle of a step
        self.recording.refused = 0
        if state.is_world_process_zero:
            self.recording.say(str(self.recording))

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """Put hooks on the model if this step is chosen."""
        step = state.global_step + 1
        if model is not None and state.is_world_process_zero and self.recording.wants(step):
            self.recording.start(model, step)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the record of the first micro-batch."""
        self.recording.finish()

    on_step_end = on_substep_end

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Note how many micro-batches a guard has refused, which its logs tell."""
        self.recording.refused = logs.get("refused", self.recording.refused)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the pictures of all recorded steps."""
        self.recording.stop()
        self.recording.draw()
