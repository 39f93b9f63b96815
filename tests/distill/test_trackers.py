"""Trackers: the real libraries, offline; only finite numbers reach them, and without one accelerate is never asked."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from npt.config import TrainConfig
from npt.distill.trackers import Trackers

RESOLVED = {"rank": 4, "targets": ("gate", "up"), "output_dir": None, "learning_rate": 1e-3}
NOT_FINITE = {"value_nan": math.nan, "value_infinite": math.inf, "value_absent": None}
VALUES = {"step": 3, "loss": 0.5, **NOT_FINITE, "layers.1.nmse": 0.25}


def tensorboard_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((e.step, e.value) for e in events.Scalars(tag))
    return found


def test_without_a_tracker_accelerate_is_not_imported(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # an import would raise now
    trackers = Trackers(TrainConfig(), tmp_path, RESOLVED)
    trackers.log(VALUES, 3)
    trackers.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ImportError):
        Trackers(TrainConfig(use_tensorboard=True), tmp_path, RESOLVED)


def test_tensorboard_gets_the_finite_numbers_at_their_step(tmp_path) -> None:
    trackers = Trackers(TrainConfig(use_tensorboard=True), tmp_path, RESOLVED)
    trackers.log(VALUES, 3)
    trackers.log({"loss": 0.25}, 4)
    trackers.close()
    scalars = tensorboard_scalars(tmp_path)
    assert scalars["loss"] == [(3, 0.5), (4, 0.25)]
    assert scalars["layers.1.nmse"] == [(3, 0.25)]
    assert not NOT_FINITE.keys() & scalars.keys()


def test_what_is_left_out_is_left_out_for_every_tracker(tmp_path) -> None:
    trackers = Trackers(TrainConfig(), tmp_path, RESOLVED)
    seen: list[tuple[dict, int]] = []
    trackers._accelerator = SimpleNamespace(log=lambda values, step: seen.append((values, step)), end_training=lambda: None)
    trackers.log(VALUES, 3)
    assert seen == [({"step": 3, "loss": 0.5, "layers.1.nmse": 0.25}, 3)]


def test_wandb_offline_keeps_a_run_below_the_run_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    folder.mkdir()
    import wandb

    trackers = Trackers(TrainConfig(use_wandb=True, run_name="trial"), folder, RESOLVED, wandb_group="study")
    run = wandb.run
    assert (run.name, run.group) == ("trial", "study")
    assert run.config["rank"] == 4 and run.config["targets"] == "('gate', 'up')"
    trackers.log(VALUES, 3)
    trackers.close()
    (record,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    content, until = b"", time.monotonic() + 30
    while b"layers.1.nmse" not in content and time.monotonic() < until:  # another process writes it, in its own time
        time.sleep(0.05)
        content = record.read_bytes()  # its strings are stored as they are
    assert b"layers.1.nmse" in content
    assert not [name for name in NOT_FINITE if name.encode() in content]


def test_tensorboard_shows_the_steps_that_are_made_again_once(tmp_path) -> None:
    for resume_at, values in ((None, {3: 0.5, 4: 0.25, 5: 0.125}), (3, {4: 0.75, 5: 0.0625})):
        trackers = Trackers(TrainConfig(use_tensorboard=True), tmp_path, RESOLVED, resume_at=resume_at)
        for step, value in values.items():
            trackers.log({"loss": value}, step)
        trackers.close()
        for path in [] if resume_at else list((tmp_path / "npt").glob("events.*")):  # files are read by their second, then by a counter
            name, written, rest = path.name.split("tfevents")[0], *path.name.split("tfevents.")[1].split(".", 1)
            path.rename(path.with_name(f"{name}tfevents.{int(written) - 60}.{rest}"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "npt")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5), (4, 0.75), (5, 0.0625)]


def test_wandb_goes_on_with_the_run_that_it_is_told(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    for number in range(2):
        trackers = Trackers(TrainConfig(use_wandb=True), tmp_path, RESOLVED, wandb_run="a1b2c3d4", resume_at=3 if number else None)
        assert wandb.run.id == "a1b2c3d4"
        trackers.log({"loss": 0.5}, 3 + number)
        trackers.close()
    names = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(names) == 2 and all("-a1b2c3d4" in name for name in names)
