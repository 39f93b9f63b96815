"""Greedy continuations: continue prompts in batches and find where student and teacher diverge.

Prompts are padded on the left, because a sliding window counts columns. Padding attends only to
itself, like a separate document in a packed row, because some attention kernels return NaN for a
query without keys. The batch affects a token only where rounding decides a tie.

The teacher continues each prompt, and the student predicts each token of the continuation. Up to
the first difference the two texts are the same, so one forward of the student finds where its own
text would diverge.

Some continuations never diverge within the limit. They are right-censored and count with all of
their tokens, so the mean number of tokens that agree is a lower bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.converted import adapter_mode
from npt.adapters.layer import Mode
from npt.adapters.stream import MASKED, model_inputs
from npt.base.linear import cast_once
from npt.batch import IGNORE_INDEX, Batch, Sample, batch_from_tensors, collate
from npt.errors import ConfigError, NumericalError
from npt.evaluation.metrics import (
    Measured,
    check_ids,
    compare_tokens,
    final_states,
    mean_and_error,
    most_likely,
)

MODES: tuple[Mode, ...] = ("teacher", "student")
PROMPT_TOKENS = 32  # longest prompt to take from a text
MOST_LIKELY = partial(torch.argmax, dim=-1)


@torch.no_grad()
def continue_greedily(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: Collection[int],
    names: Sequence[str],
    pick: Callable[[Tensor], Tensor] = MOST_LIKELY,
) -> list[list[int]]:
    """Return the most likely continuation of each prompt, up to its limit of tokens or to one of
    `ends`, included. The adapters' mode decides which model writes. `pick` may choose tokens [B]
    from logits [B, V] in another way.

    Memory: the cache and, for a head stored in 16 bits, its fp32 form of 4 V D bytes.

    Raises:
        NumericalError: logits are not finite. The message names the prompt by `names`.
    """
    if not prompts:
        return []
    device = model.device
    batch, mask = _padded(prompts, model.config._attn_implementation in MASKED)
    inputs = model_inputs(model, batch.to(device))
    mask = mask.to(device)
    positions = inputs["position_ids"]
    # a row that has ended stays in the batch, unread, so that the shapes and the cache hold
    open_rows = {row for row, limit in enumerate(limits) if limit > 0}
    added: list[list[int]] = [[] for _ in prompts]
    cache = None
    with cast_once(model.lm_head):
        while open_rows:
            out = model.model(**inputs, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            last = out.last_hidden_state[:, -1].to(device)
            logits = model.lm_head(last).to(device)  # [B, V]
            finite = torch.isfinite(logits).all(dim=-1)
            ids = pick(torch.where(finite.unsqueeze(-1), logits, 0.0)).unsqueeze(-1)
            # one transfer from the device: the token, or -1 if logits are not finite
            answers = torch.where(finite, ids[:, 0], -1).tolist()
            for row in sorted(open_rows):
                token = answers[row]
                if token < 0:
                    raise NumericalError(
                        f"the logits after token {len(prompts[row]) + len(added[row])} of"
                        f" {names[row]} are not finite; run npt trace to find the operation"
                    )
                added[row].append(token)
                if token in ends or len(added[row]) == limits[row]:
                    open_rows.discard(row)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=-1)
            positions = positions[:, -1:] + 1
            # from now on every query is a token, which has keys
            inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return added


def _padded(prompts: Sequence[Sequence[int]], apart: bool) -> tuple[Batch, Tensor]:
    """Return the prompts, padded on the left, and their mask. Each is padded with its first token,
    so that the pad token's embedding does not matter. With `apart`, padding is a separate document.
    """
    width = max(map(len, prompts))
    rows = []
    masks = []
    for prompt in prompts:
        missing = width - len(prompt)
        padding = [prompt[0]] * missing
        rows.append([*padding, *prompt])
        hidden = [0] * missing
        shown = [1] * len(prompt)
        masks.append(hidden + shown)
    ids = torch.tensor(rows)
    mask = torch.tensor(masks)
    batch = batch_from_tensors(ids, mask)
    if apart and batch.padded:
        unmasked = torch.ones_like(mask)
        every = batch_from_tensors(ids, unmasked)
        batch = replace(every, documents=mask, position_ids=batch.position_ids)
    return batch, mask


def end_ids(model: PreTrainedModel, tokenizer: object) -> frozenset[int]:
    """Return the ids that end a text, from the tokenizer and the generation settings."""
    further = getattr(model.generation_config, "eos_token_id", None)
    further = further if isinstance(further, list | tuple) else [further]
    ids = (getattr(tokenizer, "eos_token_id", None), *further)
    return frozenset(i for i in ids if isinstance(i, int))


@dataclass(frozen=True)
class Comparison:
    """The student compared with its teacher on the teacher's continuation of one prompt.

    Attributes:
        completion: the teacher's C tokens.
        figures: [C, len(COLUMNS)], figures per token.
        position: index of the first token at which the student diverges, if any.
        student_token: the student's token there.
    """

    prompt: Sample
    completion: tuple[int, ...]
    figures: Tensor
    position: int | None
    student_token: int | None

    @property
    def student_start(self) -> tuple[int, ...]:
        """The student's own completion up to the first difference, that token included."""
        assert self.position is not None and self.student_token is not None
        return (*self.completion[: self.position], self.student_token)


@torch.no_grad()
def compare_prompts(
    model: PreTrainedModel, prompts: Sequence[Sample], max_new_tokens: int, ends: frozenset[int]
) -> list[Comparison]:
    """Continue each prompt greedily with the teacher, and compare the student on those tokens.

    The student diverges at the first token that is not its own most likely one. A token that the
    teacher would not choose again in this forward does not count: rounding decided a tie.
    """
    check_ids(collate(prompts), model, "prompts")
    names = [prompt.id for prompt in prompts]
    limits = [max_new_tokens] * len(prompts)
    with adapter_mode(model, "teacher"):
        added = continue_greedily(model, [p.input_ids for p in prompts], limits, ends, names)
    rows = []
    for prompt, new in zip(prompts, added, strict=True):
        unlabelled = [IGNORE_INDEX] * len(prompt.input_ids)
        rows.append(Sample(prompt.id, (*prompt.input_ids, *new), (*unlabelled, *new)))
    # Pad on the right with a token of the batch: every padded query has keys, and the pad token
    # needs no embedding.
    batch = collate(rows, pad_id=rows[0].input_ids[0]).to(model.device)
    hidden: dict[Mode, Tensor] = {}
    for mode in MODES:
        with adapter_mode(model, mode):
            hidden[mode] = final_states(model, batch)
    # from here on the tokens of all prompts are one dimension, as final_states returns them
    tokens = torch.tensor(list(itertools.chain(*added)), device=batch.input_ids.device)
    head = model.lm_head
    size = model.config.vocab_size
    with cast_once(head):
        figures = compare_tokens(hidden["student"], hidden["teacher"], tokens, head, size)
        written = {mode: most_likely(states, head, size).cpu() for mode, states in hidden.items()}
    expected = tokens.cpu()
    diverging = (written["student"] != expected) & (written["teacher"] == expected)
    lengths = [len(new) for new in added]
    parts = (each.split(lengths) for each in (figures, diverging, written["student"]))
    comparisons = []
    for prompt, new, per_token, differs, own in zip(prompts, added, *parts, strict=True):
        if not torch.isfinite(per_token).all():
            raise NumericalError(
                f"the student's logits after {prompt.id} are not finite; run npt trace --adapter to"
                " find the operation"
            )
        position = token = None
        if differs.any():
            position = int(differs.nonzero()[0])
            token = int(own[position])
        comparison = Comparison(prompt, tuple(new), per_token.double().cpu(), position, token)
        comparisons.append(comparison)
    return comparisons


@dataclass(frozen=True)
class Divergence(Measured):
    """Greedy continuations of the same prompts by student and teacher.

    Attributes:
        parted: number of prompts whose two continuations differ.
        tokens: number of tokens in the teacher's continuations.
        agreed: mean number of tokens before the first difference, the limit or the end.
        agreed_se: its standard error over prompts.
    """

    prompts: int
    max_new_tokens: int
    parted: int
    tokens: int
    agreed: float
    agreed_se: float


def divergence(comparisons: Sequence[Comparison], max_new_tokens: int) -> Divergence:
    """Return the figures of one or more comparisons made with this limit on new tokens."""
    counts = [len(c.completion) if c.position is None else c.position for c in comparisons]
    agreed = torch.tensor(counts, dtype=torch.float64)
    mean, error = mean_and_error(agreed, torch.ones_like(agreed))
    return Divergence(
        prompts=len(comparisons),
        max_new_tokens=max_new_tokens,
        parted=sum(c.position is not None for c in comparisons),
        tokens=sum(len(c.completion) for c in comparisons),
        agreed=mean,
        agreed_se=error,
    )


def parting_prompts(
    samples: Sequence[Sample], max_new_tokens: int, positions: int | None
) -> list[Sample]:
    """Return a prompt from each sample: the text before a completion, or the leading tokens of the
    first document. A prompt too long for the model's positions loses its beginning.

    Raises:
        ConfigError: `max_new_tokens` leaves no room for a prompt.
    """
    room = PROMPT_TOKENS + max_new_tokens if positions is None else positions - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        raise ConfigError(
            f"--max_new_tokens {max_new_tokens} must be at least 1 and below the model's"
            f" {positions} positions"
        )
    prompts = []
    for sample in samples:
        ids = sample.input_ids
        if sample.lengths:
            ids = ids[: sample.lengths[0]]
        unlabelled = itertools.takewhile(lambda label: label == IGNORE_INDEX, sample.labels or ())
        length = len(list(unlabelled))
        if not 0 < length < len(ids):  # no prompt of its own
            length = max(1, min(len(ids) // 2, PROMPT_TOKENS))
        prompts.append(Sample(sample.id, ids[:length][-room:]))
    return prompts


def measure_divergence(
    model: PreTrainedModel,
    prompts: Sequence[Sample],
    ends: frozenset[int],
    max_new_tokens: int,
    batch_size: int,
    between: Callable[[], None] | None = None,
) -> Divergence:
    """Continue and compare the prompts in batches; `between` is called before each."""
    comparisons: list[Comparison] = []
    for start in range(0, len(prompts), batch_size):
        if between is not None:
            between()
        batch = prompts[start : start + batch_size]
        comparisons += compare_prompts(model, batch, max_new_tokens, ends)
    return divergence(comparisons, max_new_tokens)
