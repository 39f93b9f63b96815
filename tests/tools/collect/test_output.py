"""Work that is taken up again after any crash ends in the bytes of work that never crashed, and
touches nothing that is not its own.
"""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from npt.errors import ConfigError
from npt.tools.collect import output
from npt.tools.collect.output import Compared, Output

SETTINGS = {"base_hash": "a" * 64, "--max_new_tokens": 8, "--prompt_column": None}
SIZES = [2, 0, 3, 1]


def batch(number: int) -> list[dict[str, Any]]:
    return [{"id": f"{number}/{i}", "text": "é\n" * i} for i in range(SIZES[number])]


def work(path: Path, batches: int = len(SIZES), settings: Any = SETTINGS) -> None:
    """Do the batches from the last whole one on; all of them complete the file."""
    with Output(path, settings) as file:
        for number in range(file.figures.prompts, batches):
            file.commit(batch(number), Compared(prompts=number + 1))
        if batches == len(SIZES):
            file.finish()


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Writing beyond this size fails, with a short write first, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "some" / "folder" / "out.jsonl"


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    work(tmp_path / "whole.jsonl")
    return (tmp_path / "whole.jsonl").read_bytes()


def test_records_are_written_in_order_and_nothing_else_is_left(path, whole) -> None:
    work(path)
    ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert ids == ["0/0", "0/1", "2/0", "2/1", "2/2", "3/0"]
    assert list(path.parent.iterdir()) == [path] and path.read_bytes() == whole


@pytest.mark.parametrize("batches", [0, 1, 3])
def test_an_interruption_loses_no_whole_batch(path, whole, batches) -> None:
    work(path, batches)
    assert path.read_bytes().count(b"\n") == sum(SIZES[:batches])
    with path.open("ab") as file:
        file.write(b'{"id": "torn')  # killed while it wrote the next one
    with Output(path, SETTINGS) as again:
        assert again.figures.prompts == batches
    work(path)
    assert path.read_bytes() == whole


def test_a_kill_at_any_time_ends_in_the_same_bytes(path, whole) -> None:
    for delay in (0.001, 0.004, 0.009, 0.016):
        child = os.fork()
        if not child:
            work(path, len(SIZES) - 1)
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    work(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("beyond", [1, 20, 60])
def test_a_full_disk_leaves_whole_lines_and_the_work_goes_on(
    path, whole, beyond, monkeypatch
) -> None:
    work(path, 2)
    before = path.read_bytes()
    monkeypatch.setattr(output, "write_json", lambda *_: None)  # that file is larger here
    with full_at(len(before) + beyond), pytest.raises(ConfigError) as error:
        work(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    told = f"cannot write --output {path}: File too large; free disk space and repeat the command"
    assert str(error.value).startswith(told)
    work(path)
    assert path.read_bytes() == whole


def test_a_disk_without_room_for_the_progress_takes_the_batch_back(
    path, whole, monkeypatch
) -> None:
    work(path, 2)
    before = path.read_bytes()
    with Output(path, SETTINGS) as file:
        monkeypatch.setattr(output, "write_json", lambda *_: os.write(-1, b""))
        with pytest.raises(ConfigError, match="free disk space"):
            file.commit(batch(2), Compared(prompts=3))
        monkeypatch.undo()
    assert path.read_bytes() == before
    work(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"base_hash": "b" * 64}, "base_hash a+, and this command has b+"),
        ({"--max_new_tokens": 9}, "--max_new_tokens 8, and this command has 9"),
    ],
)
def test_other_settings_are_refused_and_both_are_named(path, change, told) -> None:
    work(path, 1)
    before = {each: each.read_bytes() for each in path.parent.iterdir()}
    with pytest.raises(ConfigError, match=told):
        work(path, settings={**SETTINGS, **change})
    assert {each: each.read_bytes() for each in path.parent.iterdir()} == before


def test_other_settings_may_follow_a_call_that_wrote_nothing(path, whole) -> None:
    work(path, 0, {**SETTINGS, "--max_new_tokens": 9})
    work(path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"settings": {}, "bytes": true, "figures": {}}', '{"settings": {}}']
)
def test_a_damaged_progress_is_one_line(path, content) -> None:
    work(path, 1)
    output.progress_of(path).write_text(content)
    with pytest.raises(ConfigError, match=r"out\.jsonl\.progress"):
        work(path)


def test_counts_below_0_are_one_line(path) -> None:
    work(path, 1)
    progress = output.progress_of(path)
    progress.write_text(progress.read_text().replace('"prompts": 1', '"prompts": -1'))
    with pytest.raises(ConfigError, match="below 0"):
        work(path)


def test_what_is_not_a_collection_of_this_command_stays(path, tmp_path) -> None:
    work(path, 1)
    path.write_text("")
    with pytest.raises(ConfigError, match="0 bytes, fewer than"):
        work(path)
    mine = tmp_path / "mine.jsonl"
    mine.write_text("mine")
    with pytest.raises(ConfigError, match=r"exists; choose another file or remove it"):
        work(mine)
    with pytest.raises(ConfigError, match="not a folder that can be written to"):
        work(mine / "out.jsonl")
    device = tmp_path / "full.jsonl"
    device.symlink_to("/dev/full")
    for odd in (device, tmp_path):
        with pytest.raises(ConfigError, match="is not a file"):
            work(odd)
    assert mine.read_text() == "mine"


def test_two_processes_do_not_write_one_file(path) -> None:
    with Output(path, SETTINGS), pytest.raises(ConfigError, match="by another process"):
        work(path)
