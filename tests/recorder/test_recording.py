"""Which steps are recorded, and where their records go."""

import json

import pytest
from torch import nn

from npt.errors import ConfigError
from npt.recorder.record import Record, Row
from npt.recorder.recording import PICTURED, Recording


def chosen(recording: Recording, last: int = 20) -> list[int]:
    return [step for step in range(1, last + 1) if recording.wants(step)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [("1-5,8", [1, 2, 3, 4, 5, 8]), ("/6", [6, 12, 18]), ("2-3,/10", [2, 3, 10, 20]), ("30", [])],
)
def test_the_chosen_steps_are_said_and_wanted_and_no_other(steps, expected) -> None:
    recording = Recording("there", steps)
    assert chosen(recording) == expected
    assert str(recording) == (
        f"recording the first micro-batch of steps {steps} on process 0 into there"
    )
    for step in expected[:1]:  # however often it is tried
        recording.start(nn.Linear(1, 1), step)
        recording.stop()
        assert chosen(recording) == expected[1:]


def test_what_cannot_be_a_choice_of_steps_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="steps is 'x'"):
        Recording(tmp_path, "x")


def test_a_record_is_a_file_that_can_be_read_again(tmp_path) -> None:
    recording = Recording(tmp_path / "deep" / "trace", "1-9")
    record = Record(7, (), micro_batch=1)
    path = recording.keep(record)
    assert path == tmp_path / "deep" / "trace" / "step-00000007.json"
    read = json.loads(path.read_text())
    assert read == {"step": 7, "micro_batch": 1, "rows": []} and Record.from_dict(read) == record
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("bad", [0, 5])
def test_the_records_of_a_run_are_drawn_together_the_first_bad_one_among_them(
    tmp_path, drawn, steps, bad
) -> None:
    lines: list[str] = []
    recording = Recording(tmp_path, "1-99", say=lines.append)
    recording.draw()
    assert drawn == lines == []
    nan = Row("a", None, "out", "forward", (1,), "float32", 1, 0.0, 1, 0, 0, *[None] * 6)
    for step in range(1, steps + 1):
        recording.keep(Record(step, (nan,) if bad and step >= bad else ()))
    recording.draw()
    assert lines == [f"pictures of the recorded steps: {tmp_path / 'health.png'}"]
    ((shown, folder),) = drawn
    assert folder == tmp_path and shown == sorted(set(shown)) and len(shown) <= PICTURED
    assert len(shown) >= min(steps, PICTURED - 1) and {1, steps} <= set(shown)
    assert bad == 0 or bad > steps or bad in shown
