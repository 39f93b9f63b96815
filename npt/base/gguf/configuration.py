"""The configuration of a model in a GGUF file, from its metadata.

transformers has a reader of its own, which drops the scaling of rotary embeddings (Llama 3.1 and
later), takes heads of 128 for granted in Qwen3 and does not know SmolLM3. Here an entry that is
not understood is refused: it may change what the model computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from npt.base.families import FAMILIES, check_counts
from npt.base.gguf.file import PLAIN, GGUFFile
from npt.errors import first_line
from npt.stored import shown

ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
"""llama.cpp's names, which are transformers' `model_type` as well; Mistral's models are `llama`."""

ORIGIN = "npt_origin"
"""The entry of `config.json` that says which file a model was read from."""

ORIGIN_ENTRY = "base_origin"
"""The same in `run.json` and in an adapter's `adapter_config.json`."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor by which llama.cpp divides the frequencies of rotary embeddings."""

EMBEDDING, HEAD = "token_embd.weight", "output.weight"

_KNOWN = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "use_parallel_residual",  # of old files of Qwen2, which llama.cpp does not read
    "vocab_size",
}

# The factors of Llama 3.1 and later: all of its models share these.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def configuration_of(file: GGUFFile) -> PreTrainedConfig:
    """Return the configuration of the model in a file, without `quantization_config`.

    Its `dtype` is fp16, which is of the size of what is stored. Its entry `npt_origin` names the
    file and what it was quantised to.

    Raises:
        ModelError: an unknown architecture, or an entry is missing, unknown or contradicts others.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise file.refusal(
            f"is of the architecture {shown(name)}; only {', '.join(ARCHITECTURES)} can be read"
            " from GGUF"
        )
    unknown = sorted(set(file.keys(f"{name}.")) - _KNOWN)
    if unknown:
        raise file.refusal(
            f"has the entry {name}.{unknown[0]}, which may change what the model computes and is"
            " not known; load a folder of the model instead"
        )
    layers, blocks = _count(file, "block_count"), len(file.tensors)
    if layers > blocks:
        raise file.refusal(f"says block_count {layers:,} and holds {blocks} tensors; it is damaged")
    check_counts(str(file.path), {"block_count": layers})
    heads = _count(file, "attention.head_count")
    width = _count(file, "embedding_length")
    head = _count(file, "attention.key_length", width // heads)
    _check_dense(file, head)
    config: PreTrainedConfig = AutoConfig.for_model(
        name,
        vocab_size=_rows(file),
        hidden_size=width,
        intermediate_size=_count(file, "feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_count(file, "attention.head_count_kv", heads),
        head_dim=head,
        max_position_embeddings=_count(file, "context_length"),
        rms_norm_eps=_decimal(file.get(f"{name}.attention.layer_norm_rms_epsilon", float)),
        rope_parameters=_rope(file),
        tie_word_embeddings=HEAD not in file.tensors,
        **_biases(file),
        **_special(file),
    )
    _check_rope(file, config)
    config.architectures = [f"{FAMILIES[name].prefix}ForCausalLM"]
    config.dtype = torch.float16
    setattr(config, ORIGIN, {"file": file.path.name, "quantization": file.quantization})
    return config


def origin_of(config: Any) -> dict[str, Any] | None:
    """Return what is known of the GGUF file that a model was read from; None if it was not."""
    found = getattr(config, ORIGIN, None)
    return found if isinstance(found, dict) else None


def describe_origin(config: Any) -> str | None:
    """Return a line about the GGUF file that a model was read from; None if it was not."""
    found = origin_of(config)
    if found is None:
        return None
    file, quantization, dtype = (found.get(key) for key in ("file", "quantization", "dtype"))
    error = found.get("rounding")
    kept = f", kept in {dtype} (which rounds by {error:.1e})" if isinstance(error, float) else ""
    if quantization in PLAIN:
        return f"{file} holds {quantization}{kept}"
    return f"{file} was quantised to {quantization}: that is loaded{kept}, not the original"


def unpacked(config: Any) -> str:
    """Return what the weights of a base that is not packed are: unquantised, or unpacked from a
    GGUF file's type.
    """
    quantization = (origin_of(config) or {}).get("quantization", PLAIN[0])
    return "unquantised" if quantization in PLAIN else f"unpacked from {quantization}"


def _count(file: GGUFFile, key: str, default: int | None = None) -> int:
    value = file.get(f"{file.architecture}.{key}", int, default)
    if value < 1:
        raise file.refusal(f"says {key} {value}; it is damaged")
    return value


def _decimal(value: float) -> float:
    """Return the shortest decimal of an fp32 number, which its author wrote: 1e-05."""
    return float(str(np.float32(value)))


def _rows(file: GGUFFile) -> int:
    if EMBEDDING not in file.tensors:
        raise file.refusal(f"lacks the tensor {EMBEDDING}; fetch it again")
    return int(file.tensors[EMBEDDING].shape[-1])


def _check_dense(file: GGUFFile, head: int) -> None:
    """Refuse experts, heads of two widths, partial rotation and attention to later tokens."""
    name = file.architecture
    experts = file.get(f"{name}.expert_count", int, 0)
    if experts > 0:
        raise file.refusal(f"is a mixture of {experts} experts; only dense models can be converted")
    for key in ("attention.value_length", "rope.dimension_count"):
        other = _count(file, key, head)
        if other != head:
            raise file.refusal(f"says {key} {other} and heads of {head}; only equal ones are known")
    if not file.get(f"{name}.attention.causal", bool, True):
        raise file.refusal("lets tokens see later ones; only causal models can be converted")


def _biases(file: GGUFFile) -> dict[str, bool]:
    """Return the settings for biases, which Qwen2 has none of: its own are fixed."""
    if file.architecture == "qwen2":
        return {}
    found = {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
    if file.architecture != "qwen3":
        found["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return found


def _special(file: GGUFFile) -> dict[str, int | None]:
    """Return ids of tokens; None for one that the file lacks, in place of the class's default."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {entry: f"tokenizer.ggml.{name}_token_id" for entry, name in names.items()}
    return {entry: file.get(key, int) if file.has(key) else None for entry, key in keys.items()}


def _rope(file: GGUFFile) -> dict[str, Any]:
    """Return transformers' parameters of rotary embeddings."""
    name = file.architecture
    theta = _decimal(file.get(f"{name}.rope.freq_base", float, 10000.0))
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind in ("linear", "yarn"):
        factor = _decimal(file.get(f"{name}.rope.scaling.factor", float))
        found |= {"rope_type": kind, "factor": factor}
    elif kind != "none":
        raise file.refusal(f"scales rotary embeddings by {shown(kind)}, which is not known")
    if kind == "yarn":
        length = _count(file, "rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = length
    if ROPE_FACTORS in file.tensors:
        factor = float(_factors(file).max())
        if kind != "none":
            raise file.refusal(f"scales rotary embeddings by {kind} and by {ROPE_FACTORS} as well")
        if factor != 1:
            found |= {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return found


def _factors(file: GGUFFile) -> torch.Tensor:
    from gguf import dequantize

    tensor = file.tensors[ROPE_FACTORS]
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def _check_rope(file: GGUFFile, config: PreTrainedConfig) -> None:
    """Refuse factors of the frequencies that the configuration does not compute."""
    if ROPE_FACTORS not in file.tensors:
        return
    wanted, base = _factors(file), config.rope_parameters["rope_theta"]
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    try:
        made = base ** (-dims / config.head_dim) / LlamaRotaryEmbedding(config).inv_freq
        torch.testing.assert_close(made.float(), wanted, rtol=1e-4, atol=0.0)
    except (AssertionError, RuntimeError) as error:
        raise file.refusal(
            f"scales rotary embeddings by factors in {ROPE_FACTORS} that are not Llama 3's"
            f" ({first_line(error)}); load a folder of the model instead"
        ) from error
