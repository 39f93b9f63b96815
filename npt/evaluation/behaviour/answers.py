"""Greedy answers of teacher and student to the same prompts, and where they part.

The teacher answers with the KV cache. On its tokens the student is compared, in one pass; from the
first token at which it leaves, it writes its own answer to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode
from npt.adapters.layer import Mode
from npt.base.linear import cast_once
from npt.data.batch import IGNORE_INDEX, Sample
from npt.data.chat import has_template
from npt.data.continuation import continuation_text
from npt.evaluation.behaviour.prompts import Prompt
from npt.evaluation.generate import prompt_ids, shared_text
from npt.evaluation.greedy import (
    Comparison,
    compare_prompts,
    completion_states,
    continue_greedily,
    end_ids,
)
from npt.evaluation.metrics import COLUMNS, mean_and_error

_KL = COLUMNS.index("kl")


@dataclass(frozen=True)
class Choice:
    """A token as text, and the probability that either model gives it."""

    token: str
    teacher_probability: float
    student_probability: float


@dataclass(frozen=True)
class Parting:
    """The first token at which the student leaves its teacher's answer.

    position: its index, that is the number of tokens that are the same. teacher, student: the
    tokens that they write there. kl: KL(teacher, student) there, nats.
    """

    position: int
    teacher: Choice
    student: Choice
    kl: float


@dataclass(frozen=True)
class Answer:
    """Both answers to a prompt. shared: the text that they begin with alike; teacher, student: the
    rest of each. teacher_tokens: of the teacher's whole answer. parting: None if the two are the
    same. kl: mean KL(teacher, student) along the teacher's answer, nats per token.
    """

    kind: str
    prompt: str
    shared: str
    teacher: str
    student: str
    teacher_tokens: int
    parting: Parting | None
    kl: float


@dataclass(frozen=True)
class Answers:
    """Answers to all prompts. chat: they went through the tokenizer's chat template. same: answers
    that are the same to their end or to `max_new_tokens`. kl: over the tokens of all of the
    teacher's answers, its error over prompts.
    """

    chat: bool
    max_new_tokens: int
    same: int
    kl: float
    kl_se: float
    answers: tuple[Answer, ...]


@torch.no_grad()
def compare_answers(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Prompt], max_new_tokens: int
) -> Answers:
    """Answer the prompts with teacher and student, in one batch.

    Raises:
        DataError: the chat template refuses a prompt, or an id is outside the vocabulary.
        NumericalError: logits that are not finite.
    """
    samples = [Sample(p.kind, tuple(prompt_ids(tokenizer, p.text))) for p in prompts]
    ends = end_ids(model, tokenizer)
    compared = compare_prompts(model, samples, max_new_tokens, ends)
    students = _student_answers(model, compared, max_new_tokens, ends)
    partings = _partings(model, tokenizer, compared)
    answers = []
    for prompt, c, student, parting in zip(prompts, compared, students, partings, strict=True):
        before = c.prompt.input_ids
        shared, rest = shared_text(tokenizer, before, c.completion, c.position)
        own = continuation_text(tokenizer, before, student)
        if not own.startswith(shared):  # the last shared token is a part of a character
            shared, rest = "", shared + rest
        answers.append(
            Answer(
                kind=prompt.kind,
                prompt=prompt.text,
                shared=shared,
                teacher=rest,
                student=own[len(shared) :],
                teacher_tokens=len(c.completion),
                parting=parting,
                kl=float(c.figures[:, _KL].mean()),
            )
        )
    sums = torch.stack([c.figures[:, _KL].sum() for c in compared])
    counts = torch.tensor([float(len(c.completion)) for c in compared], dtype=torch.float64)
    kl, kl_se = mean_and_error(sums, counts)
    same = sum(parting is None for parting in partings)
    return Answers(has_template(tokenizer), max_new_tokens, same, kl, kl_se, tuple(answers))


def _student_answers(
    model: PreTrainedModel, compared: Sequence[Comparison], limit: int, ends: frozenset[int]
) -> list[tuple[int, ...]]:
    """Return the student's whole answers: the teacher's up to where it leaves, then its own."""
    starts = [c.completion if c.position is None else c.student_start for c in compared]
    over = [c.position is None or starts[i][-1] in ends for i, c in enumerate(compared)]
    limits = [0 if over[i] else limit - len(starts[i]) for i in range(len(starts))]
    prompts = [(*c.prompt.input_ids, *start) for c, start in zip(compared, starts, strict=True)]
    with adapter_mode(model, "student"):
        added = continue_greedily(model, prompts, limits, ends, [c.prompt.id for c in compared])
    return [(*start, *new) for start, new in zip(starts, added, strict=True)]


def _partings(
    model: PreTrainedModel, tokenizer: Any, compared: Sequence[Comparison]
) -> list[Parting | None]:
    """Return for each comparison where the student leaves, with the probabilities there."""
    apart = [c for c in compared if c.position is not None]
    rows = []
    for c in apart:
        before = (*c.prompt.input_ids, *c.completion[: c.position])
        token = c.completion[c.position or 0]
        rows.append(Sample(c.prompt.id, (*before, token), (*[IGNORE_INDEX] * len(before), token)))
    both: tuple[Mode, ...] = ("teacher", "student")
    shares = {}
    if rows:
        with cast_once(model.lm_head):
            for mode in both:
                logits = model.lm_head(completion_states(model, rows, mode))
                shares[mode] = torch.softmax(logits.to(torch.float32), dim=-1).cpu()
    found: dict[str, Parting] = {}
    for i, c in enumerate(apart):
        assert c.position is not None and c.student_token is not None
        teacher, student = (
            Choice(
                tokenizer.decode([token]),
                float(shares["teacher"][i, token]),
                float(shares["student"][i, token]),
            )
            for token in (c.completion[c.position], c.student_token)
        )
        kl = float(c.figures[c.position, _KL])
        found[c.prompt.id] = Parting(c.position, teacher, student, kl)
    return [found.get(c.prompt.id) for c in compared]
