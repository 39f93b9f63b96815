"""The seeded order: a permutation, a fair one, and the same one for ever."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.data import samples as samples_module
from npt.data.samples import Permutation, uniform

KEYS = 2000


def listed(n: int, key: str) -> list[int]:
    order = Permutation(n, key)
    return [order[i] for i in range(n)]


@pytest.mark.parametrize("key", ["0/documents", "schlüssel"])
def test_everything_comes_once(key) -> None:
    for n in range(1, 301):
        assert sorted(listed(n, key)) == list(range(n)), n


@settings(deadline=None, max_examples=15)
@given(n=st.integers(301, 3000), key=st.text(max_size=8))
def test_everything_comes_once_in_larger_orders(n, key) -> None:
    assert sorted(listed(n, key)) == list(range(n))


@settings(deadline=None, max_examples=100)
@given(n=st.integers(2**20, 2**60), key=st.text(max_size=8), data=st.data())
def test_a_huge_permutation_repeats_nothing(n, key, data) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=20, unique=True))
    order = Permutation(n, key)
    things = [order[position] for position in positions]
    assert len(set(things)) == len(positions)
    assert all(0 <= thing < n for thing in things)


@pytest.mark.parametrize("position", [-1, 5, 6, 2**40])
def test_a_position_outside_is_refused(position) -> None:
    with pytest.raises(IndexError, match=f"position {position} of an order of 5"):
        Permutation(5, "key")[position]


def test_an_order_of_nothing_is_empty() -> None:
    assert len(Permutation(0, "key")) == len(list(Permutation(0, "key"))) == 0


def test_the_key_decides() -> None:
    assert listed(100, "0/documents") == listed(100, "0/documents")
    orders = {tuple(listed(100, f"{seed}/{epoch}/0")) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("n", [2, 3, 5, 7, 10])
def test_every_thing_is_as_likely_at_every_position(n) -> None:
    counts = [[0] * n for _ in range(n)]
    for key in range(KEYS):
        for position, thing in enumerate(listed(n, str(key))):
            counts[position][thing] += 1
    error = math.sqrt(KEYS * (1 / n) * (1 - 1 / n))
    assert max(abs(count - KEYS / n) for row in counts for count in row) < 4 * error


def test_neighbours_are_not_kept_together() -> None:
    """Of n things shuffled fairly, neighbours lie (n + 1) / 3 apart on average, with variance (n +
    1)(n - 2) / 18.
    """
    n, orders = 1000, 5
    distances = [
        abs(a - b) for key in range(orders) for a, b in itertools.pairwise(listed(n, f"n{key}"))
    ]
    error = math.sqrt((n + 1) * (n - 2) / 18 / len(distances))
    assert abs(sum(distances) / len(distances) - (n + 1) / 3) < 4 * error


@pytest.mark.parametrize(
    ("n", "key", "expected"),
    [
        (1, "0/documents", [0]),
        (10, "0/documents", [2, 6, 8, 1, 0, 7, 9, 3, 5, 4]),
        (10, "1/documents", [9, 7, 0, 8, 2, 1, 5, 3, 4, 6]),
        (300, "0/3/4096", [121, 262, 267, 198, 117, 244, 209, 40]),
        (10**12, "0/documents", [809717221726, 642780010732, 302515995236]),
    ],
)
def test_the_order_is_the_same_in_every_version(n, key, expected) -> None:
    """A run that is taken up finds its place by it: other values here lose data of every run that
    was saved.
    """
    order = Permutation(n, key)
    assert [order[i] for i in range(len(expected))] == expected


def test_the_draw_is_the_same_in_every_version() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(5, 10**9)] == [
        0.6524484863740322,
        0.03401170130434639,
        0.1651982513739022,
    ]


@pytest.mark.parametrize("key", [0, 1, 2**31 - 1])
def test_draws_are_uniform_and_independent_of_their_neighbours(key) -> None:
    draws = [uniform(key, counter) for counter in range(KEYS)]
    for share in (0.02, 0.2, 0.5, 0.9):
        error = math.sqrt(share * (1 - share) / KEYS)
        assert abs(sum(draw < share for draw in draws) / KEYS - share) < 4 * error
    products = [(a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(draws)]
    # the product's standard deviation is 1/12
    assert abs(sum(products) / len(products)) < 4 / 12 / math.sqrt(len(products))


def test_a_draw_never_reaches_one(monkeypatch) -> None:
    monkeypatch.setattr(samples_module, "_mixed", lambda value: 2**64 - 1)
    assert uniform(0, 0) < 1.0
