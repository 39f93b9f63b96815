"""Agreement of two next-token distributions, summed per sample so that every figure gets an honest standard error.

Tokens of one text are not independent, samples nearly are. So the error of a mean over tokens is taken over samples, as
that of a ratio of two sums (the linearised, or delta-method, variance of a ratio estimator; Cochran, Sampling Techniques,
1977, ch. 6).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from npt.fidelity.divergence import LOGIT_CHUNK, kl_per_token

COLUMNS = ("teacher_nll", "nll", "kl", "top1", "acceptance", "tokens")


@dataclass(frozen=True)
class Figures:
    """One model against the teacher on the same tokens; `_se` is the standard error of the figure before it.

    perplexity: exp of the mean negative log-likelihood of the text. perplexity_ratio: over the teacher's, its error from
    paired differences. kl: KL(teacher || model), nats per token. top1: share of tokens on which both rank the same token
    first. acceptance: sum over the vocabulary of min(p, q), the expected rate at which speculative decoding would accept
    the model's draft.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_tokens(
    hidden: Tensor,
    teacher_hidden: Tensor,
    targets: Tensor,
    head: torch.nn.Module,
    vocab_size: int,
    teacher_head: torch.nn.Module | None = None,
) -> Tensor:
    """Per token, the quantities of COLUMNS.

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
    teacher_head = head if teacher_head is None else teacher_head
    parts = []
    rows = max(1, LOGIT_CHUNK // vocab_size)
    for h, t, target in zip(hidden.split(rows), teacher_hidden.split(rows), targets.split(rows), strict=True):
        logits, teacher_logits = head(h).to(torch.float32), teacher_head(t).to(torch.float32)
        target = target.to(logits.device)  # lm_head of a model that is spread over several devices may be on another
        log_q, log_p = torch.log_softmax(logits, dim=-1), torch.log_softmax(teacher_logits, dim=-1)
        pick = target.unsqueeze(-1)
        parts.append(
            torch.stack(
                [
                    -log_p.gather(-1, pick).squeeze(-1),
                    -log_q.gather(-1, pick).squeeze(-1),
                    kl_per_token(logits, teacher_logits),
                    (logits.argmax(dim=-1) == teacher_logits.argmax(dim=-1)).to(torch.float32),
                    torch.minimum(log_p, log_q).exp().sum(dim=-1),
                    torch.ones_like(target, dtype=torch.float32),
                ],
                dim=-1,
            )
        )
    return torch.cat(parts)


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
    kl, kl_se = mean_and_error(column["kl"], counts)
    top1, top1_se = mean_and_error(column["top1"], counts)
    acceptance, acceptance_se = mean_and_error(column["acceptance"], counts)
    return Figures(
        tokens=int(counts.sum()),
        perplexity=_exp(nll),
        perplexity_se=_exp(nll) * nll_se,
        perplexity_ratio=_exp(excess),
        perplexity_ratio_se=_exp(excess) * excess_se,
        kl=kl,
        kl_se=kl_se,
        top1=top1,
        top1_se=top1_se,
        acceptance=acceptance,
        acceptance_se=acceptance_se,
    )


def _exp(value: float) -> float:
    return math.inf if value >= 700 else math.exp(value)
