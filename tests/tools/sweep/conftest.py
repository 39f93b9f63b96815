"""A study's trials on the random Llama, with a file of tokens to train on."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npt.tools.sweep.run import Bases
from npt.tools.sweep.spec import Trial, design_of
from npt.tools.sweep.storage import Storage


@pytest.fixture(scope="session")
def tokens_file(tmp_path_factory) -> Path:
    """80 rows of 16 tokens of the small vocabulary; one in twenty is held out by its id."""
    source = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "tokens.jsonl"
    rows = [
        {"id": f"row-{i}", "input_ids": [source.randrange(3, 128) for _ in range(16)]}
        for i in range(80)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small(llama_folder: Path, load_model: Any, tokens_file: Path) -> dict[str, Any]:
    """Settings of a run of a fraction of a second; load_model has put a tokenizer next to
    the weights.
    """
    return {
        "model_name": str(llama_folder),
        "use_quantization": True,
        "dataset_name": str(tokens_file),
        "adapter_rank": 4,
        "batch_size": 2,
        "max_length": 16,
        "max_steps": 6,
        "eval_samples": 3,
        "max_consecutive_bad": 3,
    }


@pytest.fixture(scope="session")
def bases() -> Bases:
    return Bases("cpu")


@pytest.fixture
def trial(small: dict[str, Any]) -> Callable[..., Trial]:
    """`trial(learning_rate=0.1)`: the one trial of a study with these settings; `bisect` and
    `seeds` are the part's.
    """

    def make(bisect: Any = None, seeds: Any = (0,), **settings: Any) -> Trial:
        part = {"settings": settings, "seeds": list(seeds)} | (
            {} if bisect is None else {"bisect": bisect}
        )
        (found,) = design_of({"settings": small, "parts": {"a": part}}, "study.yaml").trials
        return found

    return make


@pytest.fixture(scope="session")
def empty_study(tmp_path_factory) -> Path:
    """A database with the tables of a study, which take longer to make than a copy."""
    path = tmp_path_factory.mktemp("tables") / "study.db"
    Storage(f"sqlite:///{path}", "none")
    return path
