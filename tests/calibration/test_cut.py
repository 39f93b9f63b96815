"""The cut of one layer: no other of its rank costs less, and at R = D nothing is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from npt.calibration.cut import Cut, spend

D = 12


def covariance(seed: int, rows: int = 40, exponent: float = 1.0) -> Tensor:
    """Of random rows whose directions have sizes from 1 to 10^-exponent."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, D, generator=draw, dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(D, D, generator=draw, dtype=torch.float64))[0]
    x = x * torch.logspace(0, -exponent, D, dtype=torch.float64) @ turned
    return x.T @ x / rows


def cost(code: Tensor, back: Tensor, c: Tensor, s: Tensor) -> float:
    """The mean of e'S e / 2 over attention outputs of covariance C, e = a - P A a."""
    left = torch.eye(D, dtype=torch.float64) - back.double() @ code.double()
    return float(0.5 * torch.trace(left.T @ s @ left @ c))


@given(seed=st.integers(0, 200), rank=st.integers(1, D))
def test_no_other_cut_of_its_rank_costs_less(seed: int, rank: int) -> None:
    c, s = covariance(seed), covariance(seed + 1000)
    cut = Cut.of(c, s)
    code, back = cut.code[:rank], cut.back[:, :rank]
    least = cost(code, back, c, s)
    # fp32 directions, and costs that are differences of numbers near 1
    assert least == pytest.approx(cut.cost(rank), rel=1e-3, abs=1e-6)
    draw = torch.Generator().manual_seed(seed)
    for size in (1e-2, 1.0):
        other = code + size * torch.randn(rank, D, generator=draw) * code.abs().mean()
        across = c @ other.double().T
        way = torch.linalg.solve(other.double() @ across, across, left=False)
        assert cost(other, way, c, s) >= least * (1 - 1e-6) - 1e-7


@given(seed=st.integers(0, 200), rank=st.integers(1, D))
def test_the_way_back_is_least_squares_and_the_loss_is_what_is_left(seed: int, rank: int) -> None:
    c, s = covariance(seed), covariance(seed + 1000)
    cut = Cut.of(c, s)
    code = cut.code[:rank].double()
    expected = torch.linalg.solve(code @ c @ code.T, code @ c).T
    # fp32 results
    assert_close(cut.back[:, :rank].double(), expected, rtol=1e-4, atol=1e-5)
    left = torch.eye(D, dtype=torch.float64) - cut.back[:, :rank].double() @ code
    lost = float(torch.trace(left @ c @ left.T) / torch.trace(c))
    assert cut.lost[rank] == pytest.approx(lost, rel=1e-3, abs=1e-6)


def test_all_directions_lose_nothing_even_where_none_was_seen() -> None:
    """Four rows span four directions of twelve; the others come back as well."""
    cut = Cut.of(covariance(0, rows=4), covariance(1, rows=3))
    a = torch.randn(D, 50, generator=torch.Generator().manual_seed(2))
    # numbers of a condition of 300 in fp32
    assert_close(cut.back @ (cut.code @ a), a, rtol=1e-4, atol=1e-4)
    assert cut.lost[0] == 1.0 and cut.lost[D] == pytest.approx(0.0, abs=1e-6)
    assert cut.cost(D) == 0.0 and cut.worth == sorted(cut.worth, reverse=True)


LAYERS = st.dictionaries(
    st.integers(0, 40),
    st.lists(st.floats(0, 1e3, allow_nan=False), min_size=4, max_size=4).map(
        lambda values: sorted(values, reverse=True)
    ),
    min_size=1,
    max_size=6,
)


@given(worth=LAYERS, share=st.floats(0, 1))
def test_a_budget_is_spent_whole_and_no_rank_is_worth_more_elsewhere(worth, share) -> None:
    budget = len(worth) + round(share * 3 * len(worth))
    ranks = spend(budget, worth)
    assert ranks.keys() == worth.keys()
    assert sum(ranks.values()) == budget and all(1 <= rank <= 4 for rank in ranks.values())
    last = [worth[index][rank - 1] for index, rank in ranks.items() if rank > 1]
    following = [worth[index][rank] for index, rank in ranks.items() if rank < 4]
    assert not last or not following or min(last) >= max(following)
