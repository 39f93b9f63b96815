"""Refuse token ids and labels outside the vocabulary before they trip an assertion on the GPU.

Ids are checked where they enter the embedding, because the model may replace some of them first,
such as placeholders for images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from npt.batch import IGNORE_INDEX
from npt.errors import DataError
from npt.guard.parallel import sharded_modules
from npt.tracer.token_ids import LOOKED_UP, reads_labels

PADDING = (
    "; if it is padding, call model.resize_token_embeddings(len(tokenizer)) or set another"
    " pad_token"
)


NOTHING = torch.zeros(0, dtype=torch.bool)


@contextmanager
def refuse_bad_ids(inputs: object, model: nn.Module, labels: bool = True) -> Iterator[None]:
    """Check a batch's ids and labels for the forward within the context.

    If layers are sharded, other processes wait for this forward and backward. Then valid ids and
    labels are put in, and the batch is refused afterwards.

    Args:
        inputs: the batch; if it is no mapping, it is not checked.
        labels: also check labels, if the model computes the loss and is from transformers, whose
            losses ignore -100 and nothing else. Without `input_ids`, labels are tokens only for a
            decoder that reads them, as of speech or images.

    Raises:
        DataError: on entry for a label, in the forward for an id; on exit if layers are sharded.
    """
    given: Mapping[str, object] = inputs if isinstance(inputs, Mapping) else {}
    embedding = _part(model, "get_input_embeddings")
    rows = _rows_of(embedding)
    classes = _rows_of(_part(model, "get_output_embeddings"))
    # all on the device, so that the host waits once
    bad_ids = {name: _outside(_ids_in(given.get(name)), rows) for name in LOOKED_UP}
    checked = labels and _of_transformers(model)
    tokens = given.get("input_ids") is not None or reads_labels(model)
    unchanged = _ids_in(given.get("labels") if tokens else None)
    targets = unchanged if checked else NOTHING
    bad_labels = _outside(targets.masked_fill(targets == IGNORE_INDEX, 0), classes)
    suspects = [bad.any() for bad in (*bad_ids.values(), bad_labels) if bad.numel()]
    if not suspects or not bool(torch.stack(suspects).any()):  # read once for both
        yield
        return
    # rare from here on: something is outside, but the model may replace it before it looks
    found: list[DataError] = []
    sharded = bool(sharded_modules(model))
    # a mapping that is read-only cannot have its labels replaced
    held: MutableMapping[str, object] = inputs if isinstance(inputs, MutableMapping) else {}
    if bool(bad_labels.any()):
        found.append(_unknown("labels", targets[bad_labels], classes))
        if not sharded:
            raise found[0]
        held["labels"] = targets.masked_fill(bad_labels, IGNORE_INDEX)

    def check(_: nn.Module, arguments: tuple[object, ...]) -> tuple[object, ...] | None:
        entering = _ids_in(next(iter(arguments), None))
        bad = _outside(entering, rows)
        if not bool(bad.any()):
            return None
        named = (name for name, each in bad_ids.items() if bool(each.any()))
        name = next(named, "labels")  # decoders make their ids of them
        found.append(_unknown(name, entering[bad], rows, PADDING))
        if not sharded:
            raise found[-1]
        return entering.masked_fill(bad, 0), *arguments[1:]

    handles = [each.register_forward_pre_hook(check) for each in _sharing(model, embedding)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if unchanged.numel():
            held["labels"] = unchanged
    if found:
        raise found[0]


def _unknown(name: str, bad: Tensor, rows: int | None, remedy: str = "") -> DataError:
    assert rows is not None, "without rows, no id is outside"
    message = f"{name} has {int(bad[0])}, but the model's ids are 0 to {rows - 1}"
    return DataError(message + remedy)


def _ids_in(entry: object) -> Tensor:
    """Return the ids that an entry of a batch holds; none if it holds others or nothing."""
    if isinstance(entry, Tensor) and not entry.is_floating_point():
        return entry
    return NOTHING


def _outside(ids: Tensor, rows: int | None) -> Tensor:
    """Return which ids have no row; of a model with an unknown number of rows, none."""
    if rows is None:
        return NOTHING
    return (ids >= rows) | (ids < 0)


def _of_transformers(model: nn.Module) -> bool:
    inner = getattr(model, "get_base_model", lambda: model)()
    kinds = (kind.__module__ for kind in type(inner).__mro__)
    own = next(name for name in kinds if not name.startswith("torch.distributed."))  # FSDP2's
    return own.startswith(("transformers.", "npt."))


def _part(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return getattr(model, name)()
    except (AttributeError, NotImplementedError):  # a model without tokens, or a custom one
        return None


def _sharing(model: nn.Module, embedding: nn.Module | None) -> list[nn.Module]:
    """Return an embedding and those tied to it, as of an encoder and a decoder."""
    if embedding is None:
        return []
    others = (m for m in model.modules() if isinstance(m, nn.Embedding) and m is not embedding)
    weight = getattr(embedding, "weight", None)
    return [embedding, *(other for other in others if other.weight is weight)]


def _rows_of(module: nn.Module | None) -> int | None:
    """Return how many tokens an embedding or head has rows for, also inside PEFT's wrapper."""
    inner = module
    while inner is not None:  # LoRA's own sizes differ
        module = inner
        inner = getattr(module, "base_layer", None)
        if inner is None:
            inner = getattr(module, "original_module", None)
    return getattr(module, "num_embeddings", getattr(module, "out_features", None))
