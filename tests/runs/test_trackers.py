"""Trackers: which are opened and with what, what reaches them, and that nothing of theirs reaches
the run.
"""

from __future__ import annotations

import math
import random
import re
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from several import several, values

from npt.config import TRACKERS, TrainConfig
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError
from npt.evaluation.metrics import Figures
from npt.evaluation.modulation import BINS, LayerModulation, Modulation, TargetModulation
from npt.random_state import random_state
from npt.runs.run_folder import TRACKED, check_free, is_run
from npt.runs.trackers import LOST_AFTER, Trackers, check_trackers, start_trackers, undisturbed

RESOLVED = {
    "rank": 4,
    "targets": ("gate", "up"),
    "output_dir": None,
    "learning_rate": 1e-3,
    "versions": {"torch": "2"},
}
NOT_FINITE = {"value_nan": math.nan, "value_infinite": math.inf, "value_absent": None}
VALUES = {"step": 3, "loss": 0.5, **NOT_FINITE, "layers.1.nmse": 0.25}
FIGURES = Figures(100, 9.0, 0.1, 1.5, 0.01, 0.25, 0.01, 0.75, 0.01, 0.5, math.nan)


def look(counts: list[int] | None) -> TargetModulation:
    saturated = None if counts is None else 0.125
    return TargetModulation(counts, saturated, saturated, saturated, saturated, 0.5, 1.0)


LOOKED = Modulation(
    8, 0.5, 0.1, {3: LayerModulation(1.0, {"gate": look([1] * BINS), "up": look(None)})}
)
ROWS = [("Once", " upon a | time", "\nthere was")]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record what a stub of every tracker of accelerate is asked to do; their packages exist."""
    from accelerate import tracking

    found: list[tuple[Any, ...]] = []

    class Stand:
        def __init__(self, name: str, /, *places: Any, **options: Any):
            self.name, self.tracker = name, SimpleNamespace(id="r1")
            found.append(("opened", name, places, options))

        def start(self) -> None:
            found.append(("started", self.name))

        def store_init_configuration(self, given: dict[str, Any]) -> None:
            found.append(("described", self.name, given))

        def log(self, given: dict[str, Any], step: int) -> None:
            found.append(("logged", self.name, given, step))

        def finish(self) -> None:
            found.append(("finished", self.name))

    for name in TRACKERS:
        package = ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        if name not in ("wandb", "tensorboard"):
            monkeypatch.setitem(sys.modules, name, package)
            monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, partial(Stand, name))
    return found


def test_the_trackers_are_those_that_accelerate_has() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(TRACKERS) == set(LOGGER_TYPE_TO_CLASS)


def test_without_a_tracker_accelerate_is_not_imported(tmp_path, monkeypatch) -> None:
    for name in ("accelerate", "accelerate.state", "accelerate.tracking"):
        monkeypatch.setitem(sys.modules, name, None)  # an import would raise now
    trackers = Trackers(TrainConfig(), tmp_path)
    trackers.describe(RESOLVED)
    trackers.log(VALUES, 3)
    trackers.close()
    assert not trackers.active and list(tmp_path.iterdir()) == []
    with pytest.raises(ImportError):
        Trackers(TrainConfig(use_tensorboard=True), tmp_path)


def test_all_are_those_that_are_installed_and_none_is_none(monkeypatch) -> None:
    there = {"tensorboard", "mlflow"}
    monkeypatch.setattr("npt.runs.trackers.installed", lambda name: name in there)
    assert check_trackers(TrainConfig(report_to="all")) == ["tensorboard", "mlflow"]
    assert check_trackers(TrainConfig(report_to="none", use_wandb=True)) == []
    there.clear()
    with pytest.raises(
        ConfigError,
        match=(
            r"^--report_to is all, but none of wandb, .* is installed; pip install one, or drop it$"
        ),
    ):
        check_trackers(TrainConfig(report_to="all"))


def test_a_tracker_without_its_package_is_refused_with_a_command(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        ConfigError,
        match=(
            r"^--report_to mlflow needs mlflow, which is not installed; pip install mlflow, or"
            r" leave it out$"
        ),
    ):
        Trackers(TrainConfig(report_to="tensorboard,mlflow"), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_an_old_accelerate_lacks_is_refused(seen, tmp_path, monkeypatch) -> None:
    from accelerate import tracking

    monkeypatch.delitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio")
    with pytest.raises(
        ConfigError,
        match=(
            r"^--report_to trackio: accelerate [\d.]+ opens no such tracker; pip install -U"
            r" accelerate$"
        ),
    ):
        Trackers(TrainConfig(report_to="trackio"), tmp_path / "run")


def test_every_tracker_is_opened_described_told_and_ended(seen, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("COMET_PROJECT_NAME", "of-comet")
    names = [name for name in TRACKERS if name not in ("wandb", "tensorboard")]
    with Trackers(TrainConfig(report_to=names, run_name="trial"), tmp_path / "run") as trackers:
        trackers.describe(RESOLVED)
        trackers.log(VALUES, 3)
        trackers.summarize({"final": FIGURES}, 4, best_step=3)
        trackers.modulation(LOOKED, 4)
        trackers.texts(ROWS, 4)
        trackers.alert("title", "text")
        trackers.files(RESOLVED)
    opened = {event[1]: event[2:] for event in seen if event[0] == "opened"}
    assert list(opened) == names and opened["mlflow"] == (("npt",), {"run_name": "trial"})
    assert opened["comet_ml"] == (("of-comet",), {}) and opened["aim"] == (
        ("npt", str(tmp_path / "run")),
        {},
    )
    # a commit of its own would be no observer's
    assert opened["dvclive"][1]["save_dvc_exp"] is False
    flat = {
        "rank": 4,
        "targets": "('gate', 'up')",
        "output_dir": "None",
        "learning_rate": 1e-3,
        "versions.torch": "2",
    }
    for name in names:
        own = [event for event in seen if event[1] == name]
        assert [event[0] for event in own] == [
            "opened",
            "started",
            "described",
            "logged",
            "logged",
            "logged",
            "finished",
        ]
        assert own[2][2] == flat
        assert own[3][2:] == ({"step": 3, "loss": 0.5, "layers.1.nmse": 0.25}, 3)
        assert (
            own[4][2]["summary/final/perplexity_ratio"] == 1.5
            and own[4][2]["summary/best_step"] == 3
        )
        assert own[5][2:] == (
            {f"modulation/layers.3.{key}": value for key, value in (
                ("gate.saturated", 0.125), ("gate.add_rms", 0.5), ("gate.std", 0.125),
                ("up.add_rms", 0.5)
            )},
            4,
        )  # fmt: skip


def test_a_tracker_that_cannot_start_ends_the_others_without_a_trace(
    seen, tmp_path, monkeypatch
) -> None:
    from accelerate import tracking

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("project npt belongs to somebody else.\nask them")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "swanlab", refuse)
    said = (
        "swanlab (project mine) cannot be started: project npt belongs to somebody else; "
        "log in first (swanlab login), or leave it out (--report_to none)"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        Trackers(TrainConfig(report_to="mlflow,swanlab", project="mine"), tmp_path / "run")
    assert seen[-1] == ("finished", "mlflow") and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(
            ConfigError,
            match=r"^--output_dir .*file.* cannot be written: .*; choose another folder$",
        ):
            Trackers(TrainConfig(use_tensorboard=True), folder).describe({})


def test_a_run_that_never_began_leaves_nothing_of_its_trackers(seen, tmp_path) -> None:
    with (
        pytest.raises(KeyError),
        Trackers(TrainConfig(report_to="aim,tensorboard"), tmp_path / "run"),
    ):
        (tmp_path / "run" / ".aim").mkdir()
        raise KeyError("the base")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    for name in ("run", "mine"):
        with (
            pytest.raises(KeyError),
            Trackers(TrainConfig(report_to="aim"), tmp_path / name) as trackers,
        ):
            (tmp_path / name / ".aim").mkdir()
            if name == "run":
                trackers.describe({})
            raise KeyError("the base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run"]


def test_a_folder_with_trackers_alone_is_free_and_resumable(tmp_path) -> None:
    (tmp_path / "wandb").mkdir()
    check_free(tmp_path)
    assert is_run(tmp_path) and "wandb" in TRACKED
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ConfigError, match="holds other files"):
        check_free(tmp_path)


class Failing:
    """A tracker whose network is gone for some of the calls."""

    tracker = SimpleNamespace()

    def __init__(self, fails: set[int]):
        self.calls, self.fails = 0, fails

    def log(self, values: Any, step: int) -> None:
        self.calls += 1
        if self.calls in self.fails:
            raise ConnectionError(f"call {self.calls}\nis lost;")

    def finish(self) -> None:
        raise TimeoutError


def failing(tmp_path: Path, fails: set[int]) -> tuple[Trackers, Failing, list[str]]:
    trackers, said = Trackers(TrainConfig(), tmp_path), []
    trackers.warn = said.append
    one = Failing(fails)
    trackers._trackers = {"mlflow": one}
    return trackers, one, said


def test_one_that_fails_under_way_is_warned_of_once_and_counted(tmp_path) -> None:
    trackers, one, said = failing(tmp_path, {2, 3})
    for step in range(1, 6):
        trackers.log({"loss": 1.0}, step)
    assert one.calls == 5 and said == [
        "mlflow failed: call 2; the run continues, and it may lack some of it"
    ]
    trackers.close()
    assert said[1:] == ["mlflow failed 3 times in all; what it was told then it lacks"]
    trackers.close()
    assert len(said) == 2


def test_one_that_fails_again_and_again_is_asked_no_more(tmp_path) -> None:
    trackers, one, said = failing(tmp_path, set(range(3, 1000)))
    for step in range(1, 100):
        trackers.log({"loss": 1.0}, step)
    assert (
        one.calls == 2 + LOST_AFTER
        and said[-1] == f"mlflow failed {LOST_AFTER} times in a row and is told no more"
    )
    assert not trackers.active


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
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    def refuse(*_: Any) -> None:
        raise RuntimeError("no rights")

    LOGGER_TYPE_TO_CLASS["tensorboard"] = refuse if processes.main else pytest.fail
    start_trackers(processes, TrainConfig(use_tensorboard=True), Path(folder))
    return "started"


def processes_log(processes: ProcessGroup, folder: str) -> tuple[bool, int]:
    with start_trackers(processes, TrainConfig(use_tensorboard=True), Path(folder)) as trackers:
        trackers.describe({})
        trackers.log({"loss": 1.0}, 1)
        return trackers.active, int(processes.sums([1.0])[0])


def test_a_tracker_that_cannot_start_on_process_0_ends_every_process(tmp_path) -> None:
    ended = several(2, processes_start, str(tmp_path / "run"))
    assert [one.status for one in ended] == [2, 2] and not (tmp_path / "run").exists()
    assert all("tensorboard cannot be started: no rights" in str(one.error) for one in ended)


def test_only_process_0_has_trackers_and_the_processes_go_on_together(tmp_path) -> None:
    assert values(several(2, processes_log, str(tmp_path / "run"))) == [(True, 2), (False, 2)]


class TestTensorBoard:
    """Through its own reader."""

    @staticmethod
    def events(folder: Path) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(str(folder)).Reload()

    def test_it_gets_the_finite_numbers_at_their_step(self, tmp_path) -> None:
        with Trackers(TrainConfig(report_to="tensorboard", project="other"), tmp_path) as trackers:
            trackers.describe(RESOLVED)
            trackers.log(VALUES, 3)
            trackers.log({"loss": 0.25}, 4)
        events = self.events(tmp_path / "npt")
        assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5), (4, 0.25)]
        assert [(e.step, e.value) for e in events.Scalars("layers.1.nmse")] == [(3, 0.25)]
        assert not NOT_FINITE.keys() & set(events.Tags()["scalars"])

    def test_it_gets_texts_and_histograms(self, tmp_path) -> None:
        with Trackers(TrainConfig(report_to="tensorboard"), tmp_path) as trackers:
            trackers.describe({})
            trackers.modulation(LOOKED, 4)
            trackers.texts(ROWS, 4)
        events = self.events(tmp_path / "npt")
        (text,) = events.Tensors("samples/text_summary")
        (shown,) = text.tensor_proto.string_val
        assert (
            text.step == 4
            and shown.decode().splitlines()[-1] == "| Once |  upon a \\| time | <br>there was |"
        )
        (histogram,) = events.Histograms("modulation/layers.3.gate")
        value = histogram.histogram_value
        assert (value.min, value.max, value.num, len(value.bucket)) == (0.5, 1.5, BINS, BINS)
        assert value.sum == pytest.approx(BINS)  # middles of bins around 1, one multiplier in each
        assert [e.value for e in events.Scalars("modulation/layers.3.gate.saturated")] == [0.125]

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

    def test_one_that_starts_again_forgets_nothing_until_the_run_begins(self, tmp_path) -> None:
        with Trackers(TrainConfig(use_tensorboard=True), tmp_path) as trackers:
            trackers.describe({})
            trackers.log({"loss": 0.5}, 5)
        before = sorted(path.name for path in (tmp_path / "npt").iterdir())
        with (
            pytest.raises(KeyError),
            Trackers(TrainConfig(use_tensorboard=True), tmp_path, resume_at=3),
        ):
            raise KeyError("the base")
        assert sorted(path.name for path in (tmp_path / "npt").iterdir()) == before
