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

from npt.errors import ConfigError
from npt.tools.collect.journal import Journal

SETTINGS = {"base": "a" * 64, "--max_new_tokens": 8, "--prompt_column": None}


def batch(number: int, size: int) -> list[dict]:
    return [{"id": f"{number}/{i}", "text": "é\n" * i} for i in range(size)]


def work(path: Path, sizes: list[int], settings: dict = SETTINGS) -> None:
    """Do batches of the given sizes, from the last finished one on."""
    with Journal(path, settings) as journal:
        for number in range(journal.progress.get("batches", 0), len(sizes)):
            journal.commit(batch(number, sizes[number]), {"batches": number + 1})


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path.parent)): p.read_bytes() for p in below(path) if p.is_file()}


def below(path: Path) -> list[Path]:
    return sorted(path.parent.rglob("*"))


@pytest.fixture
def begun(tmp_path) -> Path:
    path = tmp_path / "some" / "folder" / "out.jsonl"
    work(path, [2, 0, 1])
    return path


def test_records_are_written_in_order_and_the_journal_kept(begun: Path) -> None:
    ids = [json.loads(line)["id"] for line in begun.read_text(encoding="utf-8").splitlines()]
    assert ids == ["0/0", "0/1", "2/0"]
    assert below(begun) == [begun, begun.with_name("out.jsonl.journal")]
    with Journal(begun, SETTINGS) as journal:
        assert journal.progress == {"batches": 3}


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("batches", [0, 2])
def test_a_kill_loses_at_most_the_batch_in_progress(tmp_path, torn, batches) -> None:
    path, whole = tmp_path / "killed" / "out.jsonl", tmp_path / "whole" / "out.jsonl"
    work(whole, [2, 1, 3, 0])
    work(path, [2, 1, 3, 0][:batches])
    child = os.fork()
    if not child:  # killed in the middle of one more batch
        with Journal(path, SETTINGS) as journal:
            if torn:
                with journal._path.open("a") as stream:
                    stream.write('{"progress": {"batches"')
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    with Journal(path, SETTINGS) as journal:
        assert journal.progress == ({"batches": batches} if batches else {})
    work(path, [2, 1, 3, 0])
    assert content(path) == content(whole)


def test_a_kill_at_any_time_ends_in_the_same_bytes(tmp_path) -> None:
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

    with Journal(begun, SETTINGS) as journal:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            journal.commit(batch(3, 2), {"batches": 4})
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


def test_an_output_without_its_journal_is_refused(tmp_path) -> None:
    (tmp_path / "out.jsonl").write_text('{"text": "mine"}\n')
    with pytest.raises(ConfigError, match=r"out\.jsonl\.journal that it is written from does not"):
        work(tmp_path / "out.jsonl", [1])
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "mine"}\n'


def test_an_empty_file_is_a_beginning(tmp_path) -> None:
    (tmp_path / "out.jsonl").touch()
    work(tmp_path / "out.jsonl", [1])
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"records": null}'])
def test_a_journal_that_is_none_is_refused(begun: Path, line: str) -> None:
    journal = begun.with_name("out.jsonl.journal")
    journal.write_text(f"{line}\n{line}\n")
    with pytest.raises(ConfigError, match=r"out\.jsonl\.journal is damaged"):
        work(begun, [1])


def test_a_place_that_cannot_be_written_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        work(tmp_path, [1])
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        work(tmp_path / "file" / "out.jsonl", [1])


def test_two_at_once_are_refused(begun: Path) -> None:
    with Journal(begun, SETTINGS), pytest.raises(ConfigError, match="by another process"):
        Journal(begun, SETTINGS)
    work(begun, [2, 0, 1, 1])
