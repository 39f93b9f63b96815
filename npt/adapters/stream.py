"""The residual stream of a Llama, layer by layer, with what the layers need beside it.

Strategies walk the layers themselves: they share work between teacher and student, free each layer's graph at once and
stop after the last converted layer, none of which the model's own forward allows. That it computes the same is tested
against that forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function

from npt.data.batch import Batch
from npt.errors import ModelError

PACKABLE = ("sdpa", "eager", "flex_attention")
"""Attention implementations that take a mask which keeps packed documents apart; flash kernels take none."""


@dataclass(frozen=True)
class Stream:
    """The state h in front of a layer, [B, T, D], and the context that the decoder passes to every layer."""

    hidden: Tensor
    context: dict[str, Any]
    batch: Batch
    elsewhere: dict[torch.device, Stream] = field(default_factory=dict, repr=False)

    def at(self, device: torch.device) -> Stream:
        """The same on the device of a layer, where a model is spread over several; copied once and kept.

        What comes back keeps nothing itself: in a ring of streams tensors would live until the garbage collector comes by.
        """
        if device == self.hidden.device:
            return self
        if device not in self.elsewhere:
            context = {name: _moved(value, device) for name, value in self.context.items()}
            self.elsewhere[device] = Stream(self.hidden.to(device), context, self.batch.to(device))
        return self.elsewhere[device]

    def rows(self, states: Tensor) -> Tensor:
        """The valid tokens' rows of [B, T, D] states: [N, D]."""
        return states.reshape(-1, states.shape[-1]).index_select(0, self.batch.valid_index)

    def scatter(self, rows: Tensor) -> Tensor:
        """[N, D] rows back in their places, zeros at padding: [B, T, D]."""
        flat = rows.new_zeros(self.hidden.shape[0] * self.hidden.shape[1], rows.shape[-1])
        return flat.index_copy(0, self.batch.valid_index, rows).view(*self.hidden.shape[:2], -1)

    def clean(self, states: Tensor) -> Tensor:
        """Zero the padded positions. A query without a key may come out of attention as NaN, and as a key, at weight 0,
        it would still poison its row: 0 * NaN is NaN."""
        if not self.batch.padded:
            return states
        return torch.where(self.batch.attention_mask.unsqueeze(-1).bool(), states, 0.0)


def _moved(value: Any, device: torch.device) -> Any:
    """A tensor, or a tuple of some, on a device; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value


def open_stream(model: LlamaForCausalLM, batch: Batch) -> Stream:
    """The stream in front of layer 0: embeddings, rotary positions and the causal mask, as the model's forward makes them."""
    decoder = model.model
    hidden = decoder.embed_tokens(batch.input_ids)
    context = {
        "attention_mask": causal_mask(model, batch, hidden),
        "position_ids": batch.position_ids,
        "position_embeddings": decoder.rotary_emb(hidden, position_ids=batch.position_ids),
        "past_key_values": None,
        "use_cache": False,
    }
    stream = Stream(hidden, context, batch)
    return Stream(stream.clean(hidden), context, batch)


def causal_mask(model: LlamaForCausalLM, batch: Batch, hidden: Tensor) -> Any:
    """The mask that the model's attention takes: causal, closed to padding, and open within a document only where rows are packed.

    Args:
        model, batch: on one device.
        hidden: [B, T, D], whose dtype an additive mask takes.

    Returns:
        What the attention implementation asks for: a tensor [B, 1, T, T], or None where causal is all there is to it.

    Raises:
        ModelError: an implementation that would attend across packed documents.
    """
    config = model.model.config
    packed = batch.documents is not None
    if packed and config._attn_implementation not in PACKABLE:
        raise ModelError(
            f"packed documents would attend to one another under attn_implementation {config._attn_implementation}; load the base with "
            f"{', '.join(PACKABLE)}, or drop --packing"
        )
    return create_causal_mask(
        config=config,
        inputs_embeds=hidden,
        attention_mask=batch.attention_mask if batch.padded else None,
        past_key_values=None,
        position_ids=None,  # given, they would be searched for packed sequences, which waits for the device
        and_mask_function=packed_sequence_mask_function(batch.documents) if packed else None,
    )


def model_inputs(model: LlamaForCausalLM, batch: Batch) -> dict[str, Any]:
    """A batch as arguments of the model's own forward.

    Of packed rows its forward cannot tell the documents once there is a padding mask, so these get their mask made.
    """
    mask = batch.attention_mask
    if batch.documents is not None:
        mask = causal_mask(model, batch, model.model.embed_tokens(batch.input_ids))
    return {"input_ids": batch.input_ids, "attention_mask": mask, "position_ids": batch.position_ids}
