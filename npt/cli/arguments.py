"""Kinds of flag values, and what several verbs have in common."""

from __future__ import annotations

import argparse
from typing import Any

from npt.config import BaseConfig


def jsonl(text: str) -> str:
    if not text.endswith(".jsonl"):
        raise argparse.ArgumentTypeError(f"{text} does not end in .jsonl, by which --dataset_name will know it")
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


def load(base: BaseConfig, console: Any, device: Any = None, pack_on: Any = None) -> tuple[Any, Any]:
    """Load the base of these settings, and say what it is; `device` and `pack_on` are those of `load_base`."""
    import torch

    import npt
    from npt.quant.precision import quantization_of

    torch.set_float32_matmul_precision(base.matmul_precision)
    places: dict[str, Any] = {"device": device} if base.device_map is None else {"device_map": base.device_map}
    model, tokenizer = npt.load_base(
        base.model_name,
        quantization=base.quantization,
        use_fp16=base.use_fp16,
        attn_implementation=base.attn_implementation,
        pack_on=pack_on,
        **places,
    )
    packed = quantization_of(model)
    dtype = "fp16" if base.use_fp16 and packed is None else "fp32"
    devices = ", ".join(dict.fromkeys(str(parameter.device) for parameter in model.parameters()))
    console.print(f"base {base.model_name}: {'unquantised' if packed is None else packed.upper()}, computes in {dtype} on {devices}")
    return model, tokenizer
