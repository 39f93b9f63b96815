"""How many bits the codes of a student need, for `real.py`.

Each number of a code is divided by a step and rounded towards 0. An entropy coder with fixed
histograms, one for each number of each layer, needs -log2 p bits for a number that has the share p
in its histogram. The histograms are of other text than the codes.

For Gaussian numbers of the same variances, no coder reaches the same error with fewer bits than the
bound (reverse water-filling; Cover and Thomas, Elements of Information Theory, section 10.3.3).

Shapes: T tokens, R rank, V values of a histogram.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from npt.adapters.converted import adapter_mode, evaluating, npt_layers
from npt.batch import Sample

UPWARDS = 0.6
"""From this fraction of a step on, a number is rounded away from 0: most are small, and a 0 costs
few bits."""
PSEUDOCOUNT = 2.0
"""Tokens' worth of the layer's mean histogram that each histogram begins with."""
ROUNDS = 60
"""Halvings in the search for the water level."""


@contextmanager
def rounded_codes(model: Any, step: float) -> Iterator[dict[int, list[tuple[Tensor, Tensor]]]]:
    """Within the context the student's codes are rounded. Yields each pass's z and its multiples of
    the step by layer, [T, R] each, until the caller removes them.
    """
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    adapters: dict[int, Any] = {index: layer.npt for index, layer in npt_layers(model)}

    def round_code(index: int, attention: Tensor) -> Tensor:
        z = type(adapters[index]).code(adapters[index], attention)
        multiples = (z.abs() / step + 1 - UPWARDS).floor() * z.sign()
        seen.setdefault(index, []).append((z.flatten(0, -2), multiples.flatten(0, -2)))
        return step * multiples

    try:
        for index, adapter in adapters.items():
            adapter.code = partial(round_code, index)
        yield seen
    finally:
        for adapter in adapters.values():
            vars(adapter).pop("code", None)


@torch.no_grad()
def count_bits(
    model: Any, other: Sequence[Sample], measured: Sequence[Sample], step: float
) -> dict[str, Any]:
    """Return the bits of a code by layer and their mean over layers, and the bound.

    Args:
        model: with adapters attached.
        other: text of the histograms.
        measured: text whose codes are counted.
        step: in units of z.
    """
    bits: dict[int, float] = {}
    variances: list[Tensor] = []
    errors: list[Tensor] = []
    counts = {index: codes for index, (_, codes) in _codes(model, other, step).items()}
    for index, (z, codes) in _codes(model, measured, step).items():
        bits[index] = _cost(counts[index], codes)
        variances.append(z.square().mean(dim=0))
        errors.append((z - step * codes).square().sum(dim=1).mean())
    bound = _least_bits(torch.cat(variances), float(sum(errors))) / len(bits)
    return {
        "step": step,
        "bits": sum(bits.values()) / len(bits),
        "bits_bound": bound,
        "bits_by_layer": bits,
    }


def _codes(
    model: Any, samples: Sequence[Sample], step: float
) -> Mapping[int, tuple[Tensor, Tensor]]:
    """Return z and its multiples of the step by layer, over the tokens of all samples."""
    device = next(model.parameters()).device
    student = adapter_mode(model, "student")
    with rounded_codes(model, step) as seen, evaluating(model), student:
        for sample in samples:  # one at a time: no padding
            model.model(torch.tensor([sample.input_ids], device=device), use_cache=False)
    return {
        index: (torch.cat([z for z, _ in passes]), torch.cat([codes for _, codes in passes]))
        for index, passes in seen.items()
    }


def _cost(counted: Tensor, coded: Tensor) -> float:
    """Return the mean bits of a code from histograms of `counted`, [T, R] each."""
    reach = int(max(counted.abs().max(), coded.abs().max()))
    places, wanted = ((each + reach).long().T for each in (counted, coded))  # [R, T]
    values = 2 * reach + 1
    mean = torch.bincount(places.flatten(), minlength=values) + 1 / values
    counts = torch.zeros(len(places), values, device=coded.device)
    counts.scatter_add_(1, places, torch.ones_like(places, dtype=counts.dtype))
    shares = (counts + PSEUDOCOUNT * mean / mean.sum()) / (places.shape[1] + PSEUDOCOUNT)
    return float(-shares.log2().gather(1, wanted).sum() / wanted.shape[1])


def _least_bits(variances: Tensor, error: float) -> float:
    """Return the fewest bits for Gaussian numbers of these variances and this total error."""
    low, high = 0.0, float(variances.max())
    for _ in range(ROUNDS):
        level = (low + high) / 2
        if float(variances.clamp_max(level).sum()) > error:
            high = level
        else:
            low = level
    return float((variances / high).clamp_min(1.0).log2().sum() / 2)
