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

from npt.calibration.token_part import TokenPart, roots
from npt.config import STREAM, NPTConfig
from npt.errors import NumericalError

SMALLEST = 1e-5
"""Lower bound of a covariance's eigenvalues, as a share of the largest. Attention outputs almost
vanish in some directions; a code of unit variance there would consist of rounding errors."""


SOLVED = ("A", f"B.{STREAM}", "b", "L_in", "L_out", "scale")
"""The tensors of a layer that the closed-form start sets, as far as the form has them. All others
are 0."""


@dataclass(frozen=True)
class Cut:
    """All directions of one layer, sorted by worth, largest first.

    Attributes:
        worth: [D], worth of each direction in nats.
        code: A at R = D, [D, D] fp32, one direction per row.
        back: P at R = D, [D, D] fp32, one direction per column.
        lost: [D + 1], share of |a / r|^2 that a cut to R directions loses, by R; with a token part,
            of |(a - l) / r|^2.
        token_part: what precedes the code, if anything.
        known: share of the cost of losing a that the token part saves.
    """

    worth: list[float]
    code: Tensor
    back: Tensor
    lost: list[float]
    token_part: TokenPart | None = None
    known: float = 0.0

    @classmethod
    def of(cls, covariance: Tensor, sensitivity: Tensor, wanted: Tensor | None = None) -> Cut:
        """Compute the cut from C and S, [D, D] fp64.

        wanted: E y a' / r^2, to give y from a; default C, to give a.
        """
        root, inverse = roots(covariance, SMALLEST)
        across = root
        left = root
        if wanted is not None:
            across = wanted @ inverse
            left = across.T
        worth, chosen = torch.linalg.eigh(left @ sensitivity @ across)
        # eigh sorts by size, smallest first
        worth = worth.flip(0)
        chosen = chosen.flip(1)
        code = (inverse @ chosen).T
        back = across @ chosen
        # the code has unit variance, so a column of P carries the square of its norm
        sizes = back.square().sum(dim=0)
        none = sizes.new_zeros(1)
        carried = torch.cat([none, sizes.cumsum(0)])
        whole = sizes.sum()
        kept = carried / whole
        lost = 1.0 - kept
        return cls(
            worth=worth.clamp_min(0.0).tolist(),
            code=code.to(torch.float32),
            back=back.to(torch.float32),
            lost=lost.clamp_min(0.0).tolist(),
        )

    def to(self, device: torch.device) -> Cut:
        """Return the cut with its directions on a device."""
        part = self.token_part
        if part is not None:
            part = part.to(device)
        code = self.code.to(device)
        back = self.back.to(device)
        return replace(self, code=code, back=back, token_part=part)

    def tensors(self, index: int, rank: int, config: NPTConfig) -> dict[str, Tensor]:
        """Return the tensors of layer `index` by name, for the first `rank` directions. B is
        divided by alpha, because the forward multiplies by it.

        Raises:
            NumericalError: they are not finite.
        """
        code = self.code[:rank]
        back = self.back[:, :rank] / config.additive_scale
        code, back, factor = balanced(code, back)
        solved = {"A": code, f"B.{STREAM}": back}
        if self.token_part is not None:
            solved["b"] = self.token_part.bias
            solved["scale"] = self.nats[:rank] / factor
            if config.token_rank:
                solved["L_in"] = self.token_part.inner
                solved["L_out"] = self.token_part.outer
        for tensor in solved.values():
            if not torch.isfinite(tensor).all():
                raise NumericalError(
                    f"calibration: the directions of layer {index} are non-finite, so the adapters"
                    " are unchanged; pass --init random"
                )
        return solved

    @property
    def nats(self) -> Tensor:
        """[D] fp32, the factors that turn a code of unit variance into one in nats."""
        worth = torch.tensor(self.worth, dtype=torch.float64, device=self.code.device)
        least = SMALLEST**2 * float(worth[0])
        return worth.clamp_min(least).sqrt().to(torch.float32)

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
        rank = ranks[index]
        values = worth[index]
        if rank < len(values):
            heapq.heappush(queue, (-values[rank], index))
    return ranks


def balanced(code: Tensor, back: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale A and B so that training changes both evenly, without changing the student; return the
    factors of A's rows too.

    The student stays the same if a row of A [R, D] is multiplied by c and the column of B [D, R]
    that reads it is divided by c. For a code of unit variance, entries of A are a few hundredths
    and entries of B a few units, but AdamW moves every entry by the learning rate: A would be
    overwritten before B moves. So c makes their root mean squares equal. It is a power of two, so
    that fp32 products with it are exact.
    """
    sizes = back.square().mean(dim=0).sqrt() / code.square().mean(dim=1).sqrt()
    factor = torch.exp2(torch.round(torch.log2(sizes) / 2))
    # 1 for a row that is zero or that nothing reads
    factor = torch.where(torch.isfinite(factor) & (factor > 0), factor, 1.0)
    return code * factor.unsqueeze(1), back / factor, factor
