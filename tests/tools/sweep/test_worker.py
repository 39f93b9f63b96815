"""A worker's part in a study, in this process: what it records, what it leaves to others, and how
it ends.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from npt.errors import ConfigError, StoppedError
from npt.tools.sweep.spec import Design, design_of
from npt.tools.sweep.storage import Storage
from npt.tools.sweep.study import progress_line, update_table
from npt.tools.sweep.table import CSV, rows_of
from npt.tools.sweep.worker import work, work_on

DONE = {"outcome": "stable", "kl": 0.5, "refused": 0, "seconds": 0.1}
"""What a trial came to."""


@pytest.fixture(scope="module")
def design(small: dict[str, Any]) -> Design:
    part = {"grid": {"mult_form": ["sigmoid", "unbounded"], "learning_rate": [1e-3, 30.0]}}
    settings = {**small, "token_rank": 0}  # with a token part the first trial at 30.0 diverges too
    return design_of(
        {"name": "small", "settings": settings, "parts": {"forms": part}}, "study.yaml"
    )


@pytest.fixture
def storage(tmp_path, empty_study: Path, design: Design) -> Storage:
    storage = Storage(f"sqlite:///{shutil.copy(empty_study, tmp_path / 'study.db')}", design.name)
    storage.enqueue(design.trials)
    return storage


@pytest.fixture(scope="module")
def finished(design: Design, bases: Any, tmp_path_factory) -> SimpleNamespace:
    """A study that one worker has done: its folder and storage, and what the worker said. Nobody
    writes to it.
    """
    folder = tmp_path_factory.mktemp("finished")
    storage = Storage(f"sqlite:///{folder / 'study.db'}", design.name)
    storage.enqueue(design.trials)
    said: list[str] = []
    assert work(design, storage, bases, said.append).finished == 4
    return SimpleNamespace(folder=folder, storage=storage, said=said)


def test_a_worker_runs_every_trial_and_says_what_came_out(design, finished) -> None:
    said, storage = finished.said, finished.storage
    assert len(said) == 4
    assert (
        said[0].startswith("forms, mult_form sigmoid, learning_rate 0.001, seed 0: stable, KL ")
        and "worse at step" in said[1]
    )
    rows = rows_of(design, storage.rows())
    assert [row["outcome"] for row in rows] == ["stable", "worse", "stable", "diverged"]
    assert "trial-" not in rows[3]["reason"]  # whose folder is gone
    assert all(row["worker"] == storage.worker for row in rows)


def test_a_trial_that_cannot_be_computed_is_left_with_its_reason(
    design, storage, tmp_path, bases, monkeypatch
) -> None:
    import npt.tools.sweep.worker as module

    def broken(bases, trial, *more):
        if trial.settings.adapter.mult_form == "unbounded":
            raise RuntimeError("out of everything")
        return DONE

    monkeypatch.setattr(module, "run_trial", broken)
    said: list[str] = []
    progress = work(design, storage, bases, said.append)
    assert (progress.finished, progress.failed, progress.open) == (2, 2, 0)
    assert sum("out of everything" in line for line in said) == 2
    rows = rows_of(design, storage.rows())
    assert [row["outcome"] for row in rows] == ["stable", "stable", "failed", "failed"]
    assert rows[2]["reason"] == "RuntimeError: out of everything"


def test_bad_settings_fail_the_trial_and_our_faults_the_worker(
    design, storage, tmp_path, bases, monkeypatch
) -> None:
    import npt.tools.sweep.worker as module

    def refused(*_: Any) -> None:
        raise ConfigError("--loss does not go with --strategy")

    monkeypatch.setattr(module, "run_trial", refused)
    progress = work(design, storage, bases, print)
    assert (progress.failed, progress.open) == (4, 0)
    assert {row["reason"] for row in rows_of(design, storage.rows())} == {
        "ConfigError: --loss does not go with --strategy"
    }

    def broken(*_: Any) -> None:
        raise KeyError("ours")

    storage.enqueue(design.trials)
    monkeypatch.setattr(module, "run_trial", broken)
    with pytest.raises(KeyError):
        work(design, storage, bases, print)
    assert storage.progress(design.by_key).waiting == 4


def test_a_worker_whose_parent_is_gone_gives_its_trial_back_and_ends(
    design, storage, tmp_path, bases
) -> None:
    with pytest.raises(StoppedError):
        work(design, storage, bases, print, parent=os.getpid())  # nobody is his own parent
    progress = storage.progress(design.by_key)
    assert (progress.waiting, progress.running) == (4, 0)


def test_a_stop_in_the_middle_of_a_trial_gives_it_back_at_once(
    design, storage, tmp_path, bases, monkeypatch
) -> None:
    import npt.tools.sweep.worker as module

    def stopped(*_: Any) -> None:
        raise StoppedError(15)

    monkeypatch.setattr(module, "run_trial", stopped)
    with pytest.raises(StoppedError):
        work(design, storage, bases, print)
    assert storage.progress(design.by_key).waiting == 4
    taken = [storage.claim(design.by_key) for _ in range(4)]
    assert {claim.key for claim in taken if claim} == design.by_key.keys()


def test_the_progress_and_the_table_of_a_study_under_way(
    design, storage, tmp_path, bases, monkeypatch
) -> None:
    import npt.tools.sweep.worker as module

    monkeypatch.setattr(module, "run_trial", lambda *_: DONE)
    assert progress_line(storage, design) == "0 of 4 trials finished, 0 running"
    claim = storage.claim(design.by_key)
    assert (
        claim is not None and progress_line(storage, design) == "0 of 4 trials finished, 1 running"
    )
    work_on(storage, claim, design.by_key[claim.key], bases, print, lambda: None)
    assert progress_line(storage, design) == "1 of 4 trials finished, 0 running"
    rows = update_table(storage, design, tmp_path)
    assert [row["outcome"] for row in rows] == ["stable", None, None, None]
    assert len((tmp_path / CSV).read_text().splitlines()) == 5


def test_a_trial_is_called_by_its_origin_and_what_varies_there() -> None:
    parts = {
        "arms": {"arms": {"plain": {}}, "grid": {"loss": ["direction", "nmse"]}},
        "drawn": {
            "seeds": [7],
            "random": {"count": 1, "over": {"learning_rate": [1e-3], "adapter_rank": [4]}},
        },
    }
    design = design_of({"settings": {"max_steps": 5}, "parts": parts}, "names.yaml")
    assert [str(trial) for trial in design.trials] == [
        "arms, plain, loss direction, seed 0",
        "arms, plain, loss nmse, seed 0",
        "drawn, learning_rate 0.001, adapter_rank 4, seed 7",
    ]
