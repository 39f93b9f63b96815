"""The report of a calibration: figures per layer and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


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
