"""Spikes: a finite loss or gradient norm far outside the range of the steps before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from torch import Tensor

SIGMAS = 10.0
"""Far smaller values refuse healthy windows of mixed data."""

HISTORY = 128
MINIMUM = 20
"""Accepted steps before anything is called a spike: a median of fewer says little."""

MAD_TO_SIGMA = 1.4826  # median absolute deviations of a normal distribution's standard deviation

SPREAD_FLOOR = 0.01  # of values that repeat exactly: rounding is no spike


class SpikeGuard:
    """Limits of loss and gradient norm: median + k sigma of the last accepted steps' logarithms.

    Sigma is estimated by the median absolute deviation, so that neither a spike that was let
    through nor a NaN can drag the limits along. Logarithms, because both are positive and spread
    over factors: the gradient norms of small windows have a heavy upper tail, which reads as spikes
    on their own scale and not on a logarithmic one.

    """

    def __init__(self, k: float = SIGMAS):
        self.k = k
        self.recall((), ())

    def exceeds(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return a scalar bool on the tensors' device, without waiting: above a limit."""
        return (loss > self.limits[0]) | (norm > self.limits[1])

    def accept(self, loss: float, norm: float) -> None:
        """Take an applied step into the statistics, unless it has no finite logarithm."""
        for logarithms, value in ((self._losses, loss), (self._norms, norm)):
            if math.isfinite(value) and value > 0:
                logarithms.append(math.log(value))
        self.limits = (self._limit(self._losses), self._limit(self._norms))

    def remembered(self) -> tuple[list[float], list[float]]:
        return list(self._losses), list(self._norms)

    def recall(self, losses: Iterable[float], norms: Iterable[float]) -> None:
        self._losses, self._norms = deque(losses, maxlen=HISTORY), deque(norms, maxlen=HISTORY)
        self.limits = (self._limit(self._losses), self._limit(self._norms))

    def _limit(self, logarithms: deque[float]) -> float:
        if len(logarithms) < MINIMUM:
            return math.inf
        middle = median(logarithms)
        spread = MAD_TO_SIGMA * median(abs(value - middle) for value in logarithms)
        exponent = middle + self.k * max(spread, SPREAD_FLOOR)
        return math.exp(exponent) if exponent < 700 else math.inf
