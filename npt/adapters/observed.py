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


def show_stages(
    layer: NPTLayer,
    z: Tensor,
    products: tuple[Tensor, Tensor, Tensor],
    changed: Tensor,
    energy: Tensor | None,
    regularised: bool,
) -> tuple[Tensor, Tensor | None]:
    """Show the stages after gate's and up's products, and return the MLP's output and the energy,
    tied to what was shown: gradients flow through it, too.

    Args:
        layer: with an observer.
        z: [N, R], its codes.
        products: gate's and up's [N, F], copies that may ask for gradients, and down's [N, D].
        changed: [N, D], down's product, modulated, as training has it.
        energy: [N], as training has it; None if no product is modulated.
        regularised: the energy is differentiated.
    """
    adapter, (gate, up, down), z = layer.npt, products, z.detach()
    with torch.enable_grad():
        product, terms = modulated_product(layer, gate, up, z, aside=True)
    adapter.show(product=product)
    seen = _FrozenProduct.apply(product, down.detach(), layer.mlp.down_proj)
    shown, m, s = adapter.apply_to("down", seen, z, aside=True)
    changed = _Twin.apply(changed, shown)
    if energy is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and regularised):
            energy = _Twin.apply(energy, modulation_energy([*terms, (m, s)]))
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
