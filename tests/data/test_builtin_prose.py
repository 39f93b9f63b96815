import json
from pathlib import Path

import pytest

import npt
from npt.batch import is_heldout
from npt.data import prose as prose_module
from npt.data.prose import HELDOUT_ONE_IN, TOPICS, prose
from npt.data.samples import Samples
from npt.data.source import check_source, open_source, own_heldout
from npt.errors import DataError
from npt.runs.resume import data_fingerprint

LONG = "A sentence of ten words that says nothing at all. " * 12
"""Long enough for a docstring, and for a document."""


def paragraph(word: str) -> str:
    return f"This paragraph is about {word}, " * 20


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small standard library with forty topics and forty modules."""
    topics = {f"topic{i:02}": f"Topic {i}\n\n{paragraph(str(i))}" for i in range(40)}
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / TOPICS).write_text(f"# generated\ntopics = {topics!r}\n")
    for i in range(40):
        (tmp_path / f"module{i:02}.py").write_text(f'"""Module {i}. {LONG}"""\nprint(1 / 0)\n')
    return tmp_path


def documents(root: Path) -> dict[str, str]:
    return {**dict(prose("train", root)), **dict(prose("heldout", root))}


def with_topics(root: Path, topics: dict[str, str]) -> dict[str, str]:
    (root / TOPICS).write_text(f"topics = {topics!r}\n")
    return {n[6:]: text for n, text in documents(root).items() if n.startswith("topic ")}


def test_a_document_is_whole_in_one_split_and_they_are_all_there(library):
    train, heldout = dict(prose("train", library)), dict(prose("heldout", library))
    assert not train.keys() & heldout.keys()
    names = {f"topic topic{i:02}" for i in range(40)} | {f"module{i:02}.py" for i in range(40)}
    assert train.keys() | heldout.keys() == names
    assert {name for name in names if is_heldout(name, HELDOUT_ONE_IN)} == heldout.keys() != set()


def test_what_builtin_holds_out_is_held_out_of_the_prose_too():
    names = [f"module{i}.py" for i in range(2000)]
    assert {n for n in names if is_heldout(n)} < {n for n in names if is_heldout(n, HELDOUT_ONE_IN)}


def test_of_a_module_its_docstring_and_the_long_ones_are_taken(library):
    (library / "some.py").write_text(
        f'"""Short."""\nclass A:\n    """No."""\n    def f(self):\n        """{LONG}first"""\n'
        f'async def g():\n    """{LONG}second"""\nx = """{LONG}no docstring"""\n'
    )
    assert documents(library)["some.py"] == f"Short.\n\n{LONG}first\n\n{LONG}second"


def test_a_module_of_few_words_or_that_does_not_parse_is_left_out(library):
    (library / "little.py").write_text('"""A module with little to say."""\n')
    (library / "template.py").write_text(f'"""{LONG}"""\n{{{{name}}}} = 1\n')
    assert not {"little.py", "template.py"} & documents(library).keys()


def test_sessions_and_tables_are_left_out(library):
    session, table = ">>> 1 + 1\n2", "+------+\n| a    |\n+------+"
    (library / "some.py").write_text(f'"""{LONG}end\n\n{session}\n\n{table}\n\nAfter."""\n')
    assert documents(library)["some.py"] == f"{LONG}end\n\nAfter."


def test_a_paragraph_of_several_topics_is_in_the_shortest_alone(library):
    section, other = paragraph("sections"), paragraph("chapters")
    found = with_topics(library, {"chapter": f"{other}\n\n{section}", "section": section})
    assert found == {"chapter": other, "section": section}


def test_a_python_without_topics_is_refused_in_one_line(library):
    for content in (None, "", "x = ", "topics = f()"):
        path = library / TOPICS
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(DataError, match=r"Python.s help.*topics\.py.*--dataset_name") as said:
            list(prose("train", library))
        assert "\n" not in str(said.value)
        path.touch()


def test_an_unknown_split_is_refused_with_the_choices():
    config = npt.DataConfig(dataset_name="builtin-prose", dataset_split="test")
    with pytest.raises(DataError, match="no split 'test'; choose from train, heldout"):
        check_source(config)


@pytest.fixture
def small(library, monkeypatch) -> None:
    monkeypatch.setattr(prose_module, "library", lambda: library)


@pytest.mark.parametrize("streaming", [False, True], ids=["kept", "streaming"])
def test_a_run_reads_it_by_name_and_evaluates_on_other_documents(small, streaming):
    config = npt.DataConfig(dataset_name="builtin-prose", streaming=streaming)
    records, own = open_source(config), own_heldout(config)
    names, held = [r["id"] for r in records], [r["id"] for r in own]
    assert names == [r["id"] for r in records]  # a second pass
    assert names and held and not set(names) & set(held)
    assert json.dumps(data_fingerprint(records)) == json.dumps(data_fingerprint(records))


@pytest.mark.parametrize("streaming", [False, True], ids=["kept", "streaming"])
def test_samples_resume_in_the_middle_of_it(small, streaming, tokenizer):
    config = npt.DataConfig(dataset_name="builtin-prose", streaming=streaming, max_length=64)
    samples = Samples(open_source(config), tokenizer, config, seed=0, hold_out=False)
    walked = list(samples.walk())
    place = walked[99][1]
    assert [s.id for s, _ in samples.walk(place)] == [s.id for s, _ in walked[100:]]


def test_this_machine_has_prose_in_both_splits():
    """The held-out files alone are parsed: the others take seconds."""
    held = dict(prose("heldout"))
    assert sum(map(len, held.values())) > 50_000
    assert any(name.startswith("topic ") for name in held)
    letters = sum(c.isalpha() or c.isspace() for text in held.values() for c in text)
    assert letters / sum(map(len, held.values())) > 0.89  # 0.92; of the library's source 0.86
    name = next(prose("train"))[0]
    assert name.startswith("topic ") and not is_heldout(name, HELDOUT_ONE_IN)
