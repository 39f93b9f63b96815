"""Losses on hidden states: the distance of a converted layer's output o from the teacher's t.

They are pure functions of the valid tokens' rows, [N, D] each, and return one value per token, [N].
A strategy sums them; the window divides once. Per token:

    nmse         ||o - t||^2 / ||t||^2
                 1 for o = 0. Small in every layer that adds little to a large state.
    nmse_update  ||o - t||^2 / ||t - h||^2
                 1 for o = h. Measures the error against the layer's own contribution, at every
                 depth. A token to which the layer adds almost nothing dominates the sum.
    direction    mean over D of (o/||o|| - t/||t||)^2
                 Between 0 and 4/D. Depends on the angle alone, not on the length of o.

`direction` is the unit-vector MSE of the original NPT, kept for comparison. It can reach 0 with
states of any length, which the next layer then adds to in the wrong proportion.

All losses compute in fp32 (fp64 for fp64 rows) and pass no gradient to the teacher. If a divisor
overflows, the result is NaN: the micro-batch is refused rather than counted as agreement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npt.config import LOSSES

SQUARED_NORM_FLOOR = 1e-12
"""Lower bound of a divisor, so that a state of zeros has a finite loss. Real ones exceed 1e-3."""


def at_least_fp32(values: Tensor) -> Tensor:
    """Return fp64 values unchanged and all others in fp32."""
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def nmse_per_token(output: Tensor, target: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Return ||o - t||^2 / ||t||^2, or with `hidden` the update form ||o - t||^2 / ||t - h||^2."""
    target = at_least_fp32(target.detach())
    error = (at_least_fp32(output) - target).square().sum(dim=-1)
    reference = target if hidden is None else target - at_least_fp32(hidden.detach())
    energy = reference.square().sum(dim=-1).clamp_min(SQUARED_NORM_FLOOR)
    return error / _or_nan(energy)


def direction(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over D of (o/||o|| - t/||t||)^2 = 2 (1 - cos(o, t)) / D."""
    return (_unit(student) - _unit(teacher.detach())).square().mean(dim=-1)


HIDDEN_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "nmse": lambda o, t, h: nmse_per_token(o, t),
    "nmse_update": nmse_per_token,
    "direction": lambda o, t, h: direction(o, t),
}
"""Losses by their `--loss` name: (o, t, h) -> [N]. h is None unless the loss reads it."""

BUILT_IN = frozenset(HIDDEN_LOSSES)
"""Losses that are not registered by a user, and so have no state."""

READS_INPUT = {"nmse_update"}
"""Losses that read h, the teacher's input to the layer."""


def register_loss(
    name: str, per_token: Callable[..., Tensor], *, reads_input: bool = False
) -> None:
    """Register a loss under a name that `--loss` and `TrainConfig` then accept.

    Args:
        name: a new one; ValueError if it is taken.
        per_token: function of o and t, [N, D] each, and of h [N, D] if it reads the input, that
            returns [N]. It must pass no gradient to t or h.
        reads_input: pass h, the teacher's input to the layer.
    """
    if name in HIDDEN_LOSSES:
        raise ValueError(f"the loss {name!r} already exists: choose another name")
    HIDDEN_LOSSES[name] = per_token if reads_input else lambda o, t, h: per_token(o, t)
    LOSSES.append(name)
    if reads_input:
        READS_INPUT.add(name)


def _unit(states: Tensor) -> Tensor:
    states = at_least_fp32(states)
    energy = states.square().sum(dim=-1, keepdim=True).clamp_min(SQUARED_NORM_FLOOR)
    return states * _or_nan(energy).rsqrt()


def _or_nan(energy: Tensor) -> Tensor:
    """Return finite values unchanged, and NaN (Inf - Inf) in place of Inf."""
    return energy + (energy - energy)
