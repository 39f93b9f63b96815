"""Readers are added from outside the package, as docs/extend/data-reader.md says."""

import re
from pathlib import Path

import pytest

import npt
from npt.base.source import load_tokenizer
from npt.data import source
from npt.data.samples import cut
from npt.data.source import open_source
from npt.doctor.data import examine
from npt.errors import DataError

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "data-reader.md"


@pytest.fixture(autouse=True)
def _tables_as_before():
    readers = dict(source.READERS)
    yield
    source.READERS.clear()
    source.READERS.update(readers)


@pytest.fixture
def snippet(tmp_path, monkeypatch) -> dict:
    """The page's snippet, run next to a file of the form that it adds."""
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.M | re.S)
    monkeypatch.chdir(tmp_path)
    pairs = [("ab", "cd"), ("ef", "gh")]
    entries = [f'[[pairs]]\nquestion = "{q}"\nanswer = "{a}"\n' for q, a in pairs]
    Path("questions.toml").write_text("".join(entries))
    names: dict = {}
    exec(snippet, names)
    return names


@pytest.mark.parametrize("streaming", [False, True])
def test_the_pages_reader_makes_samples(snippet, tokenizer, streaming):
    config = npt.DataConfig(dataset_name="questions.toml", max_length=64, streaming=streaming)
    records = open_source(config)
    assert [dict(record) for record in records] == [dict(record) for record in records]
    samples = list(cut(records, tokenizer, snippet["data"]))
    assert [sample.id for sample in samples] == ["questions.toml:0@0", "questions.toml:1@0"]
    assert [sum(label != -100 for label in sample.labels) for sample in samples] == [3, 3]


def test_a_new_suffix_is_found_in_folders_and_named(snippet, tmp_path):
    Path("more.jsonl").write_text('{"text": "one"}\n')
    records = open_source(npt.DataConfig(dataset_name=str(tmp_path)))
    assert next(record["id"] for record in records) == "more.jsonl:1" and len(records) == 3
    Path("x.odd").write_text("x")
    with pytest.raises(DataError, match=r"x\.odd is not a \.txt, .*, \.toml file"):
        open_source(npt.DataConfig(dataset_name="x.odd"))


def test_the_doctor_reads_through_the_registry(snippet):
    report = examine(snippet["data"], load_tokenizer("tiny"), 2048)
    assert not report.problems and report.counts.samples == 2


def test_a_fault_of_a_new_reader_is_located(tmp_path):
    def read(path, config):
        yield {"text": "one"}
        raise source.FileError(path, ": not odd; mend it", line=7)

    source.register_reader(".odd", read)
    (tmp_path / "x.odd").write_text("x")
    config = npt.DataConfig(dataset_name=str(tmp_path / "x.odd"))
    (broken,) = examine(config, load_tokenizer("tiny"), 2048).broken
    assert broken == f"{tmp_path / 'x.odd'}, line 7: not odd; mend it"
    with pytest.raises(DataError, match=r"x\.odd, line 7: not odd; mend it$"):
        open_source(config)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_name_can_be_registered(streaming):
    source.register_reader("primes", lambda name, config: ({"text": str(i)} for i in (2, 3, 5)))
    records = open_source(npt.DataConfig(dataset_name="primes", streaming=streaming))
    assert list(records) == list(records) == [{"text": "2"}, {"text": "3"}, {"text": "5"}]
