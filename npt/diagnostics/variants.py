"""A base in several number formats, for comparing them."""

from __future__ import annotations

from typing import Any

import torch

from npt.base.load import load_base
from npt.base.precision import compute_in, quantization_of
from npt.base.recipe import STORED
from npt.errors import ModelError

REFERENCE = "fp32"

VARIANTS: dict[str, tuple[str | None, torch.dtype]] = {
    REFERENCE: (None, torch.float32),
    "bf16": (None, torch.bfloat16),
    "fp16": (None, torch.float16),
    "nf4": ("nf4", torch.float32),
    "fp4": ("fp4", torch.float32),
    "nf4-bf16": ("nf4", torch.bfloat16),
    "nf4-fp16": ("nf4", torch.float16),
}
"""By name: the 4-bit code of the weights, or None, and the dtype of all computation. fp32 with a
4-bit code is how this package runs a quantised base; 16 bit is how it is often run elsewhere."""


def load_variant(
    name: str,
    variant: str,
    device: str | torch.device | None = None,
    *,
    attn_implementation: str = "sdpa",
) -> tuple[Any, Any]:
    """Load a base in one of the `VARIANTS`, and its tokenizer.

    A 4-bit base that computes in 16 bit is converted after loading. A `ModelError` says that the
    base cannot be loaded, or is stored in 4 bit, so that there is no unquantised one to compare
    with.
    """
    quantization, dtype = VARIANTS[variant]
    stored = next(name for name, known in STORED.items() if known == dtype)
    model, tokenizer = load_base(
        name,
        quantization=quantization,
        device=device,
        attn_implementation=attn_implementation,
        dtype=None if quantization else stored,
    )
    if quantization_of(model) != quantization:
        raise ModelError(
            f"{name} is stored as {quantization_of(model)}, so it has no fp32 to be compared with;"
            " name its unquantised original"
        )
    if dtype != torch.float32 and quantization is not None:
        compute_in(model, dtype)
    return model, tokenizer
