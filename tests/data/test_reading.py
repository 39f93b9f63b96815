"""Every broken place of a file is found in one pass, with its line and column, and what is whole is
read.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npt.config import DataConfig
from npt.data.source import open_source
from npt.doctor.data import NAMED, Reading
from npt.errors import DataError


def read(path: Path, **settings) -> tuple[list[dict], Reading]:
    reading = Reading(DataConfig(dataset_name=str(path), **settings))
    return [dict(record) for record, _ in reading], reading


def places(path: Path, **settings) -> list[tuple[int | None, int | None, str]]:
    return [
        (broken.line, broken.column, broken.problem) for broken in read(path, **settings)[1].broken
    ]


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
    assert [(b.line, b.column, b.problem.split(" (")[0]) for b in reading.broken] == [
        (3, 9, "not JSON"),
        (5, None, 'a list, not an object like {"text": ...}'),
        (6, 10, "not JSON"),
        (7, None, "not UTF-8"),
        (8, None, 'a NoneType, not an object like {"text": ...}'),
    ]
    first = "not JSON (Expecting value); each line must be one JSON object"
    assert str(reading.broken[0]) == f"{path}, line 3, column 9: {first}"


def test_a_line_that_ends_too_early_is_broken_at_its_end(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a",\n{"text":   \n{')
    assert [(line, column) for line, column, _ in places(path)] == [(1, 14), (2, 9), (3, 2)]


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
    assert len(reading.broken) == min(reading.broken_total, NAMED)


def test_many_broken_lines_are_counted_and_twenty_are_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n' + "{\n" * 1000)
    reading = read(path)[1]
    assert reading.broken_total == 1000
    assert [b.line for b in reading.broken] == list(range(2, 22))


@pytest.mark.parametrize(
    ("name", "content", "line", "column", "problem"),
    [
        ("a.json", b'[{"text": "a"},\n {"text" "b"}]', 2, 10, "not JSON (Expecting ':' delimiter)"),
        ("a.json", b'[\n"\xff"]', 2, None, "not UTF-8 (byte 1: invalid start byte)"),
        ("a.json", b'{"text": 1}', None, None, "holds a dict; it must be a list"),
        ("a.json", b'[{"text": "a"}, 1]', None, None, "entry 1: an int, not an object"),
        ("a.txt", b"one\ntw\xffo\n", 2, None, "not UTF-8 (byte 2: invalid start byte)"),
        ("a.csv", b'text,b\n"1\n1",2\n\nx,y,z\n', 5, None, "3 fields, but the header names 2"),
        ("a.csv", b'text,b\n1,2\n3,"x\n1,3\n', 3, None, "not CSV (unexpected end of data)"),
        ("a.csv", b"text\nab\xff\n", 2, None, "not UTF-8 (byte 2: invalid start byte)"),
        ("a.parquet", b"PAR1xxx", None, None, "cannot be read as "),
    ],
)
def test_faults_of_other_files_are_located_as_far_as_possible(
    tmp_path, name, content, line, column, problem
):
    (tmp_path / name).write_bytes(content)
    ((found_line, found_column, found_problem),) = places(tmp_path / name)
    assert (found_line, found_column) == (line, column)
    assert problem in found_problem


def test_a_csv_file_whose_rows_all_have_a_field_too_many_is_not_read(tmp_path, streaming):
    path = tmp_path / "a.csv"
    path.write_text("text,label\na,b,c\nd,e,f\n")
    records, reading = read(path, streaming=streaming)
    assert records == []
    assert [(b.line, b.column) for b in reading.broken] == [(2, None), (3, None)]


def test_one_broken_file_of_a_folder_does_not_hide_the_others(tmp_path):
    (tmp_path / "a.json").write_text("[")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n{')
    (tmp_path / "c.txt").write_text("c")
    records, reading = read(tmp_path)
    assert [r["text"] for r in records] == ["b", "c"]
    assert [(Path(b.where).name, b.line) for b in reading.broken] == [("a.json", 1), ("b.jsonl", 2)]
