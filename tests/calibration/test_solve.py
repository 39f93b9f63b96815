"""Solving one layer: directions, linear start and descent."""

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
from npt.calibration.sensitivity import token_size
from npt.calibration.solve import (
    RIDGES,
    Problem,
    errors,
    linear_start,
    parameter_scale,
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
    solution = solve(problem, p["A"], form, rounds=40)
    assert solution.final.cost < 0.1 * solution.linear.cost < solution.floor.cost
    assert all(solution.parameters[name].any() for name in p)


def test_a_multiplication_is_found_by_a_multiplicative_term_alone(load_model) -> None:
    costs = {}
    for modulation in ("both", "additive"):
        problem, p = problem_of(load_model, multiplied, modulation=modulation)
        costs[modulation] = solve(
            problem, p["A"], {name: value for name, value in p.items() if name != "A"}, rounds=40
        ).final.cost
    assert costs["both"] < 0.2 * costs["additive"]


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


def test_a_unit_of_any_scaled_parameter_costs_about_one(load_model) -> None:
    """The scale is of a code of unit variance, and of the first chunk: here of all tokens."""
    problem, p = problem_of(load_model, teacher)
    p, _ = linear_start(problem, p)
    scale = parameter_scale(problem, p)
    h, a, _ = next(problem.fit_of(problem.h, problem.a, problem.t))
    z_root = (a @ p["A"].T).square().mean(dim=0).sqrt()
    at = problem.tail.at(p, h, a)
    for name in ("B.gate", "B.up", "B.down", "M.gate", "M.up", "M.down"):
        for row in (0, 17, 40):
            moved = p[name].clone()
            moved[row, 3] += 1e-3 * scale[name][row, 0] / z_root[3]
            change = problem.tail.at({**p, name: moved}, h, a).output - at.output
            # The product of the code's and the channel's variance for that of their product.
            assert 0.3 < float(change.square().sum(dim=-1).mean()) / 1e-6 < 3


def test_a_channel_that_is_all_but_dead_is_not_moved_far(load_model) -> None:
    problem, p = problem_of(load_model, teacher)
    problem.tail.down[:, 5] = 1e-12
    p, _ = linear_start(problem, p)
    scale = parameter_scale(problem, p)["B.up"]
    assert scale[5] == scale.max() < 100 * scale.median()


def test_a_descent_that_fits_noise_is_not_taken(load_model) -> None:
    """Held-out tokens that ask for the opposite: every step that fits the others costs there."""

    def opposed(tail: Tail, h: Tensor, a: Tensor) -> Tensor:
        t = teacher(tail, h, a)
        made = adapted(tail, h, a) - h - tail.at({**tail.form(6), "A": 0 * a[:6]}, h, a).output
        sign = torch.ones(TOKENS, 1)
        sign[-HELDOUT:] = -1
        return t + 3 * sign * made

    problem, p = problem_of(load_model, opposed, modulation="additive")
    form = {name: value for name, value in p.items() if name != "A"}
    solution = solve(problem, p["A"], form, rounds=3)
    assert solution.rounds == 0 and solution.final == solution.linear == solution.floor


def test_the_linear_start_is_ridge_regression(load_model) -> None:
    problem, zero = problem_of(load_model, teacher, targets=("gate",), modulation="additive")
    h, a, t = next(problem.fit_of(problem.h, problem.a, problem.t))
    p, ridge = linear_start(problem, zero)
    assert ridge in RIDGES
    size = token_size(t)
    z = (a @ zero["A"].T / size).double()
    changes = problem.tail.products(h + a)[0] - problem.tail.products(h)[0]
    difference = (changes / size).double()
    damped = z.T @ z + ridge * (z.T @ z).diagonal().mean() * torch.eye(6, dtype=torch.float64)
    expected = torch.linalg.solve(damped, z.T @ difference).T.float()
    # The sums are over 500 tokens in fp32, then fp64.
    torch.testing.assert_close(p["B.gate"], expected, rtol=1e-3, atol=1e-4)


def test_the_ridge_is_that_of_least_held_out_error(load_model, monkeypatch) -> None:
    problem, zero = problem_of(load_model, teacher, targets=("down",), modulation="additive")
    found = {}
    for ridge in RIDGES:
        monkeypatch.setattr(solving, "RIDGES", (ridge,))
        p, _ = linear_start(problem, zero)
        lacking = [
            ((t - h - problem.tail.at(p, h, a).output) / token_size(t)).square().sum()
            for h, a, t in problem.check()
        ]
        found[ridge] = float(sum(lacking))
    monkeypatch.setattr(solving, "RIDGES", RIDGES)
    assert linear_start(problem, zero)[1] == min(found, key=lambda ridge: found[ridge])


def test_the_size_of_a_chunk_changes_nothing_but_rounding(load_model, monkeypatch) -> None:
    problem, p = problem_of(load_model, teacher)
    whole = errors(problem, linear_start(problem, p)[0])
    monkeypatch.setattr(solving, "CHUNK", 37)
    pieces = errors(problem, linear_start(problem, p)[0])
    assert pieces.cost == pytest.approx(whole.cost, rel=1e-4)  # fp32 products of other heights


def test_a_token_of_any_size_weighs_as_much_as_another(load_model) -> None:
    """One output a thousand times the others', as of a first token, hardly moves the start."""

    def massive(tail: Tail, h: Tensor, a: Tensor) -> Tensor:
        t = teacher(tail, h, a)
        t[3] += 1000 * t[3]
        return t

    starts = []
    for target in (teacher, massive):
        problem, zero = problem_of(load_model, target, targets=("down",), modulation="additive")
        starts.append(linear_start(problem, zero)[0]["B.down"])
    assert (starts[1] - starts[0]).norm() < 0.2 * starts[0].norm()


def test_equal_seeds_give_equal_solutions_bit_for_bit(load_model) -> None:
    problem, p = problem_of(load_model, teacher)
    form = {name: value for name, value in p.items() if name != "A"}
    one, same, other = (solve(problem, p["A"], form, 1, seed).parameters for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["B.up"], other["B.up"])
