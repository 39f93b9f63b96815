"""Losses on next-token distributions, from logits or from the inputs of lm_head.

With p the teacher's and q the student's distribution, per token in nats:

    forward KL       sum p (log p - log q)
                     penalises q for missing parts of p
    reverse KL       sum q (log q - log p)
                     penalises q for adding to p; q may omit parts of p
    cross-entropy    -log q(target), without the teacher

All are pure functions that return one value per token. They compute from log-softmax in fp32 (fp64
for fp64 logits) and pass no gradient to the teacher. A logit of -inf, as on padded vocabulary
entries, is a probability of 0. If only one side has it, a KL may be infinite, and the micro-batch
is refused. A finite value has a finite gradient.

Shapes: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from npt.base.linear import cast_once
from npt.config import TrainConfig
from npt.distill.hidden_losses import at_least_fp32

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

    def chunk_sum(student: Tensor, teacher: Tensor) -> Tensor:
        logits = head(student)
        with torch.no_grad():
            other = guide(teacher) if of_states else teacher
        return loss(logits, other).sum()

    rows = chunk_rows(student.device, vocab_size)
    if any(parameter.requires_grad for parameter in head.parameters()):
        chunks = zip(student.split(rows), teacher.detach().split(rows), strict=True)
        sums = [checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(sums).sum()
    # the gradient is known at the end of forward, so the casts need not outlive it
    with cast_once(head, guide):
        return _ChunkedSum.apply(student, teacher.detach(), chunk_sum, rows)


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
