"""A run whose samples are all left out of its evaluation."""

from pathlib import Path
from typing import Any

import pytest
from resumed_runs import Runs

import npt
from faults.runs import NoTokenizer
from npt.errors import DataError

UNKNOWN = [{"input_ids": [5, 6, 9999]}] * 4


def test_ids_that_are_all_unknown_are_refused_in_one_line(load_model: Any, tmp_path: Path) -> None:
    model = load_model()
    npt.attach(model, npt.NPTConfig(rank=2, layers="1"))
    config = npt.TrainConfig(output_dir=str(tmp_path / "run"), smoke_test=False)
    with pytest.raises(
        DataError,
        match=r"no sample to evaluate on: every sample has ids outside the vocabulary \[0, ",
    ):
        npt.Trainer(
            model, NoTokenizer(), UNKNOWN, config, data_config=npt.DataConfig(max_length=12)
        )


@pytest.mark.parametrize("given", [[], UNKNOWN, [{"input_ids": [5]}]])
def test_eval_data_without_a_sample_is_refused(given: Any, load_model: Any, tmp_path: Path) -> None:
    data = [{"input_ids": [5, 6, 7]}] * 4
    runs = Runs(load_model(), tmp_path, lambda: data, eval_data=given)
    with pytest.raises(DataError, match=r"^eval_data has no sample to evaluate on: .* vocabulary"):
        runs.trainer(None)
