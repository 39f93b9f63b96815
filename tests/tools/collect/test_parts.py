"""Work that is taken up again after any crash ends in the bytes of work that never crashed, and
touches nothing that is not its own.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from npt import files
from npt.errors import ConfigError
from npt.tools.collect.parts import Parts

SETTINGS = {"base": "a" * 64, "--max_new_tokens": 8, "--prompt_column": None}


def batch(number: int, size: int) -> list[dict]:
    return [{"id": f"{number}/{i}", "text": "é\n" * i} for i in range(size)]


def work(path: Path, sizes: list[int], settings: dict = SETTINGS) -> None:
    """Do batches of the given sizes, from the last finished one on."""
    with Parts(path, settings) as parts:
        for number in range(parts.progress.get("batches", 0), len(sizes)):
            parts.commit(batch(number, sizes[number]), {"batches": number + 1})


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path.parent)): p.read_bytes() for p in below(path) if p.is_file()}


def below(path: Path) -> list[Path]:
    return sorted(path.parent.rglob("*"))


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    path = tmp_path / "some" / "folder" / "out.jsonl"
    work(path, [2, 0, 1])
    return path


def test_records_are_written_in_order_and_the_parts_kept(begun: Path) -> None:
    ids = [json.loads(line)["id"] for line in begun.read_text(encoding="utf-8").splitlines()]
    assert ids == ["0/0", "0/1", "2/0"]
    folder = begun.with_name("out.jsonl.parts")
    names = [f"0000000{i}.part" for i in range(3)]
    assert below(begun) == [begun, folder, *(folder / name for name in (*names, "settings.json"))]
    with Parts(begun, SETTINGS) as parts:
        assert parts.progress == {"batches": 3}


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace", "os.chmod"])
@pytest.mark.parametrize("batches", [0, 2])
def test_a_kill_loses_at_most_the_batch_in_progress(tmp_path, moment, batches) -> None:
    path, whole = tmp_path / "killed" / "out.jsonl", tmp_path / "whole" / "out.jsonl"
    work(whole, [2, 1, 3, 0])
    work(path, [2, 1, 3, 0][:batches])
    child = os.fork()
    if not child:  # killed in the middle of one more part
        with Parts(path, SETTINGS) as parts:
            setattr(os, moment.partition(".")[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            parts.commit(batch(batches, 3), {"batches": batches + 1})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with Parts(path, SETTINGS) as parts:
        assert parts.progress == ({"batches": batches} if batches else {})
    work(path, [2, 1, 3, 0])
    assert content(path) == content(whole)


def test_a_kill_at_any_time_ends_in_the_same_bytes(tmp_path: Path) -> None:
    path, whole = tmp_path / "killed" / "out.jsonl", tmp_path / "whole" / "out.jsonl"
    sizes = [3] * 40
    work(whole, sizes)
    for delay in (0.001, 0.004, 0.009, 0.016):
        child = os.fork()
        if not child:
            work(path, sizes)
            os._exit(0)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    work(path, sizes)
    assert content(path) == content(whole)


def test_a_full_disk_leaves_what_was_committed(begun: Path, monkeypatch) -> None:
    before = begun.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Parts(begun, SETTINGS) as parts:
        monkeypatch.setattr(files.os, "fsync", full)
        with pytest.raises(ConfigError, match="No space left on device; make room"):
            parts.commit(batch(3, 2), {"batches": 4})
        monkeypatch.undo()
    assert begun.read_bytes() == before
    work(begun, [2, 0, 1, 2])
    assert len(begun.read_text(encoding="utf-8").splitlines()) == 5


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("base", "b" * 64, ["base", "aaaaaaaaaaaa,", "bbbbbbbbbbbb;"]),
        ("--max_new_tokens", 9, ["--max_new_tokens", "8,", "9;"]),
    ],
)
def test_other_settings_are_refused_and_both_are_named(begun: Path, name, value, told) -> None:
    before = content(begun)
    with pytest.raises(ConfigError) as error:
        work(begun, [2, 0, 1, 1], {**SETTINGS, name: value})
    assert [word for word in told if word not in str(error.value)] == []
    assert content(begun) == before


@pytest.mark.parametrize(
    "change", [lambda b: b[:-1] + b" ", lambda b: b.replace(b"0/0", b"0/9"), lambda b: b + b"mine"]
)
def test_an_output_that_was_changed_is_left_alone(begun: Path, change) -> None:
    begun.write_bytes(change(begun.read_bytes()))
    before = content(begun)
    with pytest.raises(ConfigError, match="was changed since it was written; move it elsewhere"):
        work(begun, [2, 0, 1, 1])
    assert content(begun) == before


def test_an_output_that_is_gone_is_written_anew(begun: Path) -> None:
    before = content(begun)
    begun.unlink()
    work(begun, [2, 0, 1])
    assert content(begun) == before


def test_an_output_without_its_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"text": "mine"}\n')
    with pytest.raises(ConfigError, match=r"out\.jsonl\.parts that it is written from does not"):
        work(tmp_path / "out.jsonl", [1])
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "mine"}\n'


def test_an_empty_file_is_a_beginning(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").touch()
    work(tmp_path / "out.jsonl", [1])
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_a_part_that_is_missing_is_named(begun: Path) -> None:
    (begun.with_name("out.jsonl.parts") / "00000001.part").unlink()
    with pytest.raises(ConfigError, match=r"lacks 00000001\.part; put it back"):
        work(begun, [2, 0, 1, 1])


@pytest.mark.parametrize("settings", ["", "{", "[]", "3"])
def test_settings_that_are_none_are_refused(begun: Path, settings: str) -> None:
    (begun.with_name("out.jsonl.parts") / "settings.json").write_text(settings)
    with pytest.raises(ConfigError, match=r"settings\.json"):
        work(begun, [1])


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        work(tmp_path, [1])
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        work(tmp_path / "file" / "out.jsonl", [1])


def test_two_at_once_are_refused(begun: Path) -> None:
    with Parts(begun, SETTINGS), pytest.raises(ConfigError, match="by another process"):
        Parts(begun, SETTINGS)
    work(begun, [2, 0, 1, 1])
