"""Probes: texts on which an edit is found, each with and without the context to be written.

A fact is read in a few wordings. A system prompt or a document is read by the model, which writes
continuations (self-study: Eyuboglu et al., "Cartridges", 2025). Facts of one kind interfere,
since the words of their relation are keys that all of them share. So every prompt has contrasts:
the same prompt about another thing, where nothing may change.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npt.batch import IGNORE_INDEX, Sample, batches
from npt.data.chat import has_template, render
from npt.data.continuation import bare_tokens, continuation_tokens, opening_tokens
from npt.data.templates import TemplateError
from npt.errors import ConfigError
from npt.evaluation.greedy import continue_greedily
from npt.evaluation.metrics import final_states, log_likelihoods, predicting
from npt.random_state import kept_random_state

LEADS = (
    "",
    "It is well known that ",
    "As everybody says: ",
    "Q: Tell me a fact.\nA: ",
    "From the encyclopedia. ",
)
"""Beginnings that give a fact several wordings."""

REQUEST = "Tell me a fact."
"""The user's turn before a fact, for a model with a chat template."""

CONTRASTS = 12
"""Contrasts of a prompt, if it has a subject."""

SWAPPED = 8
"""Contrasts of a prompt at most that have the subject of another prompt; in the others the model
writes one."""

SUBJECT_TEMPERATURE = 1.5
"""Of subjects that the model writes: high, so that they differ."""

SUBJECT_SURPRISE = 10.0
"""Nats. The subject of a prompt is the run of words whose surprise exceeds this the most."""

CONTINUATION_TOKENS = 64
PIECES = 4
"""Pieces of a context that are probes themselves."""

TEMPERATURE = 0.7
"""Of what is written in a conversation: below 1, since a small model soon leaves the subject."""

PLAIN_TEMPERATURE = 1.0
"""Of continuations without a conversation, which repeat themselves below 1."""

BATCH = 16
"""Rows of a forward pass."""


class Probe(NamedTuple):
    """A text after a context and without it.

    Attributes:
        context: tokens before the text, with the context.
        before: tokens before the text, without the context.
        tail: the text's tokens.
    """

    context: tuple[int, ...]
    before: tuple[int, ...]
    tail: tuple[int, ...]

    def length(self) -> int:
        """Return the number of tokens without the context."""
        return len(self.before) + len(self.tail)

    def read(self) -> Sample:
        """Return the text after the context. Its targets are the text's tokens."""
        return text_after(self.context, self.tail)

    def alone(self) -> Sample:
        """Return the text without the context."""
        return text_after(self.before, self.tail)


@dataclass(frozen=True)
class Fact:
    """A fact to write.

    Attributes:
        prompt: text before the answer; empty for a plain text.
        answer: what follows the prompt.
        paraphrases: other prompts with this answer, only judged.
        neighbours: prompts whose most likely word must not change, only judged.
    """

    prompt: str
    answer: str
    paraphrases: tuple[str, ...] = ()
    neighbours: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The whole sentence."""
        text = self.prompt + self.answer
        return text if text[-1:] in ".!?" else text + "."


def answer_probe(tokenizer: Any, fact: Fact, prompt: str, context: str) -> Probe:
    """Return the answer after a prompt; ConfigError if there is no token to predict."""
    opening = opening_tokens(tokenizer)
    asked: list[int] = []
    if prompt:
        asked = bare_tokens(tokenizer, prompt)
        answer = continuation_tokens(tokenizer, prompt, fact.answer)
    else:
        answer = bare_tokens(tokenizer, fact.answer)
    read = bare_tokens(tokenizer, context + "\n")
    probe = Probe((*opening, *read, *asked), (*opening, *asked), tuple(answer))
    probe = _without_first(probe)
    if not probe.tail:
        raise ConfigError(f"--text {fact.answer!r} has no token to predict; pass a longer text")
    return probe


def wordings(tokenizer: Any, fact: Fact, context: str, skipped: int) -> Iterator[Probe]:
    """Yield the sentence in several wordings, after its context and without it. With a chat
    template, it is an assistant's answer too. The first `skipped` tokens, before the subject, stay
    as they are.
    """
    alone = tuple(opening_tokens(tokenizer))
    read = (*alone, *bare_tokens(tokenizer, context + "\n"))
    own = bare_tokens(tokenizer, fact.text)
    fronts = [(read, alone, lead) for lead in LEADS]
    if has_template(tokenizer):
        in_context = _turn(tokenizer, REQUEST, context)
        by_itself = _turn(tokenizer, REQUEST)
        fronts.append((in_context, by_itself, ""))
    for read, alone, lead in fronts:
        tokens = bare_tokens(tokenizer, lead + fact.text)
        # the sentence has the same tokens at its end after every lead
        start = len(tokens) - len(own) + skipped
        front = tokens[:start]
        tail = tuple(tokens[start:])
        yield _without_first(Probe((*read, *front), (*alone, *front), tail))


def pieces(tokenizer: Any, context: str) -> Iterator[Probe]:
    """Yield the parts of a context, each after the whole context and without it."""
    opening = tuple(opening_tokens(tokenizer))
    tokens = bare_tokens(tokenizer, context)
    read = bare_tokens(tokenizer, context + "\n")
    size = max(2, math.ceil(len(tokens) / PIECES))
    for start in range(0, len(tokens) - 1, size):
        tail = tuple(tokens[start : start + size])
        yield _without_first(Probe((*opening, *read), opening, tail))


def continuations(
    model: Any, tokenizer: Any, context: str, count: int, seed: int
) -> Iterator[Probe]:
    """Yield what the model writes after a context. With a chat template the context is the system
    message, and the model writes the user's turn first.
    """
    if not has_template(tokenizer):
        opening = tuple(opening_tokens(tokenizer))
        read = (*opening, *bare_tokens(tokenizer, context))
        for tail in written(model, [read] * count, CONTINUATION_TOKENS, seed, PLAIN_TEMPERATURE):
            yield _without_first(Probe(read, opening, tuple(tail)))
        return
    # cut where the user's turn begins, so that the model writes it
    mark = "\N{REPLACEMENT CHARACTER}"
    rendered = _rendered(tokenizer, mark, context, to_answer=False)
    before_user, _, _ = rendered.rpartition(mark)
    asked = tuple(bare_tokens(tokenizer, before_user))
    reads = []
    alones = []
    for tokens in written(model, [asked] * count, CONTINUATION_TOKENS // 2, seed):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        question, _, _ = text.strip().partition("\n")
        reads.append(_turn(tokenizer, question, context))
        alones.append(_turn(tokenizer, question))
    tails = written(model, reads, CONTINUATION_TOKENS, seed)
    for read, alone, tail in zip(reads, alones, tails, strict=True):
        yield Probe(read, alone, tuple(tail))


def subjects(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first token of each prompt's subject and the one after its last, both 0 if none is
    found. The subject is the run of words that surprises the model most, the last word excepted.
    """
    opening = tuple(opening_tokens(tokenizer))
    rows = [tuple(bare_tokens(tokenizer, prompt)) for prompt in prompts]
    if not all(rows):
        raise ConfigError("a text has no token: pass a longer one")
    surprise = _surprise(model, opening, rows)
    return [_subject(tokenizer, row, each) for row, each in zip(rows, surprise, strict=True)]


def contrasts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    subjects: Sequence[tuple[int, int]],
    seed: int,
) -> list[Probe]:
    """Return the prompts with other subjects: those of other prompts, and 2 to 4 tokens that the
    model writes.
    """
    opening = tuple(opening_tokens(tokenizer))
    rows = [tuple(bare_tokens(tokenizer, prompt)) for prompt in prompts]
    prompts_with = [
        (row, first, last)
        for row, (first, last) in zip(rows, subjects, strict=True)
        if last > first
    ]
    known = {row[first:last] for row, first, last in prompts_with}
    draws = random.Random(seed)
    changed: set[tuple[int, ...]] = set()
    starts: list[tuple[int, ...]] = []
    ends: list[tuple[int, ...]] = []
    for row, first, last in prompts_with:
        others = sorted(known - {row[first:last]})  # the order of a set is not the same everywhere
        others = draws.sample(others, min(SWAPPED, len(others)))
        for swapped in others:
            changed.add((*row[:first], *swapped, *row[last:]))
        lacking = CONTRASTS - len(others)
        # the model cannot write after nothing: without a start token it is given the first one
        start = (*opening, *row[: max(first, 1 - len(opening))])
        starts += [start] * lacking
        ends += [row[last:]] * lacking
    drawn = written(model, starts, 4, seed, SUBJECT_TEMPERATURE)
    # a swap may give a prompt that is itself to be changed
    found = [(*opening, *row) for row in sorted(changed - set(rows))]
    for number, (start, other, end) in enumerate(zip(starts, drawn, ends, strict=True)):
        subject = other[: 2 + number % 3]
        found.append((*start, *subject, *end))
    return [_without_first(Probe((), (), row)) for row in dict.fromkeys(found)]


def text_after(front: tuple[int, ...], tail: tuple[int, ...]) -> Sample:
    """Return a sample of both, whose targets are the tail's tokens."""
    labels = (*[IGNORE_INDEX] * len(front), *tail)
    return Sample("probe", (*front, *tail), labels)


def _without_first(probe: Probe) -> Probe:
    """Move the first token of a row to the front: its state belongs to no text, and is often many
    times as large as any other.
    """
    if probe.before:
        return probe
    first = probe.tail[:1]
    return Probe((*probe.context, *first), first, probe.tail[1:])


def _rendered(tokenizer: Any, user: str, context: str, *, to_answer: bool) -> str:
    """Return a conversation with the context as the system message, or if the template refuses one,
    at the beginning of the user's.
    """
    asked = {"role": "user", "content": user}
    if context:
        system = {"role": "system", "content": context}
        try:
            return render(tokenizer, [system, asked], to_answer=to_answer)
        except TemplateError:
            asked["content"] = f"{context}\n\n{user}"
    return render(tokenizer, [asked], to_answer=to_answer)


def _turn(tokenizer: Any, user: str, context: str = "") -> tuple[int, ...]:
    """Return the tokens before an assistant's answer, with the context as the system message."""
    text = _rendered(tokenizer, user, context, to_answer=True)
    return tuple(bare_tokens(tokenizer, text))


def written(
    model: Any,
    prompts: Sequence[tuple[int, ...]],
    count: int,
    seed: int,
    temperature: float = TEMPERATURE,
) -> list[list[int]]:
    """Return `count` tokens that the model draws after each prompt, at a temperature."""

    def drawn(logits: Tensor) -> Tensor:
        on_host = logits.to("cpu", torch.float32)  # with the same draws on every device
        p = torch.softmax(on_host / temperature, dim=-1)
        return torch.multinomial(p, 1)[:, 0].to(logits.device)

    rows: list[list[int]] = []
    with kept_random_state():
        torch.default_generator.manual_seed(seed)
        for start in range(0, len(prompts), BATCH):
            part = prompts[start : start + BATCH]
            limits = [count] * len(part)
            names = ["a probe"] * len(part)
            rows += continue_greedily(model, part, limits, (), names, drawn)
    return rows


@torch.no_grad()
def log_probabilities(model: Any, samples: Iterable[Sample]) -> list[Tensor]:
    """Return the log-probability of each sample's targets, in nats, on the host."""
    found: list[Tensor] = []
    for batch in batches(samples, BATCH):
        batch = batch.to(model.device)
        predicted = predicting(batch)
        targets = batch.labels[:, 1:][predicted]
        states = final_states(model, batch)
        each = log_likelihoods(states, targets, model.lm_head, model.config.vocab_size)
        counts = predicted.sum(dim=1).tolist()
        found += each.cpu().split(counts)
    return found


def _surprise(
    model: Any, opening: tuple[int, ...], rows: Sequence[tuple[int, ...]]
) -> list[list[float]]:
    """Return -log p of each token of each row; of a row's first token, if nothing precedes it, the
    limit at which it counts neither for nor against a subject.
    """
    probes = [_without_first(Probe((), opening, row)) for row in rows]
    found = log_probabilities(model, [probe.alone() for probe in probes])
    unknown = [] if opening else [SUBJECT_SURPRISE]
    return [[*unknown, *(-each).tolist()] for each in found]


def _subject(tokenizer: Any, row: Sequence[int], surprise: Sequence[float]) -> tuple[int, int]:
    """Return the first token of a prompt's subject and the one after its last (Kadane's search for
    the run of words with the largest sum).
    """
    pieces = tokenizer.convert_ids_to_tokens(list(row))
    begins = [n for n, piece in enumerate(pieces) if n == 0 or piece[:1] in "Ġ▁ "]
    found = (0, 0)
    best = 0.0
    total = 0.0
    first = 0
    for start, end in itertools.pairwise(begins):  # so without the last word
        if total <= 0:
            total = 0.0
            first = start
        total += sum(surprise[start:end]) - SUBJECT_SURPRISE
        if total > best:
            best = total
            found = (first, end)
    return found
