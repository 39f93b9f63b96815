"""Losses of next-token distributions, from logits or from the states that lm_head makes them of.

With p the teacher's and q the student's distribution, per token in nats:

    forward KL       sum p (log p - log q)
                     q must cover all that p does
    reverse KL       sum q (log q - log p)
                     q may leave parts of p out, and must not invent any
    cross-entropy    -log q(target); the teacher has no part in it

All are pure, return one value per token, compute from log-softmax in fp32 (in fp64 if the logits
are) and pass no gradient to the teacher. A logit of -inf, as on padded vocabulary entries, is a
probability of 0; if one side alone has it a KL is infinite and the micro-batch is refused. A value
that is finite has a finite gradient.

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
"""Logits that an evaluation computes at a time (256 MiB in fp32), so that [N, V] never exists."""

CHUNK, CUDA_CHUNK = 1 << 24, 1 << 25
"""Logits of a chunk in training, elsewhere and on CUDA: 64 MiB and 128 MiB in fp32, of which
backward has some seven alive at once. At V 128k a chunk has 256 rows, enough to keep a card busy
that computes 120 operations (TF32 on an H100) in the time that it reads a byte of weights.
"""

TILE = 128
"""Rows that a kernel of a card multiplies at a time; a last tile costs as much as a full one."""

RowLoss = Callable[[Tensor, Tensor], Tensor]
"""(student's logits [N, V], teacher's logits [N, V] or targets [N]) -> [N]."""


def kl_of_logs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return sum_v p (log p - log q), in nats, with 0 log 0 = 0: [N, V] twice -> [N].

    Infinite if q is 0 and p is not. The difference is put to 0 *before* the product: after it
    `where` would keep 0 * Inf out of the value and not out of the gradient.
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
    """Return -log q(target) from logits [N, V] and the tokens [N] that they are to predict."""
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
    """Return the summed loss of the logits that `head` makes of states, chunk by chunk.

    The gradient of a sum needs no later factor but one, so with a frozen head it is taken on the
    way and no logit is computed a second time; a head that is trained itself is computed again in
    backward. A head stored in 16 bit is cast to fp32 once for all chunks.

    Args:
        head: lm_head.
        loss: of a chunk's logits.
        student: [N, D], the student's last hidden state (after the final norm).
        teacher: [N, D], the teacher's; or targets, [N] int64, which no head is applied to. No
            gradient reaches it.
        vocab_size: V, which sets the chunk length.
        teacher_head: the teacher's lm_head, if it has one of its own.
    """
    of_states = teacher.is_floating_point()
    guide = head if teacher_head is None or not of_states else teacher_head

    def chunk_sum(student: Tensor, teacher: Tensor) -> Tensor:
        logits = head(student)
        with torch.no_grad():
            other = guide(teacher) if of_states else teacher
        return loss(logits, other).sum()

    rows = chunk_rows(student.device, vocab_size)
    if any(parameter.requires_grad for parameter in head.parameters()):
        chunks = zip(student.split(rows), teacher.detach().split(rows), strict=True)
        return torch.stack(
            [checkpoint(chunk_sum, *chunk, use_reentrant=False) for chunk in chunks]
        ).sum()
    with cast_once(head, guide):
        return _ChunkedSum.apply(student, teacher.detach(), chunk_sum, rows)


def chunk_rows(device: torch.device, vocab_size: int) -> int:
    """Return how many tokens' logits are computed at a time on a device."""
    on_cuda = device.type == "cuda"
    rows = max(1, (CUDA_CHUNK if on_cuda else CHUNK) // vocab_size)
    return rows - rows % TILE if on_cuda and rows > TILE else rows


class _ChunkedSum(torch.autograd.Function):
    """The sum of a function over chunks of rows, with its gradient for the first argument."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, chunk_sum: Callable[..., Tensor], rows: int
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        grad = torch.empty_like(student) if wanted else None
        sums = []
        for start in range(0, max(1, len(student)), rows):
            here = slice(start, start + rows)
            part = student[here].detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                # a view: torch's counter of operations cannot hook a leaf in here
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
        return None if grad is None else grad_sum.to(grad.dtype) * grad, None, None, None


def row_loss(config: TrainConfig) -> RowLoss:
    """Return the loss that `config.logit_loss` names."""
    losses = {"kl": forward_kl, "reverse_kl": reverse_kl, "cross_entropy": token_cross_entropy}
    return losses[config.logit_loss]


def _log_probabilities(logits: Tensor) -> Tensor:
    return torch.log_softmax(at_least_fp32(logits), dim=-1)
