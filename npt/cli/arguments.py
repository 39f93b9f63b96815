"""Kinds of flag values, and what several verbs have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npt.config import BaseConfig
from npt.flags import build


def jsonl(text: str) -> str:
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(
            f"{text} does not end in .jsonl, by which --dataset_name will know it"
        )
    return text


def natural(text: str) -> int:
    return _whole(text, least=0)


def positive(text: str) -> int:
    return _whole(text, least=1)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    return value


def limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_adapter(
    parser: argparse.ArgumentParser, *, required: bool = True, help: str = "a saved adapter"
) -> None:
    """Add --adapter, for a verb that loads one."""
    parser.add_argument(
        "--adapter",
        required=required,
        metavar="PATH",
        help=(
            f"{help}: its folder, a run's folder (the best, else the last), a checkpoint, or"
            " USER/NAME on the hub; it knows its base"
        ),
    )


def with_adapter(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with the adapter that they name, if any, found: once for a command. It prints as
    the name that it was given.

    Raises:
        AdapterFileError, HubError: there is none, or its configuration cannot be read.
    """
    if given.get("adapter") is None:
        return dict(given)
    from npt.adapters.files.adapter_files import find_adapter

    return {**given, "adapter": find_adapter(given["adapter"])}


def base_config(given: Mapping[str, Any]) -> BaseConfig:
    """The base of the flags, and where these are silent that of their adapter, which was found."""
    if given.get("adapter") is None:
        return build(BaseConfig, given)
    from npt.base.recipe import Recipe

    record = given["adapter"].record
    recipe, name = Recipe.of_record(record), record.get("base_model_name_or_path")
    known: dict[str, Any] = (
        {"model_name": name} if isinstance(name, str) and name != "unknown" else {}
    )
    if (
        recipe is not None
        and given.get("use_quantization", recipe.flags["use_quantization"])
        == recipe.flags["use_quantization"]
    ):
        known |= recipe.flags
    return build(BaseConfig, {**known, **given})


def load(
    base: BaseConfig, console: Any, device: Any = None, pack_on: Any = None
) -> tuple[Any, Any]:
    """Load the base of these settings, and say what it is; `device` and `pack_on` are those of
    `load_base`.
    """
    import torch

    import npt
    from npt.base.precision import quantization_of
    from npt.base.quantization_error import product_errors, set_matmul_precision

    places: dict[str, Any] = (
        {"device": device} if base.device_map is None else {"device_map": base.device_map}
    )
    model, tokenizer = npt.load_base(
        base.model_name,
        quantization=base.quantization,
        use_fp16=base.use_fp16,
        compute_dtype=base.compute_dtype,
        attn_implementation=base.attn_implementation,
        pack_on=pack_on,
        **places,
    )
    packed = quantization_of(model)
    dtype = "fp16" if base.use_fp16 and packed is None else "fp32"
    chosen = set_matmul_precision(base.matmul_precision, model)
    devices = ", ".join(dict.fromkeys(str(parameter.device) for parameter in model.parameters()))
    console.print(
        f"base {base.model_name}: {'unquantised' if packed is None else packed.upper()}, computes"
        f" in {dtype} on {devices}"
    )
    if chosen is not None:
        console.print(chosen, soft_wrap=True)
    if base.compute_dtype == "bf16":
        errors = product_errors(model)[torch.get_float32_matmul_precision()]
        worst = max(error for kind, error in errors.items() if kind != "lm_head")
        console.print(
            f"--compute_dtype bf16: 4-bit products are rounded to bf16, off by {worst:.1e} of their"
            " size here; its range is fp32's, so that none overflows which would not in fp32; all"
            " else computes in fp32",
            soft_wrap=True,
        )
    return model, tokenizer


def add_any_base(parser: argparse.ArgumentParser) -> None:
    """Add --any_base, for a verb that loads an adapter."""
    parser.add_argument(
        "--any_base",
        action="store_true",
        help=(
            "use an adapter of another base too, if its shapes fit; a warning and what is written"
            " say in what the two differ"
        ),
    )


def load_adapter(model: Any, given: Mapping[str, Any], console: Any) -> tuple[Any, dict[str, str]]:
    """Attach the adapter of the flags, which was found, to a loaded base.

    Args:
        model: the base.
        given: of the flags `adapter` and `any_base`.
        console: where a base that is not the adapter's is warned of.

    Returns:
        The base's identity, and what is put on record of such a base: `other_base`, or nothing.
    """
    import npt
    from npt.adapters.files.adapter_files import base_mismatch

    base, stored = npt.base_identity(model), given["adapter"]
    if stored.folder != Path(stored.name):
        console.print(f"adapter {stored.folder}", markup=False, highlight=False, soft_wrap=True)
    other = base_mismatch(stored, base) if given["any_base"] else None
    npt.load_adapter(model, stored, base=base, check_base=not given["any_base"])
    if other is None:
        return base, {}
    console.print(
        f"warning: --any_base: {stored} was trained on another base: {other}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return base, {"other_base": other}
