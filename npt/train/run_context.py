"""What the parts of a run share: its set-up, and where to report."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npt.data.batch import Batch
from npt.data.loader import Position
from npt.guard.update import EXACT
from npt.runs.run_folder import RunFolder
from npt.train.run_setup import RunSetup

if TYPE_CHECKING:
    from npt.evaluation.evaluate import Fidelity
    from npt.runs.trackers import Trackers


@dataclass(frozen=True)
class RunContext:
    """A run's set-up, its folder and its trackers.

    Attributes:
        total_steps: of the run, None if unknown.
        record: the content of `run.json`.
    """

    setup: RunSetup
    folder: RunFolder
    trackers: Trackers
    total_steps: int | None
    record: Mapping[str, Any] = field(default_factory=dict)

    def say(self, message: str) -> None:
        self.setup.say(message)

    def warn(self, message: str) -> None:
        """Print a warning and keep it as an event."""
        self.say(f"warning: {message}")
        self.folder.event("warning", message=message)


@dataclass(frozen=True)
class RunActions:
    """The acts of a loop between steps.

    Attributes:
        evaluate: measure the model as it is at a step, and report it.
        save: write a checkpoint; False if that failed and training continues.
        save_best: keep the adapters as the best so far.
    """

    evaluate: Callable[[int], Fidelity]
    save: Callable[[], bool]
    save_best: Callable[[Fidelity], None]


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
