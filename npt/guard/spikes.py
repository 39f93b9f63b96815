"""Spikes: a finite loss or gradient norm far above those of the steps before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from torch import Tensor

SIGMAS = 10.0
"""Much smaller values refuse healthy windows of mixed data."""

HISTORY = 128
MINIMUM = 20
"""Accepted steps needed before a spike is refused; a median of fewer is unreliable."""

MAD_TO_SIGMA = 1.4826  # standard deviation per median absolute deviation, if normal

SPREAD_FLOOR = 0.01  # for values that repeat exactly, where rounding is no spike


class SpikeGuard:
    """Limits of loss and gradient norm: median + k sigma of the last accepted steps' logarithms.

    Sigma comes from the median absolute deviation, so that one accepted spike does not move the
    limits. Logarithms are used because gradient norms of small windows have a heavy upper tail,
    which would look like spikes on a linear scale.
    """

    def __init__(self, k: float = SIGMAS):
        self.k = k
        self.recall((), ())

    def exceeds(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return whether either is above its limit: a scalar bool on the device, unread."""
        return (loss > self.limits[0]) | (norm > self.limits[1])

    def accept(self, loss: float, norm: float) -> None:
        """Add an applied step to the statistics, except values without a finite logarithm."""
        for logarithms, value in ((self._losses, loss), (self._norms, norm)):
            if math.isfinite(value) and value > 0:
                logarithms.append(math.log(value))
        self.limits = (self._limit(self._losses), self._limit(self._norms))

    def remembered(self) -> tuple[list[float], list[float]]:
        return list(self._losses), list(self._norms)

    def recall(self, losses: Iterable[float], norms: Iterable[float]) -> None:
        self._losses = deque(losses, maxlen=HISTORY)
        self._norms = deque(norms, maxlen=HISTORY)
        self.limits = (self._limit(self._losses), self._limit(self._norms))

    def _limit(self, logarithms: deque[float]) -> float:
        if len(logarithms) < MINIMUM:
            return math.inf
        middle = median(logarithms)
        spread = MAD_TO_SIGMA * median(abs(value - middle) for value in logarithms)
        exponent = middle + self.k * max(spread, SPREAD_FLOOR)
        return math.exp(exponent) if exponent < 700 else math.inf
