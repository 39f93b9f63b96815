"""The value of a consolidated fact: its recall without its context, against what is forgotten.

Recall is the log-probability of the fact's tokens after nothing but the start token; with the
context, or the fact itself, read before, it says how much there is to gain. Forgetting is the
change on held-out text: perplexity, and the divergence from the model as it was. To first order
recall grows with alpha and the divergence with its square, so a bound on what may be forgotten is a
bound on alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.consolidate import Consolidation, consolidate, unconsolidate
from npt.adapters.converted import adapter_mode, attached_config, evaluating
from npt.adapters.layer import Mode
from npt.adapters.token_modulation import as_row
from npt.console import say
from npt.data.batch import Batch, Sample, batches
from npt.data.continuation import bare_tokens, opening_tokens
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.metrics import (
    Figures,
    compare_tokens,
    figures,
    final_states,
    per_sample_sums,
    predicting,
)

STREAMS: tuple[Mode, ...] = ("student", "teacher")
ROUNDS = 20

FORGETTING = ("tokens", "perplexity", "perplexity_ratio", "perplexity_ratio_se", "kl", "kl_se")

ERRORS_OF_MARGIN = 2.0
"""Standard errors that the divergence stays below its bound, for other held-out text."""


@dataclass(frozen=True)
class Fact:
    """A fact's tokens.

    Attributes:
        alone: start token and fact.
        in_context: start token, context (or the fact once), fact.
        scored: tokens of the fact that are predicted, at the end of both.
    """

    alone: tuple[int, ...]
    in_context: tuple[int, ...]
    scored: int


Retention = dict[str, dict[str, dict[str, Any]]]
"""`recall` and `forgetting` by stream: log-probability of the fact, the sum of its tokens, in nats,
and figures of the model after against the model before on held-out text."""


def encode_fact(tokenizer: Any, text: str, context: str = "") -> Fact:
    """Return a fact and its context as tokens, the fact's own the same in both places; raise
    ConfigError if it has no token that could be predicted.
    """
    begin, words = opening_tokens(tokenizer), bare_tokens(tokenizer, text)
    front = bare_tokens(tokenizer, context) if context else words
    scored = len(words) - (not begin)
    if scored < 1:
        raise ConfigError(
            f"--text is {text!r}, of which no token can be predicted; give a fact of some words"
        )
    return Fact((*begin, *words), (*begin, *front, *words), scored)


class Baseline:
    """The model as it is now, for comparison: final states on held-out samples, and the fact's
    log-probabilities alone and in context. Raise DataError if the samples have nothing to predict.
    """

    def __init__(
        self, model: PreTrainedModel, fact: Fact, samples: Sequence[Sample], batch_size: int = 8
    ):
        attached_config(model)
        device = next(model.parameters()).device
        self._batches = [batch.to(device) for batch in batches(samples, batch_size)]
        if not any(predicting(batch).any() for batch in self._batches):
            raise DataError("no held-out token to predict; check the data")
        self.fact = fact
        self._states = {
            stream: [_final(model, batch, stream).cpu() for batch in self._batches]
            for stream in STREAMS
        }
        texts = (fact.alone, fact.in_context)
        self._recall = {
            stream: [log_probability(model, ids, fact.scored, stream) for ids in texts]
            for stream in STREAMS
        }

    @torch.no_grad()
    def forgetting(self, model: PreTrainedModel, stream: Mode) -> Figures:
        """Return the figures of the model as it is now against the model as it was."""
        parts = []
        for batch, states in zip(self._batches, self._states[stream], strict=True):
            predicted = predicting(batch)
            per_token = compare_tokens(
                _final(model, batch, stream),
                states.to(batch.input_ids.device),
                batch.labels[:, 1:][predicted],
                model.lm_head,
                model.config.vocab_size,
            )
            parts.append(per_sample_sums(per_token, predicted.nonzero()[:, 0], len(predicted)))
        return figures(torch.cat(parts))

    def against(self, model: PreTrainedModel) -> Retention:
        """Return the model as it is now against the model as it was."""
        recall: dict[str, dict[str, Any]] = {}
        forgetting: dict[str, dict[str, Any]] = {}
        for stream, (alone, in_context) in self._recall.items():
            after = log_probability(model, self.fact.alone, self.fact.scored, stream)
            recall[stream] = {
                "tokens": self.fact.scored,
                "before": alone,
                "after": after,
                "in_context": in_context,
                "gain": after - alone,
            }
            f = self.forgetting(model, stream)
            forgetting[stream] = {name: getattr(f, name) for name in FORGETTING}
        return {"recall": recall, "forgetting": forgetting}


def largest_alpha(
    model: PreTrainedModel,
    baseline: Baseline,
    make: Callable[[float], Consolidation],
    asked: float,
    max_kl: float,
) -> float:
    """Return the strength, at most the one asked for, at which neither stream's divergence on the
    baseline's text is above a bound in nats per token (inf: no bound), by halving the divergence.
    Raise ConfigError if none keeps it.
    """
    if not max_kl > 0:
        raise ConfigError(f"--max_kl is {max_kl}; it must be above 0 (inf for no bound)")
    if not math.isfinite(max_kl):
        return asked
    alpha = asked
    for _ in range(ROUNDS):
        with made(model, make(alpha)):
            both = [baseline.forgetting(model, stream) for stream in STREAMS]
        margins = [ERRORS_OF_MARGIN * f.kl_se if math.isfinite(f.kl_se) else 0.0 for f in both]
        if all(f.kl + margin <= max_kl for f, margin in zip(both, margins, strict=True)):
            return alpha
        alpha /= math.sqrt(2.0)  # which halves the divergence, to first order
    raise ConfigError(
        f"--max_kl {max_kl} cannot be kept: at alpha {alpha:.2g} the held-out divergence is above"
        " it; raise it"
    )


@contextmanager
def made(model: PreTrainedModel, update: Consolidation) -> Iterator[None]:
    """Make the update part of the model within the context."""
    consolidate(model, update)
    try:
        yield
    finally:
        unconsolidate(model)


@torch.no_grad()
def log_probability(model: PreTrainedModel, ids: Sequence[int], scored: int, stream: Mode) -> float:
    """Return the log-probability of the last `scored` tokens given those before, summed, in nats;
    raise NumericalError if it is not a number.
    """
    row = as_row(model, list(ids))
    with evaluating(model), adapter_mode(model, stream):
        states = model.model(row, use_cache=False).last_hidden_state[0, -scored - 1 : -1]
    log_p = torch.log_softmax(model.lm_head(states).to(torch.float32), dim=-1)
    value = float(log_p.gather(-1, row[0, -scored:].unsqueeze(-1)).sum(dtype=torch.float64))
    if math.isnan(value):
        raise NumericalError(
            f"the {stream}'s log-probability of the fact is not a number; look with npt trace"
        )
    return value


@torch.no_grad()
def _final(model: PreTrainedModel, batch: Batch, stream: Mode) -> Tensor:
    """Return the states, after the final norm, that held-out tokens are predicted from: [P, D]."""
    with evaluating(model), adapter_mode(model, stream):
        return final_states(model, batch)


def print_retention(retention: Retention, console: Console, text: str = "held-out") -> None:
    """Print of each stream the fact's log-probability without its context, and what is forgotten on
    other text; `text` says which.
    """
    for stream, r in retention["recall"].items():
        f = retention["forgetting"][stream]
        say(
            console,
            f"{stream}: log-probability of the fact {r['before']:.3f} nats before, {r['after']:.3f}"
            f" after ({r['gain']:+.3f}), {r['in_context']:.3f} in context; on {f['tokens']:,}"
            f" {text} tokens KL {f['kl']:.4f} ± {f['kl_se']:.4f} nats, perplexity ratio"
            f" {f['perplexity_ratio']:.4f} ± {f['perplexity_ratio_se']:.4f}",
        )
