"""How far a state or a distribution is from the teacher's, per token: what fidelity reports and
losses are made of.

Pure functions of the *valid* tokens' rows, in fp32 (in fp64 where a row is). Rows are gathered
before a divergence is taken (`Batch.valid_index`), never masked by multiplication: 0 * NaN is NaN,
and so is 0 * Inf, so a poisoned padding position would reach the sum and its gradient.

Shapes: N valid tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Below this a teacher's squared norm counts as this: a state of all zeros must not divide by zero.
# Real states of a Llama have squared norms above 1e-3.
SQUARED_NORM_FLOOR = 1e-12

# Logits are taken for so many values at a time (64 Mi fp32 values are 256 MiB), so that [N, V]
# never exists as a whole.
LOGIT_CHUNK = 1 << 26


def at_least_fp32(values: Tensor) -> Tensor:
    """fp64 as it is, everything else in fp32."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def nmse_per_token(output: Tensor, target: Tensor, hidden: Tensor | None = None) -> Tensor:
    """||o - t||^2 / ||t||^2 per token; in its `update` form, where `hidden` is given, ||o - t||^2 /
    ||t - h||^2.

    Args:
        output: o, [N, D].
        target: t, [N, D]; no gradient reaches it.
        hidden: h, [N, D], the state that the teacher's layer made t of; likewise.

    Returns:
        [N] fp32; 0 for equality, 1 for o = 0 (update form: for o = h), NaN where the divisor
        overflows (dividing by it would
        report agreement).
    """
    target = at_least_fp32(target.detach())
    error = (at_least_fp32(output) - target).square().sum(dim=-1)
    reference = target if hidden is None else target - at_least_fp32(hidden.detach())
    energy = reference.square().sum(dim=-1).clamp_min(SQUARED_NORM_FLOOR)
    return error / torch.where(torch.isfinite(energy), energy, torch.nan)


def kl_of_logs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """sum_v p (log p - log q), in nats, with 0 log 0 = 0: [N, V] twice -> [N].

    Infinite where q is 0 and p is not. Wherever the value is finite its gradients are: the
    difference is put to 0 *before* it is multiplied by a p of 0, since behind the product `where`
    would keep 0 * Inf out of the value and not out of the gradient.
    """
    p = log_p.exp()
    return (p * torch.where(p == 0, 0.0, log_p - log_q)).sum(dim=-1)


def kl_per_token(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """KL(teacher || student) per token, in nats: [N, V] twice -> [N] fp32. No gradient reaches the
    teacher.
    """
    log_p = torch.log_softmax(at_least_fp32(teacher_logits.detach()), dim=-1)
    return kl_of_logs(log_p, torch.log_softmax(at_least_fp32(student_logits), dim=-1))
