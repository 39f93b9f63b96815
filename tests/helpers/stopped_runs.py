"""Runs that are stopped by a fault, and the bundles they leave."""

import functools
import io
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import resumed_runs
from rich.console import Console
from safetensors.torch import load_file, save_file

import npt
from faults.runs import NoTokenizer
from npt.config import DataConfig, NPTConfig, TrainConfig
from npt.distill.step import student_guard
from npt.errors import TooManyRefusalsError
from npt.train.trainer import Trainer

RARE = 99
"""A token that only the record `bad` has."""

BAD: dict[str, Any] = {"id": "bad", "input_ids": [5, 6, 7, RARE, 8, 9, 10]}


def good(count: int) -> list[dict[str, Any]]:
    """Records of six to nine tokens without RARE."""
    return [
        {"id": f"good-{i}", "input_ids": [3 + (11 * i + 7 * j) % 90 for j in range(6 + i % 4)]}
        for i in range(count)
    ]


def with_row(folder: Path, to: Path, row: int, value: float) -> Path:
    """A copy of a model folder in which one row of the embedding holds `value`, and that of lm_head
    does not.
    """
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    tensors["model.embed_tokens.weight"][row] = value
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def make_trainer(
    base: Path,
    data: Iterable[Any],
    run: Path,
    *,
    quantization: str | None = "nf4",
    compute_dtype: str = "fp32",
    dtype: str | None = None,
    data_config: DataConfig | None = None,
    **config: Any,
) -> Trainer:
    """A trainer of two small adapters on the base in a folder, which gives up at the first
    refusal.
    """
    model, _ = npt.load_base(
        str(base), quantization=quantization, device="cpu", compute_dtype=compute_dtype, dtype=dtype
    )
    npt.attach(model, NPTConfig(rank=4, layers="1,3"))
    usual = {"batch_size": 1, "log_steps": 1, "learning_rate": 1e-2, "max_consecutive_bad": 1}
    settings = {**usual, "smoke_test": False, "seed": 3, **config}
    trainer = Trainer(
        model,
        NoTokenizer(),
        data,
        TrainConfig(output_dir=str(run), **settings),
        data_config=data_config if data_config is not None else DataConfig(max_length=12),
        eval_data=good(1),
        console=Console(file=io.StringIO(), width=200),
    )
    return resumed_runs.without_report(trainer)


def acting(trainer: Trainer, act: Callable[[Any, int], None]) -> Trainer:
    """Have `act(model, number)` done before every micro-batch that is computed, from number 0."""
    model = trainer.setup.model
    return resumed_runs.acting(trainer, lambda number, batch: act(model, number))


def stop(trainer: Trainer, late: bool = False) -> Path:
    """Train until the run gives up; its bundle."""
    with (
        mock.patch("npt.train.trainer.student_guard", functools.partial(student_guard, late=late)),
        pytest.raises(TooManyRefusalsError) as caught,
    ):
        trainer.train()
    assert caught.value.exit_status == 3
    (bundle,) = (trainer.setup.origin.folder / "postmortem").iterdir()
    assert str(bundle) in str(caught.value)
    return bundle
