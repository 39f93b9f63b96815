"""Losses on next-token distributions, from logits or from the inputs of lm_head.

With p the teacher's and q the student's distribution, per token in nats:

    forward KL       sum p (log p - log q)
                     penalises q for missing parts of p
    reverse KL       sum q (log q - log p)
                     penalises q for adding to p; q may omit parts of p
    cross-entropy    -log q(target), without the teacher

Forward KL of a student close to its teacher is estimated from a sample of the words, which saves
most of the work on the logits (`sampled_forward_kl`).

All are pure functions that return one value per token. They compute from log-softmax in fp32 (fp64
for fp64 logits) and pass no gradient to the teacher. A logit of -inf, as on padded vocabulary
entries, is a probability of 0. If only one side has it, a KL may be infinite, and the micro-batch
is refused. A finite value has a finite gradient.

Shapes: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from npt.base.linear import UpcastLinear, cast_once
from npt.config import TrainConfig
from npt.distill.hidden_losses import at_least_fp32
from npt.hooks import may_change

LOGIT_CHUNK = 1 << 26
"""Number of logits that an evaluation computes at a time (256 MiB in fp32), never all [N, V]."""

CHUNK = 1 << 24
CUDA_CHUNK = 1 << 25
"""Number of logits in a training chunk, off and on CUDA: 64 MiB and 128 MiB in fp32. Backward holds
about seven such tensors. With V = 128k a CUDA chunk has 256 rows, enough to keep busy a GPU that
computes 120 operations per byte of weights read (TF32 on an H100).
"""

TILE = 128
"""Rows that a GPU kernel multiplies at a time. A partial tile costs as much as a full one."""

TOP = 32
"""Words that a sampled KL takes for certain, the teacher's most probable."""

DRAWS = 64
"""Draws that stand for all other words in a sampled KL."""

SPARSE = 64
"""Words of the vocabulary for each drawn one, from which on a KL is sampled. Below, gathering the
rows costs as much as the products that it saves.
"""

SAMPLED_BELOW = 0.25
"""The KL, in nats, below which it is sampled. The expected gradient is then within 2% of the exact
one. At 0.55 it is 9% off, since words that the student alone expects are not drawn.
"""

_SAMPLING: ContextVar[bool] = ContextVar("sampling", default=False)

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""(student's logits [N, V], teacher's logits [N, V] or targets [N]) -> [N]."""


def kl_of_logs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_v p (log p - log q) [N] in nats from [N, V] each, with 0 log 0 = 0.

    Infinite if q is 0 where p is not. The difference is zeroed *before* the product: zeroed after
    it, 0 * Inf would still reach the gradient.
    """
    p = log_p.exp()
    return (p * torch.where(p == 0, 0.0, log_p - log_q)).sum(dim=-1)


def forward_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) from logits, [N, V] twice."""
    return kl_of_logs(_log_probabilities(teacher.detach()), _log_probabilities(student))


def draw_words(teacher: Tensor, top: int, draws: int) -> tuple[Tensor, Tensor]:
    """Return words [N, top + draws] from the teacher's logits [N, V], and their weights.

    The `top` most probable words p weigh p. The rest are drawn from p by systematic sampling, with
    torch's generator and one random number a token, and have equal shares of the remaining mass.
    A sum of weights times f(word) has the mean sum_v p f(v). No word with p = 0 has a weight.
    """
    p = torch.softmax(at_least_fp32(teacher), dim=-1)
    certain, words = p.topk(top, dim=-1)
    count = len(p)
    p.scatter_(1, words, 0.0)
    if count == 1:  # CUDA sums a single row in an order that varies
        p = p.repeat(2, 1)
    reach = p.cumsum_(dim=-1)[:count]
    mass = reach[:, -1:]
    share = mass / draws
    start = 1.0 - torch.rand(count, 1, dtype=p.dtype, device=p.device)  # in (0, 1]
    places = (torch.arange(draws, device=p.device) + start) * share
    # rounding may put the last place past the whole mass, and NaN is past the last word
    drawn = torch.searchsorted(reach, places.minimum(mass)).clamp_max(p.shape[1] - 1)
    words = torch.cat([words, drawn], dim=-1)
    return words, torch.cat([certain, share.expand(-1, draws)], dim=-1)


def sampled_forward_kl(apart: Tensor, weights: Tensor) -> Tensor:
    """Return an estimate of KL(teacher || student) [N] from words that `draw_words` drew.

    With d the student's logit minus the teacher's, exactly

        KL = log E_p[exp d] - E_p[d]

    so that no normaliser is needed. The logarithm of a mean makes the estimate a little too low.

    Args:
        apart: d of the words, [N, K].
        weights: of the words, [N, K]; each row sums to 1.
    """
    return torch.logsumexp(apart + weights.log(), dim=-1) - (weights * apart).sum(dim=-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(student || teacher) from logits, [N, V] twice."""
    return kl_of_logs(_log_probabilities(student), _log_probabilities(teacher.detach()))


def token_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log q(target) [N] from logits [N, V] and target tokens [N]."""
    return F.cross_entropy(at_least_fp32(logits), targets, reduction="none")


def through_head(
    head: nn.Module,
    loss: RowLoss,
    student: Tensor,
    teacher: Tensor,
    vocab_size: int,
    *,
    teacher_head: nn.Module | None = None,
) -> Tensor:
    """Return the sum of a loss on the logits that `head` computes from states, chunk by chunk.

    With a frozen head, forward already computes the gradient, so that no logit is computed twice.
    With a trainable head, backward recomputes the logits. A head stored in 16 bits is cast to fp32
    once for all chunks.

    Args:
        head: lm_head.
        loss: loss of a chunk's logits.
        student: [N, D], the student's last hidden state (after the final norm).
        teacher: [N, D], the teacher's last hidden state; or targets, [N] int64. It gets no
            gradient.
        vocab_size: V, which sets the chunk length.
        teacher_head: the teacher's lm_head, if it has its own.
    """
    of_states = teacher.is_floating_point()
    guide = head
    if of_states and teacher_head is not None:
        guide = teacher_head

    sampled = loss is forward_kl and guide is head and _may_sample(head, vocab_size)

    def chunk_sum(student: Tensor, teacher: Tensor) -> Tensor:
        if sampled:
            return _sampled_sum(head, student, teacher)
        logits = head(student)
        with torch.no_grad():
            other = guide(teacher) if of_states else teacher
        return loss(logits, other).sum()

    width = vocab_size
    if sampled:  # the rows of the head that are gathered, twice, where logits are held seven times
        width = max(vocab_size, (TOP + DRAWS) * student.shape[-1] // 4)
    rows = chunk_rows(student.device, width)
    if any(parameter.requires_grad for parameter in head.parameters()):
        chunks = zip(student.split(rows), teacher.detach().split(rows), strict=True)
        sums = [checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(sums).sum()
    # the gradient is known at the end of forward, so the casts need not outlive it
    with cast_once(head, guide):
        return _ChunkedSum.apply(student, teacher.detach(), chunk_sum, rows)


@contextmanager
def sampling_words(close: bool) -> Iterator[None]:
    """Within the context, estimate forward KL from sampled words if the student is `close`: if its
    KL is below `SAMPLED_BELOW`.
    """
    token = _SAMPLING.set(close)
    try:
        yield
    finally:
        _SAMPLING.reset(token)


def is_close() -> bool:
    """Return whether the caller is within `sampling_words` of a close student."""
    return _SAMPLING.get()


def _may_sample(head: nn.Module, vocab_size: int) -> bool:
    """Return whether forward KL is sampled: with a frozen, dense head of many words."""
    if not is_close() or vocab_size < SPARSE * (TOP + DRAWS) or may_change(head):
        return False
    is_dense = type(head) in (nn.Linear, UpcastLinear) and type(head.weight) is nn.Parameter
    return is_dense and not head.weight.requires_grad


def _sampled_sum(head: Any, student: Tensor, teacher: Tensor) -> Tensor:
    """Return the sum of `sampled_forward_kl` over states [N, D] that one head reads."""
    with torch.no_grad():
        words, weights = draw_words(head(teacher), TOP, DRAWS)
    rows = head.weight.detach()[words].to(student.dtype)
    # of the difference, where biases and the rounding of weights cancel
    apart = torch.einsum("nd,nkd->nk", student - teacher, rows)
    return sampled_forward_kl(apart, weights).sum()


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """Return the number of tokens whose logits are computed at a time on a device."""
    if device.type != "cuda":
        return max(1, CHUNK // vocab_size)
    rows = max(1, CUDA_CHUNK // vocab_size)
    return rows - rows % TILE if rows > TILE else rows


class _ChunkedSum(torch.autograd.Function):
    """Sum of a function over chunks of rows, with a gradient for the first argument."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, chunk_sum: Callable[..., Tensor], rows: int
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        grad = torch.empty_like(student) if wanted else None
        sums = []
        # at least one chunk: without a scored token, the sum of an empty one is 0
        for start in range(0, max(1, len(student)), rows):
            here = slice(start, start + rows)
            part = student[here].detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                # a view, since torch's FLOP counter cannot hook a leaf here
                value = chunk_sum(part.view_as(part), teacher[here])
            if grad is not None:
                (grad[here],) = torch.autograd.grad(value, part)
            sums.append(value.detach())
        ctx.save_for_backward(grad)
        return torch.stack(sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad_sum.to(grad.dtype) * grad, None, None, None


def row_loss(config: TrainConfig) -> RowLoss:
    """Return the loss of `config.logit_loss`."""
    losses = {"kl": forward_kl, "reverse_kl": reverse_kl, "cross_entropy": token_cross_entropy}
    return losses[config.logit_loss]


def _log_probabilities(logits: Tensor) -> Tensor:
    return torch.log_softmax(at_least_fp32(logits), dim=-1)
