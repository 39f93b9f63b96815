"""The measurement of `npt doctor --products`: error and speed of a base's products under each
setting of --matmul_precision, on this device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npt.cli.arguments import open_base, plain_table
from npt.config import BaseConfig, DataConfig
from npt.errors import ConfigError
from npt.flags import build


@dataclass(frozen=True)
class Products:
    """Products of a base's kinds of weights.

    rows: tokens that are multiplied at once. shapes: kind -> (out, in). errors, seconds: setting ->
    kind -> relative error, and seconds of one product. auto, why: the setting that
    `--matmul_precision auto` takes on this device.
    """

    name: str
    device: str
    rows: int
    shapes: dict[str, tuple[int, int]]
    errors: dict[str, dict[str, float]]
    seconds: dict[str, dict[str, float]]
    auto: str
    why: str

    def speed(self, setting: str, kind: str) -> float:
        """Operations per second."""
        out, columns = self.shapes[kind]
        return 2 * self.rows * out * columns / self.seconds[setting][kind]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        settings = {
            setting: {
                kind: {
                    "shape": list(shape),
                    "error": self.errors[setting][kind],
                    "seconds": self.seconds[setting][kind],
                    "flops_per_second": self.speed(setting, kind),
                }
                for kind, shape in self.shapes.items()
            }
            for setting in self.errors
        }
        plain = {name: getattr(self, name) for name in ("name", "device", "rows", "auto", "why")}
        return {**plain, "settings": settings}


def measure_products(given: Mapping[str, Any], console: Any) -> Products:
    """Load the base that the flags name and measure products of its first layer and head.

    Raises:
        ConfigError: settings that cannot work together, or a base over several devices.
        ModelError: no such model.
    """
    import torch

    from npt.base.quantization_error import (
        choose_precision,
        product_errors,
        product_kinds,
        product_seconds,
    )

    base, data = build(BaseConfig, given), build(DataConfig, given)
    for flag in ("device_map", "shard_base"):
        if getattr(base, flag):
            raise ConfigError(
                f"--{flag} spreads the base over several devices, and products are measured on one;"
                " leave it out"
            )
    with console.status("loading the base and measuring its products"):
        model, _ = open_base(base, device=given["device"])
        rows = given["batch_size"] * data.max_length
        errors, seconds = product_errors(model), product_seconds(model, rows)
    shapes = {
        kind: (module.out_features, module.in_features)
        for kind, module in product_kinds(model).items()
    }
    device = next(model.parameters()).device
    name, auto = str(device), ("highest", "it changes nothing on the CPU")
    if device.type == "cuda":
        name, auto = torch.cuda.get_device_name(device), choose_precision(errors)
    return Products(base.model_name, name, rows, shapes, errors, seconds, *auto)


def print_products(found: Products, console: Any) -> None:
    """Print the table and the conclusion."""
    console.say(f"products of {found.name} on {found.device}, {found.rows:,} tokens at once")
    settings = list(found.errors)
    columns = [f"{figure} {s}" for figure in ("error", "TF/s") for s in settings]
    table = plain_table("", "out x in", *columns)
    for kind, (height, width) in found.shapes.items():
        errors = [f"{found.errors[s][kind]:.1e}" for s in settings]
        speeds = [f"{found.speed(s, kind) / 1e12:.3g}" for s in settings]
        table.add_row(kind, f"{height} x {width}", *errors, *speeds)
    console.print(table)
    console.say("error: ||y - exact|| / ||exact||; TF/s: 10^12 operations per second")
    if found.errors["highest"] == found.errors["high"]:
        console.say(
            "this device has no faster fp32 product: high computes as highest, and times differ by"
            " chance"
        )
    console.say(f"--matmul_precision auto takes {found.auto}: {found.why}")
