"""The residual stream of a decoder, layer by layer, with what the layers need beside it.

Strategies walk the layers themselves: they share work between teacher and student, free each
layer's graph at once and stop after the last converted layer, none of which the model's own forward
allows. That it computes the same is tested against that forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
    padding_mask_function,
)

from npt.base.attention import SDPA, attention_name
from npt.base.families import FAMILIES, sliding_layers
from npt.config import ATTENTIONS
from npt.data.batch import Batch
from npt.errors import ModelError

MASKED = ("sdpa", SDPA, "eager", "flex_attention")
"""Attention implementations that take a mask for every pair of tokens, as packed documents need;
flash kernels take none.
"""


@dataclass(frozen=True)
class Stream:
    """The state h in front of a layer, [B, T, D], and what the decoder passes to its layers beside
    it.

    beside: by argument, what is the same for all layers. masks: one for each layer, of which layers
    that see alike share one.
    """

    hidden: Tensor
    beside: dict[str, Any]
    masks: tuple[Any, ...]
    batch: Batch
    elsewhere: dict[torch.device, Stream] = field(default_factory=dict, repr=False)

    def at(self, device: torch.device) -> Stream:
        """The same on the device of a layer, where a model is spread over several; copied once and
        kept.

        What comes back keeps nothing itself: in a ring of streams tensors would live until the
        garbage collector comes by.
        """
        if device == self.hidden.device:
            return self
        if device not in self.elsewhere:
            beside = {name: _moved(value, device) for name, value in self.beside.items()}
            # layers that see alike go on sharing one
            moved = {id(mask): _moved(mask, device) for mask in self.masks}
            masks = tuple(moved[id(mask)] for mask in self.masks)
            self.elsewhere[device] = Stream(
                self.hidden.to(device), beside, masks, self.batch.to(device)
            )
        return self.elsewhere[device]

    def context_of(self, layer: Any) -> dict[str, Any]:
        """What the decoder passes to this layer of its own beside h."""
        return {**self.beside, "attention_mask": self.masks[layer.self_attn.layer_idx]}

    @property
    def context(self) -> dict[str, Any]:
        """What the decoder passes to any of its layers, where all see alike.

        Raises:
            ModelError: some look back through a sliding window and some on everything.
        """
        if any(mask is not self.masks[0] for mask in self.masks):
            raise ModelError(
                "the layers of this model do not all look back equally far; ask for the context of"
                " one layer"
            )
        return {**self.beside, "attention_mask": self.masks[0]}

    def rows(self, states: Tensor) -> Tensor:
        """The valid tokens' rows of [B, T, D] states: [N, D]."""
        return states.reshape(-1, states.shape[-1]).index_select(0, self.batch.valid_index)

    def scatter(self, rows: Tensor) -> Tensor:
        """[N, D] rows back in their places, zeros at padding: [B, T, D]."""
        flat = rows.new_zeros(self.hidden.shape[0] * self.hidden.shape[1], rows.shape[-1])
        return flat.index_copy(0, self.batch.valid_index, rows).view(*self.hidden.shape[:2], -1)

    def clean(self, states: Tensor) -> Tensor:
        """Zero the padded positions. A query without a key may come out of attention as NaN, and as
        a key, at weight 0, it would still poison its row: 0 * NaN is NaN."""
        if not self.batch.padded:
            return states
        return torch.where(self.batch.attention_mask.unsqueeze(-1).bool(), states, 0.0)


def _moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a tuple of some, on a device; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value


def open_stream(model: PreTrainedModel, batch: Batch) -> Stream:
    """The stream in front of layer 0: embeddings, rotary positions and the causal masks, as the
    model's forward makes them.
    """
    decoder = model.model
    hidden = decoder.embed_tokens(batch.input_ids)
    beside = {
        "position_ids": batch.position_ids,
        "position_embeddings": decoder.rotary_emb(hidden, position_ids=batch.position_ids),
        "past_key_values": None,
        "use_cache": False,
    }
    masks = causal_masks(model, batch, hidden)
    stream = Stream(hidden, beside, masks, batch)
    return Stream(stream.clean(hidden), beside, masks, batch)


def causal_masks(model: PreTrainedModel, batch: Batch, hidden: Tensor) -> tuple[Any, ...]:
    """The mask that each layer's attention takes: causal, within its window, closed to padding, and
    open within a document only where rows are packed.

    Args:
        model, batch: on one device.
        hidden: [B, T, D], whose dtype an additive mask takes.

    Returns:
        Of each layer, what the attention implementation asks for: a tensor [B, 1, T, T], or None
            where causal is all there is to it.

    Raises:
        ModelError: an implementation that would attend across packed documents.
    """
    config = model.model.config
    implementation = config._attn_implementation
    if batch.documents is not None and implementation not in MASKED:
        raise ModelError(
            "packed documents would attend to one another under attn_implementation"
            f" {attention_name(model)}; load the base with --attn_implementation"
            f" {', '.join(ATTENTIONS)}, or drop --packing"
        )
    sliding = sliding_layers(config)
    # Asked whether a mask could be skipped, transformers would look whether anything is padded, as
    # it would look for packed rows in
    # positions: each waits for the device. For flex_attention it always looks at a mask of padding,
    # so there that is a function too.
    by_function = batch.padded and implementation == "flex_attention"
    closed = [padding_mask_function(batch.attention_mask.bool())] if by_function else []
    if batch.documents is not None:
        closed.append(packed_sequence_mask_function(batch.documents))
    arguments = {
        "config": config,
        "inputs_embeds": hidden,
        "attention_mask": batch.attention_mask if batch.padded and not by_function else None,
        "past_key_values": None,
        "position_ids": None,
        "and_mask_function": and_masks(*closed) if closed else None,
        "allow_is_causal_skip": not batch.padded,
    }
    full = None if all(sliding) else create_causal_mask(**arguments)
    window = create_sliding_window_causal_mask(**arguments) if any(sliding) else None
    return tuple(window if slides else full for slides in sliding)


def model_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """A batch as arguments of the model's own forward.

    Of packed rows its forward cannot tell the documents once there is a padding mask, so these get
    their mask made.
    """
    mask: Any = batch.attention_mask
    if batch.documents is not None:
        masks = causal_masks(model, batch, model.model.embed_tokens(batch.input_ids))
        # such a model takes a mask for each kind of layer
        by_layer = FAMILIES[model.config.model_type].sight == "by layer"
        mask = dict(zip(model.config.layer_types, masks, strict=True)) if by_layer else masks[0]
    return {
        "input_ids": batch.input_ids,
        "attention_mask": mask,
        "position_ids": batch.position_ids,
    }
