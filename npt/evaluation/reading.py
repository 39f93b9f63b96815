"""Read texts with a model: without gradients, in a mode, and with stages of its layers kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, evaluating, npt_layers
from npt.adapters.layer import Mode
from npt.adapters.token_modulation import observed


@contextmanager
def reading(model: PreTrainedModel, stream: Mode = "student") -> Iterator[None]:
    """Within the context, layers compute as in evaluation, in a mode of the adapters, without
    gradients.
    """
    with evaluating(model), adapter_mode(model, stream), torch.no_grad():
        yield


@contextmanager
def stages_at(
    model: PreTrainedModel, place: Any, *names: str
) -> Iterator[dict[int, dict[str, Tensor]]]:
    """Within the context, keep the named stages of the student's converted layers, as far as its
    form has them, by layer. place: an index into [B, T, ...].
    """
    found: dict[int, dict[str, Tensor]] = {}
    observers = []

    def keep(kept: dict[str, Tensor], stages: dict[str, Tensor | None]) -> None:
        for name in names:
            stage = stages.get(name)
            if stage is not None:
                kept[name] = stage[place].clone()  # not a view, which would hold the whole stage

    for index, layer in npt_layers(model):
        found[index] = {}
        observers.append((layer.npt, partial(keep, found[index])))
    with observed(observers), reading(model):
        yield found
