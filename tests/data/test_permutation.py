"""The seeded order: a permutation, a fair one, and the same one for ever."""

import math
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.data.samples import permutation, uniform

KEYS = 2000


@pytest.mark.parametrize("key", ["0/documents", "schlüssel"])
def test_everything_comes_once(key) -> None:
    for n in range(1, 301):
        assert sorted(permutation(n, key)) == list(range(n)), n


@settings(deadline=None, max_examples=100)
@given(n=st.integers(2**20, 2**60), key=st.text(max_size=8), data=st.data())
def test_a_huge_permutation_repeats_nothing(n, key, data) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=20, unique=True))
    things = [next(permutation(n, key, position)) for position in positions]
    assert len(set(things)) == len(positions)
    assert all(0 <= thing < n for thing in things)


@pytest.mark.parametrize("n", [2, 3, 5, 7, 10])
def test_every_thing_is_as_likely_at_every_position(n) -> None:
    counts = [[0] * n for _ in range(n)]
    for key in range(KEYS):
        for position, thing in enumerate(permutation(n, str(key))):
            counts[position][thing] += 1
    error = math.sqrt(KEYS * (1 / n) * (1 - 1 / n))
    assert max(abs(count - KEYS / n) for row in counts for count in row) < 4 * error


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
    assert list(islice(permutation(n, key), len(expected))) == expected


def test_the_draw_is_the_same_in_every_version() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(5, 10**9)] == [
        0.6524484863740322,
        0.03401170130434639,
        0.1651982513739022,
    ]
