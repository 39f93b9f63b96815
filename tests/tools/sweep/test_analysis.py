"""Factors, edges and names of a study's parts, against what was put into the table."""

from __future__ import annotations

import pytest
from made_study import table

from npt.tools.sweep.analysis import edges, factors, of_part, parts_of, row_name

ROWS = table()


def test_a_part_has_its_rows_and_what_differs_in_it() -> None:
    assert parts_of(ROWS) == ["forms", "sizes", "faults", "limits"]
    assert factors(of_part(ROWS, "forms")) == ["learning_rate", "mult_form"]
    assert factors(of_part(ROWS, "faults")) == ["arms"]  # which decide the number format
    assert row_name(of_part(ROWS, "sizes")[0], ["learning_rate", "adapter_rank"]) == (
        "lr 0.0001, adapter_rank 4"
    )


def test_a_trial_of_two_parts_is_in_both_with_the_arm_of_each() -> None:
    both = {**ROWS[0], "parts": "a;b", "arms": "one;"}
    assert [of_part([both], part)[0]["arms"] for part in parts_of([both])] == ["one", ""]


def test_an_edge_is_the_largest_rate_up_to_which_every_seed_trains() -> None:
    sigmoid, tanh = edges(of_part(ROWS, "forms"))
    assert (sigmoid.name, sigmoid.good, sigmoid.bad) == ("mult_form sigmoid", 0.01, 0.1)
    assert (tanh.good, tanh.bad) == (0.001, 0.01)
    assert sigmoid.best is not None and sigmoid.best["learning_rate"] == 0.01


def test_a_line_that_fails_at_its_smallest_rate_trains_at_none() -> None:
    failed = [{**row, "outcome": "diverged", "kl": None} for row in of_part(ROWS, "forms")]
    assert [(line.good, line.bad, line.best) for line in edges(failed)] == [(None, 1e-4, None)] * 2


@pytest.mark.parametrize("part", ["faults", "limits"])
def test_parts_without_rates_to_compare_have_no_edges(part: str) -> None:
    assert edges(of_part(ROWS, part)) == []
