"""The formula of npt/adapters/modulation.py as a loop over tokens and channels, to compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def modulate_reference(
    y: Tensor,
    a: Tensor,
    A: Tensor,
    M: Tensor | None,
    B: Tensor | None,
    mult_bound: float,
    additive_scale: float,
) -> Tensor:
    """Return the formula above, one token and channel at a time, in fp64."""
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
