"""The student as the draft model of its teacher, and how many of its drafts are accepted
(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023).

The teacher's text comes out whatever the student drafts: greedily the same tokens, drawn the same
distribution. Both are of the same size, so no time is saved; the figure says how good a draft model
the student would be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from npt.errors import ConfigError
from npt.evaluation.generate import Decoding, Show, Written, write
from npt.evaluation.metrics import overlap_of
from npt.evaluation.view import student_view, teacher_view

DRAFT_TOKENS = 5


@dataclass(frozen=True)
class Drafts:
    """passes: per pass of the teacher, how many tokens were drafted and how many of them kept."""

    passes: tuple[tuple[int, int], ...]

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.passes)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.passes)

    @property
    def judged(self) -> int:
        """Drafted tokens before and at the first rejected one; later ones were never judged."""
        return sum(min(drafted, accepted + 1) for drafted, accepted in self.passes)

    @property
    def acceptance(self) -> float:
        """Share of the judged tokens that was accepted, NaN if there is none; its expectation is
        the expected acceptance.
        """
        return self.accepted / self.judged if self.judged else math.nan

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the standard error takes tokens for independent."""
        rate, judged = self.acceptance, self.judged
        return {
            "passes": len(self.passes),
            "drafted": self.drafted,
            "judged": judged,
            "accepted": self.accepted,
            "acceptance": rate,
            "acceptance_se": math.sqrt(rate * (1 - rate) / judged) if judged > 1 else math.nan,
        }


def write_assisted(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Sequence[int],
    decoding: Decoding,
    *,
    draft_tokens: int = DRAFT_TOKENS,
    show: Show | None = None,
) -> tuple[Written, Drafts]:
    """Write the teacher's text as `write` does, drafted by the student of the same model.

    The student drafts `draft_tokens` before each of the teacher's passes, however sure it is of
    them: transformers' default stops at the first unsure one, which would mix confidence into
    acceptance.

    Raises:
        ConfigError: no tokens to draft, or as `write`.
    """
    if draft_tokens < 1:
        raise ConfigError(f"--draft_tokens is {draft_tokens}; it must be at least 1")
    teacher, student = teacher_view(model), student_view(model)
    student.generation_config.num_assistant_tokens = draft_tokens
    student.generation_config.num_assistant_tokens_schedule = "constant"
    student.generation_config.assistant_confidence_threshold = 0.0
    seen: list[tuple[list[int], int]] = []

    def note(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        cache = given.get("past_key_values")
        seen.append(
            (given["input_ids"][0].tolist(), 0 if cache is None else int(cache.get_seq_length()))
        )

    teacher.register_forward_pre_hook(note, with_kwargs=True)
    written = write(teacher, tokenizer, prompt, decoding, show=show, assistant_model=student)
    return written, _drafts(seen, len(prompt), (*prompt, *written.ids))


def _drafts(seen: Sequence[tuple[Sequence[int], int]], prompt: int, text: Sequence[int]) -> Drafts:
    """Return the drafts of a text from the teacher's passes: (given tokens, how many are cached).

    A pass is given the last token of the text so far (the first: the prompt), then the drafts.
    Those that are in the text were accepted: the token in place of a rejected one is never the
    same.
    """
    passes = []
    for number, (given, cached) in enumerate(seen):
        start = cached + 1 if number else prompt
        drafted = given[start - cached :]
        pairs = zip(drafted, text[start:], strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        passes.append((len(drafted), kept))
    return Drafts(tuple(passes))


@torch.no_grad()
def expected_acceptance(
    model: PreTrainedModel, prompt: Sequence[int], new: Sequence[int], decoding: Decoding
) -> float:
    """Return the acceptance to expect on the teacher's text `new`, NaN if it is empty: greedily the
    share of tokens that both find most likely, drawn the mean of sum(min(p, q)).
    """
    if not new:
        return math.nan
    ids = torch.tensor([[*prompt, *new]], device=next(model.parameters()).device)
    p, q = (
        view(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].to(torch.float32)
        for view in (teacher_view(model), student_view(model))
    )
    if decoding.greedy:
        return float((p.argmax(dim=-1) == q.argmax(dim=-1)).to(torch.float64).mean())
    warp = LogitsProcessorList(decoding.warpers())  # as `generate` does
    no_ids = p.new_zeros(len(p), 1, dtype=torch.int64)
    p, q = (torch.softmax(warp(no_ids, logits), dim=-1) for logits in (p, q))
    return float(overlap_of(p, q).to(torch.float64).mean())
