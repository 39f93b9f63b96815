"""A look at a student on one batch: how its stream compares with the teacher's, where its
multipliers stand, how large its additive terms are, and which number is the first that is not
finite. One pass of the teacher, one of the student, no gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_mode, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer
from npt.adapters.modulation import multiplier_spread
from npt.adapters.stream import open_stream
from npt.config import NPTConfig
from npt.data.batch import Batch

SATURATED = 0.99
"""A multiplier is saturated beyond this share of the way from the middle of its range to an end."""

DEAD = 1e-3
"""A multiplier of this size or less has switched its channel off."""

_PRODUCTS = {"gate": "gate", "up": "up"}


@dataclass(frozen=True)
class Look:
    """What was seen.

    residual_ratio: RMS of the student's stream behind a converted layer over the teacher's there,
    the one furthest from 1. m_min, m_max: of all multipliers. saturated, dead: shares of them.
    additive_to_residual: norm of what `down` has added over that of the stream it is added to, the
    largest of all layers; additive_to_product: of gate and up, over the product. None: the form has
    no such term. bad_layer, bad_stage: the first number of the student's pass that is not finite;
    where all are, the layer whose stream is furthest from the teacher's, and its largest stage.
    """

    residual_ratio: float | None
    m_min: float | None = None
    m_max: float | None = None
    saturated: float | None = None
    dead: float | None = None
    additive_to_residual: float | None = None
    additive_to_product: float | None = None
    bad_layer: int | None = None
    bad_stage: str | None = None
    finite: bool = True

    def measures(self) -> dict[str, float | None]:
        """The figures of a row; not where the bad number is."""
        names = (
            "residual_ratio",
            "m_min",
            "m_max",
            "saturated",
            "dead",
            "additive_to_residual",
            "additive_to_product",
        )
        return {name: getattr(self, name) for name in names}


@dataclass
class _Seen:
    """What one layer's adapter shows."""

    config: NPTConfig
    valid: Tensor
    # largest size of each stage, in the order of the pass
    sizes: dict[str, float] = field(default_factory=dict)
    # smallest, largest, saturated, dead, all
    m: list[tuple[float, float, int, int, int]] = field(default_factory=list)
    to_residual: float | None = None
    to_product: list[float] = field(default_factory=list)
    stream: Tensor | None = None

    def __call__(self, stages: dict[str, Tensor | None]) -> None:
        rows = {
            name: self._rows(tensor)
            for name, tensor in stages.items()
            if tensor is not None and name != "t"
        }
        for name, tensor in rows.items():
            self.sizes[name] = float(tensor.abs().amax()) if tensor.numel() else 0.0
            if name.startswith("m_"):
                self.m.append(self._multipliers(tensor))
        self.stream = rows.get("stream", self.stream)
        for target, product in _PRODUCTS.items():
            if f"s_{target}" in rows:
                added = rows[f"s_{target}"]
                self.to_product.append(_ratio(added, rows[product] - added))
        if "s_down" in rows and self.stream is not None:
            self.to_residual = _ratio(rows["s_down"], self.stream)

    def _rows(self, states: Tensor) -> Tensor:
        return (
            states.reshape(-1, states.shape[-1])
            .index_select(0, self.valid.to(states.device))
            .to(torch.float64)
        )

    def _multipliers(self, m: Tensor) -> tuple[float, float, int, int, int]:
        middle, half = multiplier_spread(self.config.mult_form, self.config.mult_bound)
        beyond = int(((m - middle).abs() > SATURATED * half).sum())
        return float(m.amin()), float(m.amax()), beyond, int((m.abs() <= DEAD).sum()), m.numel()


def look(model: PreTrainedModel, batch: Batch) -> Look:
    """Look at the student that `model` is.

    Args:
        model: with adapters attached; left as it was.
        batch: on the model's device.
    """
    converted = npt_layers(model)
    seen = {index: _Seen(layer.npt.config, batch.valid_index) for index, layer in converted}
    before = {index: layer.npt.observer for index, layer in converted}
    with torch.no_grad():
        teacher = _rms(model, batch, converted[-1][0], "teacher")
        try:
            for index, layer in converted:
                layer.npt.observer = seen[index]
            student = _rms(model, batch, converted[-1][0], "student")
        finally:
            for index, layer in converted:
                layer.npt.observer = before[index]
    ratios = {index: _over(student[index], teacher[index]) for index in seen}
    worst = max(ratios, key=lambda index: _distance(ratios[index]))
    bad_layer, bad_stage, finite = _bad(seen, worst)
    m = [entry for one in seen.values() for entry in one.m]
    total = sum(entry[4] for entry in m)
    return Look(
        ratios[worst],
        min(entry[0] for entry in m) if m else None,
        max(entry[1] for entry in m) if m else None,
        sum(entry[2] for entry in m) / total if total else None,
        sum(entry[3] for entry in m) / total if total else None,
        max(
            (one.to_residual for one in seen.values() if one.to_residual is not None), default=None
        ),
        max((ratio for one in seen.values() for ratio in one.to_product), default=None),
        bad_layer,
        bad_stage,
        finite,
    )


def _bad(seen: dict[int, _Seen], worst: int) -> tuple[int, str | None, bool]:
    for index, one in seen.items():
        for stage, size in one.sizes.items():
            if not math.isfinite(size):
                return index, stage, False
    inner = {
        stage: size
        for stage, size in seen[worst].sizes.items()
        if stage not in ("h", "stream", "o")
    }
    return worst, max(inner, key=lambda stage: inner[stage]) if inner else None, True


def _rms(model: PreTrainedModel, batch: Batch, last: int, mode: Any) -> dict[int, float]:
    """By converted layer the RMS of the stream behind it, over the valid tokens."""
    found = {}
    with adapter_mode(model, mode):
        stream = open_stream(model, batch)
        hidden = stream.hidden
        for index, layer in enumerate(decoder_layers(model)[: last + 1]):
            hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
            if isinstance(layer, NPTLayer):
                found[index] = float(stream.rows(hidden).to(torch.float64).square().mean().sqrt())
    return found


def _ratio(part: Tensor, whole: Tensor) -> float:
    return _over(float(torch.linalg.vector_norm(part)), float(torch.linalg.vector_norm(whole)))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _distance(ratio: float) -> float:
    """How far from 1, by the logarithm; what is not a number is furthest."""
    return abs(math.log(ratio)) if ratio > 0 and math.isfinite(ratio) else math.inf
