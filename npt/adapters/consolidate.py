"""Consolidated updates: patches of `down_proj` that make a context part of the model.

An update adds a low-rank term to the last product of some layers' MLPs (npt/base/patched.py):

    down'(p) = down p + outer (inner p)

p [F] is the MLP's inner product, so what is added depends on the token's state. The weight is not
written: an update is exact on a 4-bit base, and taking it out gives back every bit.
npt/tools/editing/write.py says how updates are found.

Updates apply to teacher, student and a model without adapters. They add up, so each can be taken
out alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import decoder_layers, viewed
from npt.adapters.fit import format_layers
from npt.base.linear import Patch
from npt.base.patched import check_patchable, set_patch
from npt.errors import ConfigError, ModelError

_HISTORY = "_npt_consolidated"

Probes = tuple[tuple[tuple[int, ...], int], ...]
"""Token ids of some texts, and the number of tokens at the end of each that an update changed."""


@dataclass(frozen=True)
class Consolidation:
    """One update.

    Attributes:
        patches: outer [D, n] and inner [n, F] by layer, fp32, on the host.
        record: what was written, in JSON types: texts, context, figures.
        probes: the texts that it was found on. Later updates leave its effect on them alone.
    """

    patches: dict[int, Patch]
    record: dict[str, Any] = field(default_factory=dict)
    probes: Probes = ()

    def __str__(self) -> str:
        return f"layers {format_layers(tuple(sorted(self.patches)))}: {self.record}"


def apply_update(model: PreTrainedModel, update: Consolidation) -> None:
    """Add an update to the model's. If it raises, the model is unchanged.

    Raises:
        ConfigError: a patch is not finite.
        ModelError: a patch does not fit the model.
    """
    check_update(model, update)
    _set_updates(model, (*consolidated(model), update))


@contextmanager
def applied(model: PreTrainedModel, update: Consolidation) -> Iterator[None]:
    """Within the context, the model has an update more; errors as of `apply_update`."""
    before = consolidated(model)
    apply_update(model, update)
    try:
        yield
    finally:
        _set_updates(model, before)


def unconsolidate(model: PreTrainedModel, number: int | None = -1) -> tuple[Consolidation, ...]:
    """Take one update out of the model, bit for bit, and return it; with None, all of them.

    Args:
        model: with or without updates.
        number: index in `consolidated(model)`; a negative one counts from the end.

    Raises:
        ConfigError: there is no such update.
    """
    history = consolidated(model)
    if number is None:
        _set_updates(model, ())
        return history
    if not -len(history) <= number < len(history):
        raise ConfigError(f"there is no update {number} to undo: the model has {len(history)}")
    number %= len(history)
    left = history[:number] + history[number + 1 :]
    _set_updates(model, left)
    return history[number : number + 1]


def consolidated(model: PreTrainedModel) -> tuple[Consolidation, ...]:
    """Return the model's updates, oldest first."""
    return getattr(viewed(model), _HISTORY, ())


def check_update(model: PreTrainedModel, update: Consolidation) -> None:
    """Check that an update fits the model and is finite. Raises like `apply_update`."""
    layers = decoder_layers(model)
    for index, (outer, inner) in update.patches.items():
        if not 0 <= index < len(layers):
            raise ModelError(
                f"the update has a patch for layer {index}, but the model has layers 0 to"
                f" {len(layers) - 1}"
            )
        module = patched_module(layers[index])
        check_patchable(module)
        needed = [
            (outer, [module.out_features, len(inner)]),
            (inner, [len(inner), module.in_features]),
        ]
        for part, shape in needed:
            if part.dtype != torch.float32 or list(part.shape) != shape:
                raise ModelError(
                    f"layer {index}: the update has {part.dtype} {list(part.shape)}, the model"
                    f" needs torch.float32 {shape}"
                )
            if not torch.isfinite(part).all():
                raise ConfigError(f"layer {index}: the update has a value that is not finite")


def patched_module(layer: Any) -> Any:
    """Return the linear layer that updates patch."""
    return layer.mlp.down_proj


def summed(patches: list[Patch]) -> Patch:
    """Return the patch that acts as all of these: their parts side by side, or if that is wider
    than the layer, the identity and a dense [D, F].
    """
    outer = torch.cat([outer for outer, _ in patches], dim=1)
    inner = torch.cat([inner for _, inner in patches])
    if outer.shape[1] <= len(outer):
        return outer, inner
    return torch.eye(len(outer), dtype=outer.dtype, device=outer.device), outer @ inner


def _set_updates(model: PreTrainedModel, history: tuple[Consolidation, ...]) -> None:
    model = viewed(model)
    layers = decoder_layers(model)
    changed = {index for update in consolidated(model) + history for index in update.patches}
    composed: dict[int, Patch | None] = dict.fromkeys(changed)
    with torch.inference_mode(False):  # gradients must be able to pass through the patches
        for index in changed:
            patches = [update.patches[index] for update in history if index in update.patches]
            if patches:
                outer, inner = summed(patches)
                composed[index] = outer.clone(), inner.clone()
        # only once all are in memory: an error must not leave some layers changed
        for index, patch in composed.items():
            set_patch(patched_module(layers[index]), patch)
    setattr(model, _HISTORY, history)
    if not history:
        delattr(model, _HISTORY)
