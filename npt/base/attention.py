"""SDPA attention for fp32 on CUDA: in linear memory, with a backward that repeats its bits.

Without a mask transformers' own function hands grouped queries to torch as they are (`enable_gqa`).
In fp32 on CUDA only the math kernel takes these, which keeps the scores of every pair of tokens.
Here K and V are repeated for every query head, so that the memory-efficient kernel takes them. All
else goes to transformers' function.

npt/base/exact_attention.py has the kernel's backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from npt.base.precision import policy_dtype

SDPA = "npt_sdpa"
"""The name under which transformers knows `sdpa_attention`. It is never saved: transformers writes
no attention implementation to a configuration."""

_THEIRS = ("position_bias", "cache", "softcap", "output_attentions")
"""Arguments that only transformers' function supports."""


def sdpa_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute transformers' "sdpa", by the memory-efficient kernel for fp32 on CUDA.

    query: [B, H, T, d]; key and value: [B, H / groups, S, d]; attention_mask: [B, 1 or H, T, S],
    bool (True: may attend) or added to the scores. Returns ([B, T, H, d], None).
    """
    length = query.shape[2]
    square = attention_mask is not None or key.shape[2] == length
    theirs = dropout or any(
        others.get(name) is not None and others[name] is not False for name in _THEIRS
    )
    if theirs or length == 1 or not square or not _on_cuda_in_fp32(query, key, value):
        others |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **others)
    causal = attention_mask is None and bool(
        getattr(module, "is_causal", True) if is_causal is None else is_causal
    )
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if graph and _has_exact_backward(query, causal):
        from npt.base.exact_attention import ExactAttention

        # None for the kernel's default: torch's shape function of its backward takes no other
        usual = scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5, rel_tol=1e-12)
        scale = None if usual else scaling
        output = ExactAttention.apply(query, key, value, attention_mask, causal, scale)
    else:
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scaling
        )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(SDPA, sdpa_attention)
AttentionMaskInterface.register(SDPA, sdpa_mask)


def implementation_of(name: str) -> str:
    """Return the name to load a model with, from an `attn_implementation` as users name it."""
    return SDPA if name == "sdpa" else name


def attention_name(model: PreTrainedModel) -> str:
    """Return a model's attention implementation as users name it."""
    name = str(model.config._attn_implementation)
    return "sdpa" if name == SDPA else name


def repeats_exactly(model: PreTrainedModel) -> bool:
    """Return whether a backward through the model's attention repeats its bits, by torch's sources:
    not known of flex_attention and of the flash kernels that "sdpa" reaches in fp16.
    """
    name = model.config._attn_implementation
    if name == "eager" or all(parameter.device.type == "cpu" for parameter in model.parameters()):
        return name != "flex_attention"
    return name == SDPA and policy_dtype(model) == torch.float32 and torch.version.hip is None


def _on_cuda_in_fp32(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cuda" and tensor.dtype == torch.float32 for tensor in tensors)


def _has_exact_backward(query: Tensor, causal: bool) -> bool:
    """Return whether the memory-efficient kernel takes such heads here, with splits to choose."""
    if torch.version.hip is not None or torch.compiler.is_compiling():
        return False
    parameters = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, causal, False)
    return torch.backends.cuda.can_use_efficient_attention(parameters)
