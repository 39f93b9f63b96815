"""What a calibration came to: figures per layer, and their table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class LayerCalibration:
    """One layer on held-out calibration tokens. `before` is without any modulation (attention
    dropped), `linear` the start in closed form, `after` the end.

    nmse_*: ||o - t||^2 / ||t||^2. update_*: the same error by what the layer does, ||t - h||^2;
    `update_after` is how hard the layer is. kl_*: what the error costs in KL(teacher, student),
    nats per token, to second order and by itself. ridge: as chosen. rounds: of Gauss-Newton that
    were accepted.
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
    """What `calibrate` did; `layers` by index, of `tokens` in all `heldout_tokens` chose and were
    not fitted.
    """

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


def calibration_table(calibration: Calibration) -> Table:
    """A row per layer."""
    title = (
        f"Calibration on {calibration.tokens - calibration.heldout_tokens:,} tokens, figures on"
        f" {calibration.heldout_tokens:,} others; {calibration.inputs} inputs"
    )
    table = Table(title=title, title_justify="left")
    for heading in (
        "layer",
        "rank",
        "NMSE before",
        "linear",
        "after",
        "of the update",
        "KL, nats",
        "ridge",
        "rounds",
    ):
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
    return table


def print_calibration(calibration: Calibration, console: Console) -> None:
    console.print(calibration_table(calibration))
