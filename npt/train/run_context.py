"""What a whole run shares, and the windows that it trains on."""

from __future__ import annotations

import time
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
from npt.evaluation.evaluate import Fidelity
from npt.guard.update import EXACT
from npt.runs.run_folder import RunFolder
from npt.runs.signals import StopOnSignal
from npt.runs.trackers import Trackers

if TYPE_CHECKING:
    from npt.evaluation.modulation import Modulation


class ProgressDisplay:
    """Prints a line for each logged step.

    total_steps: None if unknown. first: steps that the resumed run has made before.
    """

    def __init__(self, total_steps: int | None, console: Console, first: int = 0):
        self.console = console
        self._total, self._first, self._started = total_steps, first, time.perf_counter()

    def step(self, step: int, metrics: dict[str, Any] | None, refused: int) -> None:
        """Show an applied step; `metrics` on logged steps only."""
        if metrics is None:
            return
        of = left = ""
        if self._total is not None:
            passed = time.perf_counter() - self._started
            seconds = int(passed / max(1, step - self._first) * (self._total - step))
            of, left = f"/{self._total}", f"  {seconds // 60}:{seconds % 60:02d} left"
        figures = f"loss {metrics['loss']:.5f}  grad {metrics['grad_norm']:.3g}"
        rates = f"lr {metrics['lr']:.2e}  {metrics['tokens_per_second']:,.0f} tokens/s"
        self.say(f"step {step}{of}  {figures}  {rates}  refused {refused}{left}")

    def say(self, line: str) -> None:
        say(self.console, line)


@dataclass
class RunContext:
    """Model, settings and where to report.

    Attributes:
        model: with adapters attached.
        stop: set by a signal.
        record: the content of `run.json`.
        processes: that train together, each with a context like this one.
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
        self.display.say(message)


@dataclass(frozen=True)
class RunActions:
    """The acts of a loop between steps.

    Attributes:
        evaluate: measure the model as it is.
        save: write a checkpoint; False if that failed and training continues.
        save_best: keep the adapters as the best so far.
        modulation: measure the multipliers on a sample, if there are any.
    """

    evaluate: Callable[[], Fidelity]
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
