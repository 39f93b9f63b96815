"""A budget of ranks: spent whole, and nowhere worth more than where it went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npt.calibration.calibrate import check_budget, spend
from npt.errors import ConfigError

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


@pytest.mark.parametrize("budget", [2, 13])
def test_a_budget_that_starves_a_layer_or_cannot_be_spent_is_refused(budget) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            f"--rank_budget is {budget}; 3 converted layers of a model of hidden size 4 take 3 to"
            " 12 ranks"
        ),
    ):
        check_budget(budget, layers=3, hidden_size=4)
