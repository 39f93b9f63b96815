"""What the fused training forward asks of its backends.

A backend modulates products of the MLP, y' = m y + s, and computes what follows from them. Torch's
operations do it in blocks of rows (npt/adapters/trained.py), Triton's kernels on a GPU
(npt/adapters/kernels.py).

Shapes: N tokens, O width of a product, R rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from npt.config import NPTConfig

Gradients = tuple[Tensor, list[Any]]
"""The gradient of z, and those of M and B of each product in turn, None if absent."""


class Product(NamedTuple):
    """A product y [N, O] of frozen weights and its M and B [O, R]; None if the form lacks one."""

    y: Tensor
    mult: Tensor | None
    add: Tensor | None


@dataclass
class Modulation(ABC):
    """The modulation of gate and up together, or of one product by itself.

    Attributes:
        z: codes, [N, R].
        config: alpha and beta.
        products: gate and up, or one product.
    """

    z: Tensor
    config: NPTConfig
    products: Sequence[Product]

    @abstractmethod
    def forward(self, out: Tensor, taught: Tensor | None = None) -> Tensor:
        """Write silu(gate') * up', or the one product's y', to `out` [N, O]; return the energy [N].

        If `taught` is given, it holds the teacher's up and `out` the teacher's gate; `taught` then
        becomes the teacher's silu(gate) * up.
        """

    @abstractmethod
    def backward(
        self, grad: Tensor, grad_energy: Tensor | None, into: Sequence[Tensor | None]
    ) -> Gradients:
        """Backpropagate the gradients of `out` [N, O] and of the energy [N].

        Write the gradient of each product's y to its tensor in `into`, if it has one.
        """
