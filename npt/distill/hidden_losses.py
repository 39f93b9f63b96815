"""Losses of hidden states: how far a converted layer's output o is from the teacher's t.

Pure functions of the valid tokens' rows, [N, D] each, that return one value per token, [N]. A
strategy sums them, and the window divides once. Per token:

    nmse         ||o - t||^2 / ||t||^2
                 1 for o = 0. Small everywhere if a layer adds little to a large state
    nmse_update  ||o - t||^2 / ||t - h||^2
                 1 for o = h. Asks for the same share of a layer's own work at every depth; a token
                 to which the layer adds next to nothing drowns the others
    direction    mean over D of (o/||o|| - t/||t||)^2
                 0 to 4/D. Blind to the length of o: it sees the angle alone

`direction` is the unit-vector MSE that NPT was first trained with, here for comparison: a student
can bring it to 0 with states of any length, which the next layer then mixes at the wrong ratio.

All compute in fp32 (in fp64 if a row is), and no gradient reaches the teacher. A divisor that
overflows gives NaN, so that the micro-batch is refused instead of reported as agreement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from npt.config import LOSSES

SQUARED_NORM_FLOOR = 1e-12
"""A smaller squared norm counts as this if it divides: a state of zeros must give a finite loss.
Real states of a Llama have squared norms above 1e-3."""


def at_least_fp32(values: Tensor) -> Tensor:
    """Return fp64 as it is, everything else in fp32."""
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
"""The losses that `--loss` names: [N] of o, t, and h (None unless the loss reads it)."""

READS_INPUT = {"nmse_update"}
"""Losses that read h, the teacher's input to the layer."""


def register_loss(
    name: str, per_token: Callable[..., Tensor], *, reads_input: bool = False
) -> None:
    """Add a loss, which `--loss` and `TrainConfig` then accept.

    Args:
        name: of the loss; one that exists is a ValueError.
        per_token: [N] from o and t, [N, D] each, and from h [N, D] if it reads the input. No
            gradient may reach t or h.
        reads_input: give it h, the teacher's input to the layer.
    """
    if name in HIDDEN_LOSSES:
        raise ValueError(f"the loss {name!r} exists; choose another name")
    HIDDEN_LOSSES[name] = per_token if reads_input else lambda o, t, h: per_token(o, t)
    LOSSES.append(name)
    if reads_input:
        READS_INPUT.add(name)


def _unit(states: Tensor) -> Tensor:
    states = at_least_fp32(states)
    energy = states.square().sum(dim=-1, keepdim=True).clamp_min(SQUARED_NORM_FLOOR)
    return states * _or_nan(energy).rsqrt()


def _or_nan(energy: Tensor) -> Tensor:
    """Return finite numbers as they are, and NaN for Inf: Inf - Inf."""
    return energy + (energy - energy)
