"""RMSNorm in one kernel on GPUs; transformers' version makes six passes over memory.

A module's class is swapped for a subclass, so names, weights and hooks remain. On a CPU, and in
dtypes other than fp32, nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

FUSED: dict[type[nn.Module], type[nn.Module]] = {}
"""Fused class for each norm class that computes weight * (x / sqrt(mean(x^2) + eps))."""


def _fused(base: Any) -> type[nn.Module]:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if hidden_states.device.type == "cpu" or hidden_states.dtype != torch.float32:
            return base.forward(self, hidden_states)
        weight = self.weight.to(hidden_states.dtype)
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)

    return type(f"Fused{base.__name__}", (base,), {"forward": forward})


for _base in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, SmolLM3RMSNorm):
    # pickle finds a class by its name in the module
    globals()[f"Fused{_base.__name__}"] = FUSED[_base] = _fused(_base)
