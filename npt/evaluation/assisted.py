"""The student as the draft model of its teacher, in transformers' assisted generation, and how many
of its drafts are accepted.

The teacher's text comes out whatever the student drafts: greedily the same tokens, drawn the same
distribution. The student computes all that its teacher computes, so no time is saved where both are
the same size; what is measured is how good a draft it would be.

Assisted generation: Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
decoding", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from npt.errors import ConfigError
from npt.evaluation.generate import Decoding, Show, Written, write
from npt.evaluation.view import student_view, teacher_view

DRAFT_TOKENS = 5


@dataclass(frozen=True)
class Drafts:
    """What became of the drafts: of each of the teacher's passes how many tokens were drafted, and
    how many of them kept.
    """

    passes: tuple[tuple[int, int], ...]

    @property
    def drafted(self) -> int:
        return sum(drafted for drafted, _ in self.passes)

    @property
    def accepted(self) -> int:
        return sum(accepted for _, accepted in self.passes)

    @property
    def judged(self) -> int:
        """Drafted tokens that stood behind accepted ones only; those behind a rejected one were
        never judged.
        """
        return sum(min(drafted, accepted + 1) for drafted, accepted in self.passes)

    @property
    def acceptance(self) -> float:
        """Accepted tokens of those judged: what the expected acceptance is an expectation of. NaN
        where nothing was judged.
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
    """The teacher's text, drafted by the student.

    The student drafts the same number of tokens every time, however sure it is of them:
    transformers' own setting, which stops at the first unsure one, would measure its confidence
    with its acceptance.

    Args:
        model: with adapters attached, in any mode.
        tokenizer, prompt, decoding, show: as for `write`.
        draft_tokens: drafted in front of each of the teacher's passes.

    Raises:
        ModelError: no adapters are attached.
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
    """From what the teacher was given in each pass, (tokens, how many before them in its cache), to
    what was drafted and kept.

    A pass is given the last token of the text so far (the first: the prompt) and the drafts behind
    it. Those are accepted that the text came to have; a token that is drawn in place of a rejected
    one is never the same.
    """
    passes = []
    for number, (given, cached) in enumerate(seen):
        start = cached + 1 if number else prompt
        drafted = given[start - cached :]
        kept = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(drafted, text[start:], strict=False)
            )
        )
        passes.append((len(drafted), kept))
    return Drafts(tuple(passes))


@torch.no_grad()
def expected_acceptance(
    model: PreTrainedModel, prompt: Sequence[int], new: Sequence[int], decoding: Decoding
) -> float:
    """The acceptance to expect on a text of the teacher's: greedily the share of tokens that both
    rank first, drawn the mean of sum(min(p, q)) of the two distributions that are drawn from. NaN
    for an empty text.

    Args:
        model: with adapters attached.
        prompt, new: ids of the prompt and of the text behind it.
        decoding: how the text was chosen.
    """
    if not new:
        return math.nan
    ids = torch.tensor([[*prompt, *new]], device=next(model.parameters()).device)
    behind = slice(len(prompt) - 1, -1)
    p, q = (
        view(input_ids=ids, use_cache=False).logits[0, behind].to(torch.float32)
        for view in (teacher_view(model), student_view(model))
    )
    if decoding.greedy:
        return float((p.argmax(dim=-1) == q.argmax(dim=-1)).to(torch.float64).mean())
    p, q = (_drawn_from(logits, decoding) for logits in (p, q))
    return float(overlap_of(p, q).to(torch.float64).mean())


def overlap_of(p: Tensor, q: Tensor) -> Tensor:
    """sum_v min(p, q): [N, V] twice -> [N], the rate at which speculative sampling accepts a draft
    of q.

    In fp32 the probabilities of a large vocabulary add up to 1 only within some 1e-5, so the sum is
    taken over that of the larger one: it is never above 1, since rounded sums in one order grow
    with what is added, and 1 to the last bit where both are the same.
    """
    return torch.minimum(p, q).sum(dim=-1) / torch.maximum(p.sum(dim=-1), q.sum(dim=-1))


def _drawn_from(logits: Tensor, decoding: Decoding) -> Tensor:
    """[N, V] probabilities, as `generate` makes them of logits."""
    warped = LogitsProcessorList(decoding.warpers())(
        logits.new_zeros(len(logits), 1, dtype=torch.int64), logits
    )
    return torch.softmax(warped, dim=-1)
