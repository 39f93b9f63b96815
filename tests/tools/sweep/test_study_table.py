"""The table: one row for each trial, through CSV and back."""

from __future__ import annotations

import csv

import pytest
from made_study import design, result, table

from npt.errors import ConfigError
from npt.tools.sweep.table import CSV, by_part, factors, read_table, rows_of, write_table


def test_every_trial_has_its_row_in_the_designs_order() -> None:
    found = design()
    first = found.trials[0].key
    rows = rows_of(found, {first: result(kl=0.25)})
    assert [row["key"] for row in rows] == [trial.key for trial in found.trials]
    assert rows[0]["kl"] == 0.25 and rows[1]["kl"] is None and rows[1]["outcome"] is None


def test_a_limit_is_in_the_column_of_its_setting() -> None:
    rows = table()
    assert {
        "mult_form",
        "learning_rate",
        "adapter_rank",
        "compute_dtype",
        "use_quantization",
        "seed",
    } <= rows[0].keys()
    assert rows[-1]["arms"] == "plain" and rows[-1]["learning_rate"] == 0.03


def test_a_table_comes_back_as_it_was_written(tmp_path) -> None:
    rows = table()
    write_table(tmp_path, rows)
    assert read_table(tmp_path) == rows
    with (tmp_path / CSV).open(encoding="utf-8") as stream:
        listed = list(csv.DictReader(stream))
    assert (
        len(listed) == len(rows)
        and float(listed[0]["kl"]) == rows[0]["kl"]
        and listed[0]["steps"] == "40"
    )


def test_a_study_of_which_nothing_has_run_has_a_table(tmp_path) -> None:
    write_table(tmp_path, rows_of(design(), {}))
    assert {row["outcome"] for row in read_table(tmp_path)} == {None}


@pytest.mark.parametrize("content", [None, b"", b"no,table\n1,2\n", b"\xff\xfe"])
def test_a_table_that_is_missing_or_broken_is_named(tmp_path, content) -> None:
    if content is not None:
        (tmp_path / CSV).write_bytes(content)
    with pytest.raises(ConfigError, match=r"trials\.csv cannot be read"):
        read_table(tmp_path)


def test_a_part_has_its_rows_and_what_differs_in_it() -> None:
    parts = by_part(table())
    assert list(parts) == ["forms", "sizes", "formats", "limits"]
    assert factors(parts["forms"]) == ["learning_rate", "mult_form"]
    assert factors(parts["formats"]) == ["arms"]  # which decide the number format
    both = by_part([{**table()[0], "parts": "a;b", "arms": "one;"}])
    assert [row["arms"] for rows in both.values() for row in rows] == ["one", ""]
