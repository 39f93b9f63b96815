"""Every broken place of a file is found in one pass, with its line and column, and what is whole is
read.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npt.config import DataConfig
from npt.data.source import open_source
from npt.doctor.data import NAMED, PLACES, DataReport, readable
from npt.errors import DataError


def read(path: Path, **settings) -> tuple[list[dict], DataReport]:
    report = DataReport(str(path), vocab_size=0, heldout=None)
    config = DataConfig(dataset_name=str(path), **settings)
    return [dict(record) for record, _ in readable(config, report)], report


@pytest.fixture(params=[False, True], ids=["kept", "streaming"])
def streaming(request) -> bool:
    return request.param


def test_every_broken_line_is_located_and_the_others_are_read(tmp_path, streaming):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "a"}\n\n{"text":\n{"text": "b"}\n[1]\n {"text" "c"}\n{"text":'
        b' "\xff"}\nnull\n{"text": "d"}'
    )
    records, reading = read(path, streaming=streaming)
    assert [r["text"] for r in records] == ["a", "b", "d"]
    assert [r["id"] for r in records] == ["data.jsonl:1", "data.jsonl:4", "data.jsonl:9"]
    assert reading.broken_total == 5
    assert [words.split(" (")[0].removeprefix(str(path)) for words in reading.broken] == [
        ", line 3, column 9: not JSON",
        ', line 5: a list, not an object like {"text": ...}',
        ", line 6, column 10: not JSON",
        ", line 7: not UTF-8",
        ', line 8: a NoneType, not an object like {"text": ...}',
    ]
    assert reading.broken[0].endswith("(Expecting value); each line must be one JSON object")


@pytest.mark.parametrize(
    ("content", "line", "column"),
    [('{"text": "a",\n{}', 1, 14), ('{}\n{"text":   \n{}', 2, 9), ("{}\n{}\n{", 3, 2)],
)
def test_a_line_that_ends_too_early_is_broken_at_its_end(tmp_path, content, line, column):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    (words,) = read(path)[1].broken
    assert words.startswith(f"{path}, line {line}, column {column}: not JSON")


@given(
    lines=st.lists(
        st.one_of(
            st.builds(lambda text: json.dumps({"text": text}).encode(), st.text()),
            st.binary().map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")),
            st.sampled_from([b"", b"  ", b"{", b"3", b'{"text": 1}', b'"x"']),
        ),
        min_size=1,
    )
)
def test_a_line_is_broken_where_training_would_stop_at_it(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("lines") / "data.jsonl"
    path.write_bytes(b"\n".join([b'{"text": "first"}', *lines]))
    records, reading = read(path)
    try:
        assert records == list(open_source(DataConfig(dataset_name=str(path))))
        assert reading.broken_total == 0
    except DataError:
        assert reading.broken_total > 0
    listed = sum(fault.count for fault in reading.faults.values())
    assert listed == reading.broken_total or len(reading.broken) == NAMED


def test_many_broken_lines_are_counted_and_the_first_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' + "{\n" * 1000)
    reading = read(path)[1]
    assert reading.broken_total == 1000
    (words,) = reading.broken
    lines = ", ".join(f"line {line}" for line in range(2, 2 + PLACES))
    assert words.startswith(f"{path}, line 2, column 2: not JSON")
    assert words.endswith(f" (1,000 such faults: {lines}, ...)")


@pytest.mark.parametrize(
    ("name", "content", "line", "column", "problem"),
    [
        ("a.json", b'[{"text": "a"},\n {"text" "b"}]', 2, 10, "not JSON (Expecting ':' delimiter)"),
        ("a.json", b'[\n"\xff"]', 2, None, "not UTF-8 (invalid start byte)"),
        ("a.json", b'{"text": 1}', None, None, "holds a dict; it must be a list"),
        ("a.json", b'[{"text": "a"}, 1]', None, None, "entry 1: an int, not an object"),
        ("a.txt", b"one\ntw\xffo\n", 2, None, "not UTF-8 (invalid start byte)"),
        ("a.csv", b'text,b\n"1\n1",2\n\nx,y,z\n', 5, None, "3 fields, but the header names 2"),
        ("a.csv", b'text,b\n1,2\n3,"x\n1,3\n', 3, None, "not CSV (unexpected end of data)"),
        ("a.csv", b"text\nab\xff\n", 2, None, "not UTF-8 (invalid start byte)"),
        ("a.parquet", b"PAR1xxx", None, None, "is damaged or not Parquet"),
    ],
)
def test_faults_of_other_files_are_located_as_far_as_possible(
    tmp_path, name, content, line, column, problem
):
    (tmp_path / name).write_bytes(content)
    (words,) = read(tmp_path / name)[1].broken
    where = "" if line is None else f", line {line}"
    where += "" if column is None else f", column {column}"
    assert words.startswith(f"{tmp_path / name}{where}") and problem in words
    assert ("line " in words) == (line is not None)


def test_a_csv_file_whose_rows_all_have_a_field_too_many_is_not_read(tmp_path, streaming):
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,b,c\nd,e,f\n")
    records, reading = read(path, streaming=streaming)
    assert records == []
    (words,) = reading.broken
    assert words.startswith(f"{path}, line 2: 3 fields")
    assert words.endswith(" (2 such faults: line 2, line 3)")


def test_one_broken_file_of_a_folder_does_not_hide_the_others(tmp_path):
    (tmp_path / "a.json").write_text("[")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{')
    (tmp_path / "c.txt").write_text("c")
    records, reading = read(tmp_path)
    assert [r["text"] for r in records] == ["b", "c"]
    for words, where in zip(reading.broken, ("a.json, line 1,", "b.jsonl, line 2,"), strict=True):
        assert words.startswith(f"{tmp_path / where}")
