"""Read decoder layers from the checkpoint one at a time, on request.

`load_base(layers_later=True)` builds the model on the meta device. transformers compares all names
and shapes with the files' headers and sets dtypes. Then embeddings, norm, head and the first layer
are read. Each layer equals, bit for bit, that of a base loaded as a whole.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from npt.base.identity import IdentityReader, base_identity, keep_identity
from npt.base.linear import quant_types
from npt.base.precision import audit_precision, declared_dtype, policy_dtype, settle_policy
from npt.base.source import reading
from npt.errors import ModelError
from npt.packed import quantized_linears

LAYERS = "model.layers"
PARTS = ("model.embed_tokens", "model.norm", "lm_head")
"""The modules with weights besides the decoder layers."""

LATER = "later."
"""Prefix under which transformers passes over 4-bit layers, which are read later."""

_LATER = "_npt_layers_later"

_UNUSED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors that a checkpoint may have though the model does not: buffers of older transformers."""


class LayersLater:
    """A model on the meta device, and the files to read it from.

    Args:
        model: on the meta device.
        name: of the base, for messages.
        source: folder or hub id of the files.
        scratch: closed once the last layer is read or the model is gone.
    """

    def __init__(self, model: PreTrainedModel, name: str, source: str, scratch: ExitStack):
        self._model = model
        self._name = name
        self.scratch = scratch
        with reading("weights", name):
            folder = Path(source)
            if not folder.is_dir():
                folder = Path(snapshot_download(source, local_files_only=True))
            self._files = _file_of_each_tensor(folder)
        names = {key for key, _ in model.named_parameters(remove_duplicate=False)}
        names |= {key.removeprefix("model.") for key in names}
        # transformers does not compare the names of layers that are read later
        refuse_extra(name, {_owner(key) for key in self._files} - names)
        # transformers leaves a weight stored in 4 bits as a tensor of bytes
        stored: Any = getattr(model.config, "quantization_config", None)
        for _, module in quantized_linears(model):
            if not isinstance(module.weight, Params4bit):
                empty = torch.empty(module.out_features, module.in_features, device="meta")
                module.weight = Params4bit(empty, quant_type=stored.bnb_4bit_quant_type)
        weakref.finalize(self, scratch.close)
        setattr(model, _LATER, self)

    def read_parts(self, device: torch.device) -> None:
        """Read all but the decoder layers, and layer 0, on which `product_error` tests products."""
        model: Any = self._model
        for part in PARTS:
            self._read(part, device)
        # built on the meta device, it holds no frequencies
        rotary = type(model.model.rotary_emb)
        model.model.rotary_emb = rotary(model.config).to(device)
        # a tied head has no tensor of its own
        lacking = {key for key, p in model.named_parameters() if p.is_meta and LAYERS not in key}
        model.tie_weights(missing_keys=lacking, recompute_mapping=False)
        dtype = policy_dtype(model)
        for part in PARTS:
            audit_precision(model, dtype, within=model.get_submodule(part))
        self.read_layer(0, device)

    def read_layer(self, index: int, device: torch.device) -> nn.Module:
        """Return a layer; read it first if it is still on the meta device."""
        name = f"{LAYERS}.{index}"
        layer = self._model.model.layers[index]
        kinds = quant_types(layer)
        self._read(name, device)
        faults = [f"lacks the weight {name}.{n}" for n, p in layer.named_parameters() if p.is_meta]
        faults += shape_faults(layer, {}, f"{name}.")
        refuse_faults(self._name, faults)
        read = quant_types(layer)
        if kinds != read:
            raise ModelError(
                f"{self._name} is stored as {'/'.join(sorted(read))} in layer {index}, but"
                f" {'/'.join(sorted(kinds))} by its configuration; restore it from the original"
            )
        if kinds:
            settle_policy(layer, declared_dtype(self._model))
        audit_precision(self._model, policy_dtype(self._model), within=layer)
        return layer

    @torch.inference_mode(False)
    def _read(self, part: str, device: torch.device) -> None:
        """Read the weights of a part of the model that its files hold; leave others unchanged."""
        module = self._model.get_submodule(part)
        with reading("weights", self._name):
            for name, empty in list(module.named_parameters()):
                key = f"{part}.{name}"
                if key not in self._files:  # a checkpoint without the head has shorter names
                    key = key.removeprefix("model.")
                if not empty.is_meta or key not in self._files:
                    continue
                statistics = {
                    k: self._tensor(k).to(device) for k in self._files if k.startswith(f"{key}.")
                }
                parent, _, leaf = name.rpartition(".")
                owner = module.get_submodule(parent)
                # no name for the stored tensor, which would keep its file open
                made = _made(owner, empty, self._tensor(key), statistics, device)
                setattr(owner, leaf, made)

    def _tensor(self, key: str) -> Tensor:
        """Return a stored tensor. Its file stays open only while the tensor exists."""
        with safe_open(self._files[key], framework="pt") as opened:
            return opened.get_tensor(key)


def real_layers(model: PreTrainedModel, device: torch.device) -> Iterator[tuple[int, Any]]:
    """Move all but the decoder layers to a device, and iterate over (index, layer) of those.

    Each layer is whole and on the device. The base's identity is recorded. With
    `load_base(layers_later=True)` the order is 0, 1, 10, 11, ..., 2, 20, and the consumer must
    shard or drop each layer before it takes the next.

    Raises:
        ModelError: a layer cannot be read or differs from the headers of its file.
    """
    for part in (*PARTS, "model.rotary_emb"):
        model.get_submodule(part).to(device)
    later: LayersLater | None = vars(model).get(_LATER)
    if later is not None:
        return _read_in_turn(model, later, device)
    keep_identity(model, base_identity(model))
    layers: Any = model.model.layers
    return ((index, layer.to(device)) for index, layer in enumerate(layers))


def _read_in_turn(
    model: PreTrainedModel, later: LayersLater, device: torch.device
) -> Iterator[tuple[int, Any]]:
    identity = IdentityReader(model)
    with later.scratch:
        for index in identity.order:
            layer = later.read_layer(index, device).to(device)  # its adapter too
            identity.add(index, layer)
            yield index, layer
    keep_identity(model, identity.result())
    delattr(model, _LATER)


def _file_of_each_tensor(folder: Path) -> dict[str, Path]:
    whole = folder / SAFE_WEIGHTS_NAME
    paths = {whole}
    if not whole.is_file():
        index = (folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8")
        paths = {folder / file for file in json.loads(index)["weight_map"].values()}
    files: dict[str, Path] = {}
    for path in sorted(paths):
        with safe_open(path, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), path)
    return files


def _owner(key: str) -> str:
    """Return the weight that a stored tensor belongs to: itself, or that of a statistic."""
    weight, mark, _ = key.partition(".weight.")
    return f"{weight}.weight" if mark else key


def _made(
    owner: Any, empty: Tensor, value: Tensor, statistics: dict[str, Tensor], device: torch.device
) -> nn.Parameter:
    """Return a parameter of `owner` in place of an empty one, quantised here or from its file."""
    if statistics:
        return Params4bit.from_prequantized(value, statistics, device=device, module=owner)
    value = value.to(device, empty.dtype)
    if not isinstance(empty, Params4bit):
        return nn.Parameter(value, requires_grad=False)
    unpacked = Params4bit(
        value,
        requires_grad=False,
        blocksize=empty.blocksize,
        compress_statistics=empty.compress_statistics,
        quant_type=empty.quant_type,
        quant_storage=empty.quant_storage,
        module=owner,
    )
    return unpacked.to(device)  # quantises it


def shape_faults(
    model: nn.Module, shapes: Mapping[str, tuple[Any, Any]], prefix: str = ""
) -> list[str]:
    """Describe shapes (stored, wanted) that differ, also of 4-bit weights, which transformers does
    not report when it quantises them.
    """
    shapes = dict(shapes)
    for key, module in quantized_linears(model):
        weight = module.weight
        name = f"{prefix}{key}.weight"
        wanted = (module.out_features, module.in_features)
        state = getattr(weight, "quant_state", None)
        if state is None:
            if isinstance(weight, Params4bit):
                shapes[name] = weight.shape, wanted
            continue
        shapes[name] = state.shape, wanted
        # neither bitsandbytes nor torch checks these in a damaged file
        count = state.shape.numel()
        # two codes a byte; half of the last byte may be unused
        codes = 2 * weight.numel() * weight.element_size()
        padded = count + count % 2
        shapes[f"{name}'s 4-bit codes"] = (codes,), (padded,)
        blocks = -(-count // state.blocksize)
        scales = state.absmax.numel()
        shapes[f"{name}.absmax"] = (scales,), (blocks,)
    return [
        f"has the weight {key} in shape {tuple(stored)}, not {tuple(wanted)}"
        for key, (stored, wanted) in sorted(shapes.items())
        if tuple(stored) != tuple(wanted)
    ]


def refuse_faults(name: str, faults: list[str]) -> None:
    """Raise ModelError with the first fault of a base and the number of faults, if any."""
    if faults:
        raise ModelError(
            f"{name} {faults[0]} ({len(faults)} in all): the checkpoint is incomplete or does not"
            " match its config.json; restore it from the original"
        )


def refuse_extra(name: str, keys: Iterable[str]) -> None:
    """Raise ModelError if weights of a base are none of the model's, such as biases, more layers
    than `config.json` has, or a LoRA that was not merged: the model would compute without them.
    """
    extra = [key for key in keys if not key.startswith(LATER) and not _UNUSED.fullmatch(key)]
    if extra:
        raise ModelError(
            f"{name} has the weight {min(extra)} ({len(extra)} in all), which the model of its"
            " config.json does not have: correct config.json, or merge or remove the weight"
        )
