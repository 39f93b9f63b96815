"""One token's modulation: its code z in every converted layer, and the resulting m and s.

In an NPT layer, the context affects the token's MLP only through it. It can be read, given to
another token (npt/tools/editing/transplant.py), or made part of the model (consolidate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import (
    adapter_mode,
    attached_config,
    attribute_set,
    evaluating,
    npt_layers,
)
from npt.adapters.layer import NPTAdapter, Observer
from npt.errors import ConfigError, ModelError, NumericalError

LayerTerms = dict[str, tuple[Tensor | None, Tensor | None]]
"""(m, s) by target, [O] each in fp32; None if the adapter's form lacks the term."""


def observed(
    observers: Sequence[tuple[NPTAdapter, Observer | None]],
) -> AbstractContextManager[None]:
    """Within the context, pass each adapter's stages to its observer."""
    return attribute_set("observer", observers)


def recoded(
    model: PreTrainedModel, recodes: Mapping[int, Callable[[Tensor], Tensor]]
) -> AbstractContextManager[None]:
    """Within the context, replace the codes of these layers: z to z, [..., R].

    Raises:
        ModelError: codes are replaced already.
    """
    adapters = {index: layer.npt for index, layer in npt_layers(model) if index in recodes}
    for adapter in adapters.values():
        if adapter.recode is not None:
            raise ModelError(
                "a code is transplanted already; exit that npt.transplanted context first"
            )
    return attribute_set("recode", [(adapter, recodes[i]) for i, adapter in adapters.items()])


@dataclass(frozen=True)
class TokenModulation:
    """The modulation of one token of a text.

    Attributes:
        codes: z [R] by layer.
        terms: m and s by layer and target.
        token: index of the token in the text.
        token_id: its id.
    """

    codes: dict[int, Tensor]
    terms: dict[int, LayerTerms]
    token: int
    token_id: int


@torch.no_grad()
def modulation_of(model: PreTrainedModel, ids: Any, token: int = -1) -> TokenModulation:
    """Run the student on a text and return one token's modulation in every converted layer.

    Args:
        model: with adapters attached. It does not change.
        ids: [T] or [1, T], token ids of the text with its start token.
        token: index in the text; a negative one counts from the end.

    Raises:
        ConfigError: there are no tokens, ids outside the vocabulary, or no such token.
        ModelError: no adapters are attached.
        NumericalError: the modulation is not finite.
    """
    targets = attached_config(model).targets
    ids = as_row(model, ids)
    token = token_index(ids, token)
    stages: dict[int, dict[str, Any]] = {index: {} for index, _ in npt_layers(model)}

    def keep(index: int, shown: dict[str, Tensor | None]) -> None:
        """Keep the stages of this token only."""
        for name, stage in shown.items():
            if name == "z" or name.startswith(("m_", "s_")):
                stages[index][name] = None if stage is None else stage[0, token].clone()

    observers = [(layer.npt, partial(keep, index)) for index, layer in npt_layers(model)]
    with observed(observers), evaluating(model), adapter_mode(model, "student"):
        model.model(ids, use_cache=False)
    terms: dict[int, LayerTerms] = {}
    for index, kept in stages.items():
        terms[index] = {t: (kept.get(f"m_{t}"), kept[f"s_{t}"]) for t in targets}
        for name, stage in kept.items():
            if name != "z" and stage is not None and not stage.isfinite().all():
                raise NumericalError(
                    f"layer {index}: the {name[2:]} modulation of token {token} is not finite;"
                    " find the cause with npt trace"
                )
    codes = {index: kept["z"] for index, kept in stages.items()}
    return TokenModulation(codes, terms, token, int(ids[0, token]))


def as_row(model: PreTrainedModel, ids: Any) -> Tensor:
    """Return token ids as one row [1, T] on the model's device; raise ConfigError if invalid."""
    row = torch.as_tensor(ids)
    if row.ndim == 1:
        row = row.unsqueeze(0)
    one_text = row.ndim == 2 and len(row) == 1 and row.numel() > 0
    if not one_text or row.is_floating_point():
        raise ConfigError(
            f"token ids are {row.dtype} of shape {list(row.shape)}; pass the integer ids of one"
            " text, [T] or [1, T]"
        )
    last = model.config.vocab_size - 1
    if int(row.min()) < 0 or int(row.max()) > last:
        raise ConfigError(
            f"the text has token ids outside 0 to {last}; use the model's own tokenizer"
        )
    return row.to(model.device, torch.int64)


def token_index(ids: Tensor, token: int) -> int:
    """Return a token's index in [1, T] ids from the start, given one from either end."""
    length = ids.shape[1]
    if not -length <= token < length:
        raise ConfigError(
            f"there is no token {token}: the text has tokens {-length} to {length - 1}"
        )
    return token % length
