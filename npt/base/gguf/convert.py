"""Convert a GGUF file to a folder of 16-bit weights that transformers loads.

Tensors are dequantised one at a time. Memory holds the largest tensor and one weight file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from npt.base.gguf.configuration import ROPE_FACTORS, configuration_of
from npt.base.gguf.file import PLAIN, GGUFFile
from npt.base.gguf.tokenizer import end_ids, tokenizer_of
from npt.base.recipe import STORED
from npt.base.shards import write_shards
from npt.errors import ModelError, first_line
from npt.files import check_folder, new_folder

_ROTATED = ("llama", "smollm3")
"""Architectures for which llama.cpp interleaves the rows of q and k within each head."""


@dataclass(frozen=True)
class Conversion:
    """A converted file.

    Attributes:
        file: path of the GGUF file.
        folder: path of the new folder.
        quantization: most frequent tensor type of the file.
        dtype: of the new weights, bf16 if the file is BF16, else fp16.
        parameters: number of parameters, tied ones once.
        size: of the new weights, in bytes.
    """

    file: str
    folder: str
    quantization: str
    dtype: str
    parameters: int
    size: int

    @property
    def quantized(self) -> bool:
        """Whether the file is quantised."""
        return self.quantization not in PLAIN


def import_base(path: str | Path, folder: str | Path) -> Conversion:
    """Convert a GGUF file to a folder with configuration, 16-bit weights and tokenizer.

    Args:
        path: the GGUF file.
        folder: a new or empty one, written completely or not at all.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or the package `gguf` is not
            installed.
        ModelError: the file is missing, damaged, not finite or of an unsupported architecture, or
            the disk is full.
    """
    folder = Path(folder).expanduser()
    check_folder(folder, "FOLDER", empty=True)
    return convert(GGUFFile(Path(path).expanduser()), folder)


def convert(file: GGUFFile, folder: Path) -> Conversion:
    """Write the model in a file to `folder`, all or nothing. Raises ModelError."""
    config = configuration_of(file)
    tokenizer = tokenizer_of(file)
    weights = _weights(file, config)
    name = "bf16" if file.quantization == "BF16" else "fp16"
    config.dtype = dtype = STORED[name]
    # a chat model ends a turn and a text with different tokens
    ends = end_ids(file)
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=ends if len(ends) > 1 else config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    # lazily: a tensor is dequantised when it is written
    values = ((key, _value(file, *weight, dtype)) for key, weight in weights.items())
    try:
        with new_folder(folder) as temporary:
            for part in (config, generation, tokenizer):
                part.save_pretrained(temporary)
            _, size = write_shards(values, temporary)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{file.path} cannot be converted to {folder}: {first_line(error)}; free disk"
            " space or choose another folder (TMPDIR sets the temporary one)"
        ) from error
    return Conversion(str(file.path), str(folder), file.quantization, name, size // 2, size)


def _weights(file: GGUFFile, config: PreTrainedConfig) -> dict[str, tuple[Any, torch.Size, int]]:
    """Return each tensor of the file by transformers' name, with its shape and the number of heads
    in which its rows are interleaved, or 0. Raise ModelError unless they are exactly the model's.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    # gguf maps the names of several libraries to its own, by architecture
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    heads = {}
    if file.architecture in _ROTATED:
        heads["q_proj"] = config.num_attention_heads
        heads["k_proj"] = config.num_key_value_heads
    weights: dict[str, tuple[Any, torch.Size, int]] = {}
    left: dict[Any, Any] = dict(file.tensors)
    for name, parameter in model.named_parameters():  # tied ones once
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        stored = left.pop(theirs, None)
        if stored is None:
            raise file.refusal(f"lacks the tensor {theirs or name}; download it again")
        shape = tuple(reversed(stored.shape.tolist()))  # a GGUF file names the last axis first
        if shape != tuple(parameter.shape):
            raise file.refusal(
                f"has {theirs} of shape {list(shape)}, but its metadata say"
                f" {list(parameter.shape)}; download it again"
            )
        module = name.split(".")[-2]
        weights[name] = stored, parameter.shape, heads.get(module, 0)
    extra = sorted(left.keys() - {ROPE_FACTORS})
    if extra:
        raise file.refusal(
            f"has the tensor {extra[0]} ({len(extra)} in all), which {type(model).__name__} does"
            " not have; load a folder of the model instead"
        )
    return weights


def _value(
    file: GGUFFile, stored: Any, shape: torch.Size, heads: int, dtype: torch.dtype
) -> Tensor:
    """Return a tensor in 16 bits with its rows in transformers' order; raise ModelError unless it
    is finite.
    """
    from gguf import dequantize

    try:
        unpacked = dequantize(stored.data, stored.tensor_type)
    except NotImplementedError as error:
        raise file.refusal(
            f"holds {stored.name} in {stored.tensor_type.name}, which gguf cannot dequantise;"
            " upgrade gguf or load another file"
        ) from error
    value = torch.from_numpy(unpacked.reshape(shape).copy()).to(dtype)
    if not torch.isfinite(value).all():
        raise file.refusal(
            f"holds values in {stored.name} that are not finite in {dtype}; download it again or"
            " load another file"
        )
    if not heads:
        return value
    # from adjacent pairs (x, y) to all x of a head, then all y
    return value.view(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
