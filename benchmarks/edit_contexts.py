"""Documents and system prompts written into a model: rows of edit.py.

A context counts as written as far as the model without it predicts what the model with it does, on
text that nothing saw: a document's own next tokens, or answers to a user's questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npt.adapters.consolidate import Consolidation, applied, apply_update
from npt.adapters.consolidate import unconsolidate as take_out
from npt.adapters.converted import decoder_layers
from npt.batch import IGNORE_INDEX, Sample, collate
from npt.data.chat import has_template, render
from npt.data.continuation import bare_tokens, opening_tokens
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.metrics import compare_tokens, final_states
from npt.evaluation.reading import reading
from npt.tools.editing.edit_metrics import Forgetting
from npt.tools.editing.layerwise import opened, seen_by, wanted_outputs
from npt.tools.editing.probes import TEMPERATURE, Probe, written
from npt.tools.editing.write import find_update, gathered

PROMPTS = Path(__file__).with_name("prompts.jsonl")
CONTEXTS = 2
DOCUMENT_TOKENS = 256
JUDGED_TOKENS = 128
ANSWER_TOKENS = 64
PROBES = 16


class Context:
    """A context, and texts after it by which it is judged."""

    def __init__(self, bench: Any, text: str, judged: Sequence[Probe]):
        self.bench, self.text, self.judged = bench, text, judged
        self.with_context = [self._states(probe.read()) for probe in judged]
        self.before = self.kl()

    def _states(self, sample: Sample) -> Tensor:
        with reading(self.bench.model):
            return final_states(self.bench.model, collate([sample]))

    @torch.no_grad()
    def kl(self) -> float:
        """Return the KL from the model with the context to the one now, without it."""
        model, parts = self.bench.model, []
        for probe, states in zip(self.judged, self.with_context, strict=True):
            targets = torch.tensor(probe.tail)
            now = self._states(probe.alone())
            found = compare_tokens(now, states, targets, model.lm_head, model.config.vocab_size)
            parts.append(found[:, 2])
        return float(torch.cat(parts).mean())

    def closed(self) -> float:
        """Return the share of the KL that is closed."""
        return 1 - self.kl() / self.before


def documents(bench: Any) -> Iterator[Context]:
    """Yield the beginnings of articles, judged by their next tokens."""
    opening = opening_tokens(bench.tokenizer)
    for text in bench.long_texts:
        tokens = bare_tokens(bench.tokenizer, text)[: DOCUMENT_TOKENS + JUDGED_TOKENS]
        read, (first, *tail) = tokens[:DOCUMENT_TOKENS], tokens[DOCUMENT_TOKENS:]
        judged = Probe((*opening, *read, first), (*opening, first), tuple(tail))
        yield Context(bench, bench.tokenizer.decode(read), [judged])


def system_prompts(bench: Any) -> Iterator[Context]:
    """Yield system prompts, judged by the model's answers with them to questions of a user."""

    def asked(turn: str, *messages: dict[str, str]) -> tuple[int, ...]:
        text = render(
            bench.tokenizer, [*messages, {"role": "user", "content": turn}], to_answer=True
        )
        return tuple(bare_tokens(bench.tokenizer, text))

    if not has_template(bench.tokenizer):
        raise ConfigError("the model has no chat template: leave out the row 'system prompt'")
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        system = {"role": "system", "content": prompt["context"]}
        read = [asked(turn, system) for turn in prompt["turns"]]
        with reading(bench.model):
            answers = written(bench.model, read, ANSWER_TOKENS, bench.seed + 1, TEMPERATURE)
        alone = [asked(turn) for turn in prompt["turns"]]
        rows = zip(read, alone, answers, strict=True)
        judged = [Probe(first, second, tuple(answer)) for first, second, answer in rows]
        yield Context(bench, prompt["context"], judged)


@contextmanager
def without_template(bench: Any) -> Iterator[None]:
    """Within the context, the tokenizer has no chat template, so all probes are plain text."""
    template, bench.tokenizer.chat_template = bench.tokenizer.chat_template, None
    try:
        yield
    finally:
        bench.tokenizer.chat_template = template


def found_for(bench: Any, context: Context) -> Consolidation:
    return find_update(
        bench.model,
        bench.tokenizer,
        [],
        bench.general,
        max_kl=bench.max_kl,
        context=context.text,
        probes=PROBES,
        seed=bench.seed,
    )


def elsewhere(bench: Any) -> Callable[[], float]:
    """Return a function that measures the KL on other text from the model as it is now."""
    forgetting = Forgetting(bench.model, bench.reported, bench.layers)
    return lambda: forgetting.figures(bench.model, "student").kl


def written_contexts(bench: Any, contexts: Sequence[Context]) -> dict[str, float]:
    """Return means over contexts of each alone in the model, as weights and as a bias, and over all
    of them when they are written one after another, and taken out again.
    """
    if not contexts:
        raise DataError("there is no context: pass longer text")
    other, size, layers = elsewhere(bench), len(contexts), decoder_layers(bench.model)
    sums = dict.fromkeys(("before", "closed", "kl", "bias_closed", "bias_kl", "in_turn"), 0.0)
    updates = []
    for context in contexts:
        updates.append(found_for(bench, context))
        with applied(bench.model, updates[-1]):
            sums["closed"] += context.closed() / size
            sums["kl"] += other() / size
        biases = scaled_biases(bench, context)
        with shifted(layers, biases):
            sums["bias_closed"] += context.closed() / size
            sums["bias_kl"] += other() / size
        sums["before"] += context.before / size
    apply_update(bench.model, updates[0])
    for context in contexts[1:]:
        apply_update(bench.model, found_for(bench, context))
    sums["in_turn"] = sum(context.closed() for context in contexts) / size
    sums["in_turn_kl"] = other()
    for _ in contexts[1:]:
        take_out(bench.model, 0)
    sums["last_alone"] = contexts[-1].closed()
    take_out(bench.model, None)
    sums["left"] = max(abs(context.closed()) for context in contexts)
    return {**sums, "contexts": size}


def document(bench: Any) -> dict[str, float]:
    with without_template(bench):
        return written_contexts(bench, list(islice(documents(bench), CONTEXTS)))


def system_prompt(bench: Any) -> dict[str, float]:
    return written_contexts(bench, list(islice(system_prompts(bench), CONTEXTS)))


@torch.no_grad()
def biases_of(bench: Any, context: Context) -> dict[int, Tensor]:
    """Return the mean change of each layer's output at the probes' tokens, [D], in order of layers,
    where earlier layers have theirs already (docs/concepts/theory.md).
    """
    rows = gathered(bench.model, bench.tokenizer, [], context.text, PROBES, bench.seed)
    first, biases = min(bench.layers), {}
    streams = list(opened(bench.model, rows.alone(), first))
    wanted = wanted_outputs(bench.model, rows, streams, bench.layers, common=0)
    for index in range(first, max(bench.layers) + 1):
        layer = decoder_layers(bench.model)[index]
        with reading(bench.model):
            states = [seen_by(layer, stream).output for stream in streams]
        if index in bench.layers:
            tails = [stream.batch.labels != IGNORE_INDEX for stream in streams]
            now = torch.cat([each[tail] for each, tail in zip(states, tails, strict=True)])
            biases[index] = (wanted[index] - now).mean(dim=0)
            states = [each + biases[index] for each in states]
        streams = [replace(old, hidden=new) for old, new in zip(streams, states, strict=True)]
    return biases


def scaled_biases(bench: Any, context: Context) -> dict[int, Tensor]:
    """Return the biases at the largest strength tried that keeps the bound."""
    forgetting = Forgetting(bench.model, bench.general.bound, bench.layers)
    biases, strength = biases_of(bench, context), 1.0
    while strength > 1e-3:
        tried = {index: strength * bias for index, bias in biases.items()}
        with shifted(decoder_layers(bench.model), tried):
            kl = forgetting.upper_kl(bench.model, bench.max_kl)
        if kl <= bench.max_kl:
            return tried
        strength *= 0.8
    raise NumericalError("no strength of the bias keeps --max_kl")


@contextmanager
def shifted(layers: Any, biases: dict[int, Tensor]) -> Iterator[None]:
    """Within the context, add a bias [D] to the outputs of layers."""

    def add(bias: Tensor, _module: Any, _args: Any, output: Tensor) -> Tensor:
        return output + bias.to(output.dtype)

    with ExitStack() as stack:
        for index, bias in biases.items():
            stack.callback(layers[index].register_forward_hook(partial(add, bias)).remove)
        yield
