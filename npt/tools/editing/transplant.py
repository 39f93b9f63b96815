"""Transplants: act on a token's code from outside.

A token's code z alone determines its modulation. So giving a token the modulation of a token from
another text replaces its code in every converted layer: the token stays, but acts on the other
token's context. Adding the code of a context (context_code.py) keeps the token's own context too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import attached_config, npt_layers
from npt.adapters.token_modulation import (
    TokenModulation,
    as_row,
    modulation_of,
    recoded,
    token_index,
)
from npt.distill.logit_losses import kl_of_logs
from npt.errors import ConfigError, ModelError
from npt.evaluation.reading import reading
from npt.tools.editing.context_code import ContextCode


@contextmanager
def transplanted(
    model: PreTrainedModel,
    code: TokenModulation | ContextCode,
    position: int | None,
    *,
    add: bool = False,
) -> Iterator[None]:
    """Within the context, give a code to a token of every row, or to all tokens.

    In a form with active numbers, codes pass the threshold before. So what is given has the numbers
    of `code`, and a sum may have more numbers that are not 0 than the form's `active`.

    Args:
        model: a model with adapters attached, of the form that the code was read from.
        code: from `npt.modulation_of` or `npt.context_code`. Layers that it lacks do not change.
        position: index in the row, 0 or above; counts left padding and, in generation, cached
            tokens. So with the index of a prompt's last token, generated tokens do not get the
            code. None: every token gets it, generated ones too.
        add: add the code to that of the token; otherwise replace it.

    Raises:
        ConfigError: the position is negative.
        ModelError: no adapters are attached, the code has other layers or ranks, another code is
            transplanted already; or within the context, with a position, a pass is not over rows
            of tokens (training and `npt.evaluate`).
    """
    attached_config(model)
    layers = dict(npt_layers(model))
    if position is not None and position < 0:
        raise ConfigError(
            f"the position is {position}; it must be 0 or above, counted from the start of the row"
        )
    # refused here, before the first pass: within one, layers below would have the code already
    for index, values in code.codes.items():
        rank = len(layers[index].npt.A) if index in layers else None
        if rank != len(values):
            here = "no adapter" if rank is None else f"rank {rank}"
            raise ModelError(
                f"the code has rank {len(values)} for layer {index}, the model has {here} there;"
                " read the code from this model"
            )
    cached = 0

    # a layer sees only the tokens of its own pass; where these begin, the model's cache knows
    def count(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal cached
        past = kwargs.get("past_key_values")
        cached = 0 if past is None else int(past.get_seq_length())

    def recode(values: Tensor, z: Tensor) -> Tensor:
        values = values.to(z)
        if add:
            values = z + values
        values = values.expand_as(z)
        if position is None:
            return values
        if z.ndim != 3:  # training keeps the valid tokens of all rows in one
            raise ModelError(
                f"npt.transplanted at position {position} acts on rows of tokens, which training"
                " and npt.evaluate do not keep: exit its context first, or pass the position None"
            )
        place = position - cached
        if not 0 <= place < z.shape[1]:
            return z  # the token is in another pass of the generation
        changed = z.clone()
        changed[:, place] = values[:, place]
        return changed

    recodes = {index: partial(recode, values) for index, values in code.codes.items()}
    with recoded(model, recodes):
        handle = model.model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


@dataclass(frozen=True)
class Transplant:
    """Next-token log-probabilities before and after a transplant, [V] in fp32 on the host.

    Attributes:
        donor: after the donor's text.
        receiver: after the receiver's text.
        transplanted: after the receiver's text with the donor's modulation at one token.
    """

    donor: Tensor
    receiver: Tensor
    transplanted: Tensor
    token_from: int
    token_to: int

    def top(self, count: int) -> dict[str, list[tuple[int, float]]]:
        """Return the `count` most probable next tokens of each, with their probabilities."""
        return top_tokens(self._log_p(), count)

    def divergences(self) -> dict[str, float]:
        """Return KLs in nats; `a_to_b` is KL(a, b)."""
        pairs = ("receiver", "transplanted"), ("donor", "transplanted"), ("donor", "receiver")
        return divergences(self._log_p(), pairs)

    def _log_p(self) -> dict[str, Tensor]:
        names = ("donor", "receiver", "transplanted")
        return {name: getattr(self, name) for name in names}


def top_tokens(log_p: Mapping[str, Tensor], count: int) -> dict[str, list[tuple[int, float]]]:
    """Return the `count` most probable tokens of each distribution, with their probabilities.

    log_p: log-probabilities [V] by name.
    """
    best = {}
    for name, each in log_p.items():
        values, ids = each.exp().topk(min(count, len(each)))
        best[name] = list(zip(ids.tolist(), values.tolist(), strict=True))
    return best


def divergences(log_p: Mapping[str, Tensor], pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return KL(a, b) in nats of pairs of distributions, as `a_to_b`. log_p: as in `top_tokens`."""
    return {
        f"{one}_to_{other}": float(kl_of_logs(log_p[one].double(), log_p[other].double()))
        for one, other in pairs
    }


def transplant(
    model: PreTrainedModel,
    ids_from: Sequence[int],
    ids_to: Sequence[int],
    token_from: int = -1,
    token_to: int = -1,
) -> Transplant:
    """Give a token of one text the modulation of a token of another text, and return the next-token
    distributions. The model does not change.

    Args:
        model: a model with adapters attached.
        ids_from: the donor's tokens, start tokens included.
        ids_to: the receiver's tokens, start tokens included.
        token_from: index of the donor's token, from the end if negative.
        token_to: index of the receiver's token, from the end if negative.

    Raises:
        ConfigError: there is no such token, or ids lie outside the vocabulary.
        ModelError: no adapters are attached.
        NumericalError: the modulation is not finite.
    """
    modulation = modulation_of(model, ids_from, token_from)
    row_from = as_row(model, ids_from)
    row_to = as_row(model, ids_to)
    position = token_index(row_to, token_to)
    with transplanted(model, modulation, position):
        changed = next_token(model, row_to)
    return Transplant(
        donor=next_token(model, row_from),
        receiver=next_token(model, row_to),
        transplanted=changed,
        token_from=modulation.token,
        token_to=position,
    )


def next_token(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Return the student's next-token log-probabilities [V] after a row of tokens."""
    with reading(model):
        output = model(row, use_cache=False, logits_to_keep=1)
    logits = output.logits[0, -1]
    return torch.log_softmax(logits.to(torch.float32), dim=-1).cpu()
