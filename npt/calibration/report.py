"""The result of a calibration: figures per layer, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class LayerCalibration:
    """Figures of one layer on the calibration tokens.

    Attributes:
        rank: R.
        nmse: ||a - a'||^2 / ||a||^2 of rows a / r: the share of the attention output that is lost.
        kl: cost of cutting only this layer in KL(teacher, student), nats per token, second order.
        known: share of the cost of losing the attention output that the token part saves.
    """

    rank: int
    nmse: float
    kl: float
    known: float


@dataclass(frozen=True)
class Calibration:
    """Result of `calibrate`.

    Attributes:
        layers: figures by layer index.
        tokens: number of tokens used.
        seconds: duration.
    """

    layers: Mapping[int, LayerCalibration]
    tokens: int
    seconds: float

    @property
    def nmse(self) -> dict[int, float]:
        """The share of each layer's attention output that is lost."""
        return {index: layer.nmse for index, layer in self.layers.items()}

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for `run.json` and `events.jsonl`."""
        return {
            "tokens": self.tokens,
            "seconds": round(self.seconds, 3),
            "layers": {str(index): asdict(layer) for index, layer in self.layers.items()},
        }


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Print a table with a row per layer."""
    title = f"Attention cut to R directions (closed-form start, {calibration.tokens:,} tokens)"
    table = Table(title=title, title_justify="left")
    for heading in ("layer", "rank R", "known to the token", "attention lost", "KL cost, nats"):
        table.add_column(heading, justify="right")
    for index, layer in calibration.layers.items():
        table.add_row(
            str(index),
            str(layer.rank),
            f"{layer.known:.0%}",
            f"{layer.nmse:.2%}",
            f"{layer.kl:.2g}",
        )
    console.print(table)
