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
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from npt.config import MULT_FORMS

Terms = Sequence[tuple[Tensor | None, Tensor | None]]
"""(m, s) of each target, [..., O]; None if the adapter's form has no such term."""


def multiplier(u: Tensor, mult_bound: float) -> Tensor:
    """Return m = 1 + beta * (2 sigmoid(u) - 1), same shape as `u`.

    Written as tanh(u / 2), which is the same function and keeps full relative precision near u = 0,
    where training starts; 2 sigmoid(u) - 1 cancels there.
    """
    return 1.0 + mult_bound * torch.tanh(0.5 * u)


@dataclass(frozen=True)
class MultiplierForm:
    """A form of m. function: of u = M z and beta. bounds: the smallest and largest m, from beta."""

    function: Callable[[Tensor, float], Tensor]
    bounds: Callable[[float], tuple[float, float]]


MULTIPLIERS: dict[str, MultiplierForm] = {
    "sigmoid": MultiplierForm(multiplier, lambda beta: (1.0 - beta, 1.0 + beta)),
    # 0.75 at the start, and never above 1
    "half_sigmoid": MultiplierForm(lambda u, _: 0.5 * torch.sigmoid(u) + 0.5, lambda _: (0.5, 1.0)),
    # reaches 0, where channel and gradient are gone
    "one_plus_tanh": MultiplierForm(lambda u, _: 1.0 + torch.tanh(u), lambda _: (0.0, 2.0)),
    "unbounded": MultiplierForm(lambda u, _: 1.0 + u, lambda _: (-math.inf, math.inf)),
}
"""Forms of m by name. All but the first were in use elsewhere; studies measure their effect."""


def register_multiplier(
    name: str,
    function: Callable[[Tensor, float], Tensor],
    bounds: Callable[[float], tuple[float, float]],
) -> None:
    """Add a form of m, which `--mult_form` and `NPTConfig` then accept.

    Args:
        name: of the form.
        function: m, of the shape of u = M z, from u and beta; 1 at u = 0.
        bounds: the smallest and the largest m, from beta.

    Raises:
        ValueError: a form of this name exists.
    """
    if name in MULTIPLIERS:
        raise ValueError(f"the multiplier form {name!r} exists; choose another name")
    MULTIPLIERS[name] = MultiplierForm(function, bounds)
    MULT_FORMS.append(name)


def multiplier_range(form: str, mult_bound: float) -> tuple[float, float]:
    """Return the smallest and the largest m that a form can give; fp32 rounds to both."""
    return MULTIPLIERS[form].bounds(mult_bound)


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
        m = MULTIPLIERS[form].function(u, mult_bound)
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


def modulate_reference(
    y: Tensor,
    a: Tensor,
    A: Tensor,
    M: Tensor | None,
    B: Tensor | None,
    mult_bound: float,
    additive_scale: float,
) -> Tensor:
    """Return the formula above, one token and channel at a time, in fp64: the tests' yardstick."""
    flat_y, flat_a = y.reshape(-1, y.shape[-1]).double(), a.reshape(-1, a.shape[-1]).double()
    out = torch.empty_like(flat_y)
    for token in range(flat_y.shape[0]):
        z = A.double() @ flat_a[token]
        for channel in range(flat_y.shape[1]):
            value = flat_y[token, channel]
            if M is not None:
                value = value * (1 + mult_bound * (2 * torch.sigmoid(M[channel].double() @ z) - 1))
            if B is not None:
                value = value + additive_scale * (B[channel].double() @ z)
            out[token, channel] = value
    return out.reshape(y.shape)
