"""A disk that is full, a folder that may not be written to or goes away: training continues from a
checkpoint, and says so.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import status_of
from resumed_runs import Runs, at, checkpoint_names, events, lines, records
from test_run_folder import files_of_at_most

from npt import manifest as manifest_module
from npt.batch import Batch
from npt.errors import CheckpointError, ConfigError, DataError
from npt.runs import checkpoint as checkpoint_module
from npt.runs import run_folder

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO]


def names(*steps: int) -> list[str]:
    return [f"step-{step:08d}" for step in steps]


@pytest.fixture(scope="module")
def base(load_model: Any) -> Any:
    return load_model()


@pytest.fixture
def here(base: Any, tmp_path: Path) -> Runs:
    """Six steps, a checkpoint after each."""
    return Runs(base, tmp_path, lambda: records(6), settings={"save_steps": 1})


@pytest.fixture(scope="module")
def whole(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(
        base, tmp_path_factory.mktemp("whole"), lambda: records(6), settings={"save_steps": 1}
    )
    made.run("whole")
    return made


def failing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, calls: range
) -> None:
    """An error of the disk in these calls of a function."""
    original, count = getattr(owner, name), iter(range(10**6))

    def function(*arguments: Any, **more: Any) -> Any:
        if next(count) in calls:
            raise OSError(number, os.strerror(number))
        return original(*arguments, **more)

    monkeypatch.setattr(owner, name, function)


PARTS = ["save_file", "write_adapter", "write_json", "write_manifest", "new_folder", "_sums"]


@pytest.mark.parametrize(  # every part, and every error at some of them
    ("part", "number"),
    list(zip(PARTS, [*ERRORS, errno.ENOSPC], strict=True)),
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value,
)
def test_a_checkpoint_that_cannot_be_written_costs_itself_only(
    here, whole, monkeypatch, part, number
) -> None:
    owner, calls, lost = checkpoint_module, range(2, 4), [3, 4]
    if part == "_sums":  # ten for each save
        owner, calls, lost = manifest_module, range(20, 21), [3]
    with monkeypatch.context() as patched:
        failing(patched, owner, part, number, calls)
        here.run("run")
    run = here.place / "run"
    assert checkpoint_names(run) == names(*(step for step in range(1, 7) if step not in lost))
    failed = events(run, "save_failed")
    assert [event["step"] for event in failed] == lost
    for word in (os.strerror(number), "step-00000002"):
        assert all(word in event["message"] for event in failed)
    assert here.said.getvalue().count("WARNING: no checkpoint at step") == len(lost)
    here.outcome("run").assert_equal(whole.outcome("whole"))


def test_a_run_json_that_cannot_be_written_is_one_line_and_leaves_no_folder(
    here, monkeypatch
) -> None:
    failing(monkeypatch, run_folder, "write_json", errno.ENOSPC, range(1))
    trainer = here.trainer("run")
    with pytest.raises(ConfigError, match=r"cannot write .*run: No space .*; choose another"):
        trainer.train()
    assert not (here.place / "run").exists()


def test_without_any_checkpoint_the_run_ends_in_one_line_and_status_5(here, monkeypatch) -> None:
    failing(monkeypatch, checkpoint_module, "save_file", errno.ENOSPC, range(99))
    message = r"cannot write the checkpoint of step 1: .*No space left.*there is no older one"
    with pytest.raises(CheckpointError, match=message) as caught:
        here.run("run")
    assert caught.value.exit_status == 5 and "\n" not in str(caught.value)
    assert list((here.place / "run" / "checkpoints").iterdir()) == []


def test_a_last_checkpoint_that_cannot_be_written_is_not_passed_over(
    here, whole, monkeypatch
) -> None:
    """The adapters that the run was for are not on the disk: that is no success."""
    with monkeypatch.context() as patched:
        failing(patched, checkpoint_module, "save_file", errno.ENOSPC, range(5, 99))
        good = r"of step 6: .*the last good one is .*step-00000005; free disk space and continue"
        with pytest.raises(CheckpointError, match=good):
            here.run("run")
    here.run("run", resume="auto")
    here.outcome("run").assert_equal(whole.outcome("whole"))


def test_broken_data_on_a_full_disk_are_still_what_is_said(here, monkeypatch) -> None:
    def act(number: int, batch: Batch) -> None:
        if number == 3:
            raise DataError("line 4 is broken")

    failing(monkeypatch, checkpoint_module, "save_file", errno.ENOSPC, range(2, 99))
    with pytest.raises(DataError, match="line 4 is broken"):
        here.run("run", act)
    errors = events(here.place / "run", "error")
    assert [event["message"][:9] for event in errors] == ["line 4 is", "not saved"]
    assert checkpoint_names(here.place / "run") == names(1, 2)


def test_figures_that_cannot_be_written_are_warned_of(here, monkeypatch) -> None:
    original = run_folder.write_json

    def write(path: Path, value: Any) -> None:
        if path.name == "fidelity.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path, value)

    monkeypatch.setattr(run_folder, "write_json", write)
    result = here.run("run", eval_steps=2)
    assert result.fidelity is not None and not (here.place / "run" / "fidelity.json").exists()
    for words in ("cannot write fidelity.json", "cannot write the best adapters"):
        assert any(words in e["message"] for e in events(here.place / "run", "warning"))


def test_lines_that_were_lost_are_said_at_the_end(here, whole) -> None:
    """Files may not grow beyond a hundred bytes while the third step is made: neither its lines nor
    its checkpoint are written.
    """

    def act(number: int, batch: Batch) -> None:
        if number == 2:
            limit.__enter__()
        if number == 3:
            limit.__exit__(None, None, None)

    limit = files_of_at_most(100)
    here.run("run", act)
    run = here.place / "run"
    lost = "warning: 2 lines of metrics.jsonl and events.jsonl could not be written"
    assert lost in here.said.getvalue()
    assert [line["step"] for line in lines(run, "metrics")] == [1, 2, 4, 5, 6]
    assert checkpoint_names(run) == names(1, 2, 4, 5, 6)
    one, other = here.outcome("run"), whole.outcome("whole")
    del other.metrics[2]
    one.assert_equal(other)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that everybody may use: the test's own are for their owner only."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o777)
    yield place
    shutil.rmtree(place)


def unprivileged(act: Callable[[], int]) -> int:
    """The exit status of a process without the rights of an administrator, whom no mode
    keeps out.
    """

    def acting() -> int:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        return act()

    return status_of(acting)


def test_a_folder_that_becomes_read_only_costs_checkpoints_only(here, whole, open_place) -> None:
    here.place = open_place

    def act(number: int, batch: Batch) -> None:
        if number in (2, 4):
            mode = 0o555 if number == 2 else 0o755
            (open_place / "run" / "checkpoints").chmod(mode)

    assert unprivileged(lambda: here.run("run", act).exit_status) == 0
    run = open_place / "run"
    assert checkpoint_names(run) == names(1, 2, 5, 6)
    failed = events(run, "save_failed")
    assert ["Permission denied" in event["message"] for event in failed] == [True, True]
    here.outcome("run").assert_equal(whole.outcome("whole"))


def test_a_read_only_place_is_refused_before_computing(here, open_place) -> None:
    here.place = open_place
    (open_place / "closed").mkdir(mode=0o555)

    def act() -> int:
        message = r"--output_dir .*closed/run cannot be written: Permission denied; choose another"
        with pytest.raises(ConfigError, match=message):
            here.trainer("closed/run")
        return 0

    assert unprivileged(act) == 0


def test_a_run_that_may_not_be_read_is_not_resumed(here, open_place) -> None:
    here.place = open_place
    assert unprivileged(lambda: here.run("run", at(1)).exit_status) == 143
    (open_place / "run" / "checkpoints").chmod(0)

    def act() -> int:
        for resume, folder in (("auto", "run"), (str(open_place / "run"), None)):
            message = r"cannot read .*checkpoints: Permission denied"
            with pytest.raises(CheckpointError, match=message):
                here.trainer(folder, resume=resume)
        return 0

    assert unprivileged(act) == 0
