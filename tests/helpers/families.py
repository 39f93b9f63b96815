"""A tiny random model of every family, saved as a base: what the parity tests and others load."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from npt.base.source import EMBEDDED_FOLDER

VOCAB = 2048  # of the embedded model's tokenizer, which each of them gets
WINDOW = 4

_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    # large enough that attention and MLP matter next to the residual stream
    "initializer_range": 0.15,
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW}

MAKE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 8}),
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2, window": ("qwen2", {**_WINDOW, "max_window_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, window": ("qwen3", {**_WINDOW, "head_dim": 16, "max_window_layers": 1}),
    "smollm3": ("smollm3", {}),
    "smollm3, window": ("smollm3", {**_WINDOW, "no_rope_layer_interval": 2}),
}
"""transformers' name of a model's kind, and its settings."""


def config_of(name: str) -> Any:
    kind, settings = MAKE[name]
    return AutoConfig.for_model(kind, **_SIZE, **settings)


def save_base(name: str, folder: Path) -> Path:
    """A base of this family in a new folder, in bf16, with biases and norms away from their start,
    and a tokenizer.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_FOLDER / file, folder / file)
    return folder
