"""Consolidation: make one token's modulation part of the model, for every token.

A token's modulation of a product, y' = m * y + s, is a scale and a bias for each row of the frozen
weight. At strength alpha, consolidation applies

    y' = (1 + alpha (m - 1)) * y + alpha s

to the products of all tokens (npt/base/rows.py). The weight is not written, so an update is exact
on a 4-bit base and can be undone exactly. With alpha in (0, 1] the scale stays within the bounds of
the modulation and is never 0.

Updates apply to teacher, student and a model without adapters. They stack: each acts on the result
of earlier ones, and the last is undone first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import decoder_layers, viewed
from npt.adapters.fit import format_layers
from npt.adapters.token_modulation import TokenModulation
from npt.base.rows import Rows, check_row_scalable, set_rows
from npt.config import TARGETS
from npt.errors import ConfigError, ModelError

_HISTORY = "_npt_consolidated"

Product = tuple[int, str]
"""A layer and a target."""


@dataclass(frozen=True)
class Consolidation:
    """One update, made from a token's modulation.

    Attributes:
        rows: scale and bias [O] by layer and target, fp32, on the host.
        record: origin of the update for the history, in JSON types: text, token, alpha and more.
    """

    rows: dict[Product, Rows]
    record: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        layers = format_layers(tuple(sorted({index for index, _ in self.rows})))
        targets = [t for t in TARGETS if any(target == t for _, target in self.rows)]
        return f"layers {layers}, {', '.join(targets)}: {self.record}"


def update_from(
    modulation: TokenModulation,
    alpha: float,
    *,
    targets: Collection[str] | None = None,
    record: dict[str, Any] | None = None,
) -> Consolidation:
    """Return the update for a token's modulation at strength alpha.

    Args:
        modulation: result of `modulation_of`.
        alpha: in (0, 1]. At 1 every token is modulated as this one was.
        targets: targets to consolidate; default all of the modulation.
        record: kept in the history, together with token, alpha and layers.

    Raises:
        ConfigError: alpha is out of range, or the modulation lacks a target.
    """
    if not 0 < alpha <= 1:
        raise ConfigError(f"--alpha is {alpha}; it must be above 0 and at most 1")
    present = {target for terms in modulation.terms.values() for target in terms}
    targets = present if targets is None else set(targets)
    if not targets or not targets <= present:
        first, second = (", ".join(sorted(names)) or "none" for names in (targets, present))
        raise ConfigError(f"--targets is {first}, but the adapter modulates {second}")
    rows: dict[Product, Rows] = {}
    for index, terms in sorted(modulation.terms.items()):
        for target, (m, s) in terms.items():
            if target not in targets:
                continue
            like = m if m is not None else s
            assert like is not None
            scale = torch.ones_like(like) if m is None else 1.0 + alpha * (m - 1.0)
            bias = torch.zeros_like(like) if s is None else alpha * s
            rows[index, target] = scale.detach().cpu().float(), bias.detach().cpu().float()
    origin = {
        "token": modulation.token,
        "token_id": modulation.token_id,
        "alpha": alpha,
        "layers": format_layers(tuple(sorted(modulation.terms))),
        "targets": [target for target in TARGETS if target in targets],
    }
    return Consolidation(rows, {**(record or {}), **origin})


def consolidate(model: PreTrainedModel, update: Consolidation) -> None:
    """Apply an update to the model, on top of earlier ones. If it raises, the model is unchanged.

    Raises:
        ConfigError: rows are not finite, or a scale is not above 0.
        ModelError: rows do not fit the model.
    """
    check_update(model, update)
    _set_history(model, (*consolidated(model), update))


def unconsolidate(model: PreTrainedModel, count: int | None = 1) -> tuple[Consolidation, ...]:
    """Undo the last `count` updates, bit for bit. Return them, oldest first.

    Args:
        model: with or without updates.
        count: number of updates; None for all.

    Raises:
        ConfigError: the model has fewer updates.
    """
    history = consolidated(model)
    if count is not None and not 0 <= count <= len(history):
        raise ConfigError(f"cannot undo {count} updates: the model has {len(history)}")
    keep = 0 if count is None else len(history) - count
    _set_history(model, history[:keep])
    return history[keep:]


def consolidated(model: PreTrainedModel) -> tuple[Consolidation, ...]:
    """Return the model's updates, oldest first."""
    return getattr(viewed(model), _HISTORY, ())


def check_update(model: PreTrainedModel, update: Consolidation) -> None:
    """Check that an update fits the model and is finite. Raises like `consolidate`."""
    layers = decoder_layers(model)
    for (index, target), (scale, bias) in update.rows.items():
        if not 0 <= index < len(layers) or target not in TARGETS:
            raise ModelError(
                f"the update has rows for {target!r} of layer {index}, but the model has layers 0"
                f" to {len(layers) - 1}"
            )
        product = product_of(layers[index], target)
        check_row_scalable(product)
        for part in (scale, bias):
            if part.dtype != torch.float32 or part.shape != (product.out_features,):
                raise ModelError(
                    f"layer {index}, {target}: the update has {part.dtype} {list(part.shape)}, the"
                    f" model needs torch.float32 [{product.out_features}]"
                )
        if not bool((torch.isfinite(scale) & torch.isfinite(bias) & (scale > 0)).all()):
            raise ConfigError(
                f"layer {index}, {target}: the update has a scale or bias that is not finite, or a"
                " scale that is not above 0"
            )


def product_of(layer: Any, target: str) -> Any:
    """Return the linear layer of a target's product; of the stream, attention's output layer."""
    return layer.get_submodule(TARGETS[target].module)


def _set_history(model: PreTrainedModel, history: tuple[Consolidation, ...]) -> None:
    """Compose the rows of updates and set them: y -> scale_2 (scale_1 y + bias_1) + bias_2."""
    model = viewed(model)
    composed: dict[Product, Rows | None] = {
        product: None for update in consolidated(model) for product in update.rows
    }
    for update in history:
        for product, (scale, bias) in update.rows.items():
            if (below := composed.get(product)) is not None:
                scale, bias = scale * below[0], scale * below[1] + bias
            composed[product] = (scale, bias)
    layers = decoder_layers(model)
    with torch.inference_mode(False):  # gradients must be able to pass through the rows
        for (index, target), rows in composed.items():
            fresh = None if rows is None else (rows[0].clone(), rows[1].clone())
            set_rows(product_of(layers[index], target), fresh)
    setattr(model, _HISTORY, history)
    if not history:
        delattr(model, _HISTORY)
