"""Measure a consolidated fact: how well the model recalls it, and what the model forgets.

Recall is the log-probability of the fact's tokens after only the start token. Their log-probability
after the context, or after the fact itself, shows how much there is to gain. Forgetting is the
change of perplexity and the KL from the model before on held-out text. To first order recall grows
with alpha and the KL with its square, so a bound on the KL is a bound on alpha.
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
from npt.figures import FIGURES

STREAMS: tuple[Mode, ...] = ("student", "teacher")
ROUNDS = 20

FORGETTING = ("tokens", "perplexity", "perplexity_ratio", "perplexity_ratio_se", "kl", "kl_se")

ERRORS_OF_MARGIN = 2.0
"""Standard errors by which the KL must stay below its bound, to hold on other text too."""


@dataclass(frozen=True)
class Fact:
    """The tokens of a fact.

    Attributes:
        alone: start token, fact.
        in_context: start token, context (or the fact itself), fact.
        scored: number of tokens to predict at the end of both.
    """

    alone: tuple[int, ...]
    in_context: tuple[int, ...]
    scored: int


Retention = dict[str, dict[str, dict[str, Any]]]
"""`recall` and `forgetting` by stream: the log-probability of the fact in nats, summed over its
tokens, and the figures of the model after against before on held-out text."""


def encode_fact(tokenizer: Any, text: str, context: str = "") -> Fact:
    """Return the tokens of a fact; ConfigError if there is no token to predict."""
    begin, words = opening_tokens(tokenizer), bare_tokens(tokenizer, text)
    front = bare_tokens(tokenizer, context) if context else words
    scored = len(words) - (not begin)
    if scored < 1:
        raise ConfigError(f"--text {text!r} has no token to predict; pass a longer text")
    return Fact((*begin, *words), (*begin, *front, *words), scored)


class Baseline:
    """The model before an edit: its final states on held-out samples, and the log-probabilities of
    the fact alone and in context. Raise DataError if the samples have no token to predict.
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
        """Return the figures of the model now against the model before."""
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
        """Return recall and forgetting of the model now against the model before."""
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
    """Return the first alpha of `asked`, `asked` / sqrt(2), `asked` / 2, ... that keeps the KL of
    both streams on the baseline's text below `max_kl` nats per token (inf: no bound). Raise
    ConfigError if none of ROUNDS does.
    """
    if not max_kl > 0:
        raise ConfigError(f"--max_kl {max_kl} must be above 0 (inf for no bound)")
    if not math.isfinite(max_kl):
        return asked
    alpha = asked
    for _ in range(ROUNDS):
        with made(model, make(alpha)):
            both = [baseline.forgetting(model, stream) for stream in STREAMS]
        margins = [ERRORS_OF_MARGIN * f.kl_se if math.isfinite(f.kl_se) else 0.0 for f in both]
        if all(f.kl + margin <= max_kl for f, margin in zip(both, margins, strict=True)):
            return alpha
        alpha /= math.sqrt(2.0)  # halves the KL, to first order
    raise ConfigError(
        f"--max_kl {max_kl} is too low: even at alpha {alpha:.2g} the held-out KL exceeds it; raise"
        " --max_kl"
    )


@contextmanager
def made(model: PreTrainedModel, update: Consolidation) -> Iterator[None]:
    """Consolidate the update into the model within the context."""
    consolidate(model, update)
    try:
        yield
    finally:
        unconsolidate(model)


@torch.no_grad()
def log_probability(model: PreTrainedModel, ids: Sequence[int], scored: int, stream: Mode) -> float:
    """Return the log-probability, in nats, of the last `scored` tokens; NumericalError if NaN."""
    row = as_row(model, list(ids))
    with evaluating(model), adapter_mode(model, stream):
        states = model.model(row, use_cache=False).last_hidden_state[0, -scored - 1 : -1]
    log_p = torch.log_softmax(model.lm_head(states).to(torch.float32), dim=-1)
    value = float(log_p.gather(-1, row[0, -scored:].unsqueeze(-1)).sum(dtype=torch.float64))
    if math.isnan(value):
        raise NumericalError(
            f"the {stream}'s log-probability of the fact is NaN; run npt trace to find out why"
        )
    return value


@torch.no_grad()
def _final(model: PreTrainedModel, batch: Batch, stream: Mode) -> Tensor:
    """Return the final states of the P predicting held-out tokens: [P, D]."""
    with evaluating(model), adapter_mode(model, stream):
        return final_states(model, batch)


def print_retention(retention: Retention, console: Console, text: str = "held-out tokens") -> None:
    """Print recall and forgetting of each stream; `text` describes the tokens of the latter."""
    for stream, r in retention["recall"].items():
        f = retention["forgetting"][stream]
        written = {
            name: FIGURES[name].write(f[name], f[f"{name}_se"])
            for name in ("kl", "perplexity_ratio")
        }
        recall = f"{r['before']:.3f} nats before, {r['after']:.3f} after ({r['gain']:+.3f})"
        say(
            console,
            f"{stream}: log-probability of the fact {recall}, {r['in_context']:.3f} in context",
            f"{stream}: {f['tokens']:,} {text}: KL {written['kl']} nats from the model"
            f" before, perplexity ratio {written['perplexity_ratio']}",
        )
