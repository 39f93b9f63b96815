"""The token part in closed form: what a token's own state says of its attention output.

It is the linear regression of a on x1 = RMSNorm1(h), with weights 1 / r^2,

    L = C_ax (C_xx + RIDGE mean(diag C_xx))^-1,   b = E a - L E x1

cut to rank Q where the error costs least: the top Q singular directions of S^1/2 L C_xx^1/2, with S
the sensitivity of the predictions to a (`Sensitivity`). This is reduced-rank regression (Izenman,
1975) weighted by the Fisher information.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-3
"""Share of the mean variance of x1 that is added to each: x1 has almost constant directions."""

SMALLEST = 1e-9
"""Lower bound of eigenvalues, as a share of the largest."""


@dataclass(frozen=True)
class TokenPart:
    """The token part of one layer.

    Attributes:
        inner: L_in, [Q, D] fp64.
        outer: L_out, [D, Q] fp64.
        bias: b, [D] fp64.
    """

    inner: Tensor
    outer: Tensor
    bias: Tensor

    @classmethod
    def of(cls, cross: Tensor, inputs: Tensor, sensitivity: Tensor, rank: int) -> TokenPart:
        """Compute the token part of rank Q from means over tokens, fp64.

        Args:
            cross: E a x' / r^2, [D, n], where x is x1 with a 1 appended, or 1 alone for Q = 0.
            inputs: E x x' / r^2, [n, n].
            sensitivity: S, [D, D].
            rank: Q.
        """
        # the last input is 1, so its products are sums of the weights 1 / r^2 and of weighted rows
        weight = inputs[-1, -1]
        mean_a = cross[:, -1] / weight
        if not rank:
            none = mean_a.new_zeros(0, len(mean_a))
            return cls(none, none.T, mean_a)
        mean_x = inputs[:-1, -1] / weight
        of_both = cross[:, :-1] - weight * torch.outer(mean_a, mean_x)
        of_inputs = inputs[:-1, :-1] - weight * torch.outer(mean_x, mean_x)
        damped = of_inputs.clone()
        damped.diagonal().add_(RIDGE * of_inputs.diagonal().mean())
        full = torch.linalg.solve(damped, of_both.T).T
        # whitened on both sides, the SVD's error is the cost of the cut in nats
        root, inverse = roots(sensitivity)
        of_x, _ = roots(of_inputs)
        whitened = root @ full @ of_x
        directions, _, _ = torch.linalg.svd(whitened)
        directions = directions[:, :rank]
        outer = inverse @ directions
        inner = directions.T @ root @ full
        # one learning rate fits both factors if their sizes are equal
        ratios = outer.square().mean(dim=0) / inner.square().mean(dim=1)
        even = ratios.pow(0.25)
        even = torch.where(torch.isfinite(even) & (even > 0), even, 1.0)
        bias = mean_a - outer @ (inner @ mean_x)
        return cls(inner * even.unsqueeze(1), outer / even, bias)

    def left(self, products: Tensor, one: Tensor, other: Tensor, inputs: Tensor) -> Tensor:
        """Return E (p - l)(q - l)' / r^2 of two outputs p and q, [D, D].

        products, one and other: E p q', E p x' and E q x', all / r^2; inputs: as for `of`.
        """
        own = self.bias.unsqueeze(1)
        if len(self.inner):
            own = torch.cat([self.outer @ self.inner, own], dim=1)
        return products - one @ own.T - own @ other.T + own @ inputs @ own.T

    def to(self, device: torch.device) -> TokenPart:
        """Return the token part on a device."""
        return TokenPart(self.inner.to(device), self.outer.to(device), self.bias.to(device))


def read_by(x1: Tensor, size: Tensor, rank: int) -> Tensor:
    """Return the rows x / r that a token part of rank Q reads, [N, n]: of x1 [N, D] with a 1
    appended, or of 1 alone for Q = 0. size: r, [N, 1].
    """
    rows = torch.ones_like(size)
    if rank:
        rows = torch.cat([x1.to(size.dtype), rows], dim=-1)
    return rows / size


def read_width(width: int, rank: int) -> int:
    """Return n of `read_by` for x1 of this width."""
    return width + 1 if rank else 1


def roots(matrix: Tensor, smallest: float = SMALLEST) -> tuple[Tensor, Tensor]:
    """Return the square root of a covariance [n, n], and its inverse, with eigenvalues raised to
    `smallest` times the largest.
    """
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values = values.clamp_min(smallest * float(values[-1]))
    root = (vectors * values.sqrt()) @ vectors.T
    inverse = (vectors * values.rsqrt()) @ vectors.T
    return root, inverse
