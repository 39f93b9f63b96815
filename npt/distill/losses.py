"""Losses that need more than a divergence's sum: the logit KL, chunked so that [N, V] never exists as a whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from npt.fidelity.divergence import LOGIT_CHUNK, kl_per_token


def kl_sum(student_hidden: Tensor, teacher_hidden: Tensor, head: torch.nn.Module, vocab_size: int) -> Tensor:
    """Sum over tokens of KL(teacher || student) through `head`, in chunks of tokens whose logits are recomputed in backward.

    Args:
        student_hidden: [N, D], the student's last hidden state (after the final norm).
        teacher_hidden: [N, D], the teacher's; no gradient reaches it.
        head: lm_head.
        vocab_size: V, which sets the chunk length.

    Returns:
        A scalar, in nats; zero for N = 0.
    """

    def chunk_sum(student: Tensor, teacher: Tensor) -> Tensor:
        return kl_per_token(head(student), head(teacher)).sum()

    rows = max(1, LOGIT_CHUNK // vocab_size)
    total = student_hidden.new_zeros((), dtype=torch.float32)
    for student, teacher in zip(student_hidden.split(rows), teacher_hidden.detach().split(rows), strict=True):
        total = total + checkpoint(chunk_sum, student, teacher, use_reentrant=False)
    return total
