"""Agreement of two models' next-token distributions, summed per sample so that every figure gets an
honest standard error.

Tokens of one text are not independent, samples nearly are. So the error of a mean over tokens is
taken over samples, as that of a ratio of two sums (the linearised, or delta-method, variance of a
ratio estimator; Cochran, Sampling Techniques, 1977, ch. 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from npt.adapters.stream import model_inputs
from npt.base.linear import cast_once
from npt.data.batch import IGNORE_INDEX, Batch, find_fault
from npt.distill.logit_losses import LOGIT_CHUNK, kl_of_logs
from npt.errors import DataError

COLUMNS = ("teacher_nll", "nll", "kl", "top1", "acceptance", "tokens")

Pair = tuple[str, str]
"""(a model, the one that it is measured against), by name."""


@dataclass(frozen=True)
class Measured:
    """Numbers that a JSON file holds, null for what is not finite."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return what a file holds, now or of an earlier version, which had more; null becomes NaN.
        KeyError if a number is missing.
        """
        plain = nan_for_null(values)
        return cls(**{field.name: plain[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Figures(Measured):
    """One model against the teacher on the same tokens; `_se` is the standard error of the figure
    before it.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of the text.
        perplexity_ratio: over the teacher's, its error from paired differences.
        kl: KL(teacher || model), nats per token.
        top1: share of tokens on which the teacher's most likely token is the model's.
        acceptance: sum over the vocabulary of min(p, q), the expected rate at which speculative
            sampling would accept the model's draft.
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


def nan_for_null(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with NaN for null, as which JSON writes it."""
    return {key: math.nan if value is None else value for key, value in values.items()}


def check_ids(batch: Batch, model: PreTrainedModel, data: str) -> None:
    """Raise DataError, about these data, if the batch has a fault or an id without a token."""
    fault = find_fault(batch, model.config.vocab_size)
    if fault is not None:
        raise DataError(f"{data}: {fault}; is this the tokenizer of the model?")


def checked_batches(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    data: str,
    between: Callable[[], None] | None = None,
) -> Iterator[Batch]:
    """Yield batches on the model's device, checked; `between` is called before each."""
    device = next(model.parameters()).device
    for batch in batches:
        if between is not None:
            between()
        check_ids(batch, model, data)
        yield batch.to(device)


def predicting(batch: Batch) -> Tensor:
    """Return [B, T - 1] bool: a valid token, followed by one to predict."""
    return (batch.labels[:, 1:] != IGNORE_INDEX) & batch.attention_mask[:, :-1].bool()


def final_states(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the last hidden states, after the final norm, from which a token is predicted: [P, D],
    row by row. The model's own forward is used, in the mode of its adapters, as users do.
    """
    # Padding is filled with a real token of its row: a broken embedding of the pad token is
    # nobody's business here.
    first = batch.attention_mask.argmax(dim=-1, keepdim=True)
    filled = torch.where(
        batch.attention_mask.bool(), batch.input_ids, batch.input_ids.gather(1, first)
    )
    inputs = model_inputs(model, replace(batch, input_ids=filled))
    states = model.model(**inputs, use_cache=False).last_hidden_state
    return states[:, :-1][predicting(batch).to(states.device)]


_Predicted = tuple[Tensor, Tensor]
"""Log-probabilities of N tokens, [N, V] fp32, and the most likely ones, [N]."""


def compare_pairs(
    hidden: Mapping[str, Tensor],
    heads: Mapping[str, torch.nn.Module],
    targets: Tensor,
    vocab_size: int,
    pairs: Sequence[Pair],
) -> dict[Pair, Tensor]:
    """Return [N, len(COLUMNS)] fp32 per pair of models: the quantities of COLUMNS, per token. Every
    model goes through its head once, whatever the pairs. Memory: logits of a chunk of tokens, and
    the fp32 form of a head that is stored in 16 bit.

    Args:
        hidden: [N, D] of each model.
        heads: of each model.
        targets: [N], the next tokens of the text.
        pairs: a model, and the one that it is measured against.
    """
    parts: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
    rows = max(1, LOGIT_CHUNK // vocab_size)
    with cast_once(*heads.values()):
        for start in range(0, max(1, len(targets)), rows):
            chunk = slice(start, start + rows)

            def predicted(name: str, chunk: slice = chunk) -> _Predicted:
                logits = heads[name](hidden[name][chunk]).to(torch.float32)
                return torch.log_softmax(logits, dim=-1), logits.argmax(dim=-1)

            references = dict.fromkeys(reference for _, reference in pairs)
            teachers = {name: predicted(name) for name in references}
            for name in dict.fromkeys(model for model, _ in pairs):
                of_model = teachers[name] if name in teachers else predicted(name)
                for pair in pairs:
                    if pair[0] == name:
                        columns = _columns(of_model, teachers[pair[1]], targets[chunk])
                        parts[pair].append(columns)
    return {pair: torch.cat(chunks) for pair, chunks in parts.items()}


def _columns(model: _Predicted, teacher: _Predicted, targets: Tensor) -> Tensor:
    (log_q, likeliest), (log_p, wanted) = model, teacher
    pick = targets.unsqueeze(-1)
    # the most likely of NaN is some token
    numbers = ~(torch.isnan(log_q[:, 0]) | torch.isnan(log_p[:, 0]))
    return torch.stack(
        [
            -log_p.gather(-1, pick).squeeze(-1),
            -log_q.gather(-1, pick).squeeze(-1),
            kl_of_logs(log_p, log_q),
            torch.where(numbers, (likeliest == wanted).to(torch.float32), torch.nan),
            overlap_of(log_p.exp(), log_q.exp()),
            torch.ones_like(targets, dtype=torch.float32),
        ],
        dim=-1,
    )


def overlap_of(p: Tensor, q: Tensor) -> Tensor:
    """Return sum_v min(p, q): [N, V] twice -> [N], the rate at which speculative sampling accepts a
    draft of q.

    In fp32 the probabilities of a large vocabulary add up to 1 only within some 1e-5, so the sum is
    taken over that of the larger one: it is never above 1, since rounded sums in one order grow
    with what is added, and 1 to the last bit if both are the same.
    """
    return torch.minimum(p, q).sum(dim=-1) / torch.maximum(p.sum(dim=-1), q.sum(dim=-1))


def compare_tokens(
    hidden: Tensor, teacher_hidden: Tensor, targets: Tensor, head: torch.nn.Module, vocab_size: int
) -> Tensor:
    """Return `compare_pairs` of one model and its teacher, which share a head."""
    heads = {"model": head, "teacher": head}
    states = {"model": hidden, "teacher": teacher_hidden}
    pair = ("model", "teacher")
    return compare_pairs(states, heads, targets, vocab_size, [pair])[pair]


def most_likely(hidden: Tensor, head: torch.nn.Module, vocab_size: int) -> Tensor:
    """Return the most likely token after each of these states: [N, D] -> [N]."""
    with cast_once(head):
        parts = hidden.split(max(1, LOGIT_CHUNK // vocab_size))
        return torch.cat([head(part).argmax(dim=-1).to(hidden.device) for part in parts])


def per_sample_sums(per_token: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sum [N, len(COLUMNS)] per-token quantities by sample: rows [N] are the samples of the tokens,
    of `count` samples. Returned in fp64 on the host, without samples that predict nothing.
    """
    sums = torch.zeros(count, len(COLUMNS), dtype=torch.float64)
    sums.index_add_(0, rows.cpu(), per_token.to("cpu", torch.float64))
    return sums[sums[:, -1] > 0]


def mean_and_error(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Return the mean per token and its standard error over samples, NaN for fewer than two, from
    fp64 sums over each sample's tokens, [C], and the numbers of these, [C].
    """
    total, n = float(counts.sum()), len(counts)
    mean = float(sums.sum()) / total
    if n < 2:
        return mean, math.nan
    residual = sums - mean * counts
    return mean, math.sqrt(n / (n - 1) * float(residual.square().sum())) / total


def figures(per_sample: Tensor) -> Figures:
    """Return the figures of [C, len(COLUMNS)] per-sample sums in fp64."""
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


def _exp(value: float) -> float:
    return math.inf if value >= 700 else math.exp(value)
