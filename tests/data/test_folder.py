"""Folders as people have them: files of many suffixes and compressions, clones of the Hub with
splits, and saved datasets. What is not read is named.
"""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import datasets
import pyarrow
import pytest

import npt
from npt.base.source import load_tokenizer
from npt.cli.main import main
from npt.data.source import check_source, open_source, passed_over
from npt.doctor.data import examine
from npt.errors import ConfigError, DataError

LINES = '{"text": "one é"}\n{"text": "two"}\n'
TABS = 'text\tn\n"one é"\t1\ntwo\t2\n'


def zst(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


def config(path: Path, **settings) -> npt.DataConfig:
    return npt.DataConfig(dataset_name=str(path), **settings)


def texts(path: Path, **settings) -> list[str]:
    """The texts of a dataset, which kept and streamed must be the same."""
    kept = [record["text"] for record in open_source(config(path, **settings))]
    stream = open_source(config(path, streaming=True, **settings))
    assert [record["text"] for record in stream] == kept
    return kept


def lines(path: Path, *values: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))


def refused(path: Path, words: str, **settings) -> None:
    """Have a dataset refused before it is read, in words that the pattern finds."""
    with pytest.raises(DataError, match=words):
        check_source(config(path, **settings))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.JSONL", LINES),
        ("a.ndjson", LINES),
        ("a.json", LINES),
        ("a.tsv", TABS),
        ("a.jsonl.gz", LINES),
        ("A.JSONL.GZ", LINES),
        ("a.tsv.bz2", TABS),
        ("a.csv.xz", TABS.replace("\t", ",")),
        ("a.ndjson.zst", LINES),
    ],
)
def test_what_datasets_reads_by_its_suffix_is_read(tmp_path, name, content):
    pack = PACK.get(Path(name).suffix.lower(), bytes)
    (tmp_path / name).write_bytes(pack(content.encode()))
    assert texts(tmp_path) == texts(tmp_path / name) == ["one é", "two"]
    assert passed_over(config(tmp_path)) is None


def test_a_text_of_any_case_and_compression_is_a_document(tmp_path):
    (tmp_path / "a.TXT").write_text("one")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two"))
    assert texts(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"{}" + packed])
def test_a_damaged_compressed_file_is_one_line(tmp_path, suffix, damage):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(damage(PACK[suffix](LINES.encode())))
    with pytest.raises(DataError) as refusal:
        texts(path)
    assert str(refusal.value).startswith(f"{path} is damaged: ")
    assert "\n" not in str(refusal.value)


def test_another_encoding_in_a_compressed_file_is_refused_with_its_line(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text\ncaf\xe9\n"))
    with pytest.raises(DataError, match=r"a\.csv\.gz, line 2: not UTF-8 \("):
        texts(path)


def test_files_that_are_passed_over_are_named(tmp_path, capsys):
    lines(tmp_path / "a.jsonl", *(f"a text, number {number}" for number in range(40)))
    for name in ("README.md", "dataset_infos.json", "sub/b.zip", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    line = f"not read in {tmp_path}: README.md, dataset_infos.json, sub/b.zip"
    assert passed_over(config(tmp_path)) == line
    assert main(["doctor", "--data", str(tmp_path)]) == 0
    assert line in capsys.readouterr().out.splitlines()
    for number in range(9):
        (tmp_path / f"c{number}").touch()
    assert str(passed_over(config(tmp_path))).endswith("README.md, c0, c1, c2, c3 and 7 more")


@pytest.mark.slow
def test_a_run_names_the_files_that_it_passes_over(tmp_path, capsys):
    lines(tmp_path / "data" / "a.jsonl", *(f"a text, number {number}" for number in range(40)))
    (tmp_path / "data" / "notes.md").touch()
    run = "pretrain --model_name tiny --init random --no_smoke_test --layers 3 --adapter_rank 2"
    run += " --max_length 16 --max_steps 1 --batch_size 2 --eval_samples 2 --dataset_name"
    assert main([*run.split(), str(tmp_path / "data"), "--output_dir", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr()
    assert f"not read in {tmp_path / 'data'}: notes.md" in printed.out + printed.err


class TestSplits:
    @pytest.mark.parametrize(
        ("train", "test"),
        [
            ("data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"),
            ("train.jsonl", "test.jsonl"),
            ("my_train_set.jsonl", "my-eval.jsonl"),
            ("train/a.jsonl", "test/a.jsonl"),
        ],
    )
    def test_a_clone_of_the_hub_is_read_by_its_splits(self, tmp_path, train, test):
        lines(tmp_path / train, "trained on")
        lines(tmp_path / test, "tested on")
        assert texts(tmp_path) == ["trained on"]
        assert texts(tmp_path, dataset_split="test") == ["tested on"]
        line = passed_over(config(tmp_path, dataset_split="test"))
        assert line == f"not read in {tmp_path}: {train} (split train)"
        for name in ("validation", "train[:5]"):
            said = r"has no split .*; choose .* from test, train$"
            refused(tmp_path, said, dataset_split=name)

    def test_the_hub_has_splits_of_any_name(self, tmp_path):
        for split in ("train_sft", "test_sft"):
            lines(tmp_path / "data" / f"{split}-00000-of-00001.jsonl", split)
        assert texts(tmp_path, dataset_split="test_sft") == ["test_sft"]
        refused(tmp_path, r"no split 'train'; .* from test_sft, train_sft$")

    def test_files_of_one_split_or_none_are_read_as_one(self, tmp_path):
        for name in ("trained", "contest", "test"):
            lines(tmp_path / f"{name}.jsonl", name)
        assert texts(tmp_path) == ["contest", "test", "trained"]
        assert texts(tmp_path, dataset_split="test") == ["test"]
        said = r"no split 'validation'; choose .* from test$"
        refused(tmp_path, said, dataset_split="validation")
        (tmp_path / "test.jsonl").unlink()
        refused(tmp_path, "--dataset_split test has no effect on", dataset_split="test")

    def test_a_glob_takes_what_it_names(self, tmp_path):
        lines(tmp_path / "train.jsonl", "trained on")
        lines(tmp_path / "test.jsonl", "tested on")
        assert texts(tmp_path / "*.jsonl") == ["tested on", "trained on"]


class TestSaved:
    ROWS = datasets.Dataset.from_dict({"text": ["one", "two"]})

    def test_a_saved_dataset_is_read(self, tmp_path):
        self.ROWS.save_to_disk(tmp_path / "saved")
        assert texts(tmp_path / "saved") == ["one", "two"]
        assert passed_over(config(tmp_path / "saved")) is None
        refused(tmp_path / "saved", "--dataset_split test has no effect on", dataset_split="test")
        (file,) = (tmp_path / "saved").glob("*.arrow")
        assert texts(file) == ["one", "two"]

    def test_a_saved_dict_is_read_by_its_splits(self, tmp_path):
        both = {"train": self.ROWS, "odd": datasets.Dataset.from_dict({"text": ["three"]})}
        datasets.DatasetDict(both).save_to_disk(tmp_path)
        assert texts(tmp_path) == ["one", "two"]
        assert texts(tmp_path, dataset_split="odd") == ["three"]
        assert passed_over(config(tmp_path)) == f"not read in {tmp_path}: odd/ (split odd)"
        refused(tmp_path, r"no split 'test'; choose .* from odd, train$", dataset_split="test")
        report = examine(config(tmp_path), load_tokenizer("tiny"), 2048)
        assert not report.problems and report.counts.records == 2

    @pytest.mark.parametrize("file", ["data-00000-of-00001.arrow", "state.json"])
    def test_a_damaged_one_is_one_line(self, tmp_path, file):
        self.ROWS.save_to_disk(tmp_path)
        (tmp_path / file).write_text("no")
        with pytest.raises(DataError, match=r"is damaged or not a saved dataset: .*; restore it"):
            texts(tmp_path)

    @pytest.mark.parametrize("content", ["no", "{}", '{"splits": 1}', '{"splits": ["../x"]}'])
    def test_damaged_splits_are_one_line(self, tmp_path, content):
        (tmp_path / "dataset_dict.json").write_text(content)
        refused(tmp_path, r"dataset_dict\.json|no split 'train'")

    def test_without_datasets_the_extra_is_named(self, tmp_path, monkeypatch):
        self.ROWS.save_to_disk(tmp_path / "saved")
        (tmp_path / "a.jsonl.zst").write_bytes(zst(LINES.encode()))
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
        monkeypatch.setattr("npt.extras.installed", lambda package: False)
        for name in ("saved", "a.jsonl.zst"):
            with pytest.raises(ConfigError, match=rf"{name} needs datasets, .*\[hub\]"):
                check_source(config(tmp_path / name))
        assert texts(tmp_path / "a.jsonl.gz") == ["one é", "two"]
