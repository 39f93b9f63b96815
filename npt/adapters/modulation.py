"""The modulation: how one token's attention output changes its MLP. Pure functions of tensors.

For a token with attention output a (width D) and low-rank code z = A a (width R), a product y of
the MLP becomes

    y' = m * y + s,   m = 1 + beta * (2 sigmoid(M z) - 1),   s = alpha * (B z)

m lies within (1 - beta, 1 + beta), so for beta < 1 it can never reach 0 and switch a channel, and
its gradient, off; it is exactly 1 at M z = 0. At the ends fp32 rounds it to the bound itself. Left
out on purpose: dropout, biases, any normalisation of a or z.

Shapes: B batch, T time, D hidden, R rank; `...` is any leading shape, O the width of the modulated
product (F or D).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Terms = Sequence[tuple[Tensor | None, Tensor | None]]
"""(m, s) of each target, [..., O]; None if the adapter's form has no such term."""


def multiplier(u: Tensor, mult_bound: float) -> Tensor:
    """Return m = 1 + beta * (2 sigmoid(u) - 1), same shape as `u`.

    Written as tanh(u / 2), which is the same function and keeps full relative precision near u = 0,
    where training starts; 2 sigmoid(u) - 1 cancels there.
    """
    return 1.0 + mult_bound * torch.tanh(0.5 * u)


MULTIPLIERS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sigmoid": multiplier,
    "half_sigmoid": lambda u, _: 0.5 * torch.sigmoid(u) + 0.5,  # 0.75 at the start, never above 1
    "one_plus_tanh": lambda u, _: 1.0 + torch.tanh(u),  # reaches 0, where the gradient is gone
    "unbounded": lambda u, _: 1.0 + u,
}
"""Forms of m by name, from u = M z and beta. All but the first were in use elsewhere; studies
measure their effect."""


def multiplier_range(form: str, mult_bound: float) -> tuple[float, float]:
    """Return the smallest and the largest m that a form can give; fp32 rounds to both."""
    return {
        "sigmoid": (1.0 - mult_bound, 1.0 + mult_bound),
        "half_sigmoid": (0.5, 1.0),
        "one_plus_tanh": (0.0, 2.0),
        "unbounded": (-math.inf, math.inf),
    }[form]


def multiplier_spread(form: str, mult_bound: float) -> tuple[float, float]:
    """Return the middle of the range of m and the distance of its ends, to measure saturation.

    A form without ends is never saturated: its ends are infinitely far from 1.
    """
    low, high = multiplier_range(form, mult_bound)
    return ((low + high) / 2, (high - low) / 2) if math.isfinite(high) else (1.0, math.inf)


def modulate(
    y: Tensor,
    z: Tensor,
    mult: Tensor | None,
    add: Tensor | None,
    mult_bound: float,
    additive_scale: float,
    form: str = "sigmoid",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Modulate one MLP product.

    Args:
        y: [..., O], the product of the frozen weight; any float dtype.
        z: [..., R], the token's code, in the adapter's dtype (fp32).
        mult: M, [O, R], or None for no multiplicative term.
        add: B, [O, R], or None for no additive term.
        mult_bound: beta.
        additive_scale: alpha.
        form: a key of `MULTIPLIERS`.

    Returns:
        y' in y's dtype, then m and s in z's dtype, None if absent.
    """
    out = y.to(z.dtype)
    m = s = None
    if mult is not None:
        u = F.linear(z, mult)
        m = MULTIPLIERS[form](u, mult_bound)
        out = m * out
    if add is not None:
        s = additive_scale * F.linear(z, add)
        out = out + s
    return out.to(y.dtype), m, s


def modulation_energy(terms: Terms) -> Tensor | None:
    """Return the energy that is regularised: sum over targets of mean((m - 1)^2) + mean(s^2).

    The means are over channels: [...], one number per token; None if nothing is modulated.
    """
    parts = [(m - 1.0).square().mean(dim=-1) for m, _ in terms if m is not None]
    parts += [s.square().mean(dim=-1) for _, s in terms if s is not None]
    return torch.stack(parts).sum(dim=0) if parts else None
