"""LongRoPE (Ding et al. 2024, arXiv 2402.13753) by document.

Beyond the length that a model was first trained on, its rotary frequencies are others. transformers
takes those of the longest row for the whole batch, so a short row's states depend on its
neighbours: a student would learn from another teacher than the one that it is measured against.
Here each document takes its own, whatever it is batched or packed with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_BEYOND = "npt_beyond"


def by_document(model: Any) -> None:
    """Let the rotary embedding of a model with LongRoPE look at each document, in place."""
    rotary = model.model.rotary_emb
    if getattr(rotary, "rope_type", None) == "longrope" and not isinstance(rotary, _ByDocument):
        own = type(rotary)
        rotary.__class__ = type(own.__name__, (_ByDocument, own), {})
        rotary.find_frequencies()


class _ByDocument(nn.Module):
    """Put before a family's own class, whose constructor, buffers and scale remain."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.find_frequencies()

    def find_frequencies(self: Any) -> None:
        """Keep both sets of frequencies, [d / 2] each."""
        parameters, device = self.config.rope_parameters, self.inv_freq.device
        self.trained_length = parameters["original_max_position_embeddings"]
        make = ROPE_INIT_FUNCTIONS["longrope"]
        beyond, _ = make(self.config, device, seq_len=self.trained_length + 1)
        self.register_buffer(_BEYOND, beyond, persistent=False)

    @torch.no_grad()
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [B, T, d], in the dtype of x; position_ids: [B, T]."""
        beyond = lengths(position_ids)[..., None] > self.trained_length
        chosen = torch.where(beyond, getattr(self, _BEYOND), self.original_inv_freq).float()
        angles = position_ids[..., None].float() * chosen
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos() * self.attention_scaling, both.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def lengths(position_ids: Tensor) -> Tensor:
    """Return each token's length of its document as far as it is read, [B, T]; positions begin at 0
    in every document."""
    document = (position_ids == 0).cumsum(dim=-1)
    size = position_ids.shape[-1] + 1
    last = position_ids.new_zeros(*position_ids.shape[:-1], size)
    return last.scatter_reduce(-1, document, position_ids, "amax").gather(-1, document) + 1
