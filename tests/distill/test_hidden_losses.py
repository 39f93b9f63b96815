"""Hidden-state losses against their formulas token by token, their gradients, and what they must
and must not notice.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from npt.config import LOSSES
from npt.distill.hidden_losses import HIDDEN_LOSSES, direction, nmse_per_token

N, D = 5, 7

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "nmse": lambda o, t, h: nmse_per_token(o, t),
    "nmse_update": nmse_per_token,
    "direction": lambda o, t, h: direction(o, t),
}
every = pytest.mark.parametrize("name", FUNCTIONS)


def states(
    seed: int = 0, rows: int = N, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """o, t and h."""
    generator = torch.Generator().manual_seed(seed)
    o, t, h = (
        scale * torch.randn(rows, D, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(3)
    )
    return o.requires_grad_(), t, h


def reference(name: str, o: list[float], t: list[float], h: list[float]) -> float:
    """One token's loss, channel by channel."""
    error = [a - b for a, b in zip(o, t, strict=True)]
    squared = sum(e * e for e in error)
    length = [math.sqrt(sum(x * x for x in v)) for v in (o, t)]
    cos = sum(a * b for a, b in zip(o, t, strict=True)) / (length[0] * length[1])
    return {
        "nmse": squared / length[1] ** 2,
        "nmse_update": squared / sum((b - c) ** 2 for b, c in zip(t, h, strict=True)),
        "direction": 2 * (1 - cos) / D,
    }[name]


def expected(name: str, o: Tensor, t: Tensor, h: Tensor) -> list[float]:
    return [reference(name, *rows) for rows in zip(o.tolist(), t.tolist(), h.tolist(), strict=True)]


def value(of: Tensor) -> float:
    return of.sum().item()


def gradient_of(name: str, o: Tensor, t: Tensor, h: Tensor) -> Tensor:
    return torch.autograd.grad(FUNCTIONS[name](o, t, h).sum(), o)[0]


@every
@pytest.mark.parametrize("scale", [1e-2, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_formulas_in_fp32_whatever_the_input(name, scale, dtype) -> None:
    o, t, h = states(scale=scale, dtype=dtype)
    losses = FUNCTIONS[name](o, t, h)
    assert (losses.dtype, losses.shape) == (torch.float32, (N,))
    # fp32 sums of 7 terms; squares of 300 and more overflow fp16, so a computation in the input's
    # dtype would show.
    assert losses.tolist() == pytest.approx(expected(name, o, t, h), rel=1e-5)
    assert torch.isfinite(gradient_of(name, o, t, h)).all()


@every
def test_fp64_stays_fp64_and_gradients_equal_finite_differences(name) -> None:
    o, t, h = states(dtype=torch.float64)
    losses = FUNCTIONS[name](o, t, h)
    assert losses.dtype == torch.float64
    assert losses.tolist() == pytest.approx(expected(name, o, t, h), rel=1e-12)
    assert torch.autograd.gradcheck(lambda o: FUNCTIONS[name](o, t, h), o)


@every
def test_the_setting_names_the_function(name) -> None:
    assert set(LOSSES) == set(FUNCTIONS)
    o, t, h = states()
    assert torch.equal(HIDDEN_LOSSES[name](o, t, h), FUNCTIONS[name](o, t, h))


@every
def test_the_teacher_gets_no_gradient(name) -> None:
    o, t, h = states()
    t.requires_grad_()
    h.requires_grad_()
    FUNCTIONS[name](o, t, h).sum().backward()
    assert t.grad is None and h.grad is None and o.grad.any()


@every
@pytest.mark.parametrize("zero", ["student", "teacher", "both", "update"])
def test_states_of_zeros_have_finite_losses_and_gradients(name, zero) -> None:
    o, t, h = states()
    o, t = (
        torch.zeros_like(x) if zero in (who, "both") else x.detach()
        for who, x in (("student", o), ("teacher", t))
    )
    h = t.clone() if zero == "update" else h
    o.requires_grad_()
    assert torch.isfinite(FUNCTIONS[name](o, t, h)).all()
    assert torch.isfinite(gradient_of(name, o, t, h)).all()


@every
def test_equal_states_and_no_tokens_have_no_loss_and_no_gradient(name) -> None:
    o, t, h = states(rows=0, dtype=torch.float16)
    assert value(FUNCTIONS[name](o, t, h)) == 0.0
    assert gradient_of(name, o, t, h).shape == (0, D)
    _, t, h = states()
    o = t.clone().requires_grad_()
    assert value(FUNCTIONS[name](o, t, h)) == 0.0
    assert not gradient_of(name, o, t, h).any()


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("who", ["student", "teacher"])
def test_a_bad_number_shows_in_the_loss_of_its_token_alone(name, bad, who) -> None:
    o, t, h = states()
    with torch.no_grad():
        (o if who == "student" else t)[2, 3] = bad
    assert not torch.isfinite(FUNCTIONS[name](o, t, h)[2])
    others = [0, 1, 3, 4]
    clean, t_clean, h_clean = states()
    assert torch.equal(
        gradient_of(name, o, t, h)[others], gradient_of(name, clean, t_clean, h_clean)[others]
    )


@every
def test_states_whose_square_overflows_never_count_as_agreement(name) -> None:
    """Sizes of 1e20 are finite, their squares are not."""
    _, t, h = states()
    total = value(FUNCTIONS[name](-1e20 * t, 1e20 * t, h))
    assert not math.isfinite(total) or total > 1


def test_direction_is_blind_to_length_and_the_others_are_not() -> None:
    _, t, h = states(seed=4)
    o = (t + 0.3 * h).requires_grad_()
    twice = (2 * o).detach().requires_grad_()
    # Scaled by a power of two, nothing is rounded differently.
    assert torch.equal(direction(twice, t), direction(o, t))
    assert torch.equal(2 * gradient_of("direction", twice, t, h), gradient_of("direction", o, t, h))
    for name in set(FUNCTIONS) - {"direction"}:
        assert value(FUNCTIONS[name](twice, t, h)) > 1.5 * value(FUNCTIONS[name](o, t, h)), name
    # A student twice as long as its teacher, perfect by `direction`, is as far off as one of zeros.
    assert value(direction(2 * t, t)) == 0.0
    assert value(nmse_per_token(2 * t, t)) == pytest.approx(N)


def test_the_update_form_asks_the_same_of_a_layer_that_adds_little() -> None:
    generator = torch.Generator().manual_seed(6)
    h, update, error = (
        torch.randn(N, D, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    for size in (1.0, 1e-3):
        t = h + size * update
        o = t + 0.1 * size * error
        share = value(nmse_per_token(o, t, h))
        assert share == pytest.approx(
            float((0.01 * error.square().sum(-1) / update.square().sum(-1)).sum()), rel=1e-9
        )
        assert (value(nmse_per_token(o, t)) < 1e-4 * share) == (size == 1e-3)
