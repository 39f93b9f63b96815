"""Local files: every format, whole and streamed, what is broken in them, and what they cost."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npt.config import DataConfig
from npt.data import readers, source
from npt.data.source import PIECE, local_files
from npt.errors import DataError

read_sequence = partial(source.read_sequence, config=DataConfig())
read_stream = partial(source.read_stream, config=DataConfig(streaming=True))
UNICODE = 'Käse, "quotes", \\ and \u2028 and \x85 and \U0001f40d'
TEXTS = ["one", UNICODE, "three\nlines\n\nof it", "NA", "17", " spaces "]


def write(path: Path, texts: list[str]) -> Path:
    """The texts in the format that the path's ending names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"text": text} for text in texts]
    if path.suffix == ".txt":
        path.write_text("".join(texts), encoding="utf-8", newline="")
    elif path.suffix == ".jsonl":
        path.write_text(
            "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records),
            encoding="utf-8",
            newline="",
        )
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8", newline="")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerows([["text", "n"], *([text, str(i)] for i, text in enumerate(texts))])
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), path)
    return path


def both(*paths: Path) -> list[Any]:
    """The records of the files, read in order and streamed, which must be the same."""
    records = read_sequence(paths)
    listed = [dict(records[i]) for i in range(len(records))]
    assert [dict(record) for record in read_stream(paths)] == listed
    return listed


def texts_of(records: list[Any]) -> list[str]:
    return [record["text"] for record in records]


def both_refuse(path: Path) -> str:
    """The one line that both ways of reading refuse a file with."""
    messages = []
    for read in (
        lambda: [records[i] for records in (read_sequence([path]),) for i in range(len(records))],
        lambda: list(read_stream([path])),
    ):
        with pytest.raises(DataError) as refusal:
            read()
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    assert messages[0].startswith(str(path))
    return messages[0].removeprefix(str(path))


class TestFormats:
    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
    def test_records_come_out_as_they_went_in(self, tmp_path, suffix):
        assert texts_of(both(write(tmp_path / f"data{suffix}", TEXTS))) == TEXTS

    @settings(deadline=None, max_examples=40)
    @given(
        texts=st.lists(
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
            min_size=1,
            max_size=8,
        )
    )
    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv"])
    def test_any_text_comes_out_as_it_went_in(self, tmp_path_factory, suffix, texts):
        assert (
            texts_of(both(write(tmp_path_factory.mktemp("data") / f"data{suffix}", texts))) == texts
        )

    def test_a_text_file_is_one_document_with_its_line_ends_made_plain(self, tmp_path):
        (tmp_path / "book.txt").write_bytes("\ufeffZeile é\r\n\r\nmore".encode())
        assert both(tmp_path / "book.txt") == [{"text": "Zeile é\n\nmore", "id": "book.txt"}]

    def test_records_are_named_by_file_and_line_or_their_own_id(self, tmp_path):
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "a"}\n\n{"text": "b", "id": "mine"}\n  \n{"text": "c"}')
        assert [record["id"] for record in both(path)] == ["data.jsonl:1", "mine", "data.jsonl:5"]
        path = tmp_path / "data.csv"
        path.write_text('text,n\n"two\nlines",1\n\nlast,2\n')
        assert [record["id"] for record in both(path)] == ["data.csv:2", "data.csv:5"]
        assert [record["id"] for record in both(write(tmp_path / "data.json", ["a", "b"]))] == [
            "data.json:0",
            "data.json:1",
        ]

    def test_csv_fields_are_text_whatever_they_look_like(self, tmp_path):
        path = tmp_path / "data.csv"
        path.write_text("text,n\nNA,1\n,2\n007,3\nnan,x\nshort\n")
        records = both(path)
        assert texts_of(records) == ["NA", "", "007", "nan", "short"]
        assert [record.get("n") for record in records] == ["1", "2", "3", "x", None]

    def test_a_folder_of_any_formats_is_read_in_the_order_of_names(self, tmp_path):
        for name in ("b.csv", "a.jsonl", "sub/d.json", "c.txt", "e.parquet"):
            write(tmp_path / name, [name])
        (tmp_path / "README.md").write_text("not data")
        write(tmp_path / ".git" / "hidden.json", ["hidden"])
        write(tmp_path / ".hidden.txt", ["hidden"])
        files = local_files(str(tmp_path))
        assert texts_of(both(*files)) == ["a.jsonl", "b.csv", "c.txt", "e.parquet", "sub/d.json"]

    def test_a_glob_is_read_in_the_order_of_its_names(self, tmp_path, monkeypatch):
        for name in ("b/2.jsonl", "a/1.jsonl", "a/1.csv"):
            write(tmp_path / name, [name])
        assert texts_of(both(*local_files(str(tmp_path / "*" / "*.jsonl")))) == [
            "a/1.jsonl",
            "b/2.jsonl",
        ]
        assert len(local_files(str(tmp_path / "**" / "*"))) == 3
        monkeypatch.chdir(tmp_path)
        assert texts_of(both(*local_files("?/1.*"))) == ["a/1.csv", "a/1.jsonl"]

    @pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv", ".parquet"])
    def test_a_name_with_brackets_is_a_name(self, tmp_path, suffix):
        path = write(tmp_path / f"data[1]{suffix}", ["text"])
        assert local_files(str(path)) == [path]
        assert texts_of(both(path)) == ["text"]


class TestLines:
    @pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n", "\r\n \r\n"])
    @pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "BOM"])
    @pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
    def test_a_single_record_is_found_whatever_is_around_it(self, tmp_path, suffix, start, end):
        path = tmp_path / f"data{suffix}"
        content = '{"text": "é"}' if suffix == ".jsonl" else "text\r\né"
        blank = end if suffix == ".jsonl" else end.replace(" ", "")  # in CSV a space is a field
        path.write_bytes(f"{start}{content}{blank}".encode())
        assert texts_of(both(path)) == ["é"]

    def test_lines_are_found_in_any_order(self, tmp_path):
        for suffix in (".jsonl", ".csv"):
            records = read_sequence(
                [write(tmp_path / f"data{suffix}", [f"text {i}" for i in range(50)])]
            )
            order = (49, 0, 17, 17)
            assert [records[i]["text"] for i in order] == [f"text {i}" for i in order]
            with pytest.raises(IndexError):
                records[50]


class TestLongTexts:
    """A long text file comes in pieces that are one document."""

    @settings(deadline=None, max_examples=60)
    @given(text=st.text(st.sampled_from("ab\n"), min_size=1, max_size=80), size=st.integers(1, 12))
    def test_the_pieces_make_up_the_text_and_end_with_lines(self, tmp_path_factory, text, size):
        path = tmp_path_factory.mktemp("data") / "book.txt"
        path.write_text(text, newline="")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(readers, "TEXT_PIECE", size)
            records = both(path)
        assert "".join(texts_of(records)) == text
        assert all(len(piece) >= size and piece.endswith("\n") for piece in texts_of(records)[:-1])
        if len(records) == 1:
            assert records == [{"text": text, "id": "book.txt"}]
        else:
            assert [record[PIECE] for record in records] == [
                (i == 0, i == len(records) - 1) for i in range(len(records))
            ]
            assert [record["id"] for record in records] == [
                f"book.txt#{i}" for i in range(len(records))
            ]


class TestBroken:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{'text': 1}", ", line 3, column 2: not JSON (Expecting property name enclosed in"),
            ('{"text": "cut', ", line 3, column 10: not JSON (Unterminated string starting at)"),
            ('{"text": "a"} {"text": "b"}', ", line 3, column 15: not JSON (Extra data)"),
            ("[" * 100_000, ", line 3: not JSON ("),
            ('{"n": ' + "1" * 5000 + "}", ", line 3: not JSON ("),
            ('["text"]', ", line 3: a list, not an object like"),
            ('"text"', ", line 3: a str, not an object"),
            ("3", ", line 3: an int, not an object"),
            ("null", ", line 3: a NoneType, not an object"),
        ],
    )
    def test_a_broken_line_is_named_with_line_and_column(self, tmp_path, line, message):
        path = tmp_path / "data.jsonl"
        path.write_text(f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n')
        assert both_refuse(path).startswith(message)

    @pytest.mark.parametrize(
        ("suffix", "content"),
        [
            (".txt", b"one\ncaf\xe9 au lait\n"),
            (".jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n'),
            (".json", b'[{"text":\n"caf\xe9"}]'),
            (".csv", b"text\ncaf\xe9\n"),
        ],
    )
    def test_another_encoding_is_refused_with_its_place(self, tmp_path, suffix, content):
        path = tmp_path / f"data{suffix}"
        path.write_bytes(content)
        assert both_refuse(path).startswith(", line 2: not UTF-8 (")

    @pytest.mark.parametrize(
        ("suffix", "content", "message"),
        [
            (
                "json",
                '[{"text": "a"},\n {"text" "b"}]',
                ", line 2, column 10: not JSON (Expecting ':'",
            ),
            (
                "json",
                '{"text": "a"}',
                ' holds a dict; it must be a list of objects like {"text": ...}',
            ),
            (
                "json",
                '[{"text": "a"}]\n[{"text": "b"}]\n',
                ", line 2, column 1: not JSON (Extra data); correct the file",
            ),
            ("json", '{"text": "a"}\n{"text":\n', ", line 2, column 9: not JSON (Expecting value)"),
            ("json", '[{"n": ' + "1" * 5000 + "}]", ": not JSON (Exceeds the limit"),
            ("json", '"text"', " holds a str"),
            ("json", '[{"text": "a"}, ["b"]]', ", entry 1: a list, not an object"),
            ("json", "[" * 100_000, ": not JSON ("),
            ("csv", '\n\n"a\n', ", line 3: not CSV (unexpected end of data)"),
            (
                "csv",
                "text,n\na,1\nb,2,3\n",
                ", line 3: 3 fields, but the header names 2; put double quotes",
            ),
            (
                "csv",
                'text\n"a\nb"\n"open\nc\n',
                ", line 4: not CSV (unexpected end of data); correct the file",
            ),
            ("csv", 'text\n"a" b\n', ", line 2: not CSV ("),
        ],
    )
    def test_a_broken_file_is_named_with_its_place(self, tmp_path, suffix, content, message):
        path = tmp_path / f"data.{suffix}"
        path.write_text(content)
        assert both_refuse(path).startswith(message)

    def test_a_file_that_is_no_parquet_is_refused(self, tmp_path, caplog):
        path = tmp_path / "data.parquet"
        path.write_text("text that is none")
        assert both_refuse(path).startswith(
            " is damaged or not Parquet: Parquet magic bytes not found"
        )
        assert not caplog.records  # said once

    def test_a_parquet_file_that_breaks_off_is_refused(self, tmp_path):
        path = write(tmp_path / "data.parquet", [str(i) * 100 for i in range(1000)])
        content = bytearray(path.read_bytes())
        content[100 : len(content) // 2] = bytes(len(content) // 2 - 100)
        path.write_bytes(content)
        assert both_refuse(path).startswith(" is damaged or not Parquet: ")

    @pytest.mark.parametrize(
        "name", ["missing.txt", "missing.csv", "no/such/*.jsonl", "x" * 5000 + ".txt", "nul\0.txt"]
    )
    def test_what_is_not_there_is_refused(self, tmp_path, name):
        with pytest.raises(DataError, match="check --dataset_name"):
            local_files(str(tmp_path / name))

    def test_what_is_of_another_kind_or_empty_is_refused(self, tmp_path):
        (tmp_path / "notes.md").write_text("text")
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(
            DataError,
            match=r"notes\.md is not a \.txt, .*, \.parquet, \.arrow file .*: \.gz, .*; convert it",
        ):
            local_files(str(tmp_path / "notes.md"))
        with pytest.raises(DataError, match=r"empty\.jsonl is empty; remove it"):
            local_files(str(tmp_path))
        with pytest.raises(DataError, match=r"there is no file at .*folder\.txt"):
            (tmp_path / "folder.txt").mkdir()
            local_files(str(tmp_path / "folder.txt"))

    @pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv"])
    def test_a_file_that_may_not_be_read_is_refused_with_the_reason(
        self, tmp_path, monkeypatch, suffix
    ):
        path = write(tmp_path / f"data{suffix}", ["text"])

        def denied(*_: Any, **__: Any) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", denied)
        assert both_refuse(path) == " cannot be read: Permission denied"


def left_open(folder: Path) -> list[str]:
    """Files below a folder that this process has open; those of other tests may be closed
    meanwhile.
    """
    opened = [os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd")]
    return [path for path in opened if path.startswith(str(folder))]


STREAM = """
import resource, sys
from pathlib import Path
from npt.config import DataConfig
from npt.data.source import read_stream

path = Path(sys.argv[1])
with path.open("w") as file:
    for i in range(int(sys.argv[2])):
        file.write('{"text": "' + f"line {i} " * 10 + '"}\\n')
stream = read_stream([path], DataConfig(streaming=True))
for _ in range(1000):
    next(stream)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = 1000 + sum(1 for _ in stream)
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_long_file_streams_with_constant_memory(tmp_path) -> None:
    lines = 200_000
    path = tmp_path / "data.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(path), str(lines)],
        capture_output=True,
        text=True,
        check=True,
    )
    count, grown = map(int, done.stdout.split())
    assert count == lines
    assert path.stat().st_size > 20 * 2**20
    # KiB beyond what the first thousand lines took; the file is ten times as large
    assert grown < 2048


def test_a_stream_that_is_left_closes_its_file(tmp_path) -> None:
    path = write(tmp_path / "data.jsonl", ["a", "b"])
    stream: Iterator[Any] = read_stream([path])
    next(stream)
    assert len(left_open(tmp_path)) == 1
    stream.close()
    assert left_open(tmp_path) == []
