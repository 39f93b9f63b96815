"""Transplants: give a token the modulation of a token from another text.

The code z alone determines a token's modulation, so a transplant replaces the code in every
converted layer at one position. The token stays, but acts on the other token's context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode, attached_config, evaluating, npt_layers
from npt.adapters.token_modulation import TokenModulation, as_row, modulation_of, token_index
from npt.distill.logit_losses import kl_of_logs
from npt.errors import ConfigError, ModelError


@contextmanager
def transplanted(
    model: PreTrainedModel, modulation: TokenModulation, position: int
) -> Iterator[None]:
    """Within the context, give the token at `position` of every row this modulation.

    Args:
        model: a model with adapters attached, of the form that the modulation was read from.
        modulation: from `npt.modulation_of`.
        position: index in the row, 0 or above; counts left padding and, in generation, cached
            tokens.

    Raises:
        ConfigError: the position is negative.
        ModelError: no adapters are attached, the modulation has other layers or ranks, or another
            modulation is transplanted already.
    """
    attached_config(model)
    layers = dict(npt_layers(model))
    if position < 0:
        raise ConfigError(
            f"the position is {position}; it must be 0 or above, counted from the start of the row"
        )
    for index, code in modulation.codes.items():
        rank = len(layers[index].npt.A) if index in layers else None
        if rank != len(code):
            here = "no adapter" if rank is None else f"rank {rank}"
            raise ModelError(
                f"the modulation has a code of rank {len(code)} for layer {index}, the model has"
                f" {here} there; read the modulation from this model"
            )
        if layers[index].npt.recode is not None:
            raise ModelError(
                "a modulation is transplanted already; exit that npt.transplanted context first"
            )
    cached = 0

    def count(_module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal cached
        past = kwargs.get("past_key_values")
        cached = int(past.get_seq_length()) if past is not None else 0

    def recode(code: Tensor, z: Tensor) -> Tensor:
        if z.ndim != 3 or not 0 <= position - cached < z.shape[1]:
            return z
        changed = z.clone()
        changed[:, position - cached] = code.to(z)
        return changed

    with ExitStack() as stack:
        stack.callback(model.model.register_forward_pre_hook(count, with_kwargs=True).remove)
        for index, code in modulation.codes.items():
            adapter = layers[index].npt
            adapter.recode = lambda z, code=code: recode(code, z)
            stack.callback(setattr, adapter, "recode", None)
        yield


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
        best = {}
        for name in ("donor", "receiver", "transplanted"):
            values, ids = getattr(self, name).exp().topk(min(count, len(self.donor)))
            best[name] = list(zip(ids.tolist(), values.tolist(), strict=True))
        return best

    def divergences(self) -> dict[str, float]:
        """Return KLs in nats; `a_to_b` is KL(a, b)."""
        donor, receiver, moved = (
            log_p.double() for log_p in (self.donor, self.receiver, self.transplanted)
        )
        return {
            "receiver_to_transplanted": float(kl_of_logs(receiver, moved)),
            "donor_to_transplanted": float(kl_of_logs(donor, moved)),
            "donor_to_receiver": float(kl_of_logs(donor, receiver)),
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
    row_from, row_to = as_row(model, ids_from), as_row(model, ids_to)
    position = token_index(row_to, token_to)
    donor, receiver = _next(model, row_from), _next(model, row_to)
    with transplanted(model, modulation, position):
        changed = _next(model, row_to)
    return Transplant(donor, receiver, changed, modulation.token, position)


@torch.no_grad()
def _next(model: PreTrainedModel, row: Tensor) -> Tensor:
    """Return the student's next-token log-probabilities [V] after a row of tokens."""
    with evaluating(model), adapter_mode(model, "student"):
        logits = model(row, use_cache=False, logits_to_keep=1).logits[0, -1]
    return torch.log_softmax(logits.to(torch.float32), dim=-1).cpu()
