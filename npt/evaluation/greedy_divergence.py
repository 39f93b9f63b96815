"""Where the student's greedy text leaves its teacher's.

The teacher continues each prompt greedily; on its tokens the student is asked, position by
position, what it would have written. Up to the first position at which it would have written
something else the two texts are the same, so that is where the student, left to itself, would have
parted from it: one forward of the student instead of a second text.

Not every text parts. What agrees up to the limit on new tokens is *censored*: all that is known is
that it parts later, if at all. So a mean position over the others would be biased low, and none is
given. Reported are the mean number of tokens before the parting or the limit, which is a lower
bound; the median by the product-limit estimator, which takes censoring into account (Kaplan and
Meier, 1958), where half of the texts part; and partings per token, which are the rate under which
most texts of any length would be seen to part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.attach import adapter_mode
from npt.adapters.layer import Mode
from npt.base.linear import cast_once
from npt.data.batch import IGNORE_INDEX, Sample, collate, find_fault
from npt.distill.divergence import LOGIT_CHUNK
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.greedy import continue_greedily
from npt.evaluation.metrics import compare_tokens, mean_and_error
from npt.evaluation.states import final_states

PROMPT_TOKENS = 32
"""Leading tokens of a text that serve as a prompt, at most."""


@dataclass(frozen=True)
class Comparison:
    """Student against teacher on the teacher's continuation of one prompt.

    completion: the teacher's tokens, C of them. figures: [C, len(COLUMNS)], per token. position:
    index in the completion of the first token at which the student leaves; None where it never
    does. student_token: what it would write there.
    """

    prompt: Sample
    completion: tuple[int, ...]
    figures: Tensor
    position: int | None
    student_token: int | None

    @property
    def student_start(self) -> tuple[int, ...]:
        """The student's own completion up to where it leaves, that token included."""
        assert self.position is not None and self.student_token is not None
        return (*self.completion[: self.position], self.student_token)


@torch.no_grad()
def compare_prompts(
    model: PreTrainedModel, prompts: Sequence[Sample], max_new_tokens: int, ends: frozenset[int]
) -> list[Comparison]:
    """The teacher's greedy continuation of each prompt, and the student's opinion of it.

    The student leaves where its most likely token is not the teacher's. A token that the teacher
    itself would not write again in the pass that the two are compared in (a tie, which rounding
    decides) is none to leave from.

    Raises:
        DataError: an id outside the vocabulary.
        NumericalError: logits that are not finite.
    """
    fault = find_fault(collate(prompts, pad_id=0), model.config.vocab_size)
    if fault is not None:
        raise DataError(f"prompts: {fault}; is this the tokenizer of the model?")
    names = [prompt.id for prompt in prompts]
    with adapter_mode(model, "teacher"):
        added = continue_greedily(
            model, [p.input_ids for p in prompts], [max_new_tokens] * len(prompts), ends, names
        )
    rows = [
        Sample(p.id, (*p.input_ids, *new), (*[IGNORE_INDEX] * len(p.input_ids), *new))
        for p, new in zip(prompts, added, strict=True)
    ]
    hidden = {mode: _states(model, rows, mode) for mode in ("teacher", "student")}
    tokens = torch.tensor([token for new in added for token in new]).to(hidden["teacher"].device)
    with cast_once(model.lm_head):
        figures = compare_tokens(
            hidden["student"], hidden["teacher"], tokens, model.lm_head, model.config.vocab_size
        )
        written = {
            mode: _argmax(states, model.lm_head, model.config.vocab_size)
            for mode, states in hidden.items()
        }
    leaves = ((written["student"] != tokens) & (written["teacher"] == tokens)).cpu()
    found, start = [], 0
    for prompt, new, own in zip(
        prompts, added, written["student"].cpu().split([len(new) for new in added]), strict=True
    ):
        part = slice(start, start + len(new))
        start += len(new)
        if not torch.isfinite(figures[part]).all():
            raise NumericalError(
                f"the student's logits behind {prompt.id} are not finite; npt trace --adapter finds"
                " the operation"
            )
        position = next(iter(leaves[part].nonzero()[:, 0].tolist()), None)
        token = None if position is None else int(own[position])
        found.append(Comparison(prompt, tuple(new), figures[part].double().cpu(), position, token))
    return found


def _states(model: PreTrainedModel, rows: Sequence[Sample], mode: Mode) -> Tensor:
    """The states that the completions' tokens are predicted from, [N, D], row by row."""
    # Padded on the right by a token that is in the batch: every padded query has keys, and no
    # embedding of its own is needed.
    batch = collate(rows, pad_id=rows[0].input_ids[0]).to(next(model.parameters()).device)
    with adapter_mode(model, mode):
        return final_states(model, batch)


def _argmax(hidden: Tensor, head: torch.nn.Module, vocab_size: int) -> Tensor:
    with cast_once(head):
        return torch.cat(
            [
                head(part).argmax(dim=-1).to(hidden.device)
                for part in hidden.split(max(1, LOGIT_CHUNK // vocab_size))
            ]
        )


@dataclass(frozen=True)
class Divergence:
    """Greedy texts of student and teacher behind the same prompts; `_se` is the standard error,
    over prompts, of the figure before it.

    prompts, parted: how many, and how many of their texts part within `max_new_tokens`. censored:
    still the same at that limit. ended: the same up to an end token. tokens: of the teacher's
    texts. agreed: mean number of tokens that are the same before the parting, the limit or the end;
    a lower bound of where they part. median: of the number of tokens before the parting, by the
    product-limit estimator; NaN where fewer than half part. rate: partings per token that was
    compared.
    """

    prompts: int
    max_new_tokens: int
    parted: int
    censored: int
    ended: int
    tokens: int
    agreed: float
    agreed_se: float
    median: float
    rate: float
    rate_se: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Divergence:
        """The figures that `as_dict` gave, through JSON or not."""
        numbers: dict[str, Any] = {
            key: math.nan if value is None else value for key, value in values.items()
        }
        return cls(**numbers)


def divergence(compared: Sequence[Comparison], max_new_tokens: int) -> Divergence:
    """Figures of at least one comparison, made with this limit on new tokens."""
    before = [len(c.completion) if c.position is None else c.position for c in compared]
    parted = torch.tensor([float(c.position is not None) for c in compared], dtype=torch.float64)
    agreed = torch.tensor(before, dtype=torch.float64)
    censored = sum(c.position is None and len(c.completion) == max_new_tokens for c in compared)
    mean, error = mean_and_error(agreed, torch.ones_like(agreed))
    # the token at which two texts part was compared as well
    rate, rate_error = mean_and_error(parted, agreed + parted)
    return Divergence(
        prompts=len(compared),
        max_new_tokens=max_new_tokens,
        parted=int(parted.sum()),
        censored=censored,
        ended=len(compared) - int(parted.sum()) - censored,
        tokens=sum(len(c.completion) for c in compared),
        agreed=mean,
        agreed_se=error,
        median=_median(
            [(n, c.position is not None) for n, c in zip(before, compared, strict=True)]
        ),
        rate=rate,
        rate_se=rate_error,
    )


def _median(observed: Sequence[tuple[int, bool]]) -> float:
    """The first number of tokens by which half have parted, of (tokens that agree, whether they
    part there); NaN if none.
    """
    surviving = 1.0
    for tokens in sorted({n for n, parts in observed if parts}):
        at_risk = sum(n > tokens or (n == tokens and parts) for n, parts in observed)
        surviving *= 1 - sum(parts and n == tokens for n, parts in observed) / at_risk
        if surviving <= 0.5:
            return float(tokens)
    return math.nan


def parting_prompts(
    samples: Sequence[Sample], count: int, max_new_tokens: int, positions: int | None
) -> list[Sample]:
    """The first `count` samples' prompts: what stands in front of a completion, or a text's leading
    tokens.

    Args:
        samples: evaluation samples; of several documents in one the first is taken.
        count: prompts at most.
        max_new_tokens: room that is left behind each.
        positions: of the model; prompts lose their front to fit.

    Raises:
        ConfigError: no room for a prompt.
    """
    room = PROMPT_TOKENS + max_new_tokens if positions is None else positions - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        raise ConfigError(
            f"--max_new_tokens is {max_new_tokens}; it must be at least 1 and below the model's"
            f" {positions} positions"
        )
    prompts = []
    for sample in samples[:count]:
        ids = sample.input_ids if sample.lengths is None else sample.input_ids[: sample.lengths[0]]
        labels = (sample.labels or ())[: len(ids)]
        given = (
            next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), len(ids))
            if labels
            else 0
        )
        length = given if 0 < given < len(ids) else max(1, min(len(ids) // 2, PROMPT_TOKENS))
        prompts.append(Sample(sample.id, ids[:length][-room:]))
    return prompts


def measure_divergence(
    model: PreTrainedModel,
    prompts: Sequence[Sample],
    ends: frozenset[int],
    *,
    max_new_tokens: int,
    batch_size: int,
    between: Callable[[], None] | None = None,
) -> Divergence:
    """Where the student parts from its teacher behind each prompt. `between` is called in front of
    every batch.

    Raises:
        DataError: an id outside the vocabulary.
        NumericalError: logits that are not finite.
    """
    compared: list[Comparison] = []
    for start in range(0, len(prompts), batch_size):
        if between is not None:
            between()
        compared += compare_prompts(
            model, prompts[start : start + batch_size], max_new_tokens, ends
        )
    return divergence(compared, max_new_tokens)
