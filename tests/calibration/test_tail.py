"""The layer's tail: what it computes is the layer, and its derivative is the layer's derivative."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import npt
from npt.adapters.converted import npt_layers
from npt.adapters.layer import student_output
from npt.calibration.tail import Parameters, Tail

FORMS = [
    (targets, modulation)
    for modulation in ("both", "additive", "multiplicative")
    for size in (1, 2, 3)
    for targets in itertools.combinations(("gate", "up", "down"), size)
]


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(
    load_model: Callable[..., Any], targets: tuple[str, ...], modulation: str
) -> tuple[Any, Tail, Parameters, Tensor, Tensor]:
    """A layer of rank 5 with parameters large enough that every term matters, and 7 tokens."""
    model = load_model("nf4")
    npt.attach(
        model,
        npt.NPTConfig(
            layers="2",
            rank=5,
            targets=targets,
            modulation=modulation,
            additive_scale=0.3,
            mult_bound=0.7,
        ),
    )
    layer = npt_layers(model)[0][1]
    tail = Tail(layer)
    p = {"A": normal(5, 64, seed=1) * 0.3, **tail.form(5)}
    p = {
        name: value if name == "A" else value + normal(*value.shape, seed=2 + i) * 0.4
        for i, (name, value) in enumerate(p.items())
    }
    return layer, tail, p, normal(7, 64, seed=20), normal(7, 64, seed=21)


@pytest.mark.parametrize(("targets", "modulation"), FORMS)
def test_the_tail_is_the_layer(targets, modulation, load_model) -> None:
    layer, tail, p, h, a = made(load_model, targets, modulation)
    with torch.no_grad():
        for name, parameter in layer.npt.named_parameters():
            parameter.copy_(p[name] / 0.3 if name.startswith("B.") else p[name])
        expected = student_output(layer, h, a)[0]
        found = h + tail.at(p, h, a).output
    # One dense product against one that dequantises inside: the same fp32 sums, in another order.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("targets", "modulation"), FORMS)
def test_pulling_is_the_derivative(targets, modulation, load_model) -> None:
    _, tail, p, h, a = made(load_model, targets, modulation)
    names = list(p)
    r = normal(7, 64, seed=60)

    def output(*values: Tensor) -> Tensor:
        return reference(tail, dict(zip(names, values, strict=True)), h, a)

    expected, gradients = torch.autograd.functional.vjp(output, tuple(p.values()), r)
    at = tail.at(p, h, a)
    torch.testing.assert_close(at.output, expected, rtol=1e-4, atol=1e-4)
    # Sums of up to 128 products of fp32 numbers of size 10, in another order than autograd's.
    for (name, found), expected_gradient in zip(
        tail.pulled(p, r, at).items(), gradients, strict=True
    ):
        torch.testing.assert_close(
            found,
            expected_gradient,
            rtol=1e-3,
            atol=1e-3,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def reference(tail: Tail, p: Parameters, h: Tensor, a: Tensor) -> Tensor:
    """The formula of the module's head, differentiable."""
    z = a @ p["A"].T
    gate, up = tail.products(h)

    def modulated(target: str, y: Tensor) -> Tensor:
        m = (
            1 + tail.beta * (2 * torch.sigmoid(z @ p[f"M.{target}"].T) - 1)
            if f"M.{target}" in p
            else 1.0
        )
        return m * y + (z @ p[f"B.{target}"].T if f"B.{target}" in p else 0.0)

    product = torch.nn.functional.silu(modulated("gate", gate)) * modulated("up", up)
    return modulated("down", product @ tail.down.T)
