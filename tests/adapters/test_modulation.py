import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from npt.adapters.layer import modulate, modulation_energy, multiplier
from npt.config import MULT_FORMS, NPTConfig

FORMS = pytest.mark.parametrize(
    ("mult", "add"), [(True, True), (True, False), (False, True), (False, False)]
)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def form_with(mult_bound: float, additive_scale: float) -> NPTConfig:
    return NPTConfig(mult_bound=mult_bound, additive_scale=additive_scale)


def modulate_reference(
    y: Tensor,
    a: Tensor,
    A: Tensor,
    M: Tensor | None,
    B: Tensor | None,
    mult_bound: float,
    additive_scale: float,
) -> Tensor:
    """Return the formula of the module, one token and channel at a time, in fp64."""
    flat_y, flat_a = y.reshape(-1, y.shape[-1]).double(), a.reshape(-1, a.shape[-1]).double()
    out = torch.empty_like(flat_y)
    for token in range(flat_y.shape[0]):
        z = A.double() @ flat_a[token]
        for channel in range(flat_y.shape[1]):
            value = flat_y[token, channel]
            if M is not None:
                value = value * (1 + mult_bound * (2 * torch.sigmoid(M[channel].double() @ z) - 1))
            if B is not None:
                value = value + additive_scale * (B[channel].double() @ z)
            out[token, channel] = value
    return out.reshape(y.shape)


@pytest.mark.parametrize("mult_bound", [0.1, 0.5, 0.9])
def test_multiplier_is_exactly_one_at_zero(mult_bound):
    assert torch.equal(multiplier(torch.zeros(7), mult_bound), torch.ones(7))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
@example([1e30, -1e30])
@example([math.inf, -math.inf])
def test_multiplier_lies_within_its_bounds_for_any_input(values):
    m = multiplier(torch.tensor(values, dtype=torch.float32), 0.5)
    assert ((m >= 0.5) & (m <= 1.5)).all()


@settings(deadline=None, max_examples=100)
@given(st.floats(1e-3, 0.999), st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=20))
def test_multiplier_is_the_scaled_sigmoid_of_the_design(mult_bound, values):
    u = torch.tensor(values, dtype=torch.float32)
    expected = 1 + mult_bound * (2 * torch.sigmoid(u.double()) - 1)
    # default tolerance of fp32: one tanh, one product and one sum, each rounded once
    assert_close(multiplier(u, mult_bound), expected.float())


@settings(deadline=None, max_examples=100)
@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
@example(1 - 1e-9)
@example(math.nextafter(1, 0))
def test_every_accepted_bound_keeps_the_multiplier_above_zero(mult_bound):
    try:
        NPTConfig(mult_bound=mult_bound)
    except ValueError:
        return
    assert (multiplier(torch.tensor([-1e30, -40.0]), mult_bound) > 0).all()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    shape=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    rank=st.integers(1, 4),
    hidden=st.integers(1, 6),
    out=st.integers(1, 5),
    mult_bound=st.floats(0.05, 0.95),
    additive_scale=st.floats(0.01, 2.0),
    mult=st.booleans(),
    add=st.booleans(),
)
def test_modulate_equals_the_slow_reference(
    seed, shape, rank, hidden, out, mult_bound, additive_scale, mult, add
):
    y, a = normal(seed, *shape, out), normal(seed + 1, *shape, hidden)
    A, M, B = (
        normal(seed + 2, rank, hidden),
        normal(seed + 3, out, rank),
        normal(seed + 4, out, rank),
    )
    got, m, s = modulate(
        y, a @ A.T, M if mult else None, B if add else None, form_with(mult_bound, additive_scale)
    )
    expected = modulate_reference(
        y, a, A, M if mult else None, B if add else None, mult_bound, additive_scale
    )
    # default tolerance of fp32 against fp64: sums of at most 6 and then 4 terms of order one
    assert_close(got, expected.float())
    assert (m is not None, s is not None) == (mult, add)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_product_is_modulated_in_fp32_and_rounded_once(dtype, mult, add):
    y, z = normal(0, 5, 8).to(dtype), normal(1, 5, 3)
    M, B = normal(2, 8, 3) if mult else None, normal(3, 8, 3) if add else None
    got, m, s = modulate(y, z, M, B, form_with(0.5, 0.1))
    assert got.dtype == dtype
    assert torch.equal(got, modulate(y.float(), z, M, B, form_with(0.5, 0.1))[0].to(dtype))
    assert all(term is None or term.dtype == torch.float32 for term in (m, s))


@FORMS
def test_gradients_are_those_of_finite_differences(mult, add):
    inputs = [
        normal(i, *shape, dtype=torch.float64).requires_grad_()
        for i, shape in enumerate([(3, 4), (3, 2), (4, 2), (4, 2)])
    ]

    def output(y, z, M, B):
        return modulate(y, z, M if mult else None, B if add else None, form_with(0.5, 0.3))[0]

    torch.autograd.gradcheck(output, inputs)


@pytest.mark.parametrize("scale", [1e3, 1e15, 1e30])
def test_gradients_through_a_saturated_multiplier_stay_finite(scale):
    y, z = (
        normal(0, 4, 6).requires_grad_(),
        torch.tensor([[scale], [-scale], [1.0], [0.0]]).requires_grad_(),
    )
    M = (torch.sign(normal(1, 6, 1)) * scale).requires_grad_()
    out, m, _ = modulate(y, z, M, None, form_with(0.5, 0.1))
    assert ((m == 0.5) | (m == 1.5) | (m == 1.0)).all()
    out.sum().backward()
    for gradient in (y.grad, z.grad, M.grad):
        assert torch.isfinite(gradient).all()
    assert torch.equal(y.grad, m)  # a saturated channel is scaled, never switched off


def test_energy_is_the_sum_over_targets_of_the_mean_over_channels():
    m, s, other = 1 + normal(0, 2, 3, 4), normal(1, 2, 3, 4), normal(2, 2, 3, 7)
    got = modulation_energy([(m, s), (None, other), (None, None)])
    expected = torch.zeros(2, 3)
    for b in range(2):
        for t in range(3):
            expected[b, t] += sum((float(x) - 1) ** 2 for x in m[b, t]) / 4
            expected[b, t] += sum(float(x) ** 2 for x in s[b, t]) / 4
            expected[b, t] += sum(float(x) ** 2 for x in other[b, t]) / 7
    # default tolerance of fp32: the same few additions in another order
    assert_close(got, expected)


def test_energy_is_zero_for_m_of_one_and_absent_without_terms():
    assert torch.equal(modulation_energy([(torch.ones(2, 5), None)]), torch.zeros(2))
    assert modulation_energy([]) is None
    assert modulation_energy([(None, None)]) is None


def form_of(form: str, u: torch.Tensor, mult_bound: float = 0.5) -> torch.Tensor:
    """m as `modulate` gives it, by products of one number each."""
    config = NPTConfig(mult_form=form, mult_bound=mult_bound if form == "sigmoid" else 0.5)
    _, m, _ = modulate(torch.ones(len(u), 1), u.unsqueeze(-1), torch.ones(1, 1), None, config)
    assert m is not None
    return m.squeeze(-1)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(MULT_FORMS),
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20),
    st.floats(0.01, 0.999),
)
@example("one_plus_tanh", [-1e6, 1e6], 0.5)
def test_every_form_stays_in_its_range_and_grows_with_its_argument(form, values, mult_bound):
    u = torch.tensor(sorted(values), dtype=torch.float32)
    m = form_of(form, u, mult_bound)
    config = NPTConfig(mult_form=form, mult_bound=mult_bound if form == "sigmoid" else 0.5)
    middle, half = config.multiplier_spread
    low, high = middle - half, middle + half
    # beta is rounded to fp32 in the range as in the multiplier, at numbers below 2
    ulp = torch.finfo(torch.float32).eps * 2
    assert (m >= low - ulp).all() and (m <= high + ulp).all()
    assert (m.diff() >= 0).all()


@pytest.mark.parametrize(
    ("form", "at_start", "ends"),
    [
        ("sigmoid", 1.0, (0.5, 1.5)),
        ("half_sigmoid", 0.75, (0.5, 1.0)),
        ("one_plus_tanh", 1.0, (0.0, 2.0)),
        ("unbounded", 1.0, (-99.0, 101.0)),
    ],
)
def test_each_form_starts_and_ends_where_it_is_known_to(form, at_start, ends):
    assert form_of(form, torch.tensor([0.0, -100.0, 100.0])).tolist() == [at_start, *ends]
