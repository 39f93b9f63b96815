"""The run folder: complete lines, no NaN, one writer, checkpoints that rotate only once the new one
exists, and folders in use.
"""

import math
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from resumed_runs import lines, strict
from torch import nn

import npt
from npt.adapters.files.run_layout import checkpoints
from npt.config import NPTConfig
from npt.errors import CheckpointError, ConfigError
from npt.files import new_folder
from npt.manifest import write_manifest
from npt.runs.run_folder import BROKEN, SUPERSEDED, RunFolder, check_free, is_run, tidy


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "outputs" / "run")
    yield made
    made.close()


def student(load_model: Callable[..., nn.Module]) -> nn.Module:
    model = load_model()
    npt.attach(model, NPTConfig(rank=2, layers="3"))
    return model


def test_non_finite_values_are_written_as_null_at_any_depth(folder) -> None:
    folder.metrics({"step": 1, "loss": math.nan, "deep": {"list": [1.0, math.inf, -math.inf]}})
    folder.event("refusal", value=math.nan)  # each line is on disk before the folder is closed
    folder.write("fidelity.json", {"student": {"kl": math.inf}})
    assert lines(folder.path, "metrics") == [
        {"step": 1, "loss": None, "deep": {"list": [1.0, None, None]}}
    ]
    (event,) = lines(folder.path, "events")
    assert event["event"] == "refusal" and event["value"] is None
    assert event["time"] > 1.7e9  # seconds since 1970, not since the start of the process
    assert strict(folder.path / "fidelity.json") == {"student": {"kl": None}}


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_pipe_in_place_of_a_log_is_refused_and_not_waited_for(folder, name) -> None:
    folder.close()
    (folder.path / name).unlink()
    os.mkfifo(folder.path / name)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file: remove it"):
        RunFolder(folder.path, resume_at=0)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("run.json", "a run already; continue it with --resume auto"),
        ("checkpoints", "a run already; continue it with --resume auto"),
        ("notes.txt", "other files; choose another folder"),
        (None, "is a file: name a folder"),
    ],
)
def test_a_folder_in_use_is_refused_and_left_alone(tmp_path, name, what) -> None:
    folder = tmp_path / "run"
    check_free(folder)  # which makes nothing
    path = folder if name is None else folder / name
    path.parent.mkdir(exist_ok=True)
    check_free(path.parent)
    path.write_text("{}")
    for refuse in (check_free, RunFolder):
        with pytest.raises(ConfigError, match=what):
            refuse(folder)
    assert list(tmp_path.rglob("*"))[-1] == path


def filled(content: str = "weights") -> Callable[[Path], None]:
    """Writes a small checkpoint that verifies."""

    def write(folder: Path) -> None:
        with new_folder(folder) as temporary:
            (temporary / "weights").write_text(content)
            write_manifest(temporary)

    return write


def names(folder: RunFolder) -> list[str]:
    return sorted(p.name for p in (folder.path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("keep", "expected"), [(None, [1, 2, 3, 10]), (1, [10]), (2, [3, 10]), (9, [1, 2, 3, 10])]
)
def test_the_newest_checkpoints_are_kept(folder, keep, expected) -> None:
    for step in (1, 2, 3, 10):
        saved = folder.save_checkpoint(step, filled(), keep)
        assert saved == folder.path / "checkpoints" / f"step-{step:08d}"
    assert names(folder) == [f"step-{step:08d}" for step in expected]
    assert [p.name for p in folder.checkpoints()] == names(folder)


def test_a_checkpoint_that_was_just_written_is_never_rotated_away(folder) -> None:
    folder.save_checkpoint(400, filled(), None)
    folder.save_checkpoint(250, filled(), 1)  # 400 could not be set aside on resuming
    assert "step-00000250" in names(folder)


def test_nothing_is_rotated_away_before_the_new_one_has_verified(folder, monkeypatch) -> None:
    folder.save_checkpoint(1, filled(), 1)

    def damaged(path: Path) -> None:
        filled()(path)
        (path / "weights").write_text("wEights")

    sums = r"sha256 \w{12} of 7 bytes, but manifest\.json has \{'bytes': 7, "
    with pytest.raises(CheckpointError, match=f"step-00000002/weights is damaged: {sums}"):
        folder.save_checkpoint(2, damaged, 1)
    assert [p.name for p in folder.checkpoints()] == ["step-00000001"]
    assert names(folder) == ["step-00000001", "step-00000002.broken"]


def test_a_checkpoint_that_cannot_be_written_costs_no_older_one(folder) -> None:
    folder.save_checkpoint(1, filled(), 1)

    def fails(path: Path) -> None:
        with new_folder(path) as temporary:
            (temporary / "weights").write_text("half of th")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        folder.save_checkpoint(2, fails, 1)
    assert names(folder) == ["step-00000001"]


def test_only_checkpoint_folders_count_as_checkpoints(folder, tmp_path) -> None:
    below = folder.path / "checkpoints"
    filled()(tmp_path / "elsewhere")
    for name in (
        "step-mine",
        "step-0000001",
        "step-00000003.broken",
        ".step-00000004.abcdefgh.partial",
        "step-٠٠٠٠٠٠٠٥",
    ):
        (below / name).mkdir(parents=True)
    (below / "step-00000006").touch()
    (below / "step-00000007").symlink_to(tmp_path / "elsewhere")
    before = set(names(folder))
    folder.save_checkpoint(1, filled(), 1)
    assert [p.name for p in folder.checkpoints()] == ["step-00000001"]
    assert set(names(folder)) == before | {"step-00000001"}


def test_a_checkpoint_that_is_set_aside_is_kept_and_picked_no_more(folder) -> None:
    kept = []
    for _ in range(2):
        kept.append(folder.set_aside(folder.save_checkpoint(3, filled(), None), BROKEN).name)
    kept.append(folder.set_aside(folder.save_checkpoint(3, filled(), None), SUPERSEDED).name)
    assert kept == ["step-00000003.broken", "step-00000003.broken-2", "step-00000003.superseded"]
    assert names(folder) == kept and folder.checkpoints() == []


def test_the_best_adapters_are_replaced_as_a_whole(folder, load_model) -> None:
    model = student(load_model)
    assert not folder.has_best
    for kl in (0.5, 0.25):
        with torch.no_grad():
            model.model.layers[3].npt.A.fill_(kl)
        figures = {"step": 1, "kl": kl}
        best = folder.save_best(model, npt.base_identity(model), figures)
        folder.save_checkpoint(1, filled(), 1)
    assert folder.has_best and best == folder.path / "best"
    assert strict(best / "fidelity.json") == figures
    other = load_model()
    npt.load_adapter(other, folder.path / "best" / "adapter")
    assert torch.equal(other.model.layers[3].npt.A, model.model.layers[3].npt.A)


@contextmanager
def gone_on(path: Path, step: int) -> Iterator[RunFolder]:
    made = RunFolder(path, resume_at=step)
    try:
        yield made
    finally:
        made.close()


def test_the_logs_are_cut_at_the_step_that_is_gone_on_from(folder) -> None:
    for step in range(1, 6):
        folder.metrics({"step": step})
        folder.event("save", step=step)
    folder.close()
    for log in ("metrics.jsonl", "events.jsonl"):
        with (folder.path / log).open("a") as stream:
            stream.write('{"step": 6, "lo')
    with gone_on(folder.path, 3) as again:
        again.metrics({"step": 4, "again": True})
        again.event("resume")
    kept = [{"step": step} for step in (1, 2, 3)]
    assert lines(folder.path, "metrics") == [*kept, {"step": 4, "again": True}]
    assert [e["event"] for e in lines(folder.path, "events")] == ["save"] * 5 + ["resume"]


@pytest.mark.parametrize(
    "line",
    [b"3", b"[1]", b'{"step": "x"}', b'{"step": null}', b"[" * 100_000, b"\xff\xfe{", b"\0" * 9],
    ids=range(7),
)
def test_whatever_a_log_holds_it_is_cut_without_a_fault(folder, line) -> None:
    folder.metrics({"step": 1})
    folder.close()
    with (folder.path / "metrics.jsonl").open("ab") as stream:
        stream.write(line + b"\n")
    with gone_on(folder.path, 1) as again:
        again.metrics({"step": 2})
    written = lines(folder.path, "metrics")
    assert {"step": 1} in written and written[-1] == {"step": 2}


def test_what_a_killed_process_left_half_written_is_cleared_away(folder, load_model) -> None:
    folder.save_checkpoint(1, filled(), None)
    model = student(load_model)
    folder.save_best(model, npt.base_identity(model), {"step": 1})
    folder.close()
    below = folder.path / "checkpoints"
    shutil.copytree(below / "step-00000001", below / ".step-00000002.abcdefgh.partial")
    (folder.path / ".run.json.q1w2e3r4.partial").write_text("{")
    # killed between the two renames that replace it
    (folder.path / "best").rename(folder.path / ".best.hgfedcba.old")
    (folder.path / ".mine").touch()
    tidy(folder.path)
    with gone_on(folder.path, 1) as again:
        assert again.has_best and [p.name for p in again.checkpoints()] == ["step-00000001"]
    assert names(folder) == ["step-00000001"]
    left = {"metrics.jsonl", "events.jsonl", "checkpoints", "best", ".mine"}
    assert {p.name for p in folder.path.iterdir()} == left


def test_a_folder_has_one_writer(folder) -> None:
    for refuse in (lambda: RunFolder(folder.path, resume_at=0), lambda: tidy(folder.path)):
        with pytest.raises(ConfigError, match="another process is writing"):
            refuse()
    folder.close()
    tidy(folder.path)
    with gone_on(folder.path, 0), pytest.raises(ConfigError, match="another process"):
        tidy(folder.path)


def test_only_a_folder_made_for_nothing_is_removed(folder) -> None:
    folder.write("run.json", {})
    folder.save_checkpoint(1, filled(), None)
    folder.close()
    again = RunFolder(folder.path, resume_at=1)
    again.discard()
    assert names(folder) == ["step-00000001"] and (folder.path / "run.json").is_file()
    tidy(folder.path)
    other = RunFolder(folder.path.parent / "other")
    other.discard()
    other.close()  # again, as a `finally` does
    assert not other.path.exists()


@pytest.mark.parametrize("way", ["removed", "renamed"])
def test_a_folder_that_goes_away_is_made_anew(folder, way) -> None:
    folder.write("run.json", {"seed": 3})
    folder.metrics({"step": 1})
    old = folder.path.with_name("old")
    folder.path.rename(old)
    if way == "removed":
        shutil.rmtree(old)
    folder.metrics({"step": 2})
    folder.save_checkpoint(2, filled(), None)
    assert strict(folder.path / "run.json") == {"seed": 3} and names(folder) == ["step-00000002"]
    assert lines(folder.path, "metrics") == [{"step": 2}] and folder.lines_lost == 0
    assert "was removed or renamed during the run" in lines(folder.path, "events")[0]["message"]
    with pytest.raises(ConfigError, match="another process"):
        tidy(folder.path)
    if way == "renamed":
        assert lines(old, "metrics") == [{"step": 1}]


def test_a_run_leaves_another_runs_folder_of_its_name_alone(folder) -> None:
    """Its folder was removed, and the command was given once more while it still ran."""
    shutil.rmtree(folder.path)
    again = RunFolder(folder.path)
    folder.metrics({"step": 7})
    with pytest.raises(OSError, match="another run is writing"):
        folder.save_checkpoint(7, filled(), None)
    assert folder.lines_lost == 1
    assert lines(again.path, "metrics") == [] and again.checkpoints() == []
    again.close()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (["run.json", "thesis.tex"], True),
        (["checkpoints"], True),
        (["metrics.jsonl", "events.jsonl", ".run.json.abcdefgh.partial"], True),
        (["metrics.jsonl", "thesis.tex"], False),
        (["thesis.tex"], False),
        ([], False),
    ],
)
def test_the_folder_of_a_run_is_told_from_others(tmp_path, content, expected) -> None:
    for name in content:
        (tmp_path / name).touch()
    assert is_run(tmp_path) is expected


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing beyond this size fails, as on a full disk: with a short write first, then with an
    error.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_without_room_is_lost_as_a_whole_and_counted(folder) -> None:
    folder.metrics({"step": 1})
    with files_of_at_most(30):  # room for half a line
        folder.metrics({"step": 2, "more": "x" * 50})
        folder.metrics({"step": 3, "more": "x" * 50})
    folder.metrics({"step": 4})
    assert folder.lines_lost == 2
    assert lines(folder.path, "metrics") == [{"step": 1}, {"step": 4}]


def test_a_folder_that_cannot_be_read_is_not_one_without_checkpoints(tmp_path, monkeypatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError

    (tmp_path / "step-00000001").mkdir()
    monkeypatch.setattr("os.scandir", denied)
    monkeypatch.setattr("os.listdir", denied)
    with pytest.raises(PermissionError):
        checkpoints(tmp_path)
