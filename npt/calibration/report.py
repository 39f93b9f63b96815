"""The report of a calibration: a bar while it runs, then figures per layer and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from npt.console import say


class CalibrationBar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, console: Console, tokens: int):
        self.console = console
        self._bar = Progress(
            TextColumn("calibrating"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("calibrate", total=tokens)
        self._bar.start()

    def tick(self, tokens: int) -> None:
        self._bar.advance(self._task, tokens)

    def say(self, line: str) -> None:
        say(self.console, line)

    def close(self) -> None:
        if not self._bar.disable:  # stopping prints a line elsewhere
            self._bar.stop()


@dataclass(frozen=True)
class LayerCalibration:
    """One layer, on the tokens of the calibration.

    Attributes:
        rank: R.
        nmse: ||a - a'||^2 / ||a||^2, the share of the attention output that is cut off, of tokens
            in units of their size.
        kl: what that costs in KL(teacher, student), nats per token, to second order and by itself.
    """

    rank: int
    nmse: float
    kl: float


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`: `layers` by index."""

    layers: Mapping[int, LayerCalibration]
    tokens: int
    seconds: float

    @property
    def nmse(self) -> dict[int, float]:
        """The share of each layer's attention output that is cut off."""
        return {index: layer.nmse for index, layer in self.layers.items()}

    def as_dict(self) -> dict[str, Any]:
        """For `run.json` and `events.jsonl`."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "layers": {str(index): asdict(layer) for index, layer in self.layers.items()},
        }


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Print a table with a row per layer."""
    title = f"Attention cut to R directions; {calibration.tokens:,} tokens"
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "rank R", "attention cut off", "its cost, nats"):
        table.add_column(heading, justify="right")
    for index, layer in calibration.layers.items():
        table.add_row(str(index), str(layer.rank), f"{layer.nmse:.2%}", f"{layer.kl:.5f}")
    console.print(table)
