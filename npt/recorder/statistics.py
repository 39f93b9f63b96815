"""Reduce a tensor on its device to nine numbers that can be read later.

Counts cover all elements; minimum, maximum, mean, standard deviation and RMS the finite ones.
Elements are divided by the largest before they are squared, so that the RMS is right even for a
tensor that is about to overflow.

On a CPU, a tensor without NaN, Inf or extreme sizes takes a path that is 100 times as fast. The
general path reads nothing from the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIELDS = ("count", "nan", "pos_inf", "neg_inf", "min", "max", "mean", "std", "rms")
"""The numbers of `summarise`, in order. The last five are NaN if no element is finite."""

# Between these sizes no sum of squares overflows fp32, and squares that underflow are too small to
# matter.
_SMALLEST = 1e-12
_LARGEST = 1e15


def summarise(tensor: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return the `FIELDS` of a tensor: [9] float64 on its device, without a wait on CUDA.

    The elements of a complex tensor are its real and imaginary parts. If the first two dimensions
    of the tensor are those of `valid`, [B, T] bool, only tokens that are True there count.
    """
    values, mask = _elements(tensor, valid)
    # a dtype that holds every element and supports the reductions
    exact = values.is_floating_point() and values.dtype != torch.float64
    values = values.to(torch.float32 if exact else torch.float64)
    readable = _readable(values) and values.numel() > 0
    # elsewhere `reshape` may copy the tensor
    sizes = _sizes(values.reshape(-1)) if readable else None
    if sizes is None:
        return _by_selection(values, mask)
    return torch.tensor([values.numel(), 0, 0, 0, *sizes], dtype=torch.float64, device="cpu")


def share_beyond(
    tensor: Tensor, centre: float, distance: float, valid: Tensor | None = None
) -> Tensor:
    """Return the share of elements further from `centre` than `distance`: [1] float64 on the
    tensor's device, 0 if there are none.
    """
    values, mask = _elements(tensor, valid)
    beyond = (values - centre).abs() > distance
    total: int | Tensor = max(1, values.numel())
    if mask is not None:
        beyond &= mask
        total = mask.sum().clamp_min(1)
    return (beyond.sum().to(torch.float64) / total).reshape(1)


def _elements(tensor: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the real elements that count; or all of them and a mask, if gathering would wait."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if valid is None or values.shape[:2] != valid.shape:
        return values, None
    valid = valid.to(values.device)
    if _readable(values):
        return values[valid], None
    mask = valid.reshape(*valid.shape, *[1] * (values.ndim - 2))  # [B, T, 1, ...]
    return values, mask.expand_as(values)


def _readable(values: Tensor) -> bool:
    """Return True if reading a number does not wait for a device."""
    return values.device.type == "cpu"


def _sizes(flat: Tensor) -> tuple[float, ...] | None:
    """Return min, max, mean, std and RMS; None if an element is non-finite or too large or small
    to be squared.
    """
    low, high = map(float, torch.aminmax(flat))
    size = max(abs(low), abs(high))
    if size != 0.0 and not _SMALLEST <= size <= _LARGEST:  # true of NaN as well
        return None
    n = flat.numel()
    mean = float(flat.sum()) / n
    square = float(torch.dot(flat, flat)) / n
    variance = square - mean * mean
    if variance < 0.01 * square:  # most digits cancelled
        centred = flat - mean
        off = float(centred.sum()) / n  # by which the rounded mean is wrong
        variance = max(0.0, float(torch.dot(centred, centred)) / n - off**2)
    return low, high, mean, math.sqrt(variance), math.sqrt(square)


def _by_selection(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the `FIELDS` of any elements without reading a number. Sums are in fp64."""
    wide = torch.float64
    if values.numel() == 0:
        return torch.tensor([0.0] * 4 + [math.nan] * 5, dtype=wide, device=values.device)
    chosen = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    counts = [chosen.sum()]
    for bad in (values != values, values == math.inf, values == -math.inf):
        counts.append((bad & chosen).sum())
    # selected, not multiplied by a mask: Inf times 0 is NaN
    finite = torch.isfinite(values) & chosen
    n = finite.sum()
    low = torch.where(finite, values, math.inf).amin()
    high = torch.where(finite, values, -math.inf).amax()
    # so that no square overflows or underflows
    size = torch.maximum(low.abs(), high.abs())
    scale = torch.where((n > 0) & (size > 0), size, 1.0)
    scaled = torch.where(finite, values, 0.0) / scale
    mean = scaled.sum(dtype=wide) / n
    # the variance of what is centred, since a difference of two squares cancels
    centred = torch.where(finite, scaled - mean.to(values.dtype), 0.0)
    variance = centred.square().sum(dtype=wide) / n
    rms = (variance + mean * mean).sqrt()
    scaled_back = torch.stack([mean, variance.sqrt(), rms]) * scale.to(wide)
    sizes = torch.cat([torch.stack([low, high]).to(wide), scaled_back])
    return torch.cat([torch.stack(counts).to(wide), torch.where(n > 0, sizes, math.nan)])
