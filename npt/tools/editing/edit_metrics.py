"""The value of a consolidated fact: its recall without its context, against what is forgotten.

Recall is the log-probability of the fact's tokens after nothing but the start token; with the
context, or the fact itself, read before, it says how much there is to gain. Forgetting is the
change on held-out text: perplexity, and the divergence from the model as it was. To first order
recall grows with alpha and the divergence with its square, so a bound on what may be forgotten is a
bound on alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.consolidate import Update, consolidate, unconsolidate, update_from
from npt.adapters.converted import adapter_mode, attached_config
from npt.adapters.fit import format_layers
from npt.adapters.layer import Mode
from npt.adapters.token_modulation import TokenModulation, as_row, modulation_of
from npt.data.batch import Batch, Sample, batches
from npt.data.continuation import bare_tokens, opening_tokens
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.metrics import (
    Figures,
    compare_tokens,
    evaluating,
    figures,
    final_states,
    per_sample_sums,
    predicting,
)

STREAMS: tuple[Mode, ...] = ("student", "teacher")
PROBE_ALPHA = 0.1
PROBE_SAMPLES = 16
ROUNDS = 6

ERRORS_OF_MARGIN = 2.0
"""Standard errors that the divergence stays below its bound, for other held-out text."""


@dataclass(frozen=True)
class Fact:
    """A fact's tokens. alone: start token and fact. in_context: start token, context (or the fact
    once), fact. scored: tokens of the fact, at the end.
    """

    alone: tuple[int, ...]
    in_context: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Recall:
    """Log-probability of the fact, summed over its tokens, in nats."""

    tokens: int
    before: float
    after: float
    in_context: float

    @property
    def gain(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Retention:
    """By stream: recall, and figures of the model after against the model before on held-out
    text.
    """

    recall: dict[str, Recall]
    forgetting: dict[str, Figures]

    def as_dict(self) -> dict[str, Any]:
        return {
            "recall": {stream: {**asdict(r), "gain": r.gain} for stream, r in self.recall.items()},
            "forgetting": {
                stream: {
                    "tokens": f.tokens,
                    "perplexity_before": f.perplexity / f.perplexity_ratio,
                    "perplexity_after": f.perplexity,
                    "perplexity_ratio": f.perplexity_ratio,
                    "perplexity_ratio_se": f.perplexity_ratio_se,
                    "kl": f.kl,
                    "kl_se": f.kl_se,
                }
                for stream, f in self.forgetting.items()
            },
        }


@dataclass(frozen=True)
class Choice:
    """One token's modulation, of some targets and layers, at a strength; `gain` in the student's
    recall.
    """

    token: int
    targets: tuple[str, ...]
    layers: tuple[int, ...]
    alpha: float
    gain: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layers": format_layers(self.layers)}


def encode_fact(tokenizer: Any, text: str, context: str = "") -> Fact:
    """Return a fact and its context as tokens, the fact's own the same in both places; raise
    ConfigError if it has no token that could be predicted.
    """
    begin, own = opening_tokens(tokenizer), bare_tokens(tokenizer, text)
    before = bare_tokens(tokenizer, context) if context else []
    scored = len(own) - (not begin)
    if scored < 1:
        raise ConfigError(
            f"--text is {text!r}, of which no token can be predicted; give a fact of some words"
        )
    return Fact((*begin, *own), (*begin, *(before or own), *own), scored)


class Before:
    """The model as it is now, for comparison: final states on held-out samples, and the fact's
    recall. Raise DataError if the samples have nothing to predict.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, fact: Fact, samples: Sequence[Sample],
        batch_size: int = 8,
    ):  # fmt: skip
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
        self._recall, self._in_context = (
            {stream: log_probability(model, ids, fact.scored, stream) for stream in STREAMS}
            for ids in (fact.alone, fact.in_context)
        )

    def recall(self, model: PreTrainedModel, stream: Mode) -> Recall:
        after = log_probability(model, self.fact.alone, self.fact.scored, stream)
        return Recall(self.fact.scored, self._recall[stream], after, self._in_context[stream])

    @torch.no_grad()
    def forgetting(self, model: PreTrainedModel, stream: Mode) -> Figures:
        parts = []
        for batch, states in zip(self._batches, self._states[stream], strict=True):
            predicted = predicting(batch)
            targets = batch.labels[:, 1:][predicted]
            per_token = compare_tokens(
                _final(model, batch, stream),
                states.to(targets.device),
                targets,
                model.lm_head,
                model.config.vocab_size,
            )
            parts.append(per_sample_sums(per_token, predicted.nonzero()[:, 0], len(predicted)))
        return figures(torch.cat(parts))

    def against(self, model: PreTrainedModel) -> Retention:
        """Return the model as it is now against the model as it was."""
        return Retention(
            {s: self.recall(model, s) for s in STREAMS},
            {s: self.forgetting(model, s) for s in STREAMS},
        )


def largest_alpha(
    model: PreTrainedModel,
    before: Before,
    make: Callable[[float], Update],
    asked: float,
    max_kl: float,
) -> float:
    """Return the strength, at most the one asked for, at which neither stream's divergence on held-
    out text, which the outcome is not reported on, is above a bound in nats per token; infinite for
    none. Raise ConfigError if no strength that counts keeps it.
    """
    if not max_kl > 0:
        raise ConfigError(f"--max_kl is {max_kl}; it must be above 0 (inf for no bound)")
    if not math.isfinite(max_kl):
        return asked
    alpha, fitting = asked, 0.0
    for _ in range(ROUNDS):
        with made(model, make(alpha)):
            reached = max(_upper(before.forgetting(model, stream)) for stream in STREAMS)
        if not math.isfinite(reached):
            alpha /= 8
            continue
        if reached <= max_kl:
            fitting = alpha
            if alpha == asked or reached >= 0.9 * max_kl:
                break
        alpha = min(asked, alpha * math.sqrt(0.95 * max_kl / max(reached, 1e-3 * max_kl)))
    if not fitting:
        raise ConfigError(
            f"--max_kl {max_kl} cannot be kept: at alpha {alpha:.2g} the held-out divergence is"
            " above it; raise it"
        )
    return fitting


def search(
    model: PreTrainedModel,
    before: Before,
    start: Choice,
    max_kl: float,
    ids: Sequence[int],
    report: Callable[[str], None] = lambda _: None,
) -> list[Choice]:
    """Try what else of the same text could be consolidated at the same cost, and return it, best
    first: other targets, then other tokens, then other layers, each from the best of the one
    before, at the strength where the student's divergence would reach `max_kl` nats per token.
    report: told what is tried.
    """
    if not (max_kl > 0 and math.isfinite(max_kl)):
        raise ConfigError(
            f"--max_kl is {max_kl}; a search compares at one cost, so that it needs a finite bound"
            " above 0"
        )
    read: dict[int, TokenModulation] = {}
    tried: dict[tuple[Any, ...], Choice] = {}

    def gain(choice: Choice) -> Choice:
        key = (choice.token, choice.targets, choice.layers)
        if key in tried:
            return tried[key]
        targets, layers = ", ".join(choice.targets), format_layers(choice.layers)
        report(f"token {choice.token}, {targets}, layers {layers}")
        if choice.token not in read:
            read[choice.token] = modulation_of(model, ids, choice.token)

        def update(alpha: float) -> Update:
            modulation = read[choice.token]
            return update_from(modulation, alpha, layers=choice.layers, targets=choice.targets)

        with made(model, update(PROBE_ALPHA)):
            reached = before.forgetting(model, "student").kl
        alpha = PROBE_ALPHA / 8
        if math.isfinite(reached):
            alpha = min(1.0, PROBE_ALPHA * math.sqrt(max_kl / max(reached, 1e-9)))
        with made(model, update(alpha)):
            tried[key] = replace(choice, alpha=alpha, gain=before.recall(model, "student").gain)
        return tried[key]

    best = gain(start)
    single = [(target,) for target in start.targets] if len(start.targets) > 1 else []
    best = max([best, *(gain(replace(best, targets=targets)) for targets in single)], key=_worth)
    best = max([best, *(gain(replace(best, token=token)) for token in range(len(ids)))], key=_worth)
    layers = start.layers
    parts = [(index,) for index in layers] + [layers[cut:] for cut in range(1, len(layers) - 1)]
    for part in parts:
        if part != layers:
            gain(replace(best, layers=part))
    return sorted(tried.values(), key=_worth, reverse=True)


@contextmanager
def made(model: PreTrainedModel, update: Update) -> Iterator[None]:
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


def _upper(f: Figures) -> float:
    return f.kl + ERRORS_OF_MARGIN * (f.kl_se if math.isfinite(f.kl_se) else 0.0)


def _worth(choice: Choice) -> float:
    return choice.gain if math.isfinite(choice.gain) else -math.inf


_BEST = 8  # how many of the choices that a search tried are shown


def print_retention(
    retention: Retention, console: Console, text: str = "held-out", tried: Sequence[Choice] = ()
) -> None:
    """Print what a search tried, the fact's log-probability and the divergence on other text,
    before and after, of each stream. text: what the other text is.
    """
    if tried:
        _print(
            console,
            f"Tried at the same cost: the best {min(_BEST, len(tried))} of {len(tried)}",
            ("*token", "targets", "layers", "*alpha", "*gain, nats"),
            (
                (str(c.token), ", ".join(c.targets), format_layers(c.layers), f"{c.alpha:.3f}",
                 f"{c.gain:+.3f}")
                for c in tried[:_BEST]
            ),
        )  # fmt: skip
    tokens = next(iter(retention.recall.values())).tokens
    _print(
        console,
        f"Recall: log-probability of the fact without its context, {tokens} tokens, nats",
        ("model", "*before", "*after", "*gain", "*in context"),
        (
            (stream, f"{r.before:.3f}", f"{r.after:.3f}", f"{r.gain:+.3f}", f"{r.in_context:.3f}")
            for stream, r in retention.recall.items()
        ),
    )
    count = next(iter(retention.forgetting.values())).tokens
    _print(
        console,
        f"Forgetting: change on {count:,} {text} tokens (± standard error)",
        ("model", "*perplexity before", "*after", "*ratio", "*KL, nats"),
        (
            (stream, f"{f.perplexity / f.perplexity_ratio:.3f}", f"{f.perplexity:.3f}",
             f"{f.perplexity_ratio:.4f} ± {f.perplexity_ratio_se:.4f}",
             f"{f.kl:.4f} ± {f.kl_se:.4f}")
            for stream, f in retention.forgetting.items()
        ),
    )  # fmt: skip


def _print(
    console: Console, title: str, heads: Iterable[str], rows: Iterable[tuple[str, ...]]
) -> None:
    """Print a table; a star before a heading makes its column one of numbers."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head.lstrip("*"), justify="right" if head[0] == "*" else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
