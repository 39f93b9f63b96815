"""The table: one row for each trial, in the design's order."""

import csv
from typing import Any

import pytest

from npt.tools.sweep.spec import Design, design_of
from npt.tools.sweep.table import CSV, rows_of, write_table


@pytest.fixture
def design() -> Design:
    """Two forms at two rates, and a limit."""
    parts: dict[str, Any] = {
        "forms": {
            "grid": {"mult_form": ["sigmoid", "one_plus_tanh"], "learning_rate": [1e-3, 1e-2]}
        },
        "limits": {"arms": {"plain": {}}, "bisect": {"low": 1e-4, "high": 1.0, "rounds": 4}},
    }
    return design_of({"settings": {"max_steps": 40}, "parts": parts}, "made.yaml")


def test_every_trial_has_its_row_in_the_designs_order(design: Design, tmp_path) -> None:
    rows = rows_of(design, {design.trials[0].key: {"kl": 0.25, "outcome": "stable"}})
    assert [row["key"] for row in rows] == [trial.key for trial in design.trials]
    write_table(tmp_path, rows)
    with (tmp_path / CSV).open(encoding="utf-8", newline="") as stream:
        first, *others = csv.DictReader(stream)
    assert (first["kl"], first["outcome"]) == ("0.25", "stable")
    assert [row["mult_form"] for row in (first, others[-2])] == ["sigmoid", "one_plus_tanh"]
    assert {row["kl"] for row in others} == {row["outcome"] for row in others} == {""}


def test_a_limit_is_in_the_column_of_its_setting(design: Design) -> None:
    figures = {"outcome": "stable", "limit_low": 0.03, "limit_high": 0.1}
    limit = rows_of(design, {design.trials[-1].key: figures})[-1]
    assert (limit["parts"], limit["arms"], limit["learning_rate"]) == ("limits", "plain", 0.03)
