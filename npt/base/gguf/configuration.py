"""The configuration of a model in a GGUF file, from its metadata.

transformers' reader drops the scaling of rotary embeddings (Llama 3.1 and later), assumes heads of
128 for Qwen3 and does not support SmolLM3. This reader refuses entries that it does not know, since
they may change what the model computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from npt.base.families import FAMILIES, MOST_LAYERS, check_entries, check_shape
from npt.base.gguf.file import PLAIN, GGUFFile
from npt.errors import first_line
from npt.stored import shown

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
"""llama.cpp's names, the same as transformers' `model_type`. Mistral's models are `llama`."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the frequencies of rotary embeddings."""

ORIGIN = "npt_origin"
"""Entry of `config.json` that names the file a model was read from."""

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"

_KNOWN = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "expert_count",
    "expert_used_count",
    "tensor_data_layout",
    "use_parallel_residual",  # in old files of Qwen2; llama.cpp ignores it
}
"""Entries, after the architecture's name, that this reader reads or that change nothing."""

_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The same for all models since Llama 3.1."""


def configuration_of(file: GGUFFile) -> PreTrainedConfig:
    """Return the configuration of the model in a file, with `dtype` fp16. Its entry `npt_origin`
    names the file and its quantisation.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise file.refusal(
            f"has the architecture {shown(name)}; from GGUF NPT supports only"
            f" {', '.join(ARCHITECTURES)}"
        )
    keys = {f"{name}.{key}" for key in _KNOWN}
    unknown = [key for key in file.keys if key.startswith(f"{name}.") and key not in keys]
    if unknown:
        raise file.refusal(
            f"has the unknown entry {min(unknown)}, which may change what the model computes; load"
            " a folder of the model instead"
        )
    heads = _count(file, "attention.head_count")
    width = _count(file, "embedding_length")
    head = _count(file, "attention.key_length", width // heads)
    # the families support a single value of these
    fixed = {
        "expert_count": 0,
        "attention.value_length": head,
        "rope.dimension_count": head,
        "attention.causal": True,
    }
    for key, wanted in fixed.items():
        value = file.get(f"{name}.{key}", type(wanted), wanted)
        if value != wanted:
            raise file.refusal(f"has {key} {value}; NPT supports only {wanted}")
    if EMBEDDING not in file.tensors:
        raise file.refusal(f"lacks the tensor {EMBEDDING}; download it again")
    # transformers would build all layers that a damaged file claims
    layers = _count(file, "block_count")
    if layers > min(len(file.tensors), MOST_LAYERS):
        raise file.refusal(
            f"has block_count {layers:,}, but {len(file.tensors):,} tensors; NPT supports at most"
            f" {MOST_LAYERS:,} layers; download it again"
        )
    settings: dict[str, Any] = {
        "vocab_size": int(file.tensors[EMBEDDING].shape[-1]),
        "hidden_size": width,
        "intermediate_size": _count(file, "feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, "attention.head_count_kv", heads),
        "head_dim": head,
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": _decimal(file.get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        "rope_parameters": _rope(file),
        "tie_word_embeddings": HEAD not in file.tensors,
        **_biases(file),
        # None, not the class's default, for a token that the file lacks
        **{f"{token}_token_id": file.token_id(token) for token in ("bos", "eos", "pad")},
    }
    check_entries(str(file.path), settings)
    try:
        config: PreTrainedConfig = AutoConfig.for_model(name, **settings)
    except Exception as error:  # transformers raises several kinds
        raise file.refusal(f"is damaged ({first_line(error)[:200]}); download it again") from error
    check_shape(str(file.path), config)
    if ROPE_FACTORS in file.tensors:
        _check_rope(file, config)
    config.architectures = [f"{FAMILIES[name].prefix}ForCausalLM"]
    config.dtype = torch.float16
    setattr(config, ORIGIN, {"file": file.path.name, "quantization": file.quantization})
    return config


def describe_origin(config: Any) -> str | None:
    """Return a line about the GGUF file that a model was read from; None for other models."""
    origin = getattr(config, ORIGIN, None)
    if not isinstance(origin, dict):
        return None
    file = origin.get("file")
    kind = origin.get("quantization")
    if kind in PLAIN:
        return f"{file} holds {kind}"
    return f"{file} was quantised to {kind}; its weights are loaded, not the original's"


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(f"{file.architecture}.{key}", int, default)
    if value < 1:
        raise file.refusal(f"has {key} {value} and is damaged; download it again")
    return value


def _decimal(value: float) -> float:
    """Return the shortest decimal of an fp32 number, such as 1e-05."""
    return float(str(np.float32(value)))


def _biases(file: GGUFFile) -> dict[str, bool]:
    """Return the settings of biases; Qwen2 has none, since its biases are fixed."""
    attention = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    mlp = {"mlp_bias": "blk.0.ffn_up.bias" in file.tensors}
    return {"qwen2": {}, "qwen3": attention}.get(file.architecture, attention | mlp)


def _rope(file: GGUFFile) -> dict[str, Any]:
    name = file.architecture
    theta = _decimal(file.get(f"{name}.rope.freq_base", float, 10000.0))
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn"):
        factor = _decimal(file.get(f"{name}.rope.scaling.factor", float))
        parameters |= {"rope_type": kind, "factor": factor}
    elif kind != "none":
        raise file.refusal(
            f"scales rotary embeddings by {shown(kind)}; NPT supports linear, yarn and Llama 3's"
        )
    if kind == "yarn":
        # it scales by how often a frequency turns within the original context
        length = _count(file, "rope.scaling.original_context_length")
        parameters["original_max_position_embeddings"] = length
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise file.refusal(f"scales rotary embeddings twice, by {kind} and by {ROPE_FACTORS}")
        # Llama 3 divides the slowest frequencies by its whole factor
        factor = float(_factors(file).max())
        if factor != 1:
            parameters |= {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return parameters


def _factors(file: GGUFFile) -> torch.Tensor:
    from gguf import dequantize

    tensor = file.tensors[ROPE_FACTORS]
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def _check_rope(file: GGUFFile, config: PreTrainedConfig) -> None:
    """Raise ModelError if the file's frequency factors differ from those of the configuration."""
    factors = _factors(file)
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    unscaled = config.rope_parameters["rope_theta"] ** (-dims / config.head_dim)
    made = (unscaled / LlamaRotaryEmbedding(config).inv_freq).float()
    if made.shape != factors.shape or not torch.allclose(made, factors, rtol=1e-4, atol=0.0):
        raise file.refusal(
            f"scales rotary embeddings by {ROPE_FACTORS}, whose factors are not Llama 3's; load a"
            " folder of the model instead"
        )
