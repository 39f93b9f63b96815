"""A loaded base made to compute in 16 bit: the mixtures that people run, for comparison with the
policy's fp32.

Nothing that trains uses this; the precision policy is in `npt.base.precision`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from npt.base.linear import quantized_linears
from npt.base.precision import UpcastEmbedding, UpcastLinear, audit_precision, declare_dtype

_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    UpcastEmbedding: nn.Embedding,
    UpcastLinear: nn.Linear,
}


def compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Store and compute everything but packed weights in `dtype`, in place; packed weights
    dequantise to it.

    Parameters only: `model.to(dtype)` would round the rotary frequencies as well, which every
    checkpoint keeps in fp32, and the model would lose count of far positions for a reason that has
    nothing to do with its weights.

    Args:
        model: from `load_base`, without adapters.
        dtype: bfloat16 or float16.

    Raises:
        PrecisionError: a module would compute in another dtype all the same.
    """
    declare_dtype(model, dtype)
    packed = {id(module.weight) for _, module in quantized_linears(model)}
    for _, module in quantized_linears(model):
        module.compute_dtype = module.weight.quant_state.dtype = dtype
    for module in model.modules():
        module.__class__ = _PLAIN.get(type(module), type(module))
    for parameter in model.parameters():
        if id(parameter) not in packed and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    audit_precision(model, dtype)
