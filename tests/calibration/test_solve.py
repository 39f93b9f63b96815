"""Solving one layer: directions, linear start and Gauss-Newton rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import npt
from npt.adapters.converted import npt_layers
from npt.calibration import solve as solving
from npt.calibration.rows import Rows
from npt.calibration.solve import (
    Problem,
    errors,
    gauss_newton_step,
    linear_start,
    round_share,
    solve,
    worth,
)
from npt.calibration.tail import Parameters, Tail

TOKENS, HELDOUT = 600, 100
WIDTHS = {"gate": 128, "up": 128, "down": 64}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(values: Tensor) -> Rows:
    made = Rows(*values.shape)
    made.write(0, values)
    return made


def problem_of(
    load_model: Callable[..., Any], target: Callable[[Tail, Tensor, Tensor], Tensor], **form: Any
) -> tuple[Problem, Parameters]:
    """Layer 1 of the random Llama on random tokens, with the outputs that `target` makes, and a
    code of unit variance.
    """
    model = load_model("nf4")
    npt.attach(model, npt.NPTConfig(**{"layers": "1", "rank": 6, **form}))
    tail = Tail(npt_layers(model)[0][1])
    h, a = normal(TOKENS, 64, seed=1), normal(TOKENS, 64, seed=2)
    code = torch.linalg.qr(normal(64, 6, seed=3))[0].T.contiguous()
    problem = Problem(tail, rows(h), rows(a), rows(target(tail, h, a)), HELDOUT, torch.eye(64))
    return problem, {**tail.form(6), "A": code}


def teacher(tail: Tail, h: Tensor, a: Tensor) -> Tensor:
    gate, up = tail.products(h + a)
    return h + a + (torch.nn.functional.silu(gate) * up) @ tail.down.T


def adapted(tail: Tail, h: Tensor, a: Tensor) -> Tensor:
    """Return outputs of an adapter that starts from a slightly different code."""
    p = {
        **tail.form(6),
        "A": torch.linalg.qr(normal(64, 6, seed=3))[0].T + 0.05 * normal(6, 64, seed=4),
    }
    p = {
        name: value if name == "A" else 0.1 * normal(*value.shape, seed=5 + i)
        for i, (name, value) in enumerate(p.items())
    }
    return h + tail.at(p, h, a).output


def multiplied(tail: Tail, h: Tensor, a: Tensor) -> Tensor:
    """Return outputs of an adapter with a multiplicative term and no other."""
    p = {
        "A": torch.linalg.qr(normal(64, 6, seed=3))[0].T,
        **{f"M.{t}": 0.3 * normal(w, 6, seed=8) for t, w in WIDTHS.items()},
    }
    return h + tail.at(p, h, a).output


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 8))
def test_code_directions_are_whitened_and_ordered_by_worth(seed, width) -> None:
    root, score = (normal(width + 4, width, seed=seed + i).double() for i in range(2))
    covariance, sensitivity = root.T @ root / len(root), score.T @ score / len(score)
    values, directions = worth(covariance, sensitivity)
    assert torch.all(values[:-1] >= values[1:])
    torch.testing.assert_close(
        directions @ covariance @ directions.T,
        torch.eye(width, dtype=torch.float64),
        rtol=0,
        atol=1e-6,
    )
    # What all directions are worth together is what losing a altogether costs: E a'S a.
    torch.testing.assert_close(
        values.sum(), (covariance @ sensitivity).trace(), rtol=1e-6, atol=1e-9
    )


def test_what_an_adapter_can_do_is_found_by_the_rounds(load_model) -> None:
    problem, p = problem_of(load_model, adapted)
    form = {name: value for name, value in p.items() if name != "A"}
    solution = solve(problem, p["A"], form, rounds=6)
    assert solution.final.cost < 0.02 * solution.linear.cost < solution.floor.cost
    assert all(solution.parameters[name].any() for name in p)


def test_a_multiplication_is_found_by_a_multiplicative_term_alone(load_model) -> None:
    costs = {}
    for modulation in ("both", "additive"):
        problem, p = problem_of(load_model, multiplied, modulation=modulation)
        costs[modulation] = solve(
            problem, p["A"], {name: value for name, value in p.items() if name != "A"}, rounds=4
        ).final.cost
    assert costs["both"] < 0.05 * costs["additive"]


def test_rounds_never_make_the_held_out_cost_worse(load_model) -> None:
    problem, p = problem_of(load_model, teacher)
    form = {name: value for name, value in p.items() if name != "A"}
    found = [solve(problem, p["A"], form, rounds=rounds) for rounds in (0, 1, 3)]
    assert found[0].final == found[0].linear and found[0].rounds == 0
    assert found[0].final.cost < found[0].floor.cost
    assert found[1].final.cost < found[0].final.cost
    assert all(solution.final.cost <= solution.linear.cost for solution in found)
    assert not any(
        value.any() for name, value in found[0].parameters.items() if name.startswith("M.")
    )


def test_a_step_agrees_with_the_dense_normal_equations(load_model, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "TOKENS", 250)
    problem, p = problem_of(load_model, teacher, targets=("down",), modulation="additive")
    p = linear_start(problem, p, 1e-1)
    step = gauss_newton_step(problem, p, damping=1e-6, steps=400)
    h, a, t = next(problem.fit())
    at = problem.tail.at(p, h, a)
    names = list(p)
    columns = []
    for name in names:
        for i in range(p[name].numel()):
            unit = {other: torch.zeros_like(value) for other, value in p.items()}
            unit[name].view(-1)[i] = 1.0
            columns.append(problem.tail.pushed(p, unit, at).flatten())
    jacobian = torch.stack(columns, dim=1).double()
    exact = torch.linalg.lstsq(
        jacobian, (t - h - at.output).flatten().double().unsqueeze(1), driver="gelsd"
    ).solution
    found = torch.cat([step[name].flatten() for name in names]).double()
    residual = (t - h - at.output).flatten().double()
    best, reached = (
        float(residual.square().sum() - (residual - jacobian @ x).square().sum())
        for x in (exact.squeeze(1), found)
    )
    # Conjugate gradients in fp32 stop short of what a factorisation in fp64 finds, in the
    # directions that matter least.
    assert 0.95 * best <= reached <= best * (1 + 1e-9) and best > 0


def test_the_linear_start_is_ridge_regression(load_model) -> None:
    problem, zero = problem_of(load_model, teacher, targets=("gate",), modulation="additive")
    h, a, _ = next(problem.fit())
    z = (a @ zero["A"].T).double()
    difference = (problem.tail.products(h + a)[0] - problem.tail.products(h)[0]).double()
    damped = z.T @ z + 0.1 * (z.T @ z).diagonal().mean() * torch.eye(6, dtype=torch.float64)
    expected = torch.linalg.solve(damped, z.T @ difference).T.float()
    # The sums are over 500 tokens in fp32, then fp64.
    torch.testing.assert_close(
        linear_start(problem, zero, 0.1)["B.gate"], expected, rtol=1e-3, atol=1e-4
    )


def test_the_size_of_a_chunk_changes_nothing_but_rounding(load_model, monkeypatch) -> None:
    problem, p = problem_of(load_model, teacher)
    whole = errors(problem, linear_start(problem, p, 1e-2))
    monkeypatch.setattr(solving, "CHUNK", 37)
    pieces = errors(problem, linear_start(problem, p, 1e-2))
    assert pieces.cost == pytest.approx(whole.cost, rel=1e-4)  # fp32 products of other heights


def test_the_last_round_fits_all_tokens_and_none_fewer_than_a_quarter() -> None:
    assert [round_share(number, 4) for number in range(4)] == [0.25, 0.25, 0.5, 1.0]
    assert round_share(0, 1) == 1.0
