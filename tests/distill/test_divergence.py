"""NMSE and KL per token against fp64, and their gradients against finite differences."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from npt.distill.divergence import kl_of_logs, kl_per_token, nmse_per_token

N, D, V = 5, 7, 11


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nmse_reference(o: Tensor, t: Tensor) -> Tensor:
    return torch.stack(
        [((a - b) ** 2).sum() / (b**2).sum() for a, b in zip(o.double(), t.double(), strict=True)]
    )


def kl_reference(student: Tensor, teacher: Tensor) -> Tensor:
    log_p, log_q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


HIDDEN = normal(N, D, seed=2)


def update(o: Tensor, t: Tensor) -> Tensor:
    """The update form of the NMSE, with an h that belongs to neither."""
    return nmse_per_token(o, t, HIDDEN[: len(t)])


def update_reference(o: Tensor, t: Tensor) -> Tensor:
    rows = zip(o.double(), t.double(), HIDDEN.double()[: len(t)], strict=True)
    return torch.stack([((a - b) ** 2).sum() / ((b - c) ** 2).sum() for a, b, c in rows])


CASES = {
    "nmse": (nmse_per_token, nmse_reference, D),
    "update": (update, update_reference, D),
    "kl": (kl_per_token, kl_reference, V),
}
every = pytest.mark.parametrize("name", CASES)


@every
@pytest.mark.parametrize("scale", [1e-2, 1.0, 5.0])
def test_values_equal_fp64(name, scale) -> None:
    function, reference, width = CASES[name]
    student, teacher = normal(N, width, scale=scale), normal(N, width, seed=1, scale=scale)
    value = function(student, teacher)
    assert value.shape == (N,) and value.dtype == torch.float32
    # A KL is what two logarithms of size 1 leave over, so it is known to some 2^-24, hence the
    # absolute part.
    torch.testing.assert_close(value, reference(student, teacher).float(), rtol=1e-5, atol=1e-6)


@every
def test_gradients_equal_finite_differences(name) -> None:
    function, reference, width = CASES[name]
    student, teacher = normal(N, width).requires_grad_(), normal(N, width, seed=1)
    (gradient,) = torch.autograd.grad(function(student, teacher).sum(), student)
    step = 1e-5  # central differences of the fp64 reference: error of order step^2
    for row in range(N):
        for column in range(width):
            moved = torch.zeros(N, width, dtype=torch.float64)
            moved[row, column] = step
            base = student.detach().double()
            slope = (reference(base + moved, teacher) - reference(base - moved, teacher)).sum() / (
                2 * step
            )
            # the fp32 gradient's rounding
            assert float(gradient[row, column]) == pytest.approx(float(slope), rel=1e-4, abs=1e-6)


@every
def test_the_teacher_gets_no_gradient(name) -> None:
    function, _, width = CASES[name]
    student, teacher = normal(N, width).requires_grad_(), normal(N, width, seed=1).requires_grad_()
    function(student, teacher).sum().backward()
    assert teacher.grad is None and student.grad.any()


@every
def test_fp64_stays_fp64(name) -> None:
    function, reference, width = CASES[name]
    student, teacher = normal(N, width).double(), normal(N, width, seed=1).double()
    value = function(student, teacher)
    assert value.dtype == torch.float64
    torch.testing.assert_close(value, reference(student, teacher), rtol=1e-12, atol=0)


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_input_is_computed_in_fp32(name, dtype) -> None:
    function, reference, width = CASES[name]
    # Squares of 300 overflow fp16, so a computation in the input's dtype would show.
    student, teacher = (
        normal(N, width, scale=300.0).to(dtype),
        normal(N, width, seed=1, scale=300.0).to(dtype),
    )
    value = function(student, teacher)
    assert value.dtype == torch.float32
    # logits of 1e3 in fp32
    torch.testing.assert_close(value, reference(student, teacher).float(), rtol=1e-5, atol=1e-4)


@every
@given(seed=st.integers(0, 10**6), scale=st.floats(1e-3, 30.0))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_never_negative_and_zero_for_equality(name, seed, scale) -> None:
    function, _, width = CASES[name]
    student, teacher = (
        normal(N, width, seed=seed, scale=scale),
        normal(N, width, seed=seed + 1, scale=scale),
    )
    # a KL near 0 is rounded at 2^-24, to either side
    assert (function(student, teacher) >= -1e-6).all()
    assert torch.equal(function(teacher.clone(), teacher), torch.zeros(N))


@given(seed=st.integers(0, 10**6), power=st.integers(-20, 20))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_nmse_does_not_depend_on_the_scale_of_the_states(seed, power) -> None:
    o, t = normal(N, D, seed=seed), normal(N, D, seed=seed + 1)
    scale = 2.0**power  # a power of two, so that scaling rounds nothing
    assert torch.equal(nmse_per_token(scale * o, scale * t), nmse_per_token(o, t))


@given(seed=st.integers(0, 10**6), shift=st.floats(-50, 50))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_kl_does_not_depend_on_a_shift_of_the_logits(seed, shift) -> None:
    q, p = normal(N, V, seed=seed), normal(N, V, seed=seed + 1)
    # logits of 50 in fp32
    torch.testing.assert_close(
        kl_per_token(q + shift, p - shift), kl_per_token(q, p), rtol=1e-4, atol=1e-4
    )


def test_nmse_is_one_for_a_student_that_says_nothing_and_tokens_do_not_mix() -> None:
    o, t = torch.zeros(N, D), normal(N, D)
    torch.testing.assert_close(nmse_per_token(o, t), torch.ones(N))
    o[2] = float("nan")
    assert nmse_per_token(o, t).isnan().tolist() == [False, False, True, False, False]


def test_nmse_of_a_teacher_of_all_zeros_is_finite() -> None:
    value = nmse_per_token(torch.full((1, D), 1e-7), torch.zeros(1, D))
    assert torch.isfinite(value).all() and value > 0
    assert torch.equal(nmse_per_token(torch.zeros(1, D), torch.zeros(1, D)), torch.zeros(1))


def test_a_teacher_whose_square_overflows_is_never_reported_as_agreement() -> None:
    """States of 1e19 are finite, the sum of their squares is not: a student 1% off must not come
    out as perfect.
    """
    t = torch.full((1, D), 1e19)
    value = float(nmse_per_token(1.01 * t, t))
    # NaN, so that the micro-batch is refused, or the truth
    assert value != value or value == pytest.approx(1e-4, rel=1e-2)


def test_kl_of_certain_and_opposite_distributions_is_finite() -> None:
    p, q = torch.full((1, V), -200.0), torch.full((1, V), -200.0)
    p[0, 0], q[0, 1] = 200.0, 200.0
    assert float(kl_per_token(q, p)) == pytest.approx(400.0)


def test_what_is_impossible_adds_nothing_and_what_only_the_second_excludes_is_infinite() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.0, 0.5], [0.5, 0.25, 0.25]])
    q = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25], [0.5, 0.5, 0.0]])
    found = kl_of_logs(p.log(), q.log()).tolist()
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.5 * math.log(2), math.inf]
    assert found == pytest.approx(expected, rel=1e-6)  # fp32


def test_nothing_impossible_makes_a_nan_gradient_on_either_side() -> None:
    for excluded in ((0,), (1,), (0, 1)):
        logits = [normal(2, V, seed=5), normal(2, V, seed=6)]
        for side in excluded:
            logits[side][0, 3] = -math.inf
        for side in (0, 1):
            leaves = [x.clone().requires_grad_(i == side) for i, x in enumerate(logits)]
            value = kl_of_logs(*(torch.log_softmax(x, -1) for x in leaves))
            finite = torch.isfinite(value)
            assert finite.tolist() == [excluded != (1,), True] and not value.isnan().any()
            gradient = torch.autograd.grad(value[finite].sum(), leaves[side])[0]
            assert torch.isfinite(gradient[finite]).all()


def test_a_nan_among_the_logits_is_not_taken_for_something_impossible() -> None:
    for side in (0, 1):
        logits = [normal(2, V, seed=5), normal(2, V, seed=6)]
        logits[side][0, 3] = math.nan
        assert kl_per_token(*logits).isnan().tolist() == [True, False]


def test_kl_goes_from_teacher_to_student() -> None:
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 0.9 * torch.log(torch.tensor(1.8)) + 0.1 * torch.log(torch.tensor(0.2))
    torch.testing.assert_close(kl_per_token(q, p), expected.reshape(1))


@every
def test_no_tokens_give_no_values(name) -> None:
    function, _, width = CASES[name]
    assert function(torch.zeros(0, width), torch.zeros(0, width)).shape == (0,)
