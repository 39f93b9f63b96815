"""What the numbers of a code stand for: the passages of a text in which each is largest."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, evaluating, npt_layers
from npt.adapters.token_modulation import observed
from npt.batch import Sample, batches
from npt.evaluation.metrics import checked_batches

PASSAGES = 3
"""Passages of each number, from different samples."""


class Number(NamedTuple):
    """A number of a layer's code, with one sign: its two signs stand for different things."""

    layer: int
    row: int
    sign: int


class Passage(NamedTuple):
    """A token at which a number is large.

    Attributes:
        value: z there.
        ids: the sample's tokens up to this one.
    """

    value: float
    ids: tuple[int, ...]


@torch.no_grad()
def passages_of(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    numbers: Iterable[Number],
    *,
    batch_size: int = 8,
) -> dict[Number, list[Passage]]:
    """Return for each number the passages of the samples in which it is largest, largest first. The
    model does not change.

    Raises:
        DataError: token ids lie outside the vocabulary.
        ModelError: no adapters are attached.
    """
    adapters = {index: layer.npt for index, layer in npt_layers(model)}
    best: dict[Number, list[tuple[float, int, Passage]]] = {number: [] for number in numbers}
    codes: dict[int, Tensor] = {}

    def keep(index: int, stages: dict[str, Tensor | None]) -> None:
        if (z := stages.get("z")) is not None:
            codes[index] = z

    watched = [
        (adapter, lambda stages, index=index: keep(index, stages))
        for index, adapter in adapters.items()
    ]
    done = 0
    with evaluating(model), adapter_mode(model, "student"), observed(watched):
        for batch in checked_batches(model, batches(samples, batch_size), "the text"):
            model.model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            padding = ~batch.attention_mask.bool()
            for number, found in best.items():
                sizes = number.sign * codes[number.layer][..., number.row].masked_fill(padding, 0)
                tops = sizes.max(dim=1)
                places = zip(tops.values.tolist(), tops.indices.tolist(), strict=True)
                for sample, (size, at) in enumerate(places):
                    if size <= 0:
                        continue
                    before = batch.attention_mask[sample, : at + 1].bool()
                    ids = batch.input_ids[sample, : at + 1][before].tolist()
                    passage = Passage(number.sign * size, tuple(ids))
                    heapq.heappush(found, (size, done + sample, passage))
                    if len(found) > PASSAGES:
                        heapq.heappop(found)
            done += len(batch.input_ids)
    return {
        number: [passage for *_, passage in sorted(found, reverse=True)]
        for number, found in best.items()
    }
