"""The closed form of one layer: attention cut to the R directions that the predictions read most.

With C = E a a' / r^2 and S = E s s' r^2 (see `Sensitivity`), an error e of a / r costs e'S e / 2 in
KL(teacher, student), to second order. Among all a' = P A a of rank R, the mean
cost is least if the rows of A span v' C^(-1/2), with v the top R eigenvectors of C^(1/2) S C^(1/2),
and P = C A'(A C A')^(-1) = C^(1/2) [v ...] is the least-squares inverse. The other directions then
cost half the sum of their eigenvalues. So an eigenvalue is the worth of its direction in nats, and
can be compared between layers. A P = 1: at R = D the layer equals its teacher.

This is canonical reduced-rank regression of a on itself (Izenman, "Reduced-rank regression for the
multivariate linear model", 1975), weighted by the Fisher information.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALLEST = 1e-5
"""Lower bound of a covariance's eigenvalues, as a share of the largest. Attention outputs almost
vanish in some directions; a code of unit variance there would consist of rounding errors."""


@dataclass(frozen=True)
class Cut:
    """All directions of one layer, sorted by worth, largest first.

    Attributes:
        worth: [D], worth of each direction in nats.
        code: A at R = D, [D, D] fp32, one direction per row.
        back: P at R = D, [D, D] fp32, one direction per column.
        lost: [D + 1], share of |a / r|^2 that a cut to R directions loses, by R.
    """

    worth: list[float]
    code: Tensor
    back: Tensor
    lost: list[float]

    @classmethod
    def of(cls, covariance: Tensor, sensitivity: Tensor) -> Cut:
        """Compute the cut from C and S, [D, D] fp64."""
        values, vectors = torch.linalg.eigh(covariance)
        values = values.clamp_min(SMALLEST * float(values[-1]))
        root = (vectors * values.sqrt()) @ vectors.T
        inverse = (vectors * values.rsqrt()) @ vectors.T
        worth, chosen = torch.linalg.eigh(root @ sensitivity @ root)
        chosen = chosen.flip(1)
        back = root @ chosen
        sizes = back.square().sum(dim=0)
        kept = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]) / sizes.sum()
        return cls(
            worth.flip(0).clamp_min(0.0).tolist(),
            (inverse @ chosen).T.to(torch.float32),
            back.to(torch.float32),
            (1.0 - kept).clamp_min(0.0).tolist(),
        )

    def to(self, device: torch.device) -> Cut:
        """Return the cut with its directions on a device."""
        return replace(self, code=self.code.to(device), back=self.back.to(device))

    def cost(self, rank: int) -> float:
        """Return the cost in KL (nats, to second order) of cutting only this layer, to `rank`."""
        return 0.5 * sum(self.worth[rank:])


def spend(budget: int, worth: Mapping[int, Sequence[float]]) -> dict[int, int]:
    """Distribute a total rank over layers, and return the rank of each.

    Each layer gets one. Then the layer whose next direction is worth most gets one more, and so on;
    of equal layers, the lowest comes first. worth: by layer, of each direction, largest first.
    """
    ranks = dict.fromkeys(worth, 1)
    queue = [(-values[1], index) for index, values in worth.items() if len(values) > 1]
    heapq.heapify(queue)
    for _ in range(budget - len(ranks)):
        _, index = heapq.heappop(queue)
        ranks[index] += 1
        if ranks[index] < len(worth[index]):
            heapq.heappush(queue, (-worth[index][ranks[index]], index))
    return ranks
