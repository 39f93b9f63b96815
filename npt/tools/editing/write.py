"""Write a context into a model, without gradients.

For each probe (npt/tools/editing/probes.py) the model reads a text after the context and without
it. In order of layers, each on the stream that earlier layers' updates have changed already,

    Y = o(with the context) - o(now)               what is missing at the probes' tokens, [n, D]
    W = Y' P (P'P + penalty C)^-1,  down'(p) = down p + W p

P [n, F] are the inner products p of the MLP at these tokens, and C = E[p p'] over general text. So
W p is near what is missing at the probes, and small on general text: the least-squares edit of
MEMIT (Meng et al., ICLR 2023), with the model itself, reading the context, in place of targets
found by gradients. Of several facts, nearly all of the probes' mean change is subtracted from Y:
any text before a token makes it, and learning it would change other texts too. Contrasts and the
probes of earlier updates are rows that must stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.consolidate import Consolidation, applied, apply_update, consolidated
from npt.adapters.converted import decoder_layers, is_attached, is_sharded, npt_layers
from npt.adapters.fit import resolve_layers
from npt.base.families import check_family
from npt.batch import Sample
from npt.calibration.samples import draw_samples, first_tokens
from npt.data.continuation import bare_tokens
from npt.data.source import Given
from npt.errors import ConfigError, DataError, ModelError, NumericalError
from npt.evaluation.reading import reading
from npt.tools.editing.edit_metrics import Forgetting, mean_log_probability
from npt.tools.editing.layerwise import Rows, moment_factors, opened, solve, wanted_outputs
from npt.tools.editing.probes import (
    CONTINUATION_TOKENS,
    Fact,
    Probe,
    answer_probe,
    continuations,
    contrasts,
    pieces,
    subjects,
    text_after,
    wordings,
)

GENERAL_TOKENS = 16_384
"""Tokens of general text that C is the mean of."""

BOUND_TOKENS = 2_048
"""Tokens of general text that the penalty is chosen on."""

GENERAL_LENGTH = 256
"""Tokens of a sample of general text."""

LEAST_PENALTY = 3e3
"""Tokens of general text that weigh as much as one token of a probe. Below it an edit changes other
text more and gains nothing."""

MOST_PENALTY = 1e8

ROUNDS = 8
"""Penalties that are tried."""

NEAR_BOUND = 0.8
"""Share of the bound from which a KL is near enough."""

AIM = 0.9
"""Share of the bound to try for."""

JUDGED_CONTINUATIONS = 2
"""Continuations after a context that an edit is judged on."""

LEAST_GAIN = 0.1
"""Nats by which a text must become more likely: less changes no answer."""


@dataclass(frozen=True)
class General:
    """What general text says of the layers to patch.

    Attributes:
        factors: `moment_factors` of C by layer, [F, F] fp32.
        bound: samples on which the KL stays below its bound.
    """

    factors: dict[int, Tensor]
    bound: Sequence[Sample]


def consolidate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Sequence[str | Fact],
    *,
    data: Given,
    max_kl: float = 0.01,
    context: str = "",
    probes: int = 0,
    layers: str | None = None,
    seed: int = 0,
) -> Consolidation:
    """Write texts into the model, so that it behaves as if it had read them.

    The student is edited, or a model without adapters. The update acts on every mode of the model;
    `npt.unconsolidate(model)` takes it out.

    Args:
        model: a model, with or without adapters and earlier updates.
        tokenizer: its tokenizer.
        texts: facts, or plain texts.
        data: general text, some 20,000 tokens, on which the model should stay as it is.
        max_kl: bound on the KL from the model before on such text, in nats per token.
        context: a text to read before each of `texts`, for example a system prompt; by default each
            text itself. Without texts, the context alone is written.
        probes: continuations that the model writes after each context, as further probes.
        layers: layers to patch, as "upper_half" or "8-15"; default the converted ones, or without
            adapters the upper half.
        seed: of the continuations and contrasts.

    Returns:
        The update, which has been applied.

    Raises:
        ConfigError: there is nothing to write, no penalty keeps the bound, or the texts do not
            become more likely. The model is then unchanged.
        DataError: the data have too little text.
        ModelError: the model is sharded or of an unsupported family, or its layers do not support
            patches.
        NumericalError: a state is not finite.
    """
    facts = as_facts(texts)
    check_asked(facts, context, max_kl)
    chosen = layers_to_patch(model, layers)
    general = general_text(model, tokenizer, data, chosen, seed=seed)
    judged = judged_probes(model, tokenizer, facts, context, seed)
    before = mean_log_probability(model, [probe.alone() for probe in judged])
    update = find_update(
        model, tokenizer, facts, general, max_kl=max_kl, context=context, probes=probes, seed=seed
    )
    with applied(model, update):
        gain = mean_log_probability(model, [probe.alone() for probe in judged]) - before
    return write_update(model, update, gain=gain)


def check_asked(facts: Sequence[Fact], context: str, max_kl: float) -> None:
    """Raise ConfigError if there is nothing to write, or no bound."""
    if not facts and not context:
        raise ConfigError("there is nothing to write: pass texts or a context")
    if not max_kl > 0:
        raise ConfigError(f"--max_kl {max_kl} must be above 0 (inf for no bound)")


def check_length(model: PreTrainedModel, tokenizer: Any, context: str) -> None:
    """Raise ConfigError if a context and what follows it exceed the model's positions."""
    positions = getattr(model.config, "max_position_embeddings", None)
    size = len(bare_tokens(tokenizer, context)) + CONTINUATION_TOKENS
    if context and positions is not None and size > positions:
        raise ConfigError(
            f"the context and a continuation take {size} tokens, but the model has {positions}"
            " positions: shorten the context"
        )


def as_facts(texts: str | Sequence[str | Fact]) -> list[Fact]:
    """Return the facts of texts, of which a string is one."""
    several = [texts] if isinstance(texts, str) else texts
    return [Fact("", text) if isinstance(text, str) else text for text in several]


def layers_to_patch(model: PreTrainedModel, layers: str | None) -> tuple[int, ...]:
    """Return the named layers, or the converted ones, or without adapters the upper half.

    Raises:
        ModelError: the model is sharded, or of another family than NPT supports.
    """
    count = len(decoder_layers(model))
    check_family(type(model).__name__, model.config)
    if is_sharded(model):
        raise ModelError("a sharded base cannot be edited: load it in one process")
    if layers is None and is_attached(model):
        return tuple(index for index, _ in npt_layers(model))
    return resolve_layers(layers or "upper_half", count)


def general_text(
    model: PreTrainedModel,
    tokenizer: Any,
    data: Given,
    layers: Sequence[int],
    bound: Sequence[Sample] | None = None,
    seed: int = 0,
) -> General:
    """Return the factors of some layers, and the samples of the bound: `bound`, or the last of the
    data's.

    Memory: 4 F^2 bytes for each layer.
    """
    wanted = GENERAL_TOKENS + (BOUND_TOKENS if bound is None else 0)
    size = model.config.vocab_size
    samples = draw_samples(data, tokenizer, GENERAL_LENGTH, wanted, size, seed)
    if len(samples) < 2:
        raise DataError(
            f"general text is needed in two samples or more, but the data yield {len(samples)}: add"
            " data"
        )
    if bound is None:
        set_apart = max(1, len(samples) * BOUND_TOKENS // wanted)
        bound = samples[-set_apart:]
        samples = samples[:-set_apart]
    factors = moment_factors(model, samples, layers)
    return General(factors, first_tokens(bound, BOUND_TOKENS))


def find_update(
    model: PreTrainedModel,
    tokenizer: Any,
    facts: Sequence[Fact],
    general: General,
    *,
    max_kl: float,
    context: str = "",
    probes: int = 0,
    seed: int = 0,
) -> Consolidation:
    """Return the update with about the smallest penalty that keeps the bound; do not apply it.

    Args and errors as for `consolidate`.
    """
    check_asked(facts, context, max_kl)
    rows = gathered(model, tokenizer, facts, context, probes, seed)
    layers = tuple(general.factors)
    # opened once: what lies below the first layer to be patched is the same in every round
    streams = list(opened(model, rows.alone(), min(layers)))
    # of one fact the mean change is its own; of many it is what any text before a token makes
    common = 1 - 1 / max(1, len(facts))
    wanted = wanted_outputs(model, rows, streams, layers, common=common)
    forgetting = Forgetting(model, general.bound, layers)
    found: Consolidation | None = None
    penalty = LEAST_PENALTY
    # penalties with their KL: the greatest that exceeds the bound, the least that keeps it
    too_low: tuple[float, float] | None = None
    kept: tuple[float, float] | None = None
    for _ in range(ROUNDS):
        patches = solve(model, streams, wanted, general.factors, penalty)
        update = Consolidation(patches)
        kl = 0.0
        if math.isfinite(max_kl):
            with applied(model, update):
                kl = forgetting.upper_kl(model, max_kl)
            if math.isnan(kl):
                raise NumericalError(
                    "the KL on general text is NaN; run npt trace to find the operation"
                )
        if kl <= max_kl:
            found = update
            kept = penalty, kl
            if kl >= NEAR_BOUND * max_kl:
                break
        else:
            too_low = penalty, kl
        # the least penalty keeps the bound, or the greatest does not
        if too_low is None or too_low[0] == MOST_PENALTY:
            break
        penalty = min(_next_penalty(too_low, kept, max_kl), MOST_PENALTY)
    if found is None or kept is None:
        raise ConfigError(
            f"--max_kl {max_kl} is too low: even an update that hardly changes the texts exceeds"
            " it; raise --max_kl"
        )
    texts = tuple((probe.before + probe.tail, len(probe.tail)) for probe in rows.probes)
    written = [fact.text if fact.prompt else fact.answer for fact in facts]
    record = {
        "texts": written,
        "context": context,
        "max_kl": max_kl,
        "tokens": sum(length for _, length in texts),
        "penalty": kept[0],
    }
    return replace(found, record=record, probes=texts)


def _next_penalty(
    too_low: tuple[float, float], kept: tuple[float, float] | None, max_kl: float
) -> float:
    """Return a penalty to try after these two, each with its KL: as the KL falls about with the
    square root of the penalty, or between them, where its logarithm is about linear.
    """
    penalty, kl = too_low
    if kept is None:
        return penalty * max(1.5, (kl / max_kl) ** 2)
    kept_penalty, kept_kl = kept
    fell = math.log(kl / max(kept_kl, 1e-12))
    wanted = math.log(kl / (AIM * max_kl)) / fell
    wanted = min(max(wanted, 0.1), 0.9)  # the bracket shrinks even where the KL is not linear
    return penalty * (kept_penalty / penalty) ** wanted


def gathered(
    model: PreTrainedModel,
    tokenizer: Any,
    facts: Sequence[Fact],
    context: str,
    count: int,
    seed: int,
) -> Rows:
    """Return the probes of facts and contexts, their contrasts, and those of earlier updates."""
    check_length(model, tokenizer, context)
    probes: list[Probe] = []
    with reading(model):
        # of a plain text, all but the last word stands for the prompt
        prompts = [fact.prompt or fact.answer.strip().rsplit(" ", 1)[0] for fact in facts]
        found = subjects(model, tokenizer, prompts)
        for fact, (first, _) in zip(facts, found, strict=True):
            probes += wordings(tokenizer, fact, context or fact.text, first)
        if not facts:
            probes += pieces(tokenizer, context)
        for read in [context] if context else [fact.text for fact in facts]:
            probes += continuations(model, tokenizer, read, count, seed)
        apart = contrasts(model, tokenizer, prompts, found, seed)
    earlier = []
    for update in consolidated(model):
        for ids, length in update.probes:
            earlier.append(text_after(ids[:-length], ids[-length:]))
    probes = [probe for probe in probes if probe.tail]
    if not probes:
        raise ConfigError("the context has too few tokens to learn from: lengthen it")
    # by length, so that batches have little padding
    probes.sort(key=Probe.length)
    apart.sort(key=Probe.length)
    return Rows(probes, apart, earlier)


def judged_probes(
    model: PreTrainedModel, tokenizer: Any, facts: Sequence[Fact], context: str, seed: int
) -> list[Probe]:
    """Return what must become more likely: the answers, or what the model writes after a context,
    drawn apart from the probes.
    """
    if facts:
        return [answer_probe(tokenizer, f, f.prompt, context or f.text) for f in facts]
    with reading(model):
        apart = continuations(model, tokenizer, context, JUDGED_CONTINUATIONS, seed + 1)
        return [probe for probe in apart if probe.tail]


def write_update(
    model: PreTrainedModel, update: Consolidation, *, gain: float, **more: Any
) -> Consolidation:
    """Apply an update, and return it with its gain in nats and more in its record.

    Raises:
        ConfigError: the texts hardly became more likely. The model is then unchanged.
    """
    if not gain >= LEAST_GAIN:
        raise ConfigError(
            f"the texts would become more likely by only {gain:+.3f} nats at a penalty of"
            f" {update.record['penalty']:.3g}, so nothing was written: raise --max_kl, write fewer"
            " texts at once, or use a model that answers differently with them in its context"
        )
    update = replace(update, record={**update.record, "gain": gain, **more})
    apply_update(model, update)
    return update
