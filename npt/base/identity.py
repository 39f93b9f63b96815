"""Which base a model is: `base_hash` down to the last bit, `base_identity` as far as an adapter
cares.

A base that is quantised on a GPU is not, bit for bit, the one that is quantised on the CPU.
bitsandbytes subtracts the mean of a weight's scales before it quantises them, and the mean is
rounded by the order of its sum and by how it is divided. An adapter does not care for the last bit
of a scale, so it belongs to what is the same on every device:

    config   the settings that decide what is computed
    codes    the packed bytes of 4-bit weights, with quant type, block sizes and shape
    dense    every tensor that is not packed

The codes of NF4 follow from value / scale, and no quotient of two bf16 numbers is so near the
border between two codes that a division rounded otherwise would cross it. Quotients of fp32 are,
two of fp16 are, and FP4 puts its borders on small fractions, one of which CUDA's kernel has rounded
to six digits. So where codes differ and the bases were packed on different kinds of device, the
checkpoint that both were packed from speaks for the codes, told by samples of its tensors: reading
all of it would take longer than loading it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from npt.base.linear import quantized_linears
from npt.stored import shown

CHUNK = 64 << 20
"""Bytes of a tensor that are brought to the host at once."""

PARTS = {"config": "configuration", "codes": "4-bit codes", "dense": "unpacked tensors"}
"""Parts that an adapter's base has to have in common with it, and what they are called in a
message.
"""

# Entries of a model's configuration that change its outputs at equal weights.
_COMPUTING = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
)

# Likewise, of some families only: left out where a family has no such setting, so that a base's
# hash does not change with this list.
_COMPUTING_IN_SOME = ("sliding_window", "layer_types", "no_rope_layers")

_WORTH_A_THREAD = 1 << 20
"""Bytes from which on two hashes of them are made at the same time."""

_KEPT = "_npt_base_identity"
_PACKED = "_npt_packed_from"


@dataclass(frozen=True)
class BaseIdentity:
    """Hashes of a base, sha256 in hex.

    config, codes, dense: see above. source: of the checkpoint that `load_base` packed it from, and
    packed_on the kind of device (`cpu`, `cuda`) that it was packed on; None for a base that was not
    packed on loading. strict: `base_hash`, over every byte.
    """

    config: str
    codes: str
    dense: str
    source: str | None
    packed_on: str | None
    strict: str

    def as_record(self) -> dict[str, Any]:
        """Return the entries by which a file names its base: `base_hash`, the strict one, and
        `base_parts`, all others.
        """
        parts = {name: getattr(self, name) for name in (*PARTS, "source", "packed_on")}
        return {"base_hash": self.strict, "base_parts": parts}

    def mismatch(self, record: Mapping[str, Any]) -> str | None:
        """Return in what this base differs from that of a record, such as `4-bit codes 0123456789ab
        there, ba9876543210 here`, or None.

        Args:
            record: with the entries of `as_record`; one without `base_parts`, of an earlier
                version, knows the strict hash alone.
        """
        theirs = record.get("base_parts")
        if not isinstance(theirs, Mapping):
            strict = record.get("base_hash")
            return (
                None
                if strict == self.strict
                else f"base hash {_short(strict)} there, {_short(self.strict)} here"
            )
        differing = [name for name in PARTS if theirs.get(name) != getattr(self, name)]
        if "codes" in differing and self._packed_from_the_same(theirs):
            differing.remove("codes")
        said = [
            f"{PARTS[name]} {_short(theirs.get(name))} there, {_short(getattr(self, name))} here"
            for name in differing
        ]
        return ", ".join(said) or None

    def _packed_from_the_same(self, theirs: Mapping[str, Any]) -> bool:
        """Whether the other base was packed from the same checkpoint on another kind of device: one
        kind always packs alike.
        """
        known = None not in (
            self.source,
            self.packed_on,
            theirs.get("source"),
            theirs.get("packed_on"),
        )
        return known and theirs["source"] == self.source and theirs["packed_on"] != self.packed_on


def base_hash(model: PreTrainedModel) -> str:
    """sha256 over the base's tensors, packed bytes and quantisation statistics included, adapters
    and consolidated updates not, and over the settings that decide what is computed with them.

    Two models with the same hash and nothing on top of it compute the same, but for what products
    of packed weights are rounded to (`compute_dtype`). It differs between kinds of device, see
    `base_identity`.
    """
    return base_identity(model).strict


def base_identity(model: PreTrainedModel) -> BaseIdentity:
    """Hash the base once, part by part and as a whole, in chunks: no more than `CHUNK` bytes of it
    are on the host at a time.
    """
    kept = getattr(model, _KEPT, None)
    if kept is not None:
        return kept
    settings = model.config.to_dict()
    computing = {key: settings.get(key) for key in _COMPUTING}
    computing |= {key: settings[key] for key in _COMPUTING_IN_SOME if settings.get(key) is not None}
    config = json.dumps(computing, sort_keys=True, default=str).encode()
    packed = {
        f"{name}.weight": module.weight.quant_state for name, module in quantized_linears(model)
    }
    strict, codes, dense = hashlib.sha256(config), hashlib.sha256(), hashlib.sha256()
    seen: dict[tuple[torch.device, int], str] = {}
    with ThreadPoolExecutor(1) as second:  # hashing leaves the interpreter to others
        for key, tensor in sorted(_state(model).items()):
            if ".npt." in key:
                continue
            # bitsandbytes names a weight's statistics as if they were below it.
            part = (
                codes
                if key in packed
                else None
                if key.partition(".weight.")[0] + ".weight" in packed
                else dense
            )
            digests = [strict] if part is None else [strict, part]
            form = f"{tensor.dtype} {tuple(tensor.shape)}"
            place = (tensor.device, tensor.data_ptr())
            if place in seen and tensor.numel() > 0:
                for digest in digests:
                    digest.update(f"{key} is {seen[place]};".encode())
                continue
            seen[place] = key
            strict.update(f"{key} {form};".encode())
            if part is not None:
                part.update(
                    f"{key} {_form_of_codes(packed[key]) if part is codes else form};".encode()
                )
            for chunk in _chunks(tensor):
                if part is None or chunk.nbytes < _WORTH_A_THREAD:
                    for digest in digests:
                        digest.update(chunk)
                else:
                    whole = second.submit(strict.update, chunk)
                    part.update(chunk)
                    whole.result()
    source, packed_on = getattr(model, _PACKED, (None, None))
    return BaseIdentity(
        hashlib.sha256(config).hexdigest(),
        codes.hexdigest(),
        dense.hexdigest(),
        source,
        packed_on,
        strict.hexdigest(),
    )


def _state(model: PreTrainedModel) -> dict[str, Any]:
    """The state dict that the model has when its packed weights compute in fp32: the dtype is a
    part of a packed weight's state.
    """
    linears = [
        (name, module)
        for name, module in quantized_linears(model)
        if module.weight.quant_state is not None
    ]
    dtypes = [module.weight.quant_state.dtype for _, module in linears]
    try:
        for _, module in linears:
            module.weight.quant_state.dtype = torch.float32
        state = dict(model.state_dict())
    finally:
        for (_, module), dtype in zip(linears, dtypes, strict=True):
            module.weight.quant_state.dtype = dtype
    biases = [f"{name}.bias" for name, module in linears if module.bias is not None]
    return state | {key: state[key].float() for key in biases}


def keep_identity(model: PreTrainedModel) -> None:
    """Remember the identity of a base that is about to be taken apart, so that no process has all
    of it to compute it from.
    """
    setattr(model, _KEPT, base_identity(model))


def note_source(
    model: PreTrainedModel,
    checkpoint: str,
    quantization: str,
    packed_on: str | torch.device | None = None,
) -> None:
    """Remember what a base was packed from and on what kind of device, as part of its identity.

    Args:
        model: just packed.
        checkpoint: its folder, or its name on the hub, from where it lies in the cache.
        quantization: nf4 or fp4.
        packed_on: the device that packed it, if that is not the one where it lies.
    """
    if packed_on is None:
        packed_on = next(module.weight.device for _, module in quantized_linears(model))
    device = torch.device(packed_on)
    setattr(model, _PACKED, (source_hash(checkpoint, quantization), device.type))


def source_hash(checkpoint: str, quantization: str) -> str | None:
    """Return a hash of a checkpoint's tensors and of what they are packed to, or None where they
    cannot be found again.

    Names, dtypes and shapes are hashed in full, of the numbers the first, middle and last row of
    every tensor: another training, merge or conversion changes some of those, an edit of single
    rows need not. How the tensors are spread over files does not matter.
    """
    digest = hashlib.sha256(quantization.encode())
    try:
        files = _files_of_tensors(checkpoint)
        with ExitStack() as stack:
            opened = {
                path: stack.enter_context(safe_open(path, framework="pt"))
                for path in set(files.values())
            }
            for name, path in sorted(files.items()):
                part = opened[path].get_slice(name)
                shape = part.get_shape()
                digest.update(f"{name} {part.get_dtype()} {shape};".encode())
                rows = (
                    sorted({0, shape[0] // 2, shape[0] - 1})
                    if len(shape) > 1 and 0 not in shape
                    else None
                )
                sampled = (
                    [opened[path].get_tensor(name)]
                    if rows is None
                    else [part[row : row + 1] for row in rows]
                )
                for chunk in itertools.chain.from_iterable(map(_chunks, sampled)):
                    digest.update(chunk)
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    return digest.hexdigest()


def _files_of_tensors(checkpoint: str) -> dict[str, Path]:
    """The file that each of a checkpoint's tensors is in, without a look at the network."""
    single, index = (
        cached_file(
            checkpoint,
            name,
            local_files_only=True,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )
    if single is not None:
        with safe_open(single, framework="pt") as stored:
            return dict.fromkeys(stored.keys(), Path(single))
    if index is None:
        raise FileNotFoundError(checkpoint)
    folder = Path(index).parent
    return {
        name: folder / file
        for name, file in json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].items()
    }


def _form_of_codes(state: Any) -> str:
    """What a packed weight's bytes mean, but for the statistics."""
    return (
        f"{state.quant_type} {state.blocksize} {state.state2.blocksize if state.nested else None}"
        f" {tuple(state.shape)}"
    )


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, row-major, in pieces on the host."""
    tensor = tensor.detach()
    tensor = tensor.reshape(1) if tensor.ndim == 0 else tensor
    if tensor.is_contiguous():
        tensor = tensor.view(-1)
    row = max(1, tensor[:1].numel() * tensor.element_size())
    for piece in tensor.split(max(1, CHUNK // row)):
        yield memoryview(piece.contiguous().cpu().reshape(-1).view(torch.uint8).numpy())


def _short(value: Any) -> str:
    return shown(str(value)[:12])[1:-1]
