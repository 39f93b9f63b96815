"""Losses of hidden states: how far a converted layer's output o is from the teacher's t, summed
over the valid tokens.

Pure functions of the valid tokens' rows that return (sum, count); the window divides once. Per
token, D being the width:

    nmse         ||o - t||^2 / ||t||^2
                 1 for o = 0. Small everywhere if a layer adds little to a large state
    nmse_update  ||o - t||^2 / ||t - h||^2
                 1 for o = h. A token to which the layer adds next to nothing drowns the others
    direction    mean over D of (o/||o|| - t/||t||)^2
                 0 to 4/D. Blind to the length of o: it sees the angle alone
    mse          mean over D of (o - t)^2
                 in the states' own units. A few tokens of huge norm drown the others
    smooth_l1    mean over D of e^2 / (2 beta) below |e| = beta, |e| - beta/2 beyond
                 likewise; beyond beta every channel pulls alike, outliers too. With a beta that
                 does not fit the states it is MSE or L1
    cosine       (1 - w) NMSE + w (1 - cos(o, t))
                 1 - w/2 for o = 0. As nmse, with more weight on the angle

`direction` is the unit-vector MSE that NPT was first trained with. A student can bring it to 0 with
states of any length, and the next layer, which adds to them, then mixes at the wrong ratio. It is
here to be compared with.

They compute in fp32 (in fp64 where a row is). No gradient reaches the teacher. No rows give (0, 0)
with a gradient of zeros. A squared norm below SQUARED_NORM_FLOOR counts as that where it divides,
so that a state of zeros gives a finite loss and gradient; one that overflows gives NaN, so that the
micro-batch is refused instead of reported as agreement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from npt.config import LOSSES, TrainConfig
from npt.distill.divergence import SQUARED_NORM_FLOOR, at_least_fp32, nmse_per_token

SumAndCount = tuple[Tensor, int]
"""A scalar with graph, and the tokens it was summed over."""


def weighted_sum(per_token: Tensor, weights: Tensor | None = None) -> SumAndCount:
    """Sum of [N] values, each times its token's weight [N] if there are any, and N."""
    return (per_token if weights is None else weights * per_token).sum(), len(per_token)


def nmse(
    student: Tensor, teacher: Tensor, hidden: Tensor | None = None, *, weights: Tensor | None = None
) -> SumAndCount:
    """||o - t||^2 / ||t||^2, or with `hidden` the update form ||o - t||^2 / ||t - h||^2.

    The update form asks for the same share of *what the layer does* at every depth; the plain form
    asks less of layers that add little to a large residual stream.

    Args:
        student: o, [N, D].
        teacher: t, [N, D].
        hidden: h, [N, D], the teacher's input to the layer.
        weights: [N], of the tokens.
    """
    return weighted_sum(nmse_per_token(student, teacher, hidden), weights)


def direction(student: Tensor, teacher: Tensor, *, weights: Tensor | None = None) -> SumAndCount:
    """Mean over D of (o/||o|| - t/||t||)^2 = 2 (1 - cos(o, t)) / D: blind to the length of o. Both
    [N, D].
    """
    return weighted_sum((_unit(student) - _unit(teacher.detach())).square().mean(dim=-1), weights)


def mse(student: Tensor, teacher: Tensor, *, weights: Tensor | None = None) -> SumAndCount:
    """Mean over D of (o - t)^2. Both [N, D]."""
    return weighted_sum(_difference(student, teacher).square().mean(dim=-1), weights)


def smooth_l1(
    student: Tensor, teacher: Tensor, beta: float = 1.0, *, weights: Tensor | None = None
) -> SumAndCount:
    """Mean over D of e^2 / (2 beta) where |e| = |o - t| is below beta, of |e| - beta / 2 elsewhere.
    Both [N, D].

    No single channel's gradient exceeds 1 / D, so outlying channels, which residual streams have,
    pull no harder than others.
    """
    error = _difference(student, teacher)
    return weighted_sum(
        F.smooth_l1_loss(error, torch.zeros_like(error), reduction="none", beta=beta).mean(dim=-1),
        weights,
    )


def cosine(
    student: Tensor, teacher: Tensor, weight: float = 0.5, *, weights: Tensor | None = None
) -> SumAndCount:
    """(1 - w) ||o - t||^2 / ||t||^2 + w (1 - cos(o, t)), w being `weight`. Both [N, D].

    1 - cos is taken as ||o/||o|| - t/||t||||^2 / 2, which does not cancel near agreement. An o of
    zeros has no direction and counts as half.
    """
    angle = 0.5 * (_unit(student) - _unit(teacher.detach())).square().sum(dim=-1)
    return weighted_sum((1.0 - weight) * nmse_per_token(student, teacher) + weight * angle, weights)


HiddenLoss = Callable[[TrainConfig, Tensor, Tensor, Tensor | None, Tensor | None], SumAndCount]
"""Of the settings, o, t, h (None unless the loss needs it) and the weights of the tokens."""

HIDDEN_LOSSES: dict[str, HiddenLoss] = {
    "nmse": lambda _, o, t, h, w: nmse(o, t, weights=w),
    "nmse_update": lambda _, o, t, h, w: nmse(o, t, h, weights=w),
    "direction": lambda _, o, t, h, w: direction(o, t, weights=w),
    "mse": lambda _, o, t, h, w: mse(o, t, weights=w),
    "smooth_l1": lambda c, o, t, h, w: smooth_l1(o, t, c.smooth_l1_beta, weights=w),
    "cosine": lambda c, o, t, h, w: cosine(o, t, c.cosine_weight, weights=w),
}
"""The losses that `--loss` names."""

READS_INPUT = {"nmse_update"}
"""Losses that read h, the teacher's input to the layer."""


def register_loss(
    name: str, per_token: Callable[..., Tensor], *, reads_input: bool = False
) -> None:
    """Add a loss, which `--loss` and `TrainConfig` then accept.

    Args:
        name: of the loss.
        per_token: [N] from o and t, [N, D] each, and from h [N, D] if it reads the input. No
            gradient may reach t or h.
        reads_input: whether it is given h, the teacher's input to the layer.

    Raises:
        ValueError: there is a loss of this name.
    """
    if name in HIDDEN_LOSSES:
        raise ValueError(f"the loss {name!r} exists; choose another name")

    def loss(
        _: TrainConfig, o: Tensor, t: Tensor, h: Tensor | None, weights: Tensor | None
    ) -> SumAndCount:
        return weighted_sum(per_token(o, t, h) if reads_input else per_token(o, t), weights)

    HIDDEN_LOSSES[name] = loss
    LOSSES.append(name)
    if reads_input:
        READS_INPUT.add(name)


def hidden_loss(
    config: TrainConfig,
    student: Tensor,
    teacher: Tensor,
    hidden: Tensor | None,
    weights: Tensor | None = None,
) -> SumAndCount:
    """Return the loss that `config.loss` names, summed, and the number of tokens.

    Args:
        config: settings of the losses.
        student, teacher, hidden: o, t, h, [N, D]; h only for losses in `READS_INPUT`.
        weights: [N], of the tokens.
    """
    return HIDDEN_LOSSES[config.loss](config, student, teacher, hidden, weights)


def _difference(student: Tensor, teacher: Tensor) -> Tensor:
    return at_least_fp32(student) - at_least_fp32(teacher.detach())


def _unit(states: Tensor) -> Tensor:
    """Each row divided by its length."""
    states = at_least_fp32(states)
    energy = states.square().sum(dim=-1, keepdim=True).clamp_min(SQUARED_NORM_FLOOR)
    return states * torch.where(torch.isfinite(energy), energy, torch.nan).rsqrt()
