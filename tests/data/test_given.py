"""What Python callers give as data: every form that has one meaning is read, any other refused in a
line that names the argument.
"""

from functools import partial
from pathlib import Path

import datasets
import pandas
import pytest

import npt
from npt.base.source import load_tokenizer
from npt.calibration.samples import read_samples, samples_of
from npt.data.source import records_from
from npt.errors import ConfigError, DataError

ROWS = [{"text": f"a text, number {number}"} for number in range(4)]
ROLES = ("user", "assistant")


def rows(count: int = 4):
    yield from ROWS[:count]


def read(data, what: str = "data") -> list:
    records = records_from(data, npt.DataConfig(), what)
    assert list(records) == list(records)
    return list(records)


def test_rows_are_those_of_a_frame_function_path_or_dataset(tmp_path):
    path = tmp_path / "a.jsonl"
    pandas.DataFrame(ROWS).to_json(path, orient="records", lines=True)
    every = (ROWS, tuple(ROWS), pandas.DataFrame(ROWS), datasets.Dataset.from_list(ROWS), rows)
    for data in (*every, partial(rows, 4), path, str(path)):
        assert [record["text"] for record in read(data)] == [row["text"] for row in ROWS]


def test_a_frame_keeps_lists_and_lacks_what_is_missing():
    chat = [{"role": role, "content": "a"} for role in ROLES]
    frame = pandas.DataFrame({"messages": [chat, None], "text": [None, "b"], "n": [1, None]})
    first, second = read(frame)
    assert first == {"messages": chat, "text": None, "n": 1}
    assert second == {"messages": None, "text": "b", "n": None}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (5, "eval_data is an int; pass a list of records like"),
        (b"text", "eval_data is a bytes; pass a list"),
        ("no such text", "eval_data is 'no such text', which is not a file or folder; pass a list"),
        (Path("/no/such/file.jsonl"), "there is no file at /no/such/file.jsonl"),
        (datasets.DatasetDict({"train": 1, "test": 2}), "a DatasetDict with train, test; pass one"),
        (lambda count: rows(count), r"a function that cannot be called without arguments \(.*coun"),
        (lambda: None, "eval_data is a function that returns a NoneType; yield records"),
        (pandas.DataFrame({"text": ["a", 1]}), "a DataFrame that `datasets` cannot read: "),
    ],
)
def test_what_is_no_data_is_refused_in_a_line(data, message):
    with pytest.raises(DataError, match=message) as refusal:
        read(data, "eval_data")
    assert "\n" not in str(refusal.value)


def test_a_frame_needs_datasets(monkeypatch):
    monkeypatch.setattr("npt.extras.installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"^a DataFrame as data needs datasets, .*\[hub\]"):
        read(pandas.DataFrame(ROWS))


@pytest.mark.parametrize("data", [rows, pandas.DataFrame(ROWS)], ids=["function", "frame"])
def test_evaluations_and_calibrations_take_them_too(data):
    tokenizer, config = load_tokenizer("tiny"), npt.DataConfig()
    expected = list(samples_of(ROWS, tokenizer, config))
    assert list(samples_of(data, tokenizer, config)) == expected
    calibrated = read_samples(data, tokenizer, 256, 1000, 2048)
    assert sorted(s.id for s in calibrated) == sorted(s.id for s in expected)
    with pytest.raises(DataError, match="data is an int; pass a list"):
        read_samples(5, tokenizer, 256, 1000, 2048)
