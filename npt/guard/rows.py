"""What the rows of a refused micro-batch are, in words: their sizes, oddities and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from npt.errors import printable
from npt.guard.ids import IGNORED

LETTERS = 80
"""Of a row's text that are shown."""


def describe_rows(inputs: Any, tokenizer: Any) -> tuple[str, ...]:
    """Return a line about each row of a micro-batch, empty for inputs without rows.

    Args:
        inputs: a Trainer's; ids are those of the first name that ends in `input_ids`.
        tokenizer: decodes them; anything without a `decode`, or None, leaves the text out.
    """
    if not isinstance(inputs, Mapping):
        return ()
    tensors = {name: t for name, t in inputs.items() if isinstance(t, Tensor) and t.ndim}
    name = next((name for name in tensors if name.endswith("input_ids")), None)
    first = next(iter(tensors.values()), None) if name is None else tensors[name]
    if first is None or not len(first):
        return ()
    prefix = "" if name is None else name.removesuffix("input_ids")
    same = {name: t.detach().cpu() for name, t in tensors.items() if len(t) == len(first)}
    return tuple(
        _row({name: t[i] for name, t in same.items()}, prefix, tokenizer) for i in range(len(first))
    )


def _row(row: Mapping[str, Tensor], prefix: str, tokenizer: Any) -> str:
    said = [
        f"{name} is not finite"
        for name, values in row.items()
        if values.is_floating_point() and not bool(values.isfinite().all())
    ]
    labels = row.get("labels")
    if labels is not None and labels.ndim and bool((labels == IGNORED).all()):
        said.append(f"every label is {IGNORED}")
    ids, mask = row.get(f"{prefix}input_ids"), row.get(f"{prefix}attention_mask")
    if ids is not None and ids.ndim == 1:
        if mask is not None and mask.shape == ids.shape:
            ids = ids[mask.bool()]
        said += [f"{len(ids)} tokens", *_text(ids, tokenizer)]
    return ", ".join(said)


def _text(ids: Tensor, tokenizer: Any) -> list[str]:
    try:
        text = printable(tokenizer.decode(ids[: 2 * LETTERS].tolist()), one_line=True)
    except Exception:  # no tokenizer, or one that does not know these ids: the refusal says which
        return []
    return [f'"{text[:LETTERS]}..."' if len(text) > LETTERS else f'"{text}"']
