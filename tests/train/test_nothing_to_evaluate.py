"""A run whose samples are all left out of its evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resumed_runs import Runs

from npt.errors import DataError


def test_ids_that_are_all_unknown_are_refused_in_one_line(load_model: Any, tmp_path: Path) -> None:
    unknown = [{"input_ids": [5, 6, 9999]}] * 4
    runs = Runs(load_model(), tmp_path, lambda: unknown, eval_data=unknown)
    with pytest.raises(
        DataError, match=r"no sample to evaluate on: every one has ids outside the vocabulary \[0, "
    ):
        runs.trainer(None).train()
