"""What the numbers of a code stand for: the passages of a text in which each is largest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from transformers import PreTrainedModel

from npt.batch import Sample, batches
from npt.evaluation.metrics import checked_batches
from npt.evaluation.reading import stages_at

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
    # largest first; the sample's index decides between equal sizes
    best: dict[Number, list[tuple[float, int, Passage]]] = {number: [] for number in numbers}
    done = 0
    with stages_at(model, ..., "z") as kept:
        for batch in checked_batches(model, batches(samples, batch_size), "the text"):
            model.model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
            padding = ~batch.attention_mask.bool()
            for number, found in best.items():
                values = kept[number.layer]["z"][..., number.row]  # [B, T]
                tops = (number.sign * values.masked_fill(padding, 0)).max(dim=1)
                # read at once, so that the loop does not wait for the device at each sample
                places = tops.indices.tolist()
                for sample, size in enumerate(tops.values.tolist()):
                    if size > 0:  # not of the other sign, and active
                        read = slice(places[sample] + 1)
                        ids = batch.input_ids[sample, read][~padding[sample, read]].tolist()
                        passage = Passage(number.sign * size, tuple(ids))
                        found.append((size, done + sample, passage))
                found.sort(reverse=True)
                del found[PASSAGES:]
            done += len(batch.input_ids)
    largest = {}
    for number, found in best.items():
        largest[number] = [passage for *_, passage in found]
    return largest
