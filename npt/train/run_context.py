"""The parts that a whole run shares, and the windows that it trains on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from npt.config import TrainConfig
from npt.data.batch import Batch
from npt.data.loader import Position
from npt.distributed.processes import ProcessGroup
from npt.evaluation.evaluate import Fidelity
from npt.evaluation.modulation import Modulation
from npt.guard.update import EXACT
from npt.runs.run_folder import RunFolder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers
from npt.train.progress import ProgressDisplay


@dataclass
class RunContext:
    """Model, settings and places to report to.

    model: with adapters attached. stop: set by a signal. record: the content of `run.json`.
    processes: the processes that train together, each with a context like this one.
    """

    model: PreTrainedModel
    config: TrainConfig
    folder: RunFolder
    trackers: Trackers
    display: ProgressDisplay
    stop: StopOnSignal
    record: Mapping[str, Any] = field(default_factory=dict)
    processes: ProcessGroup = field(default_factory=ProcessGroup)

    def say(self, message: str) -> None:
        """Print a line."""
        self.display.say(message)


@dataclass(frozen=True)
class RunActions:
    """Acts of a loop between steps.

    evaluate: measure the model as it is. save: write a checkpoint; False if that failed and
    training continues. save_best: keep the adapters as the best so far. modulation:
    measure the multipliers on a sample, if there are any.
    """

    evaluate: Callable[[], Fidelity]
    save: Callable[[], bool]
    save_best: Callable[[Fidelity], None]
    modulation: Callable[[], Modulation] | None = None


@dataclass(frozen=True)
class Window:
    """K micro-batches of every process, fewer at the end of the data.

    epoch: in which the first of them lies. position: in the data after it. Every process has all
    of them: process i of P computes number i, i + P, ...
    """

    epoch: int
    batches: list[Batch]
    position: Position = field(default_factory=Position)

    @property
    def fingerprint(self) -> int:
        """Of samples and tokens, from 1 on and below `EXACT`."""
        checksum = 0
        for batch in self.batches:
            checksum = zlib.crc32(
                batch.input_ids.numpy().tobytes(),
                zlib.crc32("\n".join(batch.sample_ids).encode(), checksum),
            )
        return checksum % (EXACT - 1) + 1
