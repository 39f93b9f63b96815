"""Measures of a student on one batch: its stream against the teacher's, its multipliers, the size
of its additive terms, and the first number that is not finite.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, decoder_layers, npt_layers
from npt.adapters.layer import NPTLayer
from npt.adapters.modulation import multiplier_spread
from npt.adapters.stream import open_stream
from npt.config import NPTConfig
from npt.data.batch import Batch

SATURATED = 0.99
"""A multiplier is saturated beyond this share of the way from the middle of its range to an end."""

DEAD = 1e-3  # a multiplier of this size or less has switched its channel off


@dataclass(frozen=True)
class Inspection:
    """Measures of a student; None if its form has no such term.

    residual_ratio: RMS of the student's stream after a converted layer over the teacher's, the one
    furthest from 1. m_min, m_max: of all multipliers. saturated, dead: shares of them.
    additive_to_residual: norm of the term that `down` has added over that of the stream, the
    largest of all layers; additive_to_product: of gate and up, over the product. bad_layer,
    bad_stage: the first number that is not finite; if all are, the layer whose stream is furthest
    from the teacher's, and its largest stage.
    """

    residual_ratio: float | None
    m_min: float | None
    m_max: float | None
    saturated: float | None
    dead: float | None
    additive_to_residual: float | None
    additive_to_product: float | None
    bad_layer: int
    bad_stage: str | None
    finite: bool

    def measures(self) -> dict[str, float | None]:
        """Return the figures, without the place of the bad number."""
        places = ("bad_layer", "bad_stage", "finite")
        return {name: value for name, value in asdict(self).items() if name not in places}


@dataclass
class _Observer:
    """The stages of one layer's adapter, in figures. sizes: the largest of each stage, in the order
    of the pass. m: smallest, largest, saturated, dead and all multipliers, by target.
    """

    config: NPTConfig
    valid: Tensor
    sizes: dict[str, float] = field(default_factory=dict)
    m: list[tuple[float, float, int, int, int]] = field(default_factory=list)
    to_residual: list[float] = field(default_factory=list)
    to_product: list[float] = field(default_factory=list)
    stream: Tensor | None = None

    def __call__(self, stages: dict[str, Tensor | None]) -> None:
        rows = {name: self._rows(t) for name, t in stages.items() if t is not None and name != "t"}
        for name, tensor in rows.items():
            self.sizes[name] = float(tensor.abs().amax()) if tensor.numel() else 0.0
            if name.startswith("m_"):
                self.m.append(self._multipliers(tensor))
        self.stream = rows.get("stream", self.stream)
        for target in ("gate", "up"):
            if f"s_{target}" in rows:
                added = rows[f"s_{target}"]
                self.to_product.append(_over(_norm(added), _norm(rows[target] - added)))
        if "s_down" in rows and self.stream is not None:
            self.to_residual.append(_over(_norm(rows["s_down"]), _norm(self.stream)))

    def _rows(self, states: Tensor) -> Tensor:
        rows = states.reshape(-1, states.shape[-1])
        return rows.index_select(0, self.valid.to(states.device)).to(torch.float64)

    def _multipliers(self, m: Tensor) -> tuple[float, float, int, int, int]:
        middle, half = multiplier_spread(self.config.mult_form, self.config.mult_bound)
        beyond = int(((m - middle).abs() > SATURATED * half).sum())
        return float(m.amin()), float(m.amax()), beyond, int((m.abs() <= DEAD).sum()), m.numel()


def inspect_student(model: PreTrainedModel, batch: Batch) -> Inspection:
    """Measure the student by one pass of the teacher and one of the student, without gradients; the
    model does not change.
    """
    converted = npt_layers(model)
    seen = {index: _Observer(layer.npt.config, batch.valid_index) for index, layer in converted}
    before = [layer.npt.observer for _, layer in converted]
    with torch.no_grad():
        with adapter_mode(model, "teacher"):
            teacher = _stream_sizes(model, batch, converted[-1][0])
        try:
            for index, layer in converted:
                layer.npt.observer = seen[index]
            with adapter_mode(model, "student"):
                student = _stream_sizes(model, batch, converted[-1][0])
        finally:
            for (_, layer), observer in zip(converted, before, strict=True):
                layer.npt.observer = observer
    ratios = {index: _over(student[index], teacher[index]) for index in seen}
    worst = max(ratios, key=lambda index: _distance(ratios[index]))
    bad_layer, bad_stage, finite = _bad(seen, worst)
    m = [entry for one in seen.values() for entry in one.m]
    total = sum(entry[4] for entry in m)
    return Inspection(
        residual_ratio=ratios[worst],
        m_min=min((entry[0] for entry in m), default=None),
        m_max=max((entry[1] for entry in m), default=None),
        saturated=sum(entry[2] for entry in m) / total if total else None,
        dead=sum(entry[3] for entry in m) / total if total else None,
        additive_to_residual=max((x for o in seen.values() for x in o.to_residual), default=None),
        additive_to_product=max((x for o in seen.values() for x in o.to_product), default=None),
        bad_layer=bad_layer,
        bad_stage=bad_stage,
        finite=finite,
    )


def _bad(seen: dict[int, _Observer], worst: int) -> tuple[int, str | None, bool]:
    for index, one in seen.items():
        for stage, size in one.sizes.items():
            if not math.isfinite(size):
                return index, stage, False
    sizes = seen[worst].sizes
    inner = [stage for stage in sizes if stage not in ("h", "stream", "o")]
    return worst, max(inner, key=sizes.__getitem__, default=None), True


def _stream_sizes(model: PreTrainedModel, batch: Batch, last: int) -> dict[int, float]:
    """Return by converted layer the RMS of the stream after it, over the valid tokens."""
    found = {}
    stream = open_stream(model, batch)
    hidden = stream.hidden
    for index, layer in enumerate(decoder_layers(model)[: last + 1]):
        hidden = stream.clean(layer(hidden, **stream.context_of(layer)))
        if isinstance(layer, NPTLayer):
            found[index] = float(stream.rows(hidden).to(torch.float64).square().mean().sqrt())
    return found


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _distance(ratio: float) -> float:
    """Return how far from 1 a ratio is, by the logarithm; NaN is furthest."""
    return abs(math.log(ratio)) if ratio > 0 and math.isfinite(ratio) else math.inf
