"""The identity of a base: `base_hash` to the last bit, `base_identity` as adapters need it.

bitsandbytes subtracts the mean of a weight's scales before it quantises them, which GPU and CPU
round differently, so a base packed on one is not, bit for bit, that of the other. An adapter does
not care for the last bit of a scale; it belongs to parts that are the same on every device:

    config   the settings that decide what is computed
    codes    the packed bytes of 4-bit weights, with quant type, block sizes and shape
    dense    every tensor that is not packed

Codes of NF4 packed from bf16 are the same on every device. Those packed from fp32 and fp16, and
those of FP4, may differ where value / scale is near the border of two codes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from npt.base.linear import quantized_linears, refuse_unread
from npt.stored import shown

CHUNK = 64 << 20
"""Bytes of a tensor that are brought to the host at once."""

PARTS = {"config": "configuration", "codes": "4-bit codes", "dense": "unpacked tensors"}
"""Parts that must be equal for an adapter, and their names in messages."""

# Entries of a model's configuration that change its outputs at equal weights.
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_OTHERS = ("model_type", "hidden_act", "rms_norm_eps", "max_position_embeddings")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
# The same for some families; left out if not set, so that other hashes stay.
_IN_SOME_FAMILIES = ("sliding_window", "layer_types", "no_rope_layers")

_WHOLE_NUMBERS = (*_SIZES, *_IN_SOME_FAMILIES)

_KEPT = "_npt_base_identity"
_LAYERS = "model.layers."


@dataclass(frozen=True)
class BaseIdentity:
    """Hashes of a base, sha256 in hex.

    Attributes:
        config: of the settings that decide what is computed.
        codes: of the packed bytes of 4-bit weights.
        dense: of every tensor that is not packed.
        strict: `base_hash`, over every byte.
    """

    config: str
    codes: str
    dense: str
    strict: str

    def as_record(self) -> dict[str, Any]:
        """Return the entries by which a file names its base, `base_hash` and `base_parts`."""
        parts = {name: getattr(self, name) for name in PARTS}
        return {"base_hash": self.strict, "base_parts": parts}

    def mismatch(self, record: Mapping[str, Any]) -> str | None:
        """Return the difference from a record's base, such as `4-bit codes 01ab there, ba10 here`;
        None if there is none.
        """
        theirs = record.get("base_parts")
        theirs = theirs if isinstance(theirs, Mapping) else {}
        described = [
            f"{what} {_short(theirs.get(name))} there, {_short(getattr(self, name))} here"
            for name, what in PARTS.items()
            if theirs.get(name) != getattr(self, name)
        ]
        return ", ".join(described) or None


def base_hash(model: PreTrainedModel) -> str:
    """Return a sha256 over the base's tensors and the settings that decide what is computed.

    Packed bytes and quantisation statistics are included, adapters and consolidated updates not.
    Bases with the same hash compute the same, but for the rounding of packed products
    (`compute_dtype`). CPU and GPU may round statistics otherwise, see `base_identity`.
    """
    return base_identity(model).strict


def base_identity(model: PreTrainedModel) -> BaseIdentity:
    """Return the hashes of a base, read once, with at most `CHUNK` bytes on the host at a time.

    Raises:
        ModelError: layers of the base are still in their files.
    """
    if (kept := getattr(model, _KEPT, None)) is not None:
        return kept
    refuse_unread(model)
    reader = IdentityReader(model)
    layers: Any = model.model.layers
    for index in reader.order:
        reader.add(index, layers[index])
    return reader.result()


class IdentityReader:
    """Takes the identity of a base layer by layer: none has to stay when the next one comes.

    Attributes:
        order: of the layers, that of their names as text: 0, 1, 10, 11, ..., 2, 20.
    """

    def __init__(self, model: PreTrainedModel):
        settings = model.config.to_dict()
        computing = {key: settings.get(key) for key in (*_SIZES, *_OTHERS, *_ROPE)}
        computing |= {k: settings[k] for k in _IN_SOME_FAMILIES if settings.get(k) is not None}
        written, config = (
            json.dumps(entries, sort_keys=True, default=str).encode()
            for entries in (computing, _canonical(computing))
        )
        self._config, self._strict = hashlib.sha256(config), hashlib.sha256(written)
        self._codes, self._dense, self._statistics = (hashlib.sha256() for _ in range(3))
        self._seen: dict[tuple[torch.device, int], str] = {}
        self.order = sorted(range(len(model.model.layers)), key=str)
        packed = _packed(model)
        rest = {key: t for key, t in _state(model).items() if not key.startswith(_LAYERS)}
        self._take({key: t for key, t in rest.items() if key < _LAYERS}, packed)
        self._above = {key: t for key, t in rest.items() if key > _LAYERS}, packed

    def add(self, index: int, layer: nn.Module) -> None:
        """Take the next layer, whole; it may then be dropped."""
        prefix, seen = f"{_LAYERS}{index}.", dict(self._seen)
        self._take(_state(layer, prefix), _packed(layer, prefix))
        self._seen = seen  # the next one may have its memory

    def result(self) -> BaseIdentity:
        """Return the identity, once every layer was added."""
        self._take(*self._above)
        return BaseIdentity(
            config=self._config.hexdigest(),
            codes=self._codes.hexdigest(),
            dense=self._dense.hexdigest(),
            strict=self._strict.hexdigest(),
        )

    def _take(self, state: Mapping[str, Tensor], packed: Mapping[str, Any]) -> None:
        """Hash tensors, by name; packed: the quantisation states of those that are packed."""
        with ThreadPoolExecutor(1) as second:  # hashing leaves the interpreter to others
            for key, tensor in sorted(state.items()):
                if ".npt." in key:
                    continue
                part, form = self._dense, f"{tensor.dtype} {tuple(tensor.shape)}"
                form_of_part = form
                if key in packed:
                    part, form_of_part = self._codes, _form_of_codes(packed[key])
                elif key.partition(".weight.")[0] + ".weight" in packed:
                    # which bitsandbytes names as if they were below the weight
                    part = self._statistics
                memory = (tensor.device, tensor.data_ptr())
                if memory in self._seen and tensor.numel() > 0:
                    for digest in (self._strict, part):
                        digest.update(f"{key} is {self._seen[memory]};".encode())
                    continue
                self._seen[memory] = key
                self._strict.update(f"{key} {form};".encode())
                part.update(f"{key} {form_of_part};".encode())
                for chunk in _chunks(tensor):
                    hashed = second.submit(self._strict.update, chunk)
                    part.update(chunk)
                    hashed.result()


def _canonical(value: Any, key: str = "") -> Any:
    """Return settings in one of the forms in which checkpoints write the same: 10000 and 10000.0,
    rotary embeddings with or without the older name of `rope_type` and the share of a head.
    """
    if isinstance(value, Mapping):
        entries = {name: _canonical(each, name) for name, each in value.items()}
        if "rope_type" in entries:
            entries.pop("type", None)
        if entries.get("partial_rotary_factor") == 1:
            del entries["partial_rotary_factor"]
        return entries
    if isinstance(value, list | tuple):
        return [_canonical(each, key) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    whole = key in _WHOLE_NUMBERS or key.endswith("max_position_embeddings")
    return int(value) if whole and value == int(value) else float(value)


def _packed(module: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Return the quantisation state of each packed weight; names follow `prefix`."""
    linears = quantized_linears(module)
    return {f"{prefix}{name}.weight": linear.weight.quant_state for name, linear in linears}


def _state(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the state dict with packed weights computing in fp32, which is a part of it."""
    linears = [(n, m) for n, m in quantized_linears(module) if m.weight.quant_state is not None]
    dtypes = [linear.weight.quant_state.dtype for _, linear in linears]
    try:
        for _, linear in linears:
            linear.weight.quant_state.dtype = torch.float32
        state = dict(module.state_dict(prefix=prefix))
    finally:
        for (_, linear), dtype in zip(linears, dtypes, strict=True):
            linear.weight.quant_state.dtype = dtype
    biases = [f"{prefix}{name}.bias" for name, linear in linears if linear.bias is not None]
    return state | {key: state[key].float() for key in biases}


def keep_identity(model: PreTrainedModel, identity: BaseIdentity) -> None:
    """Remember the identity of a base that is sharded."""
    setattr(model, _KEPT, identity)


def _form_of_codes(state: Any) -> str:
    """Return the settings that a packed weight's bytes are read by, statistics aside."""
    return (
        f"{state.quant_type} {state.blocksize} {state.state2.blocksize if state.nested else None}"
        f" {tuple(state.shape)}"
    )


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    tensor = tensor.detach()
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    row = max(1, tensor[:1].numel() * tensor.element_size())
    for piece in tensor.split(max(1, CHUNK // row)):
        yield memoryview(piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


def _short(value: Any) -> str:
    return shown(str(value)[:12])[1:-1]
