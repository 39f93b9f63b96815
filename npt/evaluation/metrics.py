"""Agreement of two next-token distributions, summed per sample so that every figure gets an honest
standard error.

Tokens of one text are not independent, samples nearly are. So the error of a mean over tokens is
taken over samples, as that of a ratio of two sums (the linearised, or delta-method, variance of a
ratio estimator; Cochran, Sampling Techniques, 1977, ch. 6).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from npt.base.linear import cast_once
from npt.distill.divergence import LOGIT_CHUNK, kl_of_logs
from npt.evaluation.assisted import overlap_of

COLUMNS = ("teacher_nll", "nll", "kl", "reverse_kl", "top1", "top5", "acceptance", "tokens")

Pair = tuple[str, str]
"""(a model, the one that it is measured against), by name."""


@dataclass(frozen=True)
class Figures:
    """One model against the teacher on the same tokens; `_se` is the standard error of the figure
    before it.

    perplexity: exp of the mean negative log-likelihood of the text. perplexity_ratio: over the
    teacher's, its error from paired differences. kl: KL(teacher || model), nats per token;
    reverse_kl: KL(model || teacher). top1, top5: share of tokens on which the teacher's most likely
    token is the model's, or among the model's five. acceptance: sum over the vocabulary of min(p,
    q), the expected rate at which speculative sampling would accept the model's draft.

    Figures that a file of an earlier version lacks are NaN.
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
    reverse_kl: float = math.nan
    reverse_kl_se: float = math.nan
    top5: float = math.nan
    top5_se: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Figures:
        """Figures that `as_dict` gave, now or in an earlier version; what JSON has no word for
        comes back as NaN.

        Raises:
            TypeError: a figure that every version has is missing, or one is unknown.
        """
        numbers: dict[str, Any] = {
            key: math.nan if value is None else value for key, value in values.items()
        }
        return cls(**numbers)


class _Predicted(NamedTuple):
    """What one model says about N tokens. logs: log-probabilities, [N, V] fp32. first: its most
    likely token, [N].
    """

    logs: Tensor
    first: Tensor


def compare_pairs(
    hidden: Mapping[str, Tensor],
    heads: Mapping[str, torch.nn.Module],
    targets: Tensor,
    vocab_size: int,
    pairs: Sequence[Pair],
) -> dict[Pair, Tensor]:
    """Per token and pair of models, the quantities of COLUMNS. Every model goes through its head
    once, whatever the pairs.

    Args:
        hidden: [N, D] of each model, its last hidden state after the final norm.
        heads: lm_head of each model. Logits exist for a chunk of tokens at a time only; the fp32
            form of a head that is stored in 16 bit for the whole call.
        targets: [N], the token that came next in the text.
        vocab_size: V.
        pairs: of names of models.

    Returns:
        [N, len(COLUMNS)] fp32 of each pair.
    """
    with cast_once(*heads.values()):
        return _compare_chunks(hidden, heads, targets, max(1, LOGIT_CHUNK // vocab_size), pairs)


def _compare_chunks(
    hidden: Mapping[str, Tensor],
    heads: Mapping[str, torch.nn.Module],
    targets: Tensor,
    rows: int,
    pairs: Sequence[Pair],
) -> dict[Pair, Tensor]:
    """`compare_pairs`, so many rows at a time."""
    parts: dict[Pair, list[Tensor]] = {pair: [] for pair in pairs}
    references = dict.fromkeys(reference for _, reference in pairs)
    for start in range(0, max(1, len(targets)), rows):
        chunk = slice(start, start + rows)

        def predicted(name: str, chunk: slice = chunk) -> _Predicted:
            # lm_head of a model that is spread over several devices may be on another one.
            logits = heads[name](hidden[name][chunk]).to(targets.device, torch.float32)
            return _Predicted(torch.log_softmax(logits, dim=-1), logits.argmax(dim=-1))

        teachers = {name: predicted(name) for name in references}
        for name in dict.fromkeys(model for model, _ in pairs):
            of_model = teachers[name] if name in teachers else predicted(name)
            for pair in pairs:
                if pair[0] == name:
                    parts[pair].append(_columns(of_model, teachers[pair[1]], targets[chunk]))
    return {pair: torch.cat(found) for pair, found in parts.items()}


def _columns(model: _Predicted, teacher: _Predicted, targets: Tensor) -> Tensor:
    log_q, log_p = model.logs, teacher.logs
    pick = targets.unsqueeze(-1)
    first = log_q.gather(-1, teacher.first.unsqueeze(-1))
    # A comparison with NaN is false, which would count as agreement where a count of larger ones is
    # taken.
    known = ~(torch.isnan(first).squeeze(-1) | torch.isnan(log_p[:, 0]))
    return torch.stack(
        [
            -log_p.gather(-1, pick).squeeze(-1),
            -log_q.gather(-1, pick).squeeze(-1),
            kl_of_logs(log_p, log_q),
            kl_of_logs(log_q, log_p),
            torch.where(known, (model.first == teacher.first).to(torch.float32), torch.nan),
            torch.where(known, ((log_q > first).sum(dim=-1) < 5).to(torch.float32), torch.nan),
            overlap_of(log_p.exp(), log_q.exp()),
            torch.ones_like(targets, dtype=torch.float32),
        ],
        dim=-1,
    )


def compare_tokens(
    hidden: Tensor,
    teacher_hidden: Tensor,
    targets: Tensor,
    head: torch.nn.Module,
    vocab_size: int,
    teacher_head: torch.nn.Module | None = None,
) -> Tensor:
    """Per token, the quantities of COLUMNS, of one model against its teacher.

    Args:
        hidden: [N, D], the model's last hidden state after the final norm.
        teacher_hidden: [N, D], the teacher's.
        targets: [N], the token that came next in the text.
        head: lm_head. Logits exist for a chunk of tokens at a time only.
        vocab_size: V.
        teacher_head: the teacher's, where it has its own.

    Returns:
        [N, len(COLUMNS)] fp32.
    """
    heads = {"model": head, "teacher": head if teacher_head is None else teacher_head}
    pair = ("model", "teacher")
    return compare_pairs(
        {"model": hidden, "teacher": teacher_hidden}, heads, targets, vocab_size, [pair]
    )[pair]


def per_sample_sums(per_token: Tensor, rows: Tensor, count: int) -> Tensor:
    """Sum the rows of `compare_tokens` by sample.

    Args:
        per_token: [N, len(COLUMNS)].
        rows: [N], the sample that each token belongs to.
        count: C, samples.

    Returns:
        [C or fewer, len(COLUMNS)] fp64 on the host: a sample without a predicted token is left out.
    """
    sums = torch.zeros(count, len(COLUMNS), dtype=torch.float64)
    sums.index_add_(0, rows.cpu(), per_token.to("cpu", torch.float64))
    return sums[sums[:, -1] > 0]


def mean_and_error(sums: Tensor, counts: Tensor) -> tuple[float, float]:
    """Mean per token and its standard error over samples.

    Args:
        sums: [C], a quantity summed over each sample's tokens, fp64.
        counts: [C], those tokens.

    Returns:
        (mean, standard error); the error is NaN for fewer than two samples.
    """
    total, n = float(counts.sum()), len(counts)
    mean = float(sums.sum()) / total
    if n < 2:
        return mean, math.nan
    residual = sums - mean * counts
    return mean, math.sqrt(n / (n - 1) * float(residual.square().sum())) / total


def figures(per_sample: Tensor) -> Figures:
    """Figures from [C, len(COLUMNS)] per-sample sums in fp64."""
    column = {name: per_sample[:, i] for i, name in enumerate(COLUMNS)}
    counts = column["tokens"]
    nll, nll_se = mean_and_error(column["nll"], counts)
    excess, excess_se = mean_and_error(column["nll"] - column["teacher_nll"], counts)
    means: dict[str, float] = {}
    for name in ("kl", "reverse_kl", "top1", "top5", "acceptance"):
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
