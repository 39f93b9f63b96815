"""The plain form's stages of a layer that training computes fused, for its observer.

They are computed aside, from the products of the frozen weights and copies of the adapter's. What
the layer gives, and every gradient that counts, has the same bits as without an observer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from npt.adapters.layer import NPTLayer, modulated_product, modulation_energy
from npt.base.linear import multiply_backward, product_weight


class Aside:
    """One pass of an observed layer from gate and up on, shown stage by stage.

    Args:
        layer: with an observer.
        z: [N, R], its codes.
        graph: gradients go through gate's and up's products.
    """

    def __init__(self, layer: NPTLayer, z: Tensor, graph: bool):
        self._layer, self._z, self._graph = layer, z.detach(), graph

    def show_product(self, *products: Tensor) -> None:
        """Show the stages from gate's and up's products [N, F] to down_proj's input."""
        with torch.enable_grad():
            gate, up = (y.clone().requires_grad_(self._graph) for y in products)
            self._product, self._terms = modulated_product(
                self._layer, gate, up, self._z, aside=True
            )
        self._layer.npt.show(product=self._product)

    def tie(
        self, down: Tensor, changed: Tensor, energy: Tensor | None, regularised: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Show the stages after down_proj; return its modulated product [N, D] and the energy [N]
        as training has them, tied to what was shown: gradients flow through it, too.
        """
        adapter = self._layer.npt
        seen = _FrozenProduct.apply(self._product, down.detach(), self._layer.mlp.down_proj)
        shown, m, s = adapter.apply_to("down", seen, self._z, aside=True)
        changed = _Twin.apply(changed, shown)
        if energy is not None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and regularised):
                energy = _Twin.apply(energy, modulation_energy([*self._terms, (m, s)]))
        adapter.show(m_down=m, s_down=s, mlp=changed)
        return changed, energy


class _Twin(torch.autograd.Function):
    """A tensor whose gradient also goes to its copy that was computed aside."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shown: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


class _FrozenProduct(torch.autograd.Function):
    """A frozen layer's product, computed already, as a function of the layer's input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Tensor, module: nn.Module) -> Tensor:
        ctx.module, ctx.dtype = module, x.dtype
        return product.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = product_weight(ctx.module, ctx.dtype)
        return multiply_backward(ctx.module, weight, grad), None, None
