"""Bases and bundles that several files look at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from stopped_runs import BAD, RARE, good, make_trainer, stop, with_row

from npt.train.trainer import Trainer


@pytest.fixture(autouse=True, scope="module")
def _unsynced() -> Iterator[None]:
    """Leaves what is written to the kernel, which no test outlives: not a killed process but a lost
    machine would need it on the disk.

    To wait for that is a quarter of a short run.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def tiny_folder(llama_folder: Path, load_model: Any) -> Path:
    """The random Llama's folder, with a tokenizer beside the weights."""
    return llama_folder


@pytest.fixture(scope="session")
def poisoned_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random Llama with an embedding of 1e30 for RARE: every number is finite, its square is
    not.
    """
    return with_row(tiny_folder, tmp_path_factory.mktemp("poisoned") / "model", RARE, 1e30)


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """`trainer(base, data, **config)`, its run folder below the test's own."""
    return lambda base, data, **config: make_trainer(base, data, tmp_path / "run", **config)


@pytest.fixture(scope="session")
def _made_once(poisoned_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stop(
        make_trainer(
            poisoned_folder,
            [*good(15), BAD],
            tmp_path_factory.mktemp("made") / "run",
            gradient_accumulation_steps=2,
        )
    )


@pytest.fixture
def bundle(_made_once: Path, tmp_path: Path) -> Path:
    """A copy of the bundle of a run in windows of two that met BAD after some steps."""
    return shutil.copytree(_made_once, tmp_path / "postmortem" / _made_once.name)
