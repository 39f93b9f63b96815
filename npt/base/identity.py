"""The identity of a base: `base_hash` covers every bit, `base_identity` what adapters depend on.

bitsandbytes subtracts the mean of a weight's scales before quantising them. GPU and CPU round that
mean differently, so bases quantised on them differ in the last bits of scales. An adapter depends
only on parts that are the same on every device:

    config   the settings that determine the computation
    codes    the packed bytes of 4-bit weights, with quant type, block sizes and shape
    dense    all other tensors

NF4 codes quantised from bf16 are the same on every device. NF4 codes from fp32 or fp16, and FP4
codes, may differ where value / scale is near the border of two codes.
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

from npt.base.linear import refuse_unread
from npt.packed import quantized_linears
from npt.stored import shown

CHUNK = 64 << 20
"""Bytes of a tensor that are copied to the host at once."""

PARTS = {"config": "configuration", "codes": "4-bit codes", "dense": "unpacked tensors"}
"""Parts that an adapter needs to be equal, and their names in messages."""

# entries of a model's configuration that change its outputs at equal weights
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
_OTHERS = ("model_type", "hidden_act", "rms_norm_eps", "max_position_embeddings")
_ROPE = ("rope_parameters", "rope_theta", "rope_scaling")
# such entries of some families; left out if unset, so that the hashes of other families stay
_IN_SOME_FAMILIES = ("sliding_window", "layer_types", "no_rope_layers")

_WHOLE_NUMBERS = (*_SIZES, *_IN_SOME_FAMILIES)

_KEPT = "_npt_base_identity"
_LAYERS = "model.layers."


@dataclass(frozen=True)
class BaseIdentity:
    """Hashes of a base, sha256 in hex.

    Attributes:
        config: of the settings that determine the computation.
        codes: of the packed bytes of 4-bit weights.
        dense: of all other tensors.
        strict: of every byte; `base_hash`.
    """

    config: str
    codes: str
    dense: str
    strict: str

    def as_record(self) -> dict[str, Any]:
        """Return the entries that identify a base in a file, `base_hash` and `base_parts`."""
        parts = {name: getattr(self, name) for name in PARTS}
        return {"base_hash": self.strict, "base_parts": parts}

    def mismatch(self, record: Mapping[str, Any]) -> str | None:
        """Return the difference from a record's base, as `4-bit codes ba10, expected 01ab`."""
        theirs = record.get("base_parts")
        theirs = theirs if isinstance(theirs, Mapping) else {}
        described = [
            f"{what} {_short(getattr(self, name))}, expected {_short(theirs.get(name))}"
            for name, what in PARTS.items()
            if theirs.get(name) != getattr(self, name)
        ]
        return ", ".join(described) or None


def base_hash(model: PreTrainedModel) -> str:
    """Return a sha256 of the base's tensors and the settings that determine the computation.

    Packed bytes and quantisation statistics count; adapters and consolidated updates do not. Bases
    with the same hash compute the same, except for the rounding of 4-bit products
    (`compute_dtype`). CPU and GPU may round statistics differently; see `base_identity`.
    """
    return base_identity(model).strict


def base_identity(model: PreTrainedModel) -> BaseIdentity:
    """Return the hashes of a base; raise ModelError if layers are still in their files."""
    if (kept := getattr(model, _KEPT, None)) is not None:
        return kept
    refuse_unread(model)
    reader = IdentityReader(model)
    layers: Any = model.model.layers
    for index in reader.order:
        reader.add(index, layers[index])
    return reader.result()


class IdentityReader:
    """Computes the identity of a base layer by layer, so that a layer may be freed before the next.

    Attributes:
        order: order of the layers, sorted as text: 0, 1, 10, 11, ..., 2, 20.
    """

    def __init__(self, model: PreTrainedModel):
        settings = model.config.to_dict()
        computing = {key: settings.get(key) for key in (*_SIZES, *_OTHERS, *_ROPE)}
        for key in _IN_SOME_FAMILIES:
            if settings.get(key) is not None:
                computing[key] = settings[key]
        self._config = _hash_of(_canonical(computing))
        self._strict = _hash_of(computing)
        self._codes = hashlib.sha256()
        self._dense = hashlib.sha256()
        self._statistics = hashlib.sha256()
        self._seen: dict[tuple[torch.device, int], str] = {}
        self.order = sorted(range(len(model.model.layers)), key=str)
        self._packed = _packed(model)
        # tensors are hashed in the order of their names: some before the layers, some in `result`
        others = {k: each for k, each in _state(model).items() if not k.startswith(_LAYERS)}
        self._above = {key: tensor for key, tensor in others.items() if key > _LAYERS}
        self._take({key: others[key] for key in others.keys() - self._above}, self._packed)

    def add(self, index: int, layer: nn.Module) -> None:
        """Add the next layer, which must be whole and may then be freed."""
        prefix = f"{_LAYERS}{index}."
        seen = dict(self._seen)
        self._take(_state(layer, prefix), _packed(layer, prefix))
        self._seen = seen  # the next layer may reuse its memory

    def result(self) -> BaseIdentity:
        """Return the identity; call it once every layer is added."""
        self._take(self._above, self._packed)
        return BaseIdentity(
            config=self._config.hexdigest(),
            codes=self._codes.hexdigest(),
            dense=self._dense.hexdigest(),
            strict=self._strict.hexdigest(),
        )

    def _take(self, state: Mapping[str, Tensor], packed: Mapping[str, Any]) -> None:
        """Hash tensors by name. packed: quantisation states of the 4-bit ones."""
        with ThreadPoolExecutor(1) as second:  # hashing releases the GIL
            for key, tensor in sorted(state.items()):
                if ".npt." in key:
                    continue
                part = self._dense
                form = f"{tensor.dtype} {tuple(tensor.shape)}"
                form_of_part = form
                if key in packed:
                    part = self._codes
                    form_of_part = _form_of_codes(packed[key])
                elif key.partition(".weight.")[0] + ".weight" in packed:
                    # bitsandbytes names statistics as children of the weight
                    part = self._statistics
                # a tied weight is hashed once; empty tensors all have the address 0
                memory = (tensor.device, tensor.data_ptr())
                if memory in self._seen and tensor.numel() > 0:
                    tied = f"{key} is {self._seen[memory]};".encode()
                    self._strict.update(tied)
                    part.update(tied)
                    continue
                self._seen[memory] = key
                self._strict.update(f"{key} {form};".encode())
                part.update(f"{key} {form_of_part};".encode())
                for chunk in byte_chunks(tensor):
                    hashed = second.submit(self._strict.update, chunk)
                    part.update(chunk)
                    hashed.result()


def _hash_of(settings: Any) -> Any:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())


def _canonical(value: Any, key: str = "") -> Any:
    """Return settings in a canonical form. Checkpoints may write 10000 or 10000.0, and may repeat
    `rope_type` under its older name or state a default share of a head.
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
    if type(value) not in (int, float):  # True is no number here
        return value
    whole = key in _WHOLE_NUMBERS or key.endswith("max_position_embeddings")
    return int(value) if whole and value == int(value) else float(value)


def _packed(module: nn.Module, prefix: str = "") -> dict[str, Any]:
    """Return the quantisation state of each 4-bit weight, by name after `prefix`."""
    linears = quantized_linears(module)
    return {f"{prefix}{name}.weight": linear.weight.quant_state for name, linear in linears}


def _state(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """Return the state dict with fp32 as the compute dtype of 4-bit weights, which it contains."""
    linears = {n: m for n, m in quantized_linears(module) if m.weight.quant_state is not None}
    states = [linear.weight.quant_state for linear in linears.values()]
    dtypes = [state.dtype for state in states]
    try:
        for state in states:
            state.dtype = torch.float32
        tensors = dict(module.state_dict(prefix=prefix))
    finally:
        for state, dtype in zip(states, dtypes, strict=True):
            state.dtype = dtype
    # the policy casts the biases of 4-bit layers to their compute dtype
    for name, linear in linears.items():
        if linear.bias is not None:
            key = f"{prefix}{name}.bias"
            tensors[key] = tensors[key].float()
    return tensors


def keep_identity(model: PreTrainedModel, identity: BaseIdentity) -> None:
    """Store the identity of a base that is about to be sharded."""
    setattr(model, _KEPT, identity)


def _form_of_codes(state: Any) -> str:
    """Return the settings needed to decode a 4-bit weight's bytes, without statistics."""
    nested = state.state2.blocksize if state.nested else None
    return f"{state.quant_type} {state.blocksize} {nested} {tuple(state.shape)}"


def byte_chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor, row by row, at most about CHUNK at once on the host."""
    tensor = tensor.detach()
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    row = max(1, tensor[:1].numel() * tensor.element_size())
    for piece in tensor.split(max(1, CHUNK // row)):
        yield memoryview(piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


def _short(value: Any) -> str:
    return shown(str(value)[:12])[1:-1]
