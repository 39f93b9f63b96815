"""The report of a calibration: a bar while it runs, then figures per layer and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from npt.console import say


class Display:
    """A bar on a terminal, a line per layer elsewhere."""

    def __init__(self, console: Console, steps: int):
        self.console = console
        self._bar = Progress(
            TextColumn("calibrating"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[stage]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("calibrate", total=steps, stage="")
        self._bar.start()

    def stage(self, name: str, done: int) -> None:
        """Name the stage that begins. done: steps that count as done; rounds may end early."""
        self._bar.update(self._task, stage=name, completed=done)

    def tick(self, steps: int = 1) -> None:
        self._bar.advance(self._task, steps)

    def say(self, line: str) -> None:
        say(self.console, line)

    def close(self) -> None:
        if not self._bar.disable:  # stopping prints a line elsewhere
            self._bar.stop()


@dataclass(frozen=True)
class LayerCalibration:
    """One layer on held-out calibration tokens. `before` is without any modulation (attention
    dropped), `linear` the start in closed form, `after` the end.

    nmse_*: ||o - t||^2 / ||t||^2. update_*: the same error over the layer's update, ||t - h||^2;
    `update_after` is how hard the layer is. kl_*: what the error costs in KL(teacher, student),
    nats per token, to second order and by itself. ridge: as chosen. rounds: passes
    that were kept.
    """

    rank: int
    ridge: float
    rounds: int
    nmse_before: float
    nmse_linear: float
    nmse_after: float
    update_before: float
    update_linear: float
    update_after: float
    kl_before: float
    kl_linear: float
    kl_after: float


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`: `layers` by index; `heldout_tokens` of the `tokens` were not fitted
    but chose ridge and steps."""

    layers: Mapping[int, LayerCalibration]
    tokens: int
    heldout_tokens: int
    inputs: str
    seconds: float

    @property
    def nmse(self) -> dict[int, float]:
        """NMSE of each layer after calibration, fed what it was calibrated on."""
        return {index: layer.nmse_after for index, layer in self.layers.items()}

    def as_dict(self) -> dict[str, Any]:
        """For `run.json` and `events.jsonl`."""
        return {
            "tokens": self.tokens,
            "heldout_tokens": self.heldout_tokens,
            "inputs": self.inputs,
            "seconds": round(self.seconds, 3),
            "layers": {str(index): asdict(layer) for index, layer in self.layers.items()},
        }


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Print a table with a row per layer."""
    title = (
        f"Calibration on {calibration.tokens - calibration.heldout_tokens:,} tokens, figures on"
        f" {calibration.heldout_tokens:,} others; {calibration.inputs} inputs"
    )
    table = Table(title=title, title_justify="left")
    errors = ("NMSE before", "linear", "after", "of the update", "KL, nats")
    for heading in ("layer", "rank", *errors, "ridge", "rounds"):
        table.add_column(heading, justify="right")
    for index, layer in calibration.layers.items():
        table.add_row(
            str(index),
            str(layer.rank),
            f"{layer.nmse_before:.5f}",
            f"{layer.nmse_linear:.5f}",
            f"{layer.nmse_after:.5f}",
            f"{layer.update_after:.4f}",
            f"{layer.kl_after:.5f}",
            f"{layer.ridge:g}",
            str(layer.rounds),
        )
    console.print(table)
