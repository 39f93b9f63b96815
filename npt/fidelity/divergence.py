"""How far a state or a distribution is from the teacher's, per token: what fidelity reports and losses are made of.

Pure functions of the *valid* tokens' rows, in fp32. Rows are gathered before a divergence is taken (`Batch.valid_index`),
never masked by multiplication: 0 * NaN is NaN, and so is 0 * Inf, so a poisoned padding position would reach the sum and its
gradient.

Shapes: N valid tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Below this a teacher's squared norm counts as this: a state of all zeros must not divide by zero. Real states of a
# Llama have squared norms above 1e-3.
SQUARED_NORM_FLOOR = 1e-12

# Logits are taken for so many values at a time (64 Mi fp32 values are 256 MiB), so that [N, V] never exists as a whole.
LOGIT_CHUNK = 1 << 26


def nmse_per_token(output: Tensor, target: Tensor) -> Tensor:
    """||o - t||^2 / ||t||^2 per token.

    Args:
        output: o, [N, D].
        target: t, [N, D]; no gradient reaches it.

    Returns:
        [N] fp32; 0 for equality, 1 for o = 0, NaN where ||t||^2 overflows (dividing by it would report agreement).
    """
    target = target.detach().to(torch.float32)
    error = (output.to(torch.float32) - target).square().sum(dim=-1)
    energy = target.square().sum(dim=-1).clamp_min(SQUARED_NORM_FLOOR)
    return error / torch.where(torch.isfinite(energy), energy, torch.nan)


def kl_per_token(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || student) = sum_v p (log p - log q) per token, in nats: [N, V] twice -> [N] fp32."""
    log_p = torch.log_softmax(teacher_logits.detach().to(torch.float32), dim=-1)
    log_q = torch.log_softmax(student_logits.to(torch.float32), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
