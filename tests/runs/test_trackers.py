"""Trackers: which are opened and with what, what reaches them, and that nothing of theirs reaches
the run.
"""

import math
import random
import re
import resource
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from several import several, values

from npt.config import TrainConfig
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError
from npt.random_state import random_state
from npt.runs.run_folder import TRACKED, check_free, is_run
from npt.runs.trackers import Trackers, start_trackers, undisturbed

RESOLVED = {
    "rank": 4,
    "targets": ("gate", "up"),
    "output_dir": None,
    "learning_rate": 1e-3,
    "versions": {"torch": "2"},
}
NOT_FINITE = {"value_nan": math.nan, "value_infinite": math.inf, "value_absent": None}
VALUES = {"step": 3, "loss": 0.5, **NOT_FINITE, "layers.1.nmse": 0.25}


def test_without_a_tracker_accelerate_is_not_imported(tmp_path, monkeypatch) -> None:
    for name in ("accelerate", "accelerate.state", "accelerate.tracking"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would raise now
    trackers = Trackers(TrainConfig(), tmp_path)
    trackers.describe(RESOLVED)
    trackers.log(VALUES, 3)
    trackers.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ImportError):
        Trackers(TrainConfig(use_tensorboard=True), tmp_path)


def test_a_tracker_that_cannot_start_says_why_and_what_to_do(tmp_path, monkeypatch) -> None:
    from accelerate.tracking import WandBTracker

    def refuse(self: Any) -> None:
        raise PermissionError("project npt belongs to somebody else\nask them")

    monkeypatch.setattr(WandBTracker, "start", refuse)
    message = (
        "cannot start wandb: project npt belongs to somebody else; run wandb"
        " login, set WANDB_MODE=offline or remove --use_wandb"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        Trackers(TrainConfig(use_wandb=True), tmp_path / "run")


def test_a_folder_with_trackers_alone_is_free_and_resumable(tmp_path) -> None:
    (tmp_path / "wandb").mkdir()
    check_free(tmp_path)
    assert is_run(tmp_path) and "wandb" in TRACKED
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match="holds other files"):
        check_free(tmp_path)


class Failing:
    """A tracker whose network is gone for some of the calls."""

    def __init__(self, fails: set[int]):
        self.calls, self.fails = 0, fails

    def log(self, values: Any, step: int) -> None:
        self.calls += 1
        if self.calls in self.fails:
            raise ConnectionError(f"call {self.calls}\nis lost")


def failing(tmp_path: Path, fails: set[int]) -> tuple[Trackers, Failing, list[str]]:
    trackers, said = Trackers(TrainConfig(), tmp_path), []
    trackers.warn = said.append
    one = Failing(fails)
    trackers._trackers = {"wandb": one}
    return trackers, one, said


def test_one_that_fails_under_way_is_warned_of_and_the_run_continues(tmp_path) -> None:
    trackers, one, said = failing(tmp_path, {2, 3})
    for step in range(1, 6):
        trackers.log({"loss": 1.0}, step)
    assert one.calls == 5
    assert said == [
        "wandb failed: call 2; the run continues, but its wandb record may be incomplete"
    ]
    trackers.close()  # has no run to finish
    assert len(said) == 1


def test_what_a_tracker_draws_leaves_every_random_state_as_it_was(tmp_path) -> None:
    def draws() -> list[Any]:
        return [torch.rand(2).tolist(), random.random(), numpy.random.rand()]

    trackers, one, _ = failing(tmp_path, set())
    one.log = lambda values, step: draws()
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    expected = draws()
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    trackers.log({"loss": 1.0}, 1)
    with pytest.raises(KeyError), undisturbed():
        draws()
        raise KeyError
    assert draws() == expected and list(random_state())


def processes_start(processes: ProcessGroup, folder: str) -> str:
    """On process 0 the tracker refuses; nobody else has any."""
    from accelerate.tracking import WandBTracker

    def refuse(self: Any) -> None:
        raise RuntimeError("no rights")

    WandBTracker.start = refuse if processes.main else pytest.fail
    start_trackers(processes, TrainConfig(use_wandb=True), Path(folder))
    return "started"


def processes_log(processes: ProcessGroup, folder: str) -> tuple[bool, int]:
    with start_trackers(processes, TrainConfig(use_tensorboard=True), Path(folder)) as trackers:
        trackers.describe({})
        trackers.log({"loss": 1.0}, 1)
        return bool(trackers._trackers), int(processes.sums([1.0])[0])


def test_a_tracker_that_cannot_start_on_process_0_ends_every_process(tmp_path) -> None:
    ended = several(2, processes_start, str(tmp_path / "run"))
    assert [one.status for one in ended] == [2, 2]
    assert all("cannot start wandb: no rights" in str(one.error) for one in ended)


def test_only_process_0_has_trackers_and_the_processes_go_on_together(tmp_path) -> None:
    assert values(several(2, processes_log, str(tmp_path / "run"))) == [(True, 2), (False, 2)]


class TestTensorBoard:
    """Through its own reader."""

    @staticmethod
    def events(folder: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(str(folder)).Reload()

    def test_it_gets_the_finite_numbers_at_their_step(self, tmp_path) -> None:
        with Trackers(TrainConfig(use_tensorboard=True), tmp_path) as trackers:
            trackers.describe(RESOLVED)
            trackers.log(VALUES, 3)
            trackers.log({"loss": 0.25}, 4)
        events = self.events(tmp_path / "npt")
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
        assert [(e.step, e.value) for e in events.Scalars("layers.1.nmse")] == [(3, 0.25)]
        assert not NOT_FINITE.keys() & set(events.Tags()["scalars"])

    def test_it_shows_the_steps_that_are_made_again_once(self, tmp_path) -> None:
        for resume_at, given in ((None, {3: 0.5, 4: 0.25, 5: 0.125}), (3, {4: 0.75, 5: 0.0625})):
            with Trackers(
                TrainConfig(use_tensorboard=True), tmp_path, resume_at=resume_at
            ) as trackers:
                trackers.describe({})
                for step, value in given.items():
                    trackers.log({"loss": value}, step)
            # files are read by their second, then by a counter
            for path in [] if resume_at else list((tmp_path / "npt").glob("events.*")):
                name, written, rest = (
                    path.name.split("tfevents")[0],
                    *path.name.split("tfevents.")[1].split(".", 1),
                )
                path.rename(path.with_name(f"{name}tfevents.{int(written) - 60}.{rest}"))
        found = self.events(tmp_path / "npt").Scalars("loss")
        assert [(e.step, e.value) for e in found] == [(3, 0.5), (4, 0.75), (5, 0.0625)]


def test_tensorboard_on_a_disk_that_is_full_is_refused_in_a_line(tmp_path) -> None:
    (tmp_path / "npt").write_text("in the folder's place")
    config = TrainConfig(use_tensorboard=True)
    with pytest.raises(ConfigError, match=r"--use_tensorboard: .*/npt is a file: name a folder"):
        Trackers(config, tmp_path)
    (tmp_path / "npt").unlink()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"/npt cannot be written: .*; free disk space or"):
            Trackers(config, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
