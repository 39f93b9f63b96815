"""Measure an edit: how likely the written texts are, and what the model forgets.

Recall is the log-probability of an answer after its prompt, or of a text after the start token.
After the context too it shows how much there is to gain. Forgetting is the change of perplexity and
the KL from the model before on held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import decoder_layers, is_attached, npt_layers
from npt.adapters.layer import Mode
from npt.adapters.token_modulation import recoded
from npt.batch import Sample, batches
from npt.console import say
from npt.errors import DataError, NumericalError
from npt.evaluation.metrics import (
    Figures,
    compare_tokens,
    figures,
    final_states,
    most_likely,
    per_sample_sums,
    predicting,
)
from npt.evaluation.reading import reading, stages_at
from npt.figures import FIGURES
from npt.tools.editing.layerwise import opened
from npt.tools.editing.probes import BATCH, Probe, log_probabilities

FORGETTING = ("tokens", "perplexity", "perplexity_ratio", "perplexity_ratio_se", "kl", "kl_se")

ERRORS_OF_MARGIN = 2.0
"""Standard errors by which the KL must stay below its bound, to hold on other text too."""

Retention = dict[str, dict[str, dict[str, Any]]]
"""`recall` and `forgetting` by stream: log-probabilities in nats, summed over an answer's tokens
and averaged over answers, and the figures of the model after against before on held-out text."""


def streams(model: PreTrainedModel) -> tuple[Mode, ...]:
    """Return the modes to measure: without adapters there is one model."""
    return ("student", "teacher") if is_attached(model) else ("student",)


class Forgetting:
    """The final states of a model before an edit, on held-out samples.

    Args:
        model: the model.
        samples: held-out text.
        layers: those that edits change. What lower layers compute is kept.

    Raises:
        DataError: the samples have no token to predict.
    """

    def __init__(self, model: PreTrainedModel, samples: Sequence[Sample], layers: Iterable[int]):
        # below the first converted layer, student and teacher are the same
        self._first = min([*layers, *(index for index, _ in npt_layers(model))])
        self._opened = list(opened(model, samples, self._first, "held-out text"))
        if not any(predicting(stream.batch).any() for stream in self._opened):
            raise DataError("no held-out token to predict; check the data")
        self._states = {mode: list(self._final(model, mode)) for mode in streams(model)}

    def _final(self, model: PreTrainedModel, mode: Mode) -> Iterator[Tensor]:
        """Yield the final states of each batch's P predicting tokens, [P, D]."""
        above = decoder_layers(model)[self._first :]
        for stream in self._opened:
            with reading(model, mode):
                states = model.model.norm(stream.through(above).hidden)
            yield states[:, :-1][predicting(stream.batch)]

    @torch.no_grad()
    def figures(self, model: PreTrainedModel, mode: Mode) -> Figures:
        """Return the figures of the model now against the model before."""
        parts = []
        compared = zip(self._opened, self._final(model, mode), self._states[mode], strict=True)
        for stream, now, before in compared:
            predicted = predicting(stream.batch)
            targets = stream.batch.labels[:, 1:][predicted]
            per_token = compare_tokens(now, before, targets, model.lm_head, model.config.vocab_size)
            samples = predicted.nonzero()[:, 0]
            parts.append(per_sample_sums(per_token, samples, len(predicted)))
        return figures(torch.cat(parts))

    def upper_kl(self, model: PreTrainedModel, enough: float = math.inf) -> float:
        """Return the larger KL of the streams, each raised by ERRORS_OF_MARGIN standard errors, or
        the first above `enough`.
        """
        largest = 0.0
        for stream in streams(model):
            found = self.figures(model, stream)
            margin = 0.0
            if math.isfinite(found.kl_se):
                margin = ERRORS_OF_MARGIN * found.kl_se
            largest = max(found.kl + margin, largest)
            if not largest <= enough:  # also at NaN
                break
        return largest


class Baseline:
    """The model before an edit: its answers without their context and with it, its most likely
    words after neighbours, and what it predicts on held-out samples.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        samples: Sequence[Sample],
        answers: Sequence[Probe],
        paraphrases: Sequence[Probe] = (),
        neighbours: Sequence[Sequence[int]] = (),
        layers: Iterable[int] = (0,),
    ):
        self._forgetting = Forgetting(model, samples, layers)
        self._asked = {"": list(answers), "paraphrases_": list(paraphrases)}
        # the last token is only a target, so that the one before it predicts
        self._neighbours = [Sample("neighbour", (*ids, ids[-1])) for ids in neighbours]
        self._before: dict[Mode, dict[str, float]] = {}
        self._words: dict[Mode, Tensor] = {}
        for stream in streams(model):
            self._words[stream] = self._next_words(model, stream)
            self._before[stream] = self._recall(model, stream)
            for name, probes in self._asked.items():
                if probes:
                    read = [probe.read() for probe in probes]
                    found = mean_log_probability(model, read, stream)
                    self._before[stream][f"{name}in_context"] = found
        if is_attached(model):
            before = self._before["student"]
            through_code = self._through_code(model)
            gained = before["in_context"] - before["before"]
            if gained:
                before["share_through_code"] = (through_code - before["before"]) / gained

    def against(self, model: PreTrainedModel) -> Retention:
        """Return recall and forgetting of the model now against the model before."""
        recall: dict[str, dict[str, Any]] = {}
        forgetting: dict[str, dict[str, Any]] = {}
        for stream, before in self._before.items():
            now = self._recall(model, stream)
            recall[stream] = {
                "answers": len(self._asked[""]),
                "tokens": sum(len(probe.tail) for probe in self._asked[""]),
                **before,
            }
            for name, value in now.items():
                prefix = name.removesuffix("before")
                recall[stream][f"{prefix}after"] = value
                recall[stream][f"{prefix}gain"] = value - before[name]
            if self._neighbours:
                words = self._next_words(model, stream)
                same = (words == self._words[stream]).double().mean()
                recall[stream]["neighbours_same"] = float(same)
            found = self._forgetting.figures(model, stream)
            forgetting[stream] = {name: getattr(found, name) for name in FORGETTING}
        return {"recall": recall, "forgetting": forgetting}

    def _recall(self, model: PreTrainedModel, stream: Mode) -> dict[str, float]:
        found = {}
        for name, probes in self._asked.items():
            if probes:
                alone = [probe.alone() for probe in probes]
                found[f"{name}before"] = mean_log_probability(model, alone, stream)
        return found

    @torch.no_grad()
    def _next_words(self, model: PreTrainedModel, stream: Mode) -> Tensor:
        """Return the most likely token after each neighbour."""
        words = [torch.empty(0, dtype=torch.int64)]
        for batch in batches(self._neighbours, BATCH):
            with reading(model, stream):
                states = final_states(model, batch.to(model.device))
            # rows of all samples lie one after another
            lasts = predicting(batch).sum(dim=1).cumsum(0) - 1
            likely = most_likely(states[lasts], model.lm_head, model.config.vocab_size)
            words.append(likely.cpu())
        return torch.cat(words)

    def _through_code(self, model: PreTrainedModel) -> float:
        """Return the answers' log-probability without their context if only the codes of the
        converted layers, at the tokens that predict the answers, are those with the context.
        """
        found = []
        for probe in self._asked[""]:
            count = len(probe.tail) + 1  # with the token that predicts the first
            tails = (slice(None), slice(-count, None))
            with stages_at(model, tails, "z") as codes:
                mean_log_probability(model, [probe.read()])
            recodes = {index: partial(_with_tail, kept["z"]) for index, kept in codes.items()}
            with recoded(model, recodes):
                found.append(mean_log_probability(model, [probe.alone()]))
        return math.fsum(found) / len(found)


def _with_tail(tail: Tensor, z: Tensor) -> Tensor:
    """Return codes [1, T, R] with others at the last tokens."""
    return torch.cat([z[:, : -tail.shape[1]], tail], dim=1)


def mean_log_probability(
    model: PreTrainedModel, samples: Sequence[Sample], stream: Mode = "student"
) -> float:
    """Return the log-probability of the samples' targets, in nats, summed over a sample's tokens
    and averaged over samples; raise NumericalError if it is NaN.
    """
    with reading(model, stream):
        found = log_probabilities(model, samples)
    sums = [float(each.double().sum()) for each in found]
    value = math.fsum(sums) / len(sums)
    if math.isnan(value):
        raise NumericalError(
            f"the {stream}'s log-probability of a text is NaN; run npt trace to find out why"
        )
    return value


def print_retention(retention: Retention, console: Console, text: str) -> None:
    """Print recall and forgetting of each stream; `text` describes the tokens of the latter."""
    for stream, r in retention["recall"].items():
        f = retention["forgetting"][stream]
        kl = FIGURES["kl"].write(f["kl"], f["kl_se"])
        ratio = FIGURES["perplexity_ratio"].write(f["perplexity_ratio"], f["perplexity_ratio_se"])
        for prefix, what in (("", "what was written"), ("paraphrases_", "paraphrases")):
            if f"{prefix}after" in r:  # if there are such texts
                say(
                    console,
                    f"{stream}: log-probability of {what} {r[f'{prefix}before']:.3f} nats before,"
                    f" {r[f'{prefix}after']:.3f} after ({r[f'{prefix}gain']:+.3f}),"
                    f" {r[f'{prefix}in_context']:.3f} in context",
                )
        if "neighbours_same" in r:
            same = f"{r['neighbours_same']:.0%}"
            say(console, f"{stream}: {same} of neighbours keep their first word")
        if "share_through_code" in r:
            say(
                console,
                f"{stream}: of the gain in context, {r['share_through_code']:.0%} comes through the"
                " code alone",
            )
        say(
            console,
            f"{stream}: {f['tokens']:,} {text}: KL {kl} nats from the model before,"
            f" perplexity ratio {ratio}",
        )
