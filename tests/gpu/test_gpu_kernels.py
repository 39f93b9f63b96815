"""Triton kernels on a GPU: the plain form's numbers, equal bits each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from npt.adapters import trained
from npt.adapters.products import Product
from npt.adapters.trained import TorchModulation
from npt.base.precision import fp32_products
from npt.config import NPTConfig
from npt.extras import installed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not installed("triton"), reason="needs Triton")]


@pytest.mark.parametrize("rank", [5, 32, 64])
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-5), ("high", 4e-3)])
def test_kernels_are_the_plain_form_and_repeat_their_bits(monkeypatch, rank, precision, tolerance):
    """fp32 sums of some hundred terms; TF32 rounds the factors to 11 bits."""
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda")

    gate, up, grad, of_gate, of_up = (normal(300, 1000) for _ in range(5))
    z, grad_energy, weights = normal(300, rank), normal(300), [normal(1000, rank) for _ in range(4)]

    def step() -> list[Tensor]:
        products = [Product(gate, *weights[:2]), Product(up, *weights[2:])]
        modulation = trained._backend(z)(z, NPTConfig(), products)
        parts: list[Any] = [of_gate.clone(), of_up.clone(), *map(torch.empty_like, (gate, up))]
        energy = modulation.forward(*parts[:2])
        grad_z, grads = modulation.backward(grad, grad_energy, parts[2:])
        return [energy, grad_z, *grads, *parts]

    with fp32_products(precision):
        assert trained._backend(z) is not TorchModulation
        computed, again = step(), step()
        assert all(map(torch.equal, computed, again))
        monkeypatch.setattr(trained, "_backend", lambda _: TorchModulation)
        for one, other in zip(computed, step(), strict=True):
            assert float((one - other).abs().max() / other.abs().max()) < tolerance
