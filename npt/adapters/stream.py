"""The residual stream of a decoder: the states between its layers, and the layers' arguments.

Strategies call the layers one by one. Unlike the model's forward, they can share work between
teacher and student, free each layer's graph at once and stop after the last converted layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    create_causal_mask,
    create_sliding_window_causal_mask,
    packed_sequence_mask_function,
)

from npt.base.attention import EXACT, SDPA, attention_name
from npt.base.families import FAMILIES
from npt.batch import Batch
from npt.config import ATTENTIONS
from npt.errors import ModelError

MASKED = ("sdpa", SDPA, EXACT, "eager")
"""Attention implementations that support the masks of packed documents; flash kernels do not."""


@dataclass(frozen=True)
class Stream:
    """The states between two layers, and the arguments that the decoder passes to its layers.

    Attributes:
        hidden: h, [B, T, D].
        shared: arguments by name, the same for all layers.
        masks: attention mask of each layer; layers with the same reach share one.
        batch: the batch of tokens.
    """

    hidden: Tensor
    shared: dict[str, Any]
    masks: tuple[Any, ...]
    batch: Batch

    def context_of(self, layer: Any) -> dict[str, Any]:
        """Return the arguments that the decoder passes to a layer, without h."""
        return {**self.shared, "attention_mask": self.masks[layer.self_attn.layer_idx]}

    def after(self, layer: Any, hidden: Tensor) -> Tensor:
        """Return the states [B, T, D] after a layer applied to `hidden`."""
        return self.clean(layer(hidden, **self.context_of(layer)))

    def through(self, layers: Iterable[Any]) -> Stream:
        """Return the stream after these layers, applied in order."""
        hidden = self.hidden
        for layer in layers:
            hidden = self.after(layer, hidden)
        return replace(self, hidden=hidden)

    def rows(self, states: Tensor) -> Tensor:
        """Return the valid tokens' rows [N, D] of [B, T, D] states; a view if all are valid."""
        flat = states.reshape(-1, states.shape[-1])
        return flat.index_select(0, self.batch.valid_index) if self.batch.padded else flat

    def scatter(self, rows: Tensor) -> Tensor:
        """Put rows [N, D] back into [B, T, D], with zeros at padding."""
        if self.batch.padded:
            flat = rows.new_zeros(self.batch.attention_mask.numel(), rows.shape[-1])
            rows = flat.index_copy(0, self.batch.valid_index, rows)
        return rows.view(*self.hidden.shape[:2], -1)

    def clean(self, states: Tensor) -> Tensor:
        """Zero the padded positions.

        Attention may return NaN for a query without keys, which would make its row NaN in the next
        layer: 0 * NaN is NaN.
        """
        if not self.batch.padded:
            return states
        valid = self.batch.attention_mask.bool()
        return torch.where(valid.unsqueeze(-1), states, 0.0)


def open_stream(model: PreTrainedModel, batch: Batch) -> Stream:
    """Return the stream before layer 0, as the model's forward computes it."""
    decoder = model.model
    hidden = decoder.embed_tokens(batch.input_ids)
    shared = {
        "position_ids": batch.position_ids,
        "position_embeddings": decoder.rotary_emb(hidden, position_ids=batch.position_ids),
        "past_key_values": None,
        "use_cache": False,
    }
    stream = Stream(hidden, shared, causal_masks(model, batch, hidden), batch)
    return replace(stream, hidden=stream.clean(hidden))


def causal_masks(model: PreTrainedModel, batch: Batch, hidden: Tensor) -> tuple[Any, ...]:
    """Return each layer's attention mask: causal, within its window, without padding and, in packed
    rows, without other documents. A mask is a tensor [B, 1, T, T], or None for causal alone.

    Raises:
        ModelError: the attention implementation would attend across packed documents.
    """
    config = model.model.config
    implementation = config._attn_implementation
    if batch.documents is not None and implementation not in MASKED:
        raise ModelError(
            "packed documents would attend to one another with attn_implementation"
            f" {attention_name(model)}: load the base with --attn_implementation"
            f" {' or '.join(ATTENTIONS)}, or remove --packing"
        )
    sliding = sliding_layers(config)
    documents = batch.documents
    apart = None if documents is None else packed_sequence_mask_function(documents)
    # With positions, or if asked to skip masks, transformers would search for packed rows and
    # padding, which waits for the GPU.
    arguments = {
        "config": config,
        "inputs_embeds": hidden,
        "attention_mask": batch.attention_mask if batch.padded else None,
        "past_key_values": None,
        "position_ids": None,
        "and_mask_function": apart,
        "allow_is_causal_skip": not batch.padded,
    }
    full = None if all(sliding) else create_causal_mask(**arguments)
    window = create_sliding_window_causal_mask(**arguments) if any(sliding) else None
    return tuple(window if slides else full for slides in sliding)


def sliding_layers(config: PreTrainedConfig) -> tuple[bool, ...]:
    """Return for each layer whether it attends only to the last `sliding_window` tokens."""
    sight = FAMILIES[config.model_type].sight
    if sight != "by layer":
        return (sight == "window" and config.sliding_window is not None,) * config.num_hidden_layers
    odd = sorted(set(config.layer_types) - {"full_attention", "sliding_attention"})
    if odd:
        raise ModelError(
            f"the model has layers of type {odd[0]!r}; NPT supports only full_attention and"
            " sliding_attention"
        )
    return tuple(kind == "sliding_attention" for kind in config.layer_types)


def is_known(model: nn.Module) -> bool:
    """Return whether the model belongs to a supported family."""
    return getattr(getattr(model, "config", None), "model_type", None) in FAMILIES


def model_inputs(model: PreTrainedModel, batch: Batch) -> dict[str, Any]:
    """Return a batch as arguments of the model's own forward.

    It includes the masks of packed rows, since the forward itself cannot tell documents apart.
    """
    inputs: dict[str, Any] = batch.inputs
    if batch.documents is not None:
        hidden = model.model.embed_tokens(batch.input_ids)
        masks = causal_masks(model, batch, hidden)
        inputs["attention_mask"] = masks[0]
        if FAMILIES[model.config.model_type].sight == "by layer":
            # such a model expects a mask for each kind of layer
            kinds = model.config.layer_types
            inputs["attention_mask"] = dict(zip(kinds, masks, strict=True))
    return inputs
