import json
from pathlib import Path

import pytest

import npt
from npt.data import source as source_module
from npt.data.builtin import is_heldout
from npt.data.source import open_source
from npt.errors import DataError


def records(path: Path, **settings) -> list:
    return list(open_source(npt.DataConfig(dataset_name=str(path), **settings)))


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "id": "mine"}\n   \n{"text": "drei \\u00e9"}')
    return path


@pytest.fixture(params=[False, True], ids=["kept", "streaming"])
def streaming(request) -> bool:
    return request.param


class TestFiles:
    def test_a_text_file_is_one_document(self, tmp_path, streaming):
        (tmp_path / "book.txt").write_text("Zeile eins\n\nZeile é\n", encoding="utf-8")
        assert records(tmp_path / "book.txt", streaming=streaming) == [{"text": "Zeile eins\n\nZeile é\n", "id": "book.txt"}]

    def test_jsonl_records_are_named_by_their_line_unless_they_name_themselves(self, lines, streaming):
        assert records(lines, streaming=streaming) == [
            {"id": "data.jsonl:1", "text": "one"},
            {"id": "mine", "text": "two"},
            {"id": "data.jsonl:5", "text": "drei é"},
        ]

    def test_a_relative_name_and_the_home_folder_work(self, lines, monkeypatch):
        monkeypatch.chdir(lines.parent)
        assert len(records(Path("data.jsonl"))) == 3
        monkeypatch.setenv("HOME", str(lines.parent))
        assert len(records(Path("~/data.jsonl"))) == 3

    def test_a_list_is_kept_and_a_stream_is_read_anew_at_every_pass(self, lines):
        kept = open_source(npt.DataConfig(dataset_name=str(lines)))
        stream = open_source(npt.DataConfig(dataset_name=str(lines), streaming=True))
        assert isinstance(kept, list)
        assert not hasattr(stream, "__len__")
        assert list(stream) == list(stream) == kept
        lines.write_text('{"text": "new"}\n')
        assert [r["text"] for r in stream] == ["new"]
        assert len(kept) == 3

    def test_a_stream_is_read_only_as_far_as_it_is_asked(self, tmp_path):
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "good"}\nbroken\n')
        stream = iter(open_source(npt.DataConfig(dataset_name=str(path), streaming=True)))
        assert next(stream)["text"] == "good"
        with pytest.raises(DataError, match="line 2"):
            next(stream)

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{'text': 1}", r"not JSON \(.*\); each line has to be one JSON object"),
            ('{"text": "cut', r"not JSON"),
            ('["text"]', r"a list, not an object like"),
            ('"text"', r"a str, not an object"),
            ("3", r"a int, not an object"),
            ("null", r"a NoneType, not an object"),
        ],
    )
    def test_a_jsonl_fault_is_located_by_its_line(self, tmp_path, streaming, line, message):
        path = tmp_path / "data.jsonl"
        path.write_text(f'{{"text": "good"}}\n\n{line}\n{{"text": "good"}}\n')
        with pytest.raises(DataError, match=rf"data\.jsonl, line 3: {message}"):
            records(path, streaming=streaming)

    @pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
    def test_another_encoding_is_refused_with_its_place(self, tmp_path, streaming, suffix):
        path = tmp_path / f"data{suffix}"
        path.write_bytes(b'{"text": "caf\xe9 au lait"}\n')
        with pytest.raises(DataError, match=r"is not UTF-8 \(byte 13: .*\); convert it first") as refusal:
            records(path, streaming=streaming)
        assert str(path) in str(refusal.value)

    @pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
    def test_an_empty_file_is_refused(self, tmp_path, streaming, suffix):
        (tmp_path / f"data{suffix}").touch()
        with pytest.raises(DataError, match=rf"data\{suffix} is empty; there is nothing to train on"):
            records(tmp_path / f"data{suffix}", streaming=streaming)

    def test_a_file_of_blank_lines_holds_no_records(self, tmp_path):
        (tmp_path / "data.jsonl").write_text("\n  \n")
        with pytest.raises(DataError, match=r"data\.jsonl holds no records"):
            records(tmp_path / "data.jsonl")

    @pytest.mark.parametrize("name", ["missing.txt", "missing.jsonl", "missing.csv"])
    def test_a_missing_file_is_refused_with_the_alternative(self, tmp_path, streaming, name):
        with pytest.raises(DataError, match=rf"there is no file .*{name}; check --dataset_name \('builtin'"):
            records(tmp_path / name, streaming=streaming)

    def test_a_file_in_the_home_folder_is_never_looked_for_on_the_hub(self):
        with pytest.raises(DataError, match=r"there is no file .*missing\.csv"):
            records(Path("~/missing.csv"))

    @pytest.mark.parametrize("name", ["table.csv", "data.json", "noext"])
    def test_another_format_is_refused_with_those_that_are_read(self, tmp_path, streaming, name):
        (tmp_path / name).write_text("text\nx\n")
        with pytest.raises(DataError, match=rf"{name} is not a \.txt or \.jsonl file"):
            records(tmp_path / name, streaming=streaming)

    def test_a_folder_is_refused(self, tmp_path, streaming):
        (tmp_path / "folder.txt").mkdir()
        for path in (tmp_path, tmp_path / "folder.txt"):
            with pytest.raises(DataError, match=r"is not a \.txt or \.jsonl file"):
                records(path, streaming=streaming)

    def test_a_file_that_may_not_be_read_is_refused_with_the_reason(self, tmp_path, monkeypatch, streaming):
        (tmp_path / "data.txt").write_text("text")

        def denied(*_, **__):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_text", denied)
        with pytest.raises(DataError, match=r"data\.txt cannot be read: Permission denied"):
            records(tmp_path / "data.txt", streaming=streaming)


class TestBuiltin:
    def test_a_split_is_read_with_its_paths_as_names(self, monkeypatch, streaming):
        monkeypatch.setattr(source_module, "builtin_files", lambda split: iter([(f"{split}.py", "x = 1\n")]))
        config = npt.DataConfig(dataset_split="heldout", streaming=streaming)
        assert list(open_source(config)) == [{"text": "x = 1\n", "id": "heldout.py"}]

    def test_is_the_default(self):
        record = next(iter(open_source(npt.DataConfig(streaming=True))))
        assert record["id"].endswith(".py")
        assert not is_heldout(record["id"])

    def test_an_unknown_split_is_refused(self, streaming):
        with pytest.raises(DataError, match=r"no split 'test'"):
            list(open_source(npt.DataConfig(dataset_split="test", streaming=streaming)))


class TestHub:
    @pytest.mark.parametrize("name", ["no-such-team/no-such-data", "missing.csv"])
    def test_a_failure_is_one_line_with_name_split_and_remedy(self, streaming, name):
        with pytest.raises(DataError, match=r"cannot load the data set '.*' \(split 'train'\): .*check the name and") as refusal:
            open_source(npt.DataConfig(dataset_name=name, streaming=streaming))
        assert name in str(refusal.value)
        assert "\n" not in str(refusal.value)

    def test_settings_are_passed_on(self, monkeypatch, streaming):
        import datasets

        asked = []
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or "records")
        config = npt.DataConfig(dataset_name="team/data", dataset_config="de", dataset_split="train[:1%]", streaming=streaming)
        assert open_source(config) == "records"
        assert asked == [(("team/data", "de"), {"split": "train[:1%]", "streaming": streaming})]


def test_what_json_can_hold_comes_out_as_it_went_in(tmp_path):
    text = 'quotes " and \\ and \u2028 and \x85 and \r\n and \U0001f40d'
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
    assert records(tmp_path / "data.jsonl")[0]["text"] == text
