"""Agreement of two models' next-token distributions, with standard errors.

Tokens of one text are not independent, but samples nearly are. The standard error of a mean over
tokens is therefore taken over samples, by the linearised (delta-method) variance of a ratio
estimator (Cochran, Sampling Techniques, 1977, ch. 6).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.stream import model_inputs
from npt.base.linear import cast_once
from npt.batch import IGNORE_INDEX, Batch, find_fault
from npt.distill.logit_losses import LOGIT_CHUNK, kl_of_logs, token_cross_entropy
from npt.errors import DataError
from npt.figures import Change, nan_for_null, unpaired

COLUMNS = ("teacher_nll", "nll", "kl", "top1", "acceptance", "tokens")

Pair = tuple[str, str]
"""(model, model that it is compared with), by name."""


@dataclass(frozen=True)
class Measured:
    """Numbers that read from and write to JSON, where null stands for a non-finite number."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the numbers of a file, which may hold others of another version; null becomes NaN.
        Raise KeyError if one is missing.
        """
        plain = nan_for_null(values)
        return cls(**{field.name: plain[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Figures(Measured):
    """One model compared with the teacher on the same tokens. `<name>_se` is the standard error.

    Attributes:
        tokens: number of predicted tokens.
        perplexity: exp of the mean negative log-likelihood of the text.
        perplexity_ratio: model's over the teacher's perplexity; the error uses paired differences.
        kl: KL(teacher || model), nats per token.
        top1: share of tokens for which both models find the same token most likely.
        acceptance: mean over tokens of sum(min(p, q)) over the vocabulary, the expected rate at
            which speculative sampling accepts drafts of the model.
    """

    tokens: int
    perplexity: float
    perplexity_se: float
    perplexity_ratio: float
    perplexity_ratio_se: float
    kl: float
    kl_se: float
    top1: float
    top1_se: float
    acceptance: float
    acceptance_se: float


def check_ids(batch: Batch, model: PreTrainedModel, data: str) -> None:
    """Raise DataError if the batch has a fault or ids outside the vocabulary; `data` names it."""
    fault = find_fault(batch, model.config.vocab_size)
    if fault is not None:
        raise DataError(f"{data}: {fault}; check the data and use the model's own tokenizer")


def checked_batches(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    data: str,
    between: Callable[[], None] | None = None,
) -> Iterator[Batch]:
    """Yield checked batches on the model's device; `between` is called before each."""
    for batch in batches:
        if between is not None:
            between()
        check_ids(batch, model, data)
        yield batch.to(model.device)


def predicting(batch: Batch) -> Tensor:
    """Return [B, T - 1] bool: True for a valid token that is followed by a token to predict."""
    return (batch.labels[:, 1:] != IGNORE_INDEX) & batch.attention_mask[:, :-1].bool()


def final_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the final states (after the last norm) of the P predicting tokens, row by row: [P, D].
    The model's own forward runs, in the mode of its adapters.
    """
    # Fill padding with a real token of its row, since the pad token's embedding may be broken.
    first = batch.attention_mask.argmax(dim=-1, keepdim=True)
    filled = torch.where(
        batch.attention_mask.bool(), batch.input_ids, batch.input_ids.gather(1, first)
    )
    inputs = model_inputs(model, replace(batch, input_ids=filled))
    states = model.model(**inputs, use_cache=False).last_hidden_state
    return states[:, :-1][predicting(batch).to(states.device)]


def rows_at_once(vocab_size: int) -> int:
    """Return the number of tokens whose logits an evaluation computes at a time."""
    return max(1, LOGIT_CHUNK // vocab_size)


_Predicted = tuple[Tensor, Tensor]
"""Log-probabilities at N positions, [N, V] fp32, and the most likely tokens, [N]."""


def _predict(head: torch.nn.Module, states: Tensor) -> _Predicted:
    logits = head(states).to(torch.float32)
    return torch.log_softmax(logits, dim=-1), logits.argmax(dim=-1)


def compare_pairs(
    hidden: Mapping[str, Tensor],
    heads: Mapping[str, torch.nn.Module],
    targets: Tensor,
    vocab_size: int,
    pairs: Sequence[Pair],
) -> dict[Pair, Tensor]:
    """Return per pair of models the quantities of COLUMNS per token: [N, len(COLUMNS)] fp32.

    Each head runs once per model. Memory: the logits of a chunk of tokens and, for a head stored in
    16 bits, its fp32 form.

    Args:
        hidden: [N, D] states of each model.
        heads: head of each model.
        targets: [N], the next tokens of the text.
        pairs: (model, model that it is compared with).
    """
    parts: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
    rows = rows_at_once(vocab_size)
    by_model: dict[str, list[str]] = {}
    for model, reference in pairs:
        by_model.setdefault(model, []).append(reference)
    references = dict.fromkeys(itertools.chain(*by_model.values()))
    with cast_once(*heads.values()):
        # no tokens are one empty chunk, so that the result has its shape
        for start in range(0, max(1, len(targets)), rows):
            chunk = slice(start, start + rows)
            teachers = {name: _predict(heads[name], hidden[name][chunk]) for name in references}
            # one model at a time beside the references: a chunk of logits is large
            for model, compared_with in by_model.items():
                of_model = teachers.get(model)
                if of_model is None:
                    of_model = _predict(heads[model], hidden[model][chunk])
                for reference in compared_with:
                    columns = _columns(of_model, teachers[reference], targets[chunk])
                    parts[model, reference].append(columns)
    return {pair: torch.cat(chunks) for pair, chunks in parts.items()}


def _columns(model: _Predicted, teacher: _Predicted, targets: Tensor) -> Tensor:
    log_q, likeliest = model
    log_p, wanted = teacher
    pick = targets.unsqueeze(-1)
    # argmax of NaN is still a token
    numbers = ~(torch.isnan(log_q[:, 0]) | torch.isnan(log_p[:, 0]))
    same = (likeliest == wanted).to(torch.float32)
    columns = [
        -log_p.gather(-1, pick).squeeze(-1),
        -log_q.gather(-1, pick).squeeze(-1),
        kl_of_logs(log_p, log_q),
        torch.where(numbers, same, torch.nan),
        overlap_of(log_p.exp(), log_q.exp()),
        torch.ones_like(targets, dtype=torch.float32),
    ]
    return torch.stack(columns, dim=-1)


def overlap_of(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_v min(p, q) for p and q [N, V]: [N], the rate at which speculative sampling from p
    accepts a draft of q.

    In fp32 the probabilities of a large vocabulary add up to 1 only within about 1e-5. Dividing by
    the larger of the two sums makes the rate exactly 1 for equal distributions and never above 1.
    """
    return torch.minimum(p, q).sum(dim=-1) / torch.maximum(p.sum(dim=-1), q.sum(dim=-1))


def compare_tokens(
    hidden: Tensor, teacher_hidden: Tensor, targets: Tensor, head: torch.nn.Module, vocab_size: int
) -> Tensor:
    """Return `compare_pairs` for a model and a teacher that share a head."""
    heads = {"model": head, "teacher": head}
    states = {"model": hidden, "teacher": teacher_hidden}
    pair = ("model", "teacher")
    return compare_pairs(states, heads, targets, vocab_size, [pair])[pair]


def most_likely(hidden: Tensor, head: torch.nn.Module, vocab_size: int) -> Tensor:
    """Return the most likely token after each state: [N, D] -> [N]."""
    with cast_once(head):
        parts = hidden.split(rows_at_once(vocab_size))
        return torch.cat([head(part).argmax(dim=-1).to(hidden.device) for part in parts])


def log_likelihoods(
    hidden: Tensor, targets: Tensor, head: torch.nn.Module, vocab_size: int
) -> Tensor:
    """Return the log-probability of each target after its state: [N, D] and [N] -> [N] fp32."""
    rows = rows_at_once(vocab_size)
    parts = zip(hidden.split(rows), targets.to(hidden.device).split(rows), strict=True)
    with cast_once(head):
        return -torch.cat([token_cross_entropy(head(states), ids) for states, ids in parts])


def per_sample_sums(per_token: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return per-sample sums of [N, len(COLUMNS)] per-token quantities, in fp64 on the host. `rows`
    [N] gives the sample of each token, out of `count`; samples without tokens are dropped.
    """
    sums = torch.zeros(count, len(COLUMNS), dtype=torch.float64)
    sums.index_add_(0, rows.cpu(), per_token.to("cpu", torch.float64))
    return sums[sums[:, -1] > 0]


def mean_and_error(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Return the mean per token and its standard error over samples, NaN for fewer than two.

    `sums` [C] are fp64 sums over each sample's tokens, `counts` [C] the numbers of tokens.
    """
    total = float(counts.sum())
    n = len(counts)
    mean = float(sums.sum()) / total
    if n < 2:
        return mean, math.nan
    residual = sums - mean * counts
    return mean, math.sqrt(n / (n - 1) * float(residual.square().sum())) / total


def figures(per_sample: Tensor) -> Figures:
    """Return the figures from per-sample sums, [C, len(COLUMNS)] in fp64."""
    column = {name: per_sample[:, i] for i, name in enumerate(COLUMNS)}
    counts = column["tokens"]
    nll, nll_se = mean_and_error(column["nll"], counts)
    excess, excess_se = mean_and_error(column["nll"] - column["teacher_nll"], counts)
    means: dict[str, float] = {}
    for name in ("kl", "top1", "acceptance"):
        means[name], means[f"{name}_se"] = mean_and_error(column[name], counts)
    return Figures(
        tokens=int(counts.sum()),
        perplexity=_exp(nll),
        perplexity_se=_exp(nll) * nll_se,
        perplexity_ratio=_exp(excess),
        perplexity_ratio_se=_exp(excess) * excess_se,
        **means,
    )


Samples = Sequence[Sequence[float | None]]
"""Sums of each sample, [C, len(COLUMNS)], as a checkpoint holds them: null is NaN."""


def change_of(
    name: str, before: Figures, after: Figures, earlier: Samples, later: Samples
) -> Change:
    """Return how `kl` or `perplexity` changed. If the samples before and after are not the same, or
    not known, the error is that of two independent measurements, which is too large.
    """
    changed = unpaired(name, before.as_dict(), after.as_dict())
    sums, counts = _column(earlier, name)
    later_sums, later_counts = _column(later, name)
    if not len(counts) or not counts.equal(later_counts):
        return changed
    _, error = mean_and_error(later_sums - sums, counts)
    return replace(changed, change_se=error * (changed.after if name == "perplexity" else 1.0))


def _column(samples: Samples, name: str) -> tuple[Tensor, Tensor]:
    """Return of each sample the sum that makes a figure, and the number of tokens: [C] in fp64."""
    index = COLUMNS.index("nll" if name == "perplexity" else name)
    sums = [math.nan if sample[index] is None else sample[index] for sample in samples]
    counts = [sample[-1] for sample in samples]
    return torch.tensor(sums, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64)


def _exp(value: float) -> float:
    return math.inf if value >= 700 else math.exp(value)
