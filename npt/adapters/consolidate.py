"""Consolidation: one token's modulation becomes part of the model, for every token.

A token's modulation of a product, y' = m * y + s, is a scale and a bias for every row of the frozen
weight. At strength alpha,

    y' = (1 + alpha (m - 1)) * y + alpha s

it is applied to every token's product from then on (npt/base/rows.py). No byte of the weight is
written: it is exact on a 4-bit base and goes away without a trace. With alpha in (0, 1] the scale
lies within the modulation's own bounds and is never 0.

Teacher and student share the rows, live adapters modulate their results, and a model without
adapters has them as well. Updates stack: each acts on the result of those before it, and the last
is the first to go.
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
    """One update: the rows that a token's modulation has become.

    Attributes:
        rows: scale and bias [O] by layer and target, fp32, on the host.
        record: its origin, for the history: text, token, alpha and more, all JSON.
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
    """Return the update that a token's modulation makes at a strength.

    Args:
        modulation: of `modulation_of`.
        alpha: above 0; at 1 every token is modulated as that one was.
        targets: of the modulation; default all.
        record: kept in the history together with the token, alpha and the layers.

    Raises:
        ConfigError: alpha out of range, or targets that the modulation does not have.
    """
    if not 0 < alpha <= 1:
        raise ConfigError(f"--alpha is {alpha}; it must lie above 0 and be at most 1")
    present = {target for terms in modulation.terms.values() for target in terms}
    targets = present if targets is None else set(targets)
    if not targets or not targets <= present:
        first, second = (", ".join(sorted(names)) or "none" for names in (targets, present))
        raise ConfigError(f"--targets is {first}; the adapter modulates {second}")
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
    """Make an update part of the model, on top of those before it; if refused, change nothing.

    Raises:
        ConfigError: rows that are not finite, or a scale that is not above 0.
        ModelError: rows that do not fit the model.
    """
    check_update(model, update)
    _set_history(model, (*consolidated(model), update))


def unconsolidate(model: PreTrainedModel, count: int | None = 1) -> tuple[Consolidation, ...]:
    """Take back the last `count` updates, bit for bit, and return them, oldest first.

    Args:
        model: with updates or without.
        count: None for all.

    Raises:
        ConfigError: the model has fewer.
    """
    history = consolidated(model)
    if count is not None and not 0 <= count <= len(history):
        raise ConfigError(f"{count} updates are to be taken back, the model has {len(history)}")
    keep = 0 if count is None else len(history) - count
    _set_history(model, history[:keep])
    return history[keep:]


def consolidated(model: PreTrainedModel) -> tuple[Consolidation, ...]:
    """Return the updates that are part of the model, oldest first."""
    return getattr(viewed(model), _HISTORY, ())


def check_update(model: PreTrainedModel, update: Consolidation) -> None:
    """Refuse an update that does not fit the model or would poison it; errors as `consolidate`."""
    layers = decoder_layers(model)
    for (index, target), (scale, bias) in update.rows.items():
        if not 0 <= index < len(layers) or target not in TARGETS:
            raise ModelError(
                f"the update has rows for {target!r} of layer {index}; the model has layers 0 to"
                f" {len(layers) - 1}"
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
    """Return the linear layer whose product a target is.

    The stream's is the attention's last: what is added to the attention output reaches the stream
    of the base as it is, and that of a student by way of its code.
    """
    return layer.get_submodule(TARGETS[target].module)


def _set_history(model: PreTrainedModel, history: tuple[Consolidation, ...]) -> None:
    """Give every product the rows of these updates: y -> scale_2 (scale_1 y + bias_1) + bias_2."""
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
    with torch.inference_mode(False):  # gradients pass the products and their rows
        for (index, target), rows in composed.items():
            fresh = None if rows is None else (rows[0].clone(), rows[1].clone())
            set_rows(product_of(layers[index], target), fresh)
    setattr(model, _HISTORY, history)
    if not history:
        delattr(model, _HISTORY)
