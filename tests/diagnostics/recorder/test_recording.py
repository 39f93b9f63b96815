"""Which steps are recorded, and where their records go."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from npt.diagnostics.recorder import recording as recording_module
from npt.diagnostics.recorder.record import Record
from npt.diagnostics.recorder.recording import PICTURED, Recording, describe, read_record
from npt.errors import ConfigError


def chosen(recording: Recording, last: int = 20) -> list[int]:
    return [step for step in range(1, last + 1) if recording.wants(step)]


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [
        ("1,2,3,4,5,8", None, [1, 2, 3, 4, 5, 8]),
        ("1-5,8", None, [1, 2, 3, 4, 5, 8]),
        (None, 6, [6, 12, 18]),
        ("2-3", 10, [2, 3, 10, 20]),
        (None, None, []),
        ("30", None, []),
        (None, 1, list(range(1, 21))),
    ],
)
def test_the_chosen_steps_are_wanted_and_no_other(steps, every, expected, tmp_path) -> None:
    assert chosen(Recording(tmp_path, steps, every)) == expected


def test_a_step_is_recorded_once_however_often_it_is_tried(tmp_path) -> None:
    recording = Recording(tmp_path, "2-4")
    recording.begin(3)
    assert chosen(recording) == [2, 4]


@pytest.mark.parametrize(
    ("steps", "every", "message"),
    [("x", None, "steps is 'x'"), (None, 0, "every is 0"), (None, -1, "every is -1")],
)
def test_what_cannot_be_a_choice_of_steps_is_refused(steps, every, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        Recording(tmp_path, steps, every)


@pytest.mark.parametrize(
    ("steps", "every", "plan"),
    [
        ("1-5", None, "steps 1-5"),
        (None, 1, "every 1st step"),
        (None, 12, "every 12th step"),
        ("3", 22, "steps 3 and every 22nd step"),
    ],
)
def test_it_says_what_will_be_recorded(steps, every, plan) -> None:
    said = str(Recording("there", steps, every))
    assert said == f"recording {plan}, of each the first micro-batch on process 0 only, into there"


def test_a_record_is_a_file_that_can_be_read_again(tmp_path) -> None:
    recording = Recording(tmp_path / "deep" / "trace", "1-9")
    record = Record(7, (), micro_batch=1)
    path = recording.keep(record)
    assert path == tmp_path / "deep" / "trace" / "step-00000007.json"
    assert (
        json.loads(path.read_text()) == {"step": 7, "micro_batch": 1, "rows": []}
        and read_record(path) == record
    )
    assert (
        describe(record, path)
        == f"recorded step 7 (micro-batch 1, process 0) in {path}: nothing was computed"
    )
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def drawn(monkeypatch) -> list[tuple[list[Record], Path]]:
    """The calls of the part that draws, which is replaced."""
    calls: list[tuple[list[Record], Path]] = []
    picture = ModuleType("npt.diagnostics.recorder.picture")

    def write_pictures(records, folder):
        calls.append((list(records), folder))
        return [folder / "forward.png", folder / "trace.html"]

    picture.write_pictures = write_pictures
    monkeypatch.setitem(sys.modules, "npt.diagnostics.recorder.picture", picture)
    monkeypatch.setattr(sys.modules["npt.diagnostics.recorder"], "picture", picture, raising=False)
    return calls


def test_all_records_of_a_run_are_drawn_together(tmp_path, drawn) -> None:
    recording = Recording(tmp_path, "1-9")
    assert recording.draw() == [] and drawn == []
    for step in (2, 5):
        recording.keep(Record(step, ()))
    assert recording.draw() == [tmp_path / "forward.png", tmp_path / "trace.html"]
    assert drawn == [([Record(2, ()), Record(5, ())], tmp_path)]


def test_of_very_many_records_an_even_choice_is_drawn(tmp_path, drawn, monkeypatch) -> None:
    recording = Recording(tmp_path, every=1)
    monkeypatch.setattr(
        recording_module, "read_record", lambda path: SimpleNamespace(step=int(path.stem[5:]))
    )
    recording._files = [tmp_path / f"step-{step:08d}.json" for step in range(1, 1001)]
    recording.draw()
    steps = [record.step for record in drawn[0][0]]
    assert len(steps) == PICTURED and steps[0] == 1 and steps[-1] == 1000
    assert {after - before for before, after in itertools.pairwise(steps)} == {10, 11}
