"""Token ids and labels that a model does not know, refused before a GPU asserts them.

Only what the model would index is refused. Ids that it replaces first, such as the placeholders of
images, never reach the embedding, so ids are judged where they enter it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from npt.errors import DataError

IGNORED = -100


@contextmanager
def refuse_bad_ids(inputs: Any, model: nn.Module, labels: bool = True) -> Iterator[None]:
    """Refuse ids and labels of a batch for the forward within the context.

    Args:
        inputs: the batch; one that is no mapping, or holds no `input_ids`, passes through.
        model: whose embedding and head have a row per token.
        labels: the loss is the model's own. It is checked for models of transformers only, whose
            losses are known to ignore -100 and nothing else.

    Raises:
        DataError: on entering for a label, within the forward for an id.
    """
    if not isinstance(inputs, Mapping) or not _whole_numbers(inputs.get("input_ids")):
        yield
        return
    embedding = _part(model, "get_input_embeddings")
    bad_id = _bad(inputs["input_ids"], _rows_of(embedding))
    targets, head = inputs.get("labels"), _part(model, "get_output_embeddings")
    bad_label = None
    if labels and _whole_numbers(targets) and _of_transformers(model):
        bad_label = _bad(targets, _rows_of(head), IGNORED)
    suspects = [bad.any() for bad in (bad_id, bad_label) if bad is not None]
    if not suspects or not bool(torch.stack(suspects).any()):  # read once for both
        yield
        return
    if bad_label is not None and bool(bad_label.any()):
        raise _unknown("labels", targets, bad_label, _rows_of(head))
    assert embedding is not None  # its rows were counted

    def check(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        ids = arguments[0] if arguments else None
        bad = _bad(ids, _rows_of(embedding)) if _whole_numbers(ids) else None
        if bad is not None and bool(bad.any()):
            padding = _masked(bad, inputs.get("attention_mask"))
            raise _unknown("input_ids", ids, bad, _rows_of(embedding), padding)

    handle = embedding.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _unknown(
    name: str, ids: Any, bad: Tensor, size: int | None, padding: bool = False
) -> DataError:
    assert size is not None
    known = f"and the model knows ids from 0 to {size - 1}"
    if not padding:
        return DataError(f"{name} has {int(ids[bad][0])}, {known}")
    remedy = "call model.resize_token_embeddings(len(tokenizer)) or set another pad_token"
    return DataError(f"{name} has {int(ids[bad][0])} as padding, {known}; {remedy}")


def _masked(bad: Tensor, mask: Any) -> bool:
    """Return whether all of these positions are padding, which a model looks up all the same."""
    return isinstance(mask, Tensor) and mask.shape == bad.shape and not bool((mask != 0)[bad].any())


def _whole_numbers(ids: Any) -> bool:
    return isinstance(ids, Tensor) and not ids.is_floating_point() and ids.numel() > 0


def _bad(ids: Any, size: int | None, ignored: int | None = None) -> Tensor | None:
    if size is None:
        return None
    below = ids < 0 if ignored is None else (ids < 0) & (ids != ignored)
    return (ids >= size) | below


def _of_transformers(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return type(inner).__module__.startswith(("transformers.", "npt."))


def _part(model: Any, name: str) -> nn.Module | None:
    """Return an embedding or head, None if the model has none."""
    try:
        return getattr(model, name)()
    except (AttributeError, NotImplementedError):  # models of no tokens, and of one's own
        return None


def _rows_of(module: Any) -> int | None:
    """Return the number of tokens that an embedding or head has a row for, also inside PEFT's."""
    inner = module
    while inner is not None:  # a LoRA's own sizes are others
        module, inner = inner, getattr(inner, "base_layer", None)
        inner = getattr(module, "original_module", None) if inner is None else inner
    return getattr(module, "num_embeddings", getattr(module, "out_features", None))
