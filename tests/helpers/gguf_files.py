"""Tiny GGUF files, written from a model and a tokenizer of transformers' as llama.cpp's converter
does.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter, LlamaFileType
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from npt.base.source import load_tokenizer

FILE_TYPES = {
    Type.F32: LlamaFileType.ALL_F32,
    Type.F16: LlamaFileType.MOSTLY_F16,
    Type.BF16: LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: LlamaFileType.MOSTLY_Q8_0,
    Type.Q4_0: LlamaFileType.MOSTLY_Q4_0,
}
ROTATED = ("llama", "smollm3")
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


TOKENS = 512
"""Of the embedded model's 2,048: a file has them one by one, which takes time to write and read."""


def made_model(family: str = "llama", **settings: Any) -> PreTrainedModel:
    """Return a model of two layers with random weights, for the embedded model's first tokens."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": TOKENS,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
            **settings,
        },
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms other than 1, so that one put in another's place is seen
            parameter.add_(0.1 * torch.randn_like(parameter)) if "norm" in name else None
    return model.eval()


@cache
def _usual_model() -> PreTrainedModel:
    return made_model()


@cache
def vocabulary(size: int) -> dict[str, Any]:
    """The embedded model's first tokens, and the merges that make them."""
    made = json.loads(load_tokenizer().backend_tokenizer.to_str())
    tokens = sorted(made["model"]["vocab"], key=made["model"]["vocab"].__getitem__)[:size]
    special = {entry["content"] for entry in made["added_tokens"]}
    merges = [pair for pair in made["model"]["merges"] if "".join(pair) in tokens]
    return {
        "tokens": tokens,
        "types": [3 if token in special else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in merges],
    }


def write_gguf(
    path: Path,
    model: PreTrainedModel | None = None,
    kind: Type = Type.F16,
    *,
    leave_out: tuple[str, ...] = (),
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: bool = True,
    pre: str = "gpt-2",
) -> Path:
    """Write a model as a GGUF file.

    Args:
        path: of the file.
        model: default `made_model()`.
        kind: of the matrices; norms and biases are F32.
        leave_out: keys and tensors that are not written.
        metadata, tensors: that are written as well, or in the place of others.
        tokenizer: write the embedded model's.
        pre: the name of its splitting.
    """
    model = _usual_model() if model is None else model
    config, name = model.config, model.config.model_type
    entries: dict[str, Any] = {
        "general.file_type": int(FILE_TYPES[kind]),
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{name}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{name}.vocab_size": config.vocab_size,
    }
    if tokenizer:
        own = vocabulary(config.vocab_size)
        entries |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": own["tokens"],
            "tokenizer.ggml.token_type": own["types"],
            "tokenizer.ggml.merges": own["merges"],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": TEMPLATE,
        }
    entries |= metadata or {}
    writer = GGUFWriter(path, entries.pop("general.architecture", name))
    for key, value in entries.items():
        if key not in leave_out:
            _add(writer, key, value)
    for key, value in {**_tensors(model), **(tensors or {})}.items():
        if key not in leave_out:
            as_is = value.ndim == 1 or kind == Type.F32
            stored = Type.F32 if as_is else kind
            packed = gguf.quantize(value, stored)
            writer.add_tensor(key, packed, raw_dtype=None if as_is else stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string"}
    getattr(writer, f"add_{kinds.get(type(value), 'array')}")(key, value)


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """Return the model's tensors by llama.cpp's names, q and k as it has them."""
    config = model.config
    kind = next(k for k, n in gguf.MODEL_ARCH_NAMES.items() if n == config.model_type)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, parameter in model.named_parameters():
        value, shape = parameter.detach(), parameter.shape
        part = name.split(".")[-2]
        if config.model_type in ROTATED and part in heads:
            value = value.reshape(heads[part], 2, -1, *shape[1:]).transpose(1, 2).reshape(shape)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = value.numpy().copy()
    return found
