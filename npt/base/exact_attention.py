"""Attention by torch's memory-efficient kernel, with a backward that repeats its bits.

The kernel's own backward splits the keys among thread blocks that add to the same gradient in no
fixed order; with one split, as asked for here, the order is fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.integrations.sdpa_attention import repeat_kv

_HIDDEN = -1e30
"""Added to a masked score. Finite, so that a padded query without keys gives numbers and not NaN.
Its exponential is exactly 0 next to any unmasked score, and times log2(e), as the kernel takes it,
it does not overflow."""

_ALIGNED = 8
"""A row of a mask starts at a multiple of so many numbers in memory, as the kernel reads it."""


class ExactAttention(torch.autograd.Function):
    """Attention by the memory-efficient kernel, its backward in one split of the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        heads = query.shape[1] // key.shape[1]
        output, log_sum_exp, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            query,
            repeat_kv(key, heads),
            repeat_kv(value, heads),
            _bias(mask, query, key),
            True,
            0.0,
            causal,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, mask, output, log_sum_exp, seed, offset)
        ctx.causal, ctx.scale = causal, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, output, log_sum_exp, seed, offset = ctx.saved_tensors
        heads = query.shape[1] // key.shape[1]
        by_token = [
            x.transpose(1, 2)
            for x in (gradient, query, repeat_kv(key, heads), repeat_kv(value, heads), output)
        ]
        scaling = {} if ctx.scale is None else {"scale": ctx.scale}
        of_query, of_key, of_value, _ = torch.ops.aten._efficient_attention_backward(
            *by_token[:4],
            _bias(mask, query, key),
            by_token[4],
            None,
            None,
            query.shape[2],
            key.shape[2],
            log_sum_exp,
            0.0,
            seed,
            offset,
            int(ctx.causal),  # 1: causal from the top left, 0: no mask of the kernel's own
            False,
            num_splits_key=1,
            **scaling,
        )
        grads = of_query.transpose(1, 2), _summed(of_key, heads), _summed(of_value, heads)
        return *grads, None, None, None


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Sum the gradient of a repeated K or V, [B, S, H, d], to [B, H / heads, S, d]."""
    return gradient.unflatten(2, (-1, heads)).sum(dim=3).transpose(1, 2)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask as the kernel adds it to the scores, [B, H, T, S], shared by the heads."""
    if mask is None:
        return None
    length = key.shape[2]
    aligned = -(-length // _ALIGNED) * _ALIGNED
    bias = query.new_zeros(*mask.shape[:-1], aligned)[..., :length]
    if mask.dtype == torch.bool:
        bias.masked_fill_(~mask, _HIDDEN)
    else:
        bias.copy_(mask)
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], length)
