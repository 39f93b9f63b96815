"""The closed form of one layer: attention cut to the R directions that predictions read most.

With C = E a a' / r^2 and S = E s s' r^2 (see `Sensitivity`), an error e of the attention output
costs e'S e / 2 in KL(teacher, student), to second order. Among all a' = P A a of rank R the mean
cost is least if the rows of A span v' C^(-1/2), v the top R eigenvectors of C^(1/2) S C^(1/2), and
P = C A'(A C A')^(-1), the least-squares way back: P = C^(1/2) [v ...]. What is left out costs half
of the other eigenvalues, so an eigenvalue is the worth of its direction, in nats, and comparable
between layers. A P = 1: at R = D the layer is its teacher.

That is canonical reduced-rank regression of a on itself (Izenman, "Reduced-rank regression for the
multivariate linear model", 1975) with the Fisher information as the weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALLEST = 1e-5
"""Eigenvalues of a covariance below this share of its largest one are taken for it. Attention
outputs all but vanish in some directions; a code that had unit variance there would be made of
rounding, and fitted to noise."""


@dataclass(frozen=True)
class Cut:
    """All directions of one layer, the worthiest first.

    Attributes:
        worth: [D], of each, in nats.
        code: A at R = D, [D, D] fp32, as rows.
        back: P at R = D, [D, D] fp32, as columns.
        lost: [D + 1], the share of |a / r|^2 that a cut to so many directions loses.
    """

    worth: list[float]
    code: Tensor
    back: Tensor
    lost: list[float]

    @classmethod
    def of(cls, covariance: Tensor, sensitivity: Tensor) -> Cut:
        """Return that of C and S, [D, D] fp64."""
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
        """Return the same with its directions on a device."""
        return replace(self, code=self.code.to(device), back=self.back.to(device))

    def cost(self, rank: int) -> float:
        """Return the nats that a cut to so many directions costs, by itself and to second order."""
        return 0.5 * sum(self.worth[rank:])


def spend(budget: int, worth: Mapping[int, Sequence[float]]) -> dict[int, int]:
    """Return ranks by layer: one each, then always one more for the layer whose next direction is
    worth most, the lowest of equal ones. worth: of each direction by layer, largest first.
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
