"""A needle in held-out prose: a made-up fact, and far later the question about it.

The answer is begun for the model ("The access code of the archive is"), so what is measured is
whether the code follows: the log-probability of its tokens, and whether each is the most likely
one. Nothing but the fact tells the code, so a model that does not look back that far has 9.2 nats
to find among four digits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from npt.adapters.layer import Mode
from npt.base.linear import cast_once
from npt.data.batch import IGNORE_INDEX, Sample
from npt.data.chat import has_template
from npt.data.continuation import bare_tokens, continuation_tokens, prompt_tokens
from npt.errors import NumericalError
from npt.evaluation.generate import prompt_text
from npt.evaluation.greedy import completion_states
from npt.evaluation.metrics import mean_and_error

DEPTHS = (64, 256, 768, 1500)
"""Tokens of prose between the fact and the question."""

PER_DEPTH = 3
BEFORE = 48
"""Tokens of prose before the fact."""

DIGITS = 4
CHANCE = -DIGITS * math.log(10)
"""Log-probability of a code that is guessed."""

_THINGS = ("archive", "greenhouse", "harbour office", "west gate", "laboratory", "boat house")
_MODES: tuple[Mode, ...] = ("teacher", "student")


@dataclass(frozen=True)
class Needle:
    """A fact to find again. text: the prompt up to the code. back: tokens from the fact's end to
    the code.
    """

    depth: int
    code: str
    text: str
    ids: tuple[int, ...]
    answer: tuple[int, ...]
    back: int


@dataclass(frozen=True)
class Found:
    """Figures of the facts that teacher and student found again; `_se` is the standard error over
    needles.

    depth: tokens of prose after the fact; None for all depths together. back: mean number of tokens
    from the fact to its code. *_log_prob: of the code, nats. *_retrieved: share of the needles of
    which every token of the code was the most likely one.
    """

    depth: int | None
    needles: int
    back: float
    teacher_log_prob: float
    teacher_log_prob_se: float
    student_log_prob: float
    student_log_prob_se: float
    teacher_retrieved: float
    teacher_retrieved_se: float
    student_retrieved: float
    student_retrieved_se: float


@dataclass(frozen=True)
class Needles:
    """chance: log-probability of a guess. by_depth: the nearest first. total: of all."""

    chance: float
    by_depth: tuple[Found, ...]
    total: Found


def make_needles(tokenizer: Any, prose: Sequence[int], room: int) -> list[Needle]:
    """Return needles whose prompts have at most `room` tokens, code included: each in prose of its
    own as far as there is enough, from the first token on, and over again after the last.
    """
    draw = random.Random("needles")
    found: list[Needle] = []
    at = 0
    for depth in DEPTHS:
        for _ in range(PER_DEPTH):
            thing = _THINGS[len(found) % len(_THINGS)]
            code = "".join(draw.sample("0123456789", DIGITS))
            before = _excerpt(tokenizer, prose, at, BEFORE)
            after = _excerpt(tokenizer, prose, at + BEFORE, depth)
            needle = _needle(tokenizer, thing, code, before, after, depth)
            if len(needle.ids) + len(needle.answer) > room:
                return found
            found.append(needle)
            at += BEFORE + depth
    return found


def _excerpt(tokenizer: Any, prose: Sequence[int], start: int, count: int) -> str:
    """Return the text of so many tokens, without the parts of words at its ends."""
    ids = [prose[(start + i) % len(prose)] for i in range(count)]
    text = tokenizer.decode(ids, skip_special_tokens=True).replace("\ufffd", "")
    return " ".join(text.split(" ")[1:-1]) or text


def _needle(tokenizer: Any, thing: str, code: str, before: str, after: str, depth: int) -> Needle:
    fact, begun = f"The access code of the {thing} is {code}.", f"The access code of the {thing} is"
    chat = has_template(tokenizer)
    asked = f"{before}\n\n{fact}\n\n{after}\n\nWhat is the access code of the {thing}?"
    opened = prompt_text(tokenizer, asked, chat=chat)
    text = f"{opened}{begun}" if chat else f"{opened}\n{begun}"
    upto = text[: text.index(fact) + len(fact)]
    tokens_of = bare_tokens if chat else prompt_tokens
    ids, seen = (tokens_of(tokenizer, each) for each in (text, upto))
    answer = continuation_tokens(tokenizer, text, f" {code}")
    return Needle(depth, code, text, tuple(ids), tuple(answer), len(ids) - len(seen))


@torch.no_grad()
def find_needles(
    model: PreTrainedModel, needles: Sequence[Needle], between: Callable[[], None] | None = None
) -> Needles:
    """Ask teacher and student for the codes, `between` being called before each depth.

    Raises:
        NumericalError: logits that are not finite.
    """
    measured: dict[int, list[list[float]]] = {}
    with cast_once(model.lm_head):
        for depth in dict.fromkeys(needle.depth for needle in needles):
            if between is not None:
                between()
            batch = [needle for needle in needles if needle.depth == depth]
            by_mode = [_asked(model, batch, mode) for mode in _MODES]
            measured[depth] = [
                [float(needle.back), *teacher, *student]
                for needle, teacher, student in zip(batch, *by_mode, strict=True)
            ]
    every = [figures for found in measured.values() for figures in found]
    by_depth = tuple(_found(depth, found) for depth, found in measured.items())
    return Needles(CHANCE, by_depth, _found(None, every))


def _asked(
    model: PreTrainedModel, needles: Sequence[Needle], mode: Mode
) -> list[tuple[float, float]]:
    """Return of each needle the log-probability of its code, and 1.0 if each token of it is the
    most likely one.
    """
    rows = [
        Sample(f"needle {n.code}", (*n.ids, *n.answer), (*[IGNORE_INDEX] * len(n.ids), *n.answer))
        for n in needles
    ]
    states = completion_states(model, rows, mode)
    logits = model.lm_head(states).to("cpu", torch.float32)
    if not torch.isfinite(logits).all():
        raise NumericalError(
            f"the {mode}'s logits after a text of {len(rows[0].input_ids)} tokens are not finite;"
            " npt trace --adapter finds the operation"
        )
    wanted = torch.tensor([token for needle in needles for token in needle.answer])
    logs = torch.log_softmax(logits, dim=-1).gather(-1, wanted.unsqueeze(-1))[:, 0]
    right = logits.argmax(dim=-1) == wanted
    lengths = [len(needle.answer) for needle in needles]
    parts = zip(logs.split(lengths), right.split(lengths), strict=True)
    return [(float(log.sum()), float(hit.all())) for log, hit in parts]


def _found(depth: int | None, figures: Sequence[Sequence[float]]) -> Found:
    """Return the means of back, and of log-probability and success of teacher and student."""
    values = torch.tensor(figures, dtype=torch.float64)
    ones = torch.ones(len(values), dtype=torch.float64)
    pairs = [mean_and_error(column, ones) for column in values.T]
    (back, _), teacher, teacher_hit, student, student_hit = pairs
    return Found(depth, len(values), back, *teacher, *student, *teacher_hit, *student_hit)
