"""A journal taken up again after any crash ends in the bytes of one that never crashed, and touches
nothing that is not its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npt.errors import ConfigError
from npt.tools.collect.journal import Journal, read_state

SETTINGS = {"base": "a" * 64, "--max_new_tokens": 8, "--prompt_column": None}
MARKS = {"base_hash": "a" * 64}


def batch(number: int, size: int) -> list[dict]:
    return [{"id": f"{number}/{i}", "text": "é\n" * i, **MARKS} for i in range(size)]


def work(path: Path, sizes: list[int], settings: dict = SETTINGS) -> Journal:
    """Batches of the given sizes, from wherever the journal stands."""
    with Journal(path, settings, MARKS) as journal:
        for number in range(journal.progress.get("batches", 0), len(sizes)):
            journal.commit(batch(number, sizes[number]), {"batches": number + 1})
    return journal


def content(path: Path) -> tuple[bytes, bytes]:
    return path.read_bytes(), path.with_name(path.name + ".state").read_bytes()


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    path = tmp_path / "some" / "folder" / "out.jsonl"
    work(path, [2, 0, 1])
    return path


def test_lines_and_state_are_written(begun: Path) -> None:
    assert [json.loads(line)["id"] for line in begun.read_text().splitlines()] == [
        "0/0",
        "0/1",
        "2/0",
    ]
    state = read_state(begun)
    assert state is not None
    assert (state["bytes"], state["progress"], state["settings"]) == (
        begun.stat().st_size,
        {"batches": 3},
        SETTINGS,
    )
    assert sorted(p.name for p in begun.parent.iterdir()) == ["out.jsonl", "out.jsonl.state"]


@given(sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4), data=st.data())
def test_a_crash_anywhere_changes_no_byte_of_the_outcome(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data
) -> None:
    whole, crashed = (
        tmp_path_factory.mktemp("whole") / "out.jsonl",
        tmp_path_factory.mktemp("crashed") / "out.jsonl",
    )
    work(whole, sizes)
    done = data.draw(st.integers(0, len(sizes) - 1), label="batches committed before the crash")
    work(crashed, sizes[:done])
    state = content(crashed)[1]
    # The batch under way got as far as some byte of the lines that it appends; the state is still
    # that of before.
    work(crashed, sizes[: done + 1])
    committed, appended = json.loads(state)["bytes"], crashed.stat().st_size
    cut = data.draw(st.integers(committed, appended), label="bytes on the disk")
    os.truncate(crashed, cut)
    crashed.with_name("out.jsonl.state").write_bytes(state)
    assert work(crashed, sizes).removed == cut - committed
    assert content(crashed) == content(whole)


def test_a_full_disk_leaves_what_was_committed_and_the_next_call_goes_on(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = begun.read_bytes()
    write = os.write
    with Journal(begun, SETTINGS, MARKS) as journal:
        monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:7]))
        with pytest.raises(ConfigError, match="disk is full; make room"):
            journal.commit(batch(3, 2), {"batches": 4})
        monkeypatch.undo()
    assert begun.read_bytes() == before + b'{"id": '
    assert work(begun, [2, 0, 1, 2]).removed == 7
    assert len(begun.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("base", "b" * 64, ["base", "aaaaaaaaaaaa,", "bbbbbbbbbbbb;"]),
        ("--max_new_tokens", 9, ["--max_new_tokens", "8,", "9;"]),
    ],
)
def test_other_settings_are_refused_and_both_are_named(
    begun: Path, name: str, value: object, told: list[str]
) -> None:
    before = content(begun)
    with pytest.raises(ConfigError) as error:
        work(begun, [2, 0, 1, 1], {**SETTINGS, name: value})
    assert [word for word in told if word not in str(error.value)] == []
    assert content(begun) == before


@pytest.mark.parametrize(
    "change", [lambda b: b[:-1], lambda b: b.replace(b"0/0", b"0/9"), lambda b: b""]
)
def test_a_file_that_was_changed_is_refused_and_left_alone(begun: Path, change) -> None:
    begun.write_bytes(change(begun.read_bytes()))
    before = content(begun)
    with pytest.raises(
        ConfigError, match=r"was changed since it was written; .* out\.jsonl\.state"
    ):
        work(begun, [2, 0, 1, 1])
    assert content(begun) == before


@pytest.mark.parametrize(
    "line",
    [b'{"text": "mine"}\n', b"notes\n", b"notes", b"3\n", b'{"id": "x", "base_hash": "other"}\n'],
)
def test_lines_that_others_added_are_not_removed(begun: Path, line: bytes) -> None:
    with begun.open("ab") as file:
        file.write(line)
    before = content(begun)
    with pytest.raises(ConfigError, match="added by something else"):
        work(begun, [2, 0, 1, 1])
    assert content(begun) == before


def test_a_file_without_its_state_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text('{"text": "mine"}\n')
    with pytest.raises(ConfigError, match=r"out\.jsonl\.state beside it does not"):
        work(tmp_path / "out.jsonl", [1])
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "mine"}\n'


def test_an_empty_file_is_a_beginning(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").touch()
    work(tmp_path / "out.jsonl", [1])
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1


def test_a_state_without_its_file_is_refused(begun: Path) -> None:
    begun.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        work(begun, [1])
    assert not begun.exists()


@pytest.mark.parametrize("state", ["", "{", "[]", "{}", "3", '{"bytes": 1}'])
def test_a_state_that_is_none_is_refused(begun: Path, state: str) -> None:
    begun.with_name("out.jsonl.state").write_text(state)
    with pytest.raises(ConfigError, match="not the state of a collection"):
        work(begun, [1])


def test_a_folder_and_a_place_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        work(tmp_path, [1])
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be"):
        work(tmp_path / "file" / "out.jsonl", [1])


def test_two_at_once_are_refused(begun: Path) -> None:
    with Journal(begun, SETTINGS, MARKS), pytest.raises(ConfigError, match="by another process"):
        Journal(begun, SETTINGS, MARKS)
    work(begun, [2, 0, 1, 1])
