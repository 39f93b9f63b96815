"""A tiny random model of every family, saved as a base: what the parity tests and others load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from npt.base.load import EMBEDDED_FOLDER

VOCAB = 2048  # of the embedded model's tokenizer, which each of them gets
WINDOW = 4

_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # large enough that attention and MLP matter next to the residual stream
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}

MAKE = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZE, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZE, sliding_window=None, head_dim=8)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**_SIZE, sliding_window=WINDOW)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZE)),
    "qwen2, window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_SIZE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZE, head_dim=16)),
    "qwen3, window": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **_SIZE,
            head_dim=16,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        )
    ),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**_SIZE)),
    "smollm3, window": lambda: SmolLM3ForCausalLM(
        SmolLM3Config(
            **_SIZE, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=WINDOW
        )
    ),
}


def save_base(name: str, folder: Path) -> Path:
    """A base of this family in a new folder, in bf16, with biases and norms away from their start,
    and a tokenizer.
    """
    torch.manual_seed(0)
    model = MAKE[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / file, folder / file)
    return folder
