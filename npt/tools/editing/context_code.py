"""A context as a code: what it changes in the code of the last token after it.

In an NPT layer a context affects a token's MLP only through the token's code z [R]. So what a
context does there, for example five examples of a task before a query, is a change of the code,

    d = mean over queries of z(context, query) - z(query)      at the query's last token

one for each converted layer. `npt.transplanted(model, d, position, add=True)` adds it to the code
of a token in another prompt: z + d. Adding keeps what that token needs of its own prompt, which
putting the mean of z(context, query) in its place does not.

With a token part, the context also changes what the code does not carry: the state h that earlier
layers leave, and the part l of the attention output that h gives. So there d is the change of the
code that brings the stream, whose shift is B z r, nearest to the one with the context,

    d = pinv(B) mean over queries of (stream(context, query) - stream(query)) / r

All is computed in order of layers, where earlier layers have d already, because adding changes the
state that later layers read. From two separate passes, a later layer would count that change twice.

Moving a mean difference follows task vectors (Hendel et al. 2023, arXiv:2310.15916: hidden states)
and function vectors (Todd et al. 2024, arXiv:2310.15213: outputs of attention heads).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from npt.adapters.converted import npt_layers
from npt.adapters.files.adapter_files import adapter_hash
from npt.adapters.layer import NPTAdapter
from npt.adapters.token_modulation import as_row, recoded
from npt.config.adapter import STREAM
from npt.errors import ConfigError, DataError, ModelError, NumericalError
from npt.evaluation.reading import stages_at
from npt.files import to_json, write_bytes
from npt.stored import RESTORE, described, non_finite, opened, parse_json, read_headers, shown

RECORD = "npt_context_code"
"""Entry of the file's metadata that holds the record, as JSON."""

RECORD_BYTES = 1 << 20
"""Size limit of a record."""

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,5})")
"""Name of a layer's tensor."""


@dataclass(frozen=True)
class ContextCode:
    """The change of a token's codes that a context makes.

    Attributes:
        codes: d [R] by layer, fp32, on the host.
        record: its origin, in JSON types: the context, the number of queries, and more.

    Raises:
        NumericalError: a code is not finite.
    """

    codes: dict[int, Tensor]
    record: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if faulty := non_finite(tensors_of(self.codes)):
            raise NumericalError(
                f"{faulty}: the code is not finite; find the cause with npt trace, or"
                " lower the scale"
            )

    def scaled(self, factor: float) -> ContextCode:
        """Return the code times a factor; raise NumericalError if that is not finite."""
        codes = {index: factor * code for index, code in self.codes.items()}
        scale = self.record.get("scale", 1.0) * factor
        return ContextCode(codes, {**self.record, "scale": scale})

    def __add__(self, other: ContextCode) -> ContextCode:
        """Return the sum of two codes.

        Raises:
            ModelError: they are of different adapters, or have other layers or ranks.
        """
        # numbers of a code have a meaning only beside those of the same layer and rank
        for index in sorted({*self.codes, *other.codes}):
            here = self._form_of(index)
            there = other._form_of(index)
            if here != there:
                raise ModelError(
                    f"the codes differ in layer {index}: {here} and {there}; add codes of one"
                    " adapter"
                )
        hashes = {self.record.get("adapter_hash"), other.record.get("adapter_hash")}
        hashes.discard(None)  # codes made by hand have none
        if len(hashes) > 1:
            one, two = sorted(str(each)[:12] for each in hashes)
            raise ModelError(
                f"the codes are of two adapters ({one} and {two}), whose numbers mean different"
                " things; add codes of one adapter"
            )
        record: dict[str, Any] = {"sum": [self.record, other.record]}
        if hashes:
            record["adapter_hash"] = hashes.pop()
        codes = {index: code + other.codes[index] for index, code in self.codes.items()}
        return ContextCode(codes, record)

    def _form_of(self, index: int) -> str:
        code = self.codes.get(index)
        return "no code" if code is None else f"rank {len(code)}"

    def numbers(self) -> dict[int, int]:
        """Return by layer how many numbers of the code are not 0."""
        return {index: int(code.count_nonzero()) for index, code in self.codes.items()}

    def save(self, path: Path | str) -> None:
        """Write one safetensors file, whole or not at all: a tensor `layers.{i}` for each layer,
        and the record in the metadata.

        Raises:
            OSError: the file cannot be written.
        """
        metadata = {"format": "pt", RECORD: to_json(self.record)}
        write_bytes(Path(path), safetensors.torch.save(tensors_of(self.codes), metadata))

    @classmethod
    def load(cls, path: Path | str) -> ContextCode:
        """Read a file that `save` wrote.

        Raises:
            DataError: the file is unreadable or not such a file, or a number is not finite.
        """
        path = Path(path)
        headers = read_headers(path, DataError)
        with opened(path, DataError) as stored:
            record = (stored.metadata() or {}).get(RECORD)
            if record is None or not headers:
                raise DataError(
                    f"{path} holds no code of a context: pass a file written by npt transplant"
                    " --output or ContextCode.save"
                )
            # by the header, before a tensor is read into memory
            for name, header in headers.items():
                if not _LAYER.fullmatch(name):
                    raise DataError(f"{path} has the extra tensor {shown(name)}; {RESTORE}")
                dtype, shape = header
                if dtype != "F32" or len(shape) != 1 or not shape[0]:
                    raise DataError(
                        f"{path}: {name} is {described(header)}, expected F32 [R]; {RESTORE}"
                    )
            tensors = {name: stored.get_tensor(name) for name in headers}
        if faulty := non_finite(tensors):
            raise DataError(f"{path}: {faulty} is not finite; {RESTORE}")
        if len(record) > RECORD_BYTES:  # before it is parsed
            raise DataError(
                f"{path}: the record has {len(record):,} characters, more than the limit of"
                f" {RECORD_BYTES:,}; {RESTORE}"
            )
        codes = {int(name.partition(".")[2]): tensor for name, tensor in tensors.items()}
        return cls(dict(sorted(codes.items())), parse_json(record, path, DataError))


def tensors_of(codes: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Return codes by the names of their tensors in a file."""
    return {f"layers.{index}": code.contiguous() for index, code in codes.items()}


def context_code(
    model: PreTrainedModel,
    pairs: Iterable[tuple[Any, Any]],
    *,
    record: Mapping[str, Any] | None = None,
) -> ContextCode:
    """Return the mean change of the last token's codes that a context makes.

    Args:
        model: with adapters attached. It does not change.
        pairs: token ids of a query with the context before it and of the query alone, [T] or
            [1, T] each, start tokens included. Both end with the same token.
        record: kept in the code's record, together with the number of queries and the hash of the
            adapter; for example the text of the context.

    Raises:
        ConfigError: there are no pairs, the last tokens of one differ, or ids are invalid.
        ModelError: no adapters are attached, or a code is transplanted.
        NumericalError: a code is not finite.
    """
    queries: list[Tensor] = []
    wanted: dict[int, list[Tensor]] = {}
    for count, (read, query) in enumerate(pairs, start=1):
        with_context = as_row(model, read)
        alone = as_row(model, query)
        last = int(with_context[0, -1])
        other = int(alone[0, -1])
        if last != other:
            raise ConfigError(
                f"query {count} ends with token {last} after the context and with token {other}"
                " alone; end both with the same token"
            )
        # what the code is to reach is known at once, what it has only when earlier layers have it
        queries.append(alone[0])
        states = _last_states(model, with_context)
        for index, state in states.items():
            wanted.setdefault(index, []).append(state)
    if not queries:
        raise ConfigError("there are no queries: pass at least one pair of a query's token ids")
    stacked = {index: torch.stack(states) for index, states in wanted.items()}
    codes = _changes(model, queries, stacked)
    origin = dict(record or {})
    origin["queries"] = len(queries)
    origin["adapter_hash"] = adapter_hash(model)
    return ContextCode(codes, origin)


def _last_states(model: PreTrainedModel, row: Tensor) -> dict[int, Tensor]:
    """Return by layer what a code is to reach at a row's last token: the stream [D], or without a
    token part the code itself [R].
    """
    with stages_at(model, (0, -1), "z", "stream") as found:
        model.model(row, use_cache=False)
    states = {}
    for index, layer in npt_layers(model):
        name = "z" if layer.npt.scale is None else "stream"
        states[index] = found[index][name]
    return states


def _changes(
    model: PreTrainedModel, queries: Sequence[Tensor], wanted: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """Return d [R] by layer, on the host.

    queries: N rows of ids, [T] each; wanted: `_last_states` of each with its context, [N, ...].
    """
    rows = pad_sequence(list(queries), batch_first=True)  # causal: what follows changes nothing
    lasts = torch.tensor([len(row) - 1 for row in queries])
    places = torch.arange(len(rows)), lasts
    changes: dict[int, Tensor] = {}

    def change(adapter: NPTAdapter, index: int, z: Tensor) -> Tensor:
        z = z[places]
        if adapter.scale is None:
            return (wanted[index] - z).mean(dim=0)
        state = now[index]["h"].to(z.dtype)
        own = now[index]["l"].to(z.dtype)
        size = adapter.size_of(state)
        # the stream of this pass, in which earlier layers have d already
        read = size * (z / adapter.scale)
        stream, _, _ = adapter.apply_to(STREAM, state + own, read)
        missing = ((wanted[index] - stream) / size).mean(dim=0)
        if not torch.isfinite(missing).all():
            raise NumericalError(
                f"layer {index}: the stream of a query's last token is not finite; find the cause"
                " with npt trace"
            )
        decoder = adapter.config.additive_scale * adapter.B[STREAM]
        return adapter.scale * (torch.linalg.pinv(decoder) @ missing)

    def give(adapter: NPTAdapter, index: int, z: Tensor) -> Tensor:
        changes[index] = change(adapter, index, z)
        changed = z.clone()
        changed[places] += changes[index]  # later layers see it
        return changed

    recodes = {index: partial(give, layer.npt, index) for index, layer in npt_layers(model)}
    # one pass: `give` finds a layer's d and changes the code before the next layer runs
    with stages_at(model, places, "h", "l") as now, recoded(model, recodes):
        model.model(rows, use_cache=False)
    return {index: each.float().cpu() for index, each in changes.items()}
