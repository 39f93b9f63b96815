"""The Triton kernels, interpreted on the CPU, against the plain form."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_fused import (
    assert_same,
    form_of,
    gradients,
    modulated,
    modulated_product,
    normal,
    weights_of,
)
from torch import Tensor
from torch.nn import functional as F

from npt.adapters import trained
from npt.adapters.trained import LowRank, product_forward
from npt.base.precision import fp32_products

triton = pytest.importorskip("triton")


@pytest.fixture(scope="module")
def kernels() -> Any:
    """Return a copy of the module whose kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(triton.knobs.runtime, "interpret", True)
        spec = importlib.util.find_spec("npt.adapters.kernels")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["high", "highest"], ids=["multiplied by kernels", "multiplied by torch"])
def on_gpu(request, kernels, monkeypatch) -> Iterator[Any]:
    """A switch that makes the forms of npt/adapters/trained.py take the kernels."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(trained, "_kernels", lambda _: kernels if on else None)

    monkeypatch.setattr(kernels, "ROWS", 24)
    small = {"BM": 16, "BN": 64, "num_warps": 4}  # a program takes the interpreter a millisecond
    monkeypatch.setattr(kernels, "TILES", dict.fromkeys(kernels.TILES, small))
    with fp32_products(request.param):
        yield switch


def compared(on_gpu: Any, act: Any) -> tuple[Any, Any]:
    """What the kernels give and what the plain form does."""
    on_gpu(True)
    computed = act()
    on_gpu(False)
    return computed, act()


CASES = [
    # rows, columns, rank, M, B, both products, gradients of the products, energy
    (37, 150, 5, True, True, True, True, True),
    (37, 150, 1, True, True, True, False, False),
    (64, 256, 16, True, True, True, True, True),
    (30, 130, 48, True, True, True, True, True),
    (25, 70, 16, True, False, True, True, True),
    (25, 70, 16, False, True, True, True, True),
    (25, 70, 3, False, False, True, True, False),
    (70, 64, 16, True, True, False, True, True),
    (9, 40, 2, True, False, False, False, True),
    (33, 129, 7, False, True, False, True, False),
    (0, 8, 2, True, True, True, True, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_are_the_plain_form(on_gpu, case):
    rows, columns, rank, mult, add, both, of_products, energy = case
    products = [normal(i, rows, columns).requires_grad_(of_products) for i in range(1 + both)]
    weights = weights_of(rank, columns, mult, add, 3)[: 2 + 2 * both]
    inputs = [*products, normal(2, rows, rank).requires_grad_(), *weights]
    act = modulated_product if both else modulated
    assert_same(*compared(on_gpu, lambda: gradients(act, inputs, form_of(0.4, 0.3), energy)))


def test_a_target_may_lack_what_the_other_has(on_gpu):
    inputs = [normal(i, 20, 40).requires_grad_() for i in range(2)]
    inputs += [normal(2, 20, 4).requires_grad_(), *weights_of(4, 40, True, True, 3)]
    inputs[4] = inputs[5] = None  # B of gate and M of up
    act = lambda: gradients(modulated_product, inputs, form_of(0.5, 0.3), True)  # noqa: E731
    assert_same(*compared(on_gpu, act))


def test_the_teachers_product_comes_out_of_the_same_pass(on_gpu):
    gate, up, of_gate, of_up = (normal(i, 20, 40) for i in range(4))
    weights = [w.detach() for w in weights_of(4, 40, True, True, 3)]

    def act() -> tuple[Tensor, ...]:
        out, taught, low = of_gate.clone(), of_up.clone(), LowRank(normal(4, 20, 4), weights, form_of(0.5, 0.3))
        return product_forward(gate, up, low, out, taught), out, taught

    computed, plain = compared(on_gpu, act)
    assert_same(computed, plain)
    assert_same((computed[2],), (F.silu(of_gate) * of_up,))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["gate", "up", "z", "M"])
def test_a_bad_number_stays_where_the_plain_form_has_it(on_gpu, value, where):
    inputs: list[Any] = [normal(i, 30, 70).requires_grad_() for i in range(2)]
    inputs += [normal(2, 30, 5).requires_grad_(), *weights_of(5, 70, True, True, 3)]
    with torch.no_grad():
        inputs[["gate", "up", "z", "M"].index(where)].view(-1)[6] = value
    act = lambda: gradients(modulated_product, inputs, form_of(0.5, 0.3), True)  # noqa: E731
    for one, other in zip(*compared(on_gpu, act), strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        assert_same((one.nan_to_num(0, 0, 0),), (other.nan_to_num(0, 0, 0),))
