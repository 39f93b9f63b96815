"""What `npt doctor --products` says: error and speed of a base's products under each setting of
--matmul_precision, on this device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from npt.config import BaseConfig, DataConfig
from npt.errors import ConfigError
from npt.flags import build


@dataclass(frozen=True)
class Products:
    """Products of a base's kinds of weights.

    rows: tokens that are multiplied at once. shapes: kind -> (out, in). errors, seconds: setting ->
    kind -> relative error, and seconds of one product. auto, why: what `--matmul_precision auto`
    takes on this device.
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
        return {
            "name": self.name,
            "device": self.device,
            "rows": self.rows,
            "settings": {
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
            },
            "auto": self.auto,
            "why": self.why,
        }


def measure_products(given: Mapping[str, Any], console: Any) -> Products:
    """Load the base that the flags name and measure products of its first layer and head.

    Raises:
        ConfigError: settings that cannot work together, or a base that is spread over several
            processes.
        ModelError: no such model.
    """
    import torch

    import npt
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
        model, _ = npt.load_base(
            base.model_name,
            quantization=base.quantization,
            use_fp16=base.use_fp16,
            compute_dtype=base.compute_dtype,
            device=given["device"],
        )
        rows = given["batch_size"] * data.max_length
        errors, seconds = product_errors(model), product_seconds(model, rows)
        shapes = {
            kind: (module.out_features, module.in_features)
            for kind, module in product_kinds(model).items()
        }
    device = next(model.parameters()).device
    if device.type == "cuda":
        auto, why = choose_precision(errors)
        return Products(
            base.model_name,
            torch.cuda.get_device_name(device),
            rows,
            shapes,
            errors,
            seconds,
            auto,
            why,
        )
    return Products(
        base.model_name,
        str(device),
        rows,
        shapes,
        errors,
        seconds,
        "highest",
        "it changes nothing on the CPU",
    )


def print_products(found: Products, console: Any) -> None:
    """Print the table, and what it comes to."""
    from npt.cli.planning import _table

    console.print(
        f"products of {found.name} on {found.device}, {found.rows:,} tokens at once", soft_wrap=True
    )
    settings = list(found.errors)
    table = _table("", "out x in", *(f"{what} {s}" for what in ("error", "TF/s") for s in settings))
    for kind, (out, columns) in found.shapes.items():
        errors = [f"{found.errors[s][kind]:.1e}" for s in settings]
        speeds = [f"{found.speed(s, kind) / 1e12:.3g}" for s in settings]
        table.add_row(kind, f"{out} x {columns}", *errors, *speeds)
    console.print(table)
    console.print(
        "error: ||y - exact|| / ||exact||; TF/s: 10^12 operations per second", soft_wrap=True
    )
    if found.errors["highest"] == found.errors["high"]:
        console.print(
            "this device has no faster fp32 product: high computes as highest, and times differ by"
            " chance",
            soft_wrap=True,
        )
    console.print(f"--matmul_precision auto takes {found.auto}: {found.why}", soft_wrap=True)
