"""Sharpness against matrices whose eigenvalues are known, and against a Hessian that was written
out.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import npt
from npt.adapters.converted import npt_layers
from npt.config import TrainConfig
from npt.tools.sweep.sharpness import _loss, largest_eigenvalue, layer_sharpness


def quadratic(*eigenvalues: float):
    """A loss whose Hessian has these eigenvalues, in a rotated basis, over two parameters."""
    n = len(eigenvalues)
    basis = torch.linalg.qr(
        torch.randn(n, n, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    )[0]
    matrix = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T
    one, other = (torch.randn(k, dtype=torch.float64, requires_grad=True) for k in (n - 1, 1))
    return lambda: 0.5 * torch.cat([one, other]) @ matrix @ torch.cat([one, other]), [one, other]


@pytest.mark.parametrize(
    "eigenvalues", [(3.0, 1.0, 0.5), (7.0, -2.0, 0.0), (1.0, -5.0, 0.3), (-1.0, -4.0, -9.0)]
)
def test_the_largest_eigenvalue_is_found_whatever_the_others_are(eigenvalues) -> None:
    loss, parameters = quadratic(*eigenvalues)
    # three dimensions are walked through
    assert largest_eigenvalue(loss, parameters, 10) == pytest.approx(max(eigenvalues), abs=1e-6)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.integers(1, 8))
def test_the_estimate_grows_towards_the_largest_eigenvalue(eigenvalues, iterations) -> None:
    loss, parameters = quadratic(*eigenvalues)
    estimates = [largest_eigenvalue(loss, parameters, n) for n in (iterations, iterations + 1)]
    assert estimates[0] <= estimates[1] + 1e-6 and estimates[1] <= max(eigenvalues) + 1e-6


def test_a_loss_without_curvature_or_parameters_has_none() -> None:
    one = torch.ones(3, requires_grad=True)
    assert largest_eigenvalue(lambda: one.sum(), [one], 5) == 0.0
    assert largest_eigenvalue(lambda: (one * 0).square().sum(), [one], 5) == 0.0


def test_a_curvature_that_is_not_finite_is_nan_and_no_error() -> None:
    one = torch.zeros(2, requires_grad=True)
    assert torch.isnan(torch.tensor(largest_eigenvalue(lambda: one.abs().sqrt().sum(), [one], 5)))


@pytest.mark.parametrize("form", [{}, {"mult_form": "unbounded", "targets": ("gate",)}])
def test_the_layers_sharpness_is_that_of_its_hessian_written_out(load_model, batch, form) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(layers="2-3", rank=1, init_std_b=0.1, **form))
    layer = npt_layers(model)[0][1]
    small = list(layer.npt.parameters())
    seen: dict[str, torch.Tensor] = {}
    layer.npt.observer = seen.update
    config = TrainConfig()
    sharpness = layer_sharpness(model, batch, config, 40)
    with torch.no_grad():
        model.model(batch.input_ids, batch.attention_mask, batch.position_ids)
    layer.npt.observer = None
    h, a = (seen[name].reshape(-1, seen[name].shape[-1])[batch.valid_index] for name in ("h", "a"))
    with torch.no_grad():
        t = h + a + layer.mlp(layer.post_attention_layernorm(h + a))
    gradient = torch.autograd.grad(_loss(layer, h, a, t, config) / len(h), small, create_graph=True)
    flat = torch.cat([g.flatten() for g in gradient])
    rows = torch.autograd.grad(flat, small, torch.eye(len(flat)), is_grads_batched=True)
    exact = torch.linalg.eigvalsh(torch.cat([g.flatten(1) for g in rows], dim=1).double())[
        -1
    ].item()
    assert sharpness == pytest.approx(exact, rel=1e-3)  # 40 products of some hundred dimensions


def test_the_loss_that_sharpness_is_of_is_the_one_that_is_trained(load_model, batch) -> None:
    from npt.distill.local import local

    model = load_model()
    npt.attach(model, npt.NPTConfig(layers="2", rank=3, init_std_b=0.1, init_std_m=0.5))
    config = TrainConfig(loss="nmse_update", regularization_lambda=0.1)
    trained = local(model, batch, config)
    layer, seen = npt_layers(model)[0][1], {}
    layer.npt.observer = seen.update
    with torch.no_grad():
        model.model(batch.input_ids, batch.attention_mask, batch.position_ids)
    h, a = (seen[name].reshape(-1, seen[name].shape[-1])[batch.valid_index] for name in ("h", "a"))
    with torch.no_grad():
        t = h + a + layer.mlp(layer.post_attention_layernorm(h + a))
    torch.testing.assert_close(_loss(layer, h, a, t, config).detach(), trained.loss)
