"""Figures of a base in several number formats: errors and headroom, layer by layer.

The two errors say different things. The residual stream's is what has piled up by a layer, on the
variant's own stream. That of a layer's own update is taken with the fp32 stream as its input: it is
what this layer adds, whatever came before.

Headroom is how many times the largest value could still double before its format has no number for
it. fp16 ends at 65504; bf16 goes as far as fp32, and pays in digits. It holds for the tokens of the
pass.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from npt.evaluation.metrics import Figures

CHECKPOINTS = (
    "input_norm",
    "q",
    "k",
    "v",
    "qk",
    "attention",
    "residual_mid",
    "mlp_norm",
    "gate",
    "up",
    "product",
    "down",
    "residual",
)
"""The measured places of a layer, in the order of its pass.

qk: attention logits after the rotary embedding, before they are scaled down, of any two valid
tokens of a row: eager attention stores them so, and before it masks. attention: after o_proj.
residual_mid: h + a. product: act(gate) * up, the input of down_proj. residual: the layer's output.
"""


@dataclass(frozen=True)
class Extent:
    """The largest size of the finite values at one checkpoint, and the number of the others."""

    absmax: float
    non_finite: int

    def headroom(self, dtype: torch.dtype) -> float:
        """Return log2 of the dtype's largest finite number over absmax, below 0 if it does not fit;
        -inf if a value is not finite in the first place.
        """
        if self.non_finite:
            return -math.inf
        return math.inf if self.absmax == 0 else math.log2(torch.finfo(dtype).max / self.absmax)

    def joined(self, other: Extent) -> Extent:
        return Extent(max(self.absmax, other.absmax), self.non_finite + other.non_finite)


@dataclass(frozen=True)
class Errors:
    """Relative errors ||x - x_fp32|| / ||x_fp32|| over the valid tokens, NaN or inf if a token has
    no finite one. non_finite: tokens whose state holds a non-finite value.
    """

    mean: float
    worst: float
    non_finite: int


@dataclass(frozen=True)
class LayerFigures:
    """One decoder layer of a variant. residual: of its output on the variant's own stream. update:
    of what it adds to fp32's stream."""

    residual: Errors
    update: Errors
    checkpoints: dict[str, Extent]

    def tightest(self, dtype: torch.dtype) -> tuple[str, float]:
        """Return the checkpoint with the least headroom, and its bits."""
        bits = {name: extent.headroom(dtype) for name, extent in self.checkpoints.items()}
        return min(bits.items(), key=lambda item: item[1])

    def as_dict(self) -> dict[str, Any]:
        checkpoints = {
            name: {
                **asdict(extent),
                "headroom_fp16": extent.headroom(torch.float16),
                "headroom_bf16": extent.headroom(torch.bfloat16),
            }
            for name, extent in self.checkpoints.items()
        }
        return {**asdict(self), "checkpoints": checkpoints}


@dataclass(frozen=True)
class VariantFigures:
    """A variant against fp32. figures: of its predictions, with fp32 as the teacher."""

    name: str
    quantization: str | None
    dtype: torch.dtype
    layers: tuple[LayerFigures, ...]
    figures: Figures

    @property
    def first_non_finite(self) -> tuple[int, str, int] | None:
        """Layer, checkpoint and count of the first non-finite values on the variant's stream."""
        for index, layer in enumerate(self.layers):
            for name, extent in layer.checkpoints.items():
                if extent.non_finite:
                    return index, name, extent.non_finite
        return None

    @property
    def failing_layers(self) -> tuple[int, ...]:
        """Layers that give non-finite values even on fp32's stream: those at fault, not those that
        were handed a bad one. If fp32's stream itself does not fit, that is every layer after."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.update.non_finite)

    def tightest(self, dtype: torch.dtype) -> tuple[int, str, float]:
        """Return layer and checkpoint with the least headroom, and its bits."""
        index = min(range(len(self.layers)), key=lambda i: self.layers[i].tightest(dtype)[1])
        return index, *self.layers[index].tightest(dtype)

    def as_dict(self) -> dict[str, Any]:
        first = self.first_non_finite
        names = ("layer", "checkpoint", "count")
        return {
            "quantization": self.quantization,
            "compute_dtype": str(self.dtype).removeprefix("torch."),
            **self.figures.as_dict(),
            "first_non_finite": None if first is None else dict(zip(names, first, strict=True)),
            "failing_layers": list(self.failing_layers),
            "layers": [{"layer": i, **layer.as_dict()} for i, layer in enumerate(self.layers)],
        }


@dataclass(frozen=True)
class PrecisionComparison:
    """All variants of one base on the same tokens, fp32 first. heldout: of held-out text."""

    model: str
    samples: int
    tokens: int
    heldout: bool
    variants: tuple[VariantFigures, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self), "variants": {v.name: v.as_dict() for v in self.variants}}
