"""What the parts of a run share: its model and settings, and where to report."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from transformers import PreTrainedModel

from npt.config import TrainConfig
from npt.console import say
from npt.data.batch import Batch
from npt.data.loader import Position
from npt.distributed.processes import ProcessGroup
from npt.guard.update import EXACT
from npt.runs.run_folder import RunFolder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers

if TYPE_CHECKING:
    from npt.evaluation.evaluate import Fidelity
    from npt.evaluation.modulation import Modulation


@dataclass(frozen=True)
class RunContext:
    """Model, settings and where to report.

    Attributes:
        model: with adapters attached.
        stop: set by a signal.
        total_steps: of the run, None if unknown.
        first_step: the steps that the resumed run has made.
        record: the content of `run.json`.
        processes: that train together, each with a context like this one.
    """

    model: PreTrainedModel
    config: TrainConfig
    folder: RunFolder
    trackers: Trackers
    console: Console
    stop: StopOnSignal
    total_steps: int | None
    first_step: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    processes: ProcessGroup = field(default_factory=ProcessGroup)

    def say(self, message: str) -> None:
        say(self.console, message)

    def warn(self, message: str) -> None:
        """Print a warning and keep it as an event."""
        self.say(f"warning: {message}")
        self.folder.event("warning", message=message)


@dataclass(frozen=True)
class RunActions:
    """What a loop calls between steps.

    Attributes:
        evaluate: measure the model as it is at a step, and report it.
        save: write a checkpoint; False if that failed and training continues.
        save_best: keep the adapters as the best so far.
        modulation: measure the multipliers on a sample, if there are any.
    """

    evaluate: Callable[[int], Fidelity]
    save: Callable[[], bool]
    save_best: Callable[[Fidelity], None]
    modulation: Callable[[], Modulation] | None = None


@dataclass(frozen=True)
class Window:
    """K micro-batches of every process, fewer at the end of the data.

    Every process has all of them, and computes number i, i + P, ... as process i of P: where a
    sample is, and so the position after the window, depends on the tokens of all before it.

    Attributes:
        epoch: in which the first of them lies.
        position: in the data after it.
    """

    epoch: int
    batches: list[Batch]
    position: Position = field(default_factory=Position)

    @property
    def fingerprint(self) -> int:
        """A checksum of samples and tokens, from 1 on and below `EXACT`."""
        checksum = 0
        for batch in self.batches:
            checksum = zlib.crc32("\n".join(batch.sample_ids).encode(), checksum)
            checksum = zlib.crc32(batch.input_ids.numpy().tobytes(), checksum)
        return checksum % (EXACT - 1) + 1
