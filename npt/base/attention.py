"""SDPA attention for fp32 on CUDA, in linear memory.

For grouped queries in fp32 on CUDA, torch has only the math kernel, which stores the scores of
every pair of tokens. Here K and V are repeated for every query head, so that the memory-efficient
kernel can be used. All other cases go to transformers' function.

The kernel's backward splits the keys among thread blocks that add to one gradient in no fixed
order. With a single split (`set_deterministic`) the order is fixed, but at batch 1 three quarters
of an H100 are idle.

Without a backward and without a mask, if TF32 is allowed, the operands are rounded to fp16 for the
flash kernel, which takes a fifth of the time. fp16 has as many digits as TF32, and the same error:
9e-4 of the output in the worst layer of SmolLM2-135M (bf16: 7e-3).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from npt.base.precision import policy_dtype, tf32_allowed

SDPA = "npt_sdpa"
EXACT = "npt_sdpa_exact"
"""Transformers' names of `sdpa_attention` and its exact form, never written to a configuration."""


def sdpa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    exact: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' "sdpa", with a fused kernel for fp32 on CUDA.

    Args as of transformers: query [B, H, T, d], key and value [B, H / groups, S, d], attention_mask
    [B, 1 or H, T, S], bool (True: may attend) or added to the scores. exact: use a backward that
    repeats its bits. Returns ([B, T, H, d], None).
    """
    length = query.shape[2]
    inputs = (query, key, value)
    # torch counts a causal mask from the first key, but with a cache the queries are the last ones
    masked = attention_mask is not None
    aligned = masked or key.shape[2] == length
    fused = aligned and length != 1 and not dropout
    if not fused or not _on_cuda_in_fp32(*inputs):
        return sdpa_attention_forward(
            module,
            *inputs,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **others,
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = not masked and bool(is_causal)
    trained = any(x.requires_grad for x in inputs)
    graph = torch.is_grad_enabled() and trained
    if graph and _has_backward(query, causal):
        # None for the default: torch's shape function of the backward supports no other scale
        default = query.shape[-1] ** -0.5
        is_default = scaling is not None and math.isclose(scaling, default, rel_tol=1e-12)
        if is_default:
            scaling = None
        output = FusedAttention.apply(query, key, value, attention_mask, causal, scaling, exact)
    elif not graph and not masked and _takes_fp16(query, key, causal):
        output = _in_fp16(query, key, value, causal, scaling)
    else:
        # for grouped queries torch has only the math kernel
        groups = query.shape[1] // key.shape[1]
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling
        )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(SDPA, sdpa_attention)
AttentionInterface.register(EXACT, partial(sdpa_attention, exact=True))
AttentionMaskInterface.register(SDPA, sdpa_mask)
AttentionMaskInterface.register(EXACT, sdpa_mask)


def implementation_of(name: str) -> str:
    """Return transformers' name of an `attn_implementation` that a user passes."""
    return SDPA if name == "sdpa" else name


def attention_name(model: PreTrainedModel) -> str:
    """Return the user's name of a model's attention implementation."""
    name = str(model.config._attn_implementation)
    return "sdpa" if name in (SDPA, EXACT) else name


def set_deterministic(model: PreTrainedModel, deterministic: bool) -> None:
    """Select the backward of a model's "sdpa" attention on CUDA: bit-exact, or fast."""
    if model.config._attn_implementation in (SDPA, EXACT):
        model.config._attn_implementation = EXACT if deterministic else SDPA


def repeats_exactly(model: PreTrainedModel) -> bool:
    """Return whether torch's source shows that a backward through attention repeats its bits."""
    name = model.config._attn_implementation
    if name == "eager" or all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return True
    return name == EXACT and policy_dtype(model) == torch.float32 and torch.version.hip is None


def _on_cuda_in_fp32(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cuda" and tensor.dtype == torch.float32 for tensor in tensors)


def _has_backward(query: Tensor, causal: bool) -> bool:
    """Return whether the memory-efficient kernel supports these heads and a choice of splits."""
    if torch.version.hip is not None or torch.compiler.is_compiling():
        return False
    parameters = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, causal, False)
    return torch.backends.cuda.can_use_efficient_attention(parameters)


def _takes_fp16(query: Tensor, key: Tensor, causal: bool) -> bool:
    """Return whether TF32 is allowed and the flash kernel supports these heads in fp16."""
    if not tf32_allowed() or torch.compiler.is_compiling():
        return False
    q, k = (torch.empty_like(x, dtype=torch.float16) for x in (query, key))
    parameters = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, causal, True)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _in_fp16(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """Return attention [B, H, T, d] in fp32 from operands rounded to fp16.

    v is scaled into fp16's range, and the output back, so that v neither overflows nor underflows.
    An Inf in q or k could silently drop a key, so it turns its row of the batch into NaN.
    """

    def largest(x: Tensor) -> Tensor:
        # keep dimensions: in type promotion a scalar tensor would not count
        return torch.linalg.vector_norm(x, torch.inf, dim=(1, 2, 3), keepdim=True)

    q = query.half()
    k = key.half()
    v = torch.empty_like(value, dtype=torch.float16)
    unit = (largest(value) * 2.0**-15).clamp_min(1e-35)
    torch.div(value, unit, out=v)
    output = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    # plus 0 times the largest of q and k: NaN if that is Inf, else the unit's own bits
    unit = torch.add(unit, torch.maximum(largest(q), largest(k)), alpha=0.0)
    return output * unit


_HIDDEN = -1e30
"""Added to a masked score, whose exponential is then 0 next to any other. It is finite, also times
log2(e) in the kernel, so that a padded query without keys does not yield NaN."""

_ALIGNED = 8
"""The kernel needs rows of a mask to start at a multiple of this many numbers in memory."""


class FusedAttention(torch.autograd.Function):
    """Attention with the memory-efficient kernel; `exact`: one split of the keys in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
        exact: bool,
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
        ctx.causal = causal
        ctx.scale = scale
        ctx.splits = 1 if exact else None
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # this kernel takes and returns [B, T, H, d]
        def by_token(x: Tensor) -> Tensor:
            return x.transpose(1, 2)

        query, key, value, mask, output, log_sum_exp, seed, offset = ctx.saved_tensors
        # repeated again, since keeping the copies would take the memory of all heads
        heads = query.shape[1] // key.shape[1]
        scaling = {} if ctx.scale is None else {"scale": ctx.scale}
        of_query, of_key, of_value, _ = torch.ops.aten._efficient_attention_backward(
            by_token(gradient),
            by_token(query),
            by_token(repeat_kv(key, heads)),
            by_token(repeat_kv(value, heads)),
            _bias(mask, query, key),
            by_token(output),
            None,
            None,
            query.shape[2],
            key.shape[2],
            log_sum_exp,
            # no dropout; the next two are its state
            0.0,
            seed,
            offset,
            int(ctx.causal),  # 1: causal from the top left, 0: no built-in mask
            False,
            num_splits_key=ctx.splits,
            **scaling,
        )
        of_key = _summed(of_key, heads)
        of_value = _summed(of_value, heads)
        return by_token(of_query), of_key, of_value, None, None, None, None


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Sum the gradient [B, S, H, d] of a repeated K or V to [B, H / heads, S, d]."""
    return gradient.unflatten(2, (-1, heads)).sum(dim=3).transpose(1, 2)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the mask that the kernel adds to the scores, [B, H, T, S], shared by the heads."""
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
