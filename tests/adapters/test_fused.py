"""The fused forms against the plain ones, and what they keep."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from npt.adapters import trained
from npt.adapters.layer import modulate, modulation_energy
from npt.adapters.products import Modulation, Product
from npt.config import NPTConfig

Weights = tuple[Tensor | None, Tensor | None]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def form_of(mult_bound: float, additive_scale: float) -> NPTConfig:
    return NPTConfig(mult_bound=mult_bound, additive_scale=additive_scale)


def modulation_of(form: NPTConfig, z: Tensor, products: Any, weights: Any) -> Modulation:
    """What is in use for z; weights: M and B of each product in turn."""
    modulated = map(Product, products, weights[::2], weights[1::2])
    return trained._backend(z)(z, form, list(modulated))


class ByHand(torch.autograd.Function):
    """The modulation of one product, or of gate and up with what follows: parts of `_MLP`."""

    @staticmethod
    def forward(ctx: Any, form: NPTConfig, z: Tensor, count: int, *tensors: Any) -> Any:
        products, weights = tensors[:count], tensors[count:]
        out = torch.empty_like(products[0])
        energy = modulation_of(form, z, products, weights).forward(out)
        ctx.form, ctx.count = form, count
        ctx.save_for_backward(z, *tensors)
        ctx.set_materialize_grads(False)
        return out, energy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_energy: Tensor | None) -> Any:
        z, *tensors = ctx.saved_tensors
        products, weights = tensors[: ctx.count], tensors[ctx.count :]
        into = [torch.empty_like(product) for product in products]
        modulation = modulation_of(ctx.form, z, products, weights)
        grad_z, grads = modulation.backward(grad, grad_energy, into)
        return None, grad_z, None, *into, *grads


def modulated_product(
    gate: Tensor, up: Tensor, z: Tensor, gate_weights: Weights, up_weights: Weights, form: NPTConfig
) -> tuple[Tensor, Tensor]:
    return ByHand.apply(form, z, 2, gate, up, *gate_weights, *up_weights)  # type: ignore[return-value]


def plain_product(
    gate: Tensor, up: Tensor, z: Tensor, gate_weights: Weights, up_weights: Weights, form: NPTConfig
) -> tuple[Tensor, Tensor]:
    """As automatic differentiation would have it."""
    gate, *gate_terms = modulate(gate, z, *gate_weights, form)
    up, *up_terms = modulate(up, z, *up_weights, form)
    energy = modulation_energy([tuple(gate_terms), tuple(up_terms)])
    return F.silu(gate) * up, torch.zeros(len(z), dtype=z.dtype) if energy is None else energy


def modulated(y: Tensor, z: Tensor, weights: Weights, form: NPTConfig) -> tuple[Tensor, Tensor]:
    return ByHand.apply(form, z, 1, y, *weights)  # type: ignore[return-value]


def plain_modulated(
    y: Tensor, z: Tensor, weights: Weights, form: NPTConfig
) -> tuple[Tensor, Tensor]:
    y, *terms = modulate(y, z, *weights, form)
    energy = modulation_energy([tuple(terms)])
    return y, torch.zeros(len(z), dtype=z.dtype) if energy is None else energy


def weights_of(
    rank: int, width: int, mult: bool, add: bool, seed: int, **own: Any
) -> list[Tensor | None]:
    """M and B of gate, then of up."""
    return [
        normal(seed + i, width, rank, **own).requires_grad_() if wanted else None
        for i, wanted in enumerate([mult, add, mult, add])
    ]


def gradients(
    function: Any, inputs: list[Tensor | None], form: NPTConfig, regularised: bool, seed: int = 0
) -> tuple[Tensor, ...]:
    """Result, energy, and the gradient of every tensor that asks for one, of a loss that depends on
    both.
    """
    out, energy = function(inputs[0], *_grouped(inputs), form)
    loss = (out * normal(seed, *out.shape, dtype=out.dtype)).sum()
    if regularised:
        loss = loss + (energy * normal(seed + 1, *energy.shape, dtype=out.dtype)).sum()
    asked = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = (
        torch.autograd.grad(loss, asked, allow_unused=True)
        if loss.requires_grad
        else [None] * len(asked)
    )
    return (
        out.detach(),
        energy.detach(),
        *(torch.zeros_like(t) if g is None else g for g, t in zip(found, asked, strict=True)),
    )


def _grouped(inputs: list[Any]) -> tuple[Any, ...]:
    """gate, [up,] z, M, B, [M, B] -> [up,] z, (M, B)[, (M, B)]."""
    if len(inputs) == 4:
        return inputs[1], tuple(inputs[2:])
    return inputs[1], inputs[2], tuple(inputs[3:5]), tuple(inputs[5:])


def assert_same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        # fp32 sums of up to some hundred terms, in blocks where the other has one sum; sizes that
        # cancel are measured by the largest entry
        scale = float(other.abs().max()) if other.numel() else 0.0
        assert_close(one, other, rtol=1e-4, atol=2e-6 * max(scale, 1.0))


sizes = {
    "seed": st.integers(0, 2**30),
    "rows": st.integers(0, 9),
    "width": st.integers(1, 12),
    "rank": st.integers(1, 4),
}
forms = st.builds(form_of, st.floats(0.05, 0.95), st.floats(0.01, 2.0))


@settings(deadline=None, max_examples=100)
@given(
    **sizes,
    form=forms,
    regularised=st.booleans(),
    mult=st.booleans(),
    add=st.booleans(),
    block=st.integers(1, 40),
    of_products=st.booleans(),
    both=st.booleans(),
)
def test_products_are_the_plain_forms_in_any_blocks(
    seed, rows, width, rank, form, regularised, mult, add, block, of_products, both
):
    """gate and up together, or one product by itself."""
    products = [normal(seed + i, rows, width).requires_grad_(of_products) for i in range(1 + both)]
    z, weights = normal(seed + 2, rows, rank), weights_of(rank, width, mult, add, seed)
    inputs = [*products, z.requires_grad_(), *weights[: 2 + 2 * both]]
    by_hand, plain = (modulated_product, plain_product) if both else (modulated, plain_modulated)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(trained.BLOCK, "cpu", block)
        computed = gradients(by_hand, inputs, form, regularised)
    assert_same(computed, gradients(plain, inputs, form, regularised))


@pytest.mark.parametrize("scale", [1e3, 1e15, 1e30])
def test_gradients_of_a_saturated_multiplier_are_those_of_its_bound(scale):
    y, z = (
        normal(0, 4, 6).requires_grad_(),
        torch.tensor([[scale], [-scale], [1.0], [0.0]]).requires_grad_(),
    )
    mult = (torch.sign(normal(1, 6, 1)) * scale).requires_grad_()
    out, _ = modulated(y, z, (mult, None), form_of(0.5, 0.1))
    out.sum().backward()
    assert all(torch.isfinite(g).all() for g in (y.grad, z.grad, mult.grad))
    assert set(y.grad.unique().tolist()) <= {0.5, 1.0, 1.5}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", range(7))
def test_a_bad_number_anywhere_comes_out(value, where):
    inputs: list[Any] = [
        normal(i, *shape).requires_grad_()
        for i, shape in enumerate([(3, 4), (3, 4), (3, 2), *[(4, 2)] * 4])
    ]
    with torch.no_grad():
        inputs[where].view(-1)[1] = value
    found = gradients(modulated_product, inputs, form_of(0.5, 0.3), True)
    expected = gradients(plain_product, inputs, form_of(0.5, 0.3), True)
    for one, other in zip(found, expected, strict=True):
        assert bool(torch.isfinite(one).all()) == bool(torch.isfinite(other).all())
    assert not all(torch.isfinite(part).all() for part in found)


def saved_by(act: Any) -> list[Tensor]:
    """Tensors that a graph keeps for its backward, each once."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = act()
    assert result[0].requires_grad
    return list(kept.values())


def test_nothing_is_kept_but_products_code_and_weights():
    gate, up, z = normal(0, 30, 40), normal(1, 30, 40), normal(2, 30, 3).requires_grad_()
    weights = weights_of(3, 40, True, True, 5)
    form = form_of(0.5, 0.1)
    kept = saved_by(
        lambda: modulated_product(gate, up, z, tuple(weights[:2]), tuple(weights[2:]), form)
    )
    assert {t.data_ptr() for t in kept} == {t.data_ptr() for t in (gate, up, z, *weights)}
    plain = saved_by(
        lambda: plain_product(gate, up, z, tuple(weights[:2]), tuple(weights[2:]), form)
    )
    assert sum(t.numel() for t in plain if t.shape == gate.shape) > 10 * gate.numel()


def test_inputs_are_not_written_to_and_any_strides_will_do():
    base = normal(0, 6, 10)
    gate, up, z = base[:, ::2], base.t()[:5, :6].t(), normal(1, 2, 6).t().requires_grad_()
    weights = [w for w in weights_of(2, 5, True, True, 3) if w is not None]
    before = [t.detach().clone() for t in (base, z, *weights)]
    out, _ = modulated_product(
        gate, up, z, tuple(weights[:2]), tuple(weights[2:]), form_of(0.5, 0.3)
    )
    out.sum().backward()  # the gradient that comes in is one number, expanded
    expected, _ = plain_product(
        gate, up, z, tuple(weights[:2]), tuple(weights[2:]), form_of(0.5, 0.3)
    )
    assert_close(out, expected)  # default tolerance of fp32
    assert all(torch.equal(t.detach(), b) for t, b in zip((base, z, *weights), before, strict=True))
