"""The measurement of `npt doctor --products`: error and speed of a base's products under each
setting of --matmul_precision, on this device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npt.cli.arguments import open_base, plain_table
from npt.config import BaseConfig, DataConfig
from npt.errors import ConfigError
from npt.flags import build


def measure_products(given: Mapping[str, Any], console: Any) -> dict[str, Any]:
    """Load the base that the flags name and measure products of its first layer and head.

    Returns:
        Values for JSON. rows: tokens that are multiplied at once. settings: setting -> kind of
        weight -> shape (out, in), relative error, seconds of one product, operations per second.
        auto, why: the setting that `--matmul_precision auto` takes on this device.

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
    rows = given["batch_size"] * data.max_length
    with console.status("loading the base and measuring its products"):
        model, _ = open_base(base, device=given["device"])
        errors, seconds = product_errors(model), product_seconds(model, rows)

    def product(setting: str, kind: str, out: int, columns: int) -> dict[str, Any]:
        taken = seconds[setting][kind]
        return {
            "shape": [out, columns],
            "error": errors[setting][kind],
            "seconds": taken,
            "flops_per_second": 2 * rows * out * columns / taken,
        }

    device = next(model.parameters()).device
    name, auto, why = str(device), "highest", "it changes nothing on the CPU"
    if device.type == "cuda":
        name, (auto, why) = torch.cuda.get_device_name(device), choose_precision(errors)
    kinds = product_kinds(model).items()
    return {
        "name": base.model_name,
        "device": name,
        "rows": rows,
        "settings": {
            setting: {k: product(setting, k, m.out_features, m.in_features) for k, m in kinds}
            for setting in errors
        },
        "auto": auto,
        "why": why,
    }


def print_products(found: Mapping[str, Any], console: Any) -> None:
    """Print the table and the conclusion."""
    console.say(
        f"products of {found['name']} on {found['device']}, {found['rows']:,} tokens at once"
    )
    settings = found["settings"]
    columns = [f"{figure} {s}" for figure in ("error", "TF/s") for s in settings]
    table = plain_table("", "out x in", *columns)
    for kind, product in settings["highest"].items():
        errors = [f"{settings[s][kind]['error']:.1e}" for s in settings]
        speeds = [f"{settings[s][kind]['flops_per_second'] / 1e12:.3g}" for s in settings]
        out, width = product["shape"]
        table.add_row(kind, f"{out} x {width}", *errors, *speeds)
    console.print(table)
    console.say("error: ||y - exact|| / ||exact||; TF/s: 10^12 operations per second")
    if all(settings["high"][k]["error"] == p["error"] for k, p in settings["highest"].items()):
        console.say(
            "this device has no faster fp32 product: high computes as highest, and times differ by"
            " chance"
        )
    console.say(f"--matmul_precision auto takes {found['auto']}: {found['why']}")
