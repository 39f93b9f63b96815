"""Spikes: a finite loss or gradient norm far outside the range of the steps before it."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from torch import Tensor

HISTORY = 128
MINIMUM = 20
"""Accepted steps before anything is called a spike: a median of fewer says little."""

# For a normal distribution this many median absolute deviations are one standard deviation; it makes k read as sigmas.
MAD_TO_SIGMA = 1.4826


class SpikeGuard:
    """Limits of loss and gradient norm, median + k sigma of the last accepted steps, sigma estimated by the median absolute
    deviation: neither a spike that was let through nor a NaN can drag such limits along.

    Args:
        k: how many robust standard deviations above the median a step may lie.
    """

    def __init__(self, k: float):
        self.k = k
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._norms: deque[float] = deque(maxlen=HISTORY)
        self.limits = (math.inf, math.inf)
        """Of loss and gradient norm, as they stand now."""

    def exceeds(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Scalar bool on the tensors' device: above a limit. The limits are plain numbers, so nothing is waited for."""
        return (loss > self.limits[0]) | (norm > self.limits[1])

    def accept(self, loss: float, norm: float) -> None:
        """Take an applied step into the statistics; a non-finite value is left out."""
        for values, value in ((self._losses, loss), (self._norms, norm)):
            if math.isfinite(value):
                values.append(value)
        self.limits = (self._limit(self._losses), self._limit(self._norms))

    def describe(self, loss: float, norm: float, limits: tuple[float, float]) -> str:
        """What was exceeded, with both values. `limits` are those of the time of the decision."""
        parts = [
            f"{name} {value:.4g} is above {limit:.4g}"
            for name, value, limit in (("loss", loss, limits[0]), ("gradient norm", norm, limits[1]))
            if value > limit
        ]
        return f"{' and '.join(parts)} (median + {self.k:g} robust sigma of the accepted steps)"

    def _limit(self, values: deque[float]) -> float:
        if len(values) < MINIMUM:
            return math.inf
        middle = median(values)
        spread = MAD_TO_SIGMA * median(abs(value - middle) for value in values)
        # Values that repeat exactly have no spread; one hundredth of the median keeps rounding from being a spike.
        return middle + self.k * max(spread, 0.01 * abs(middle))
