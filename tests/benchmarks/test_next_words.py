"""Items of next_words.py: what is asked, and that the harness reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import next_words
from real_text import Document


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a file of ten articles of 200 different words each."""
    names = ["".join(chr(97 + int(d)) for d in f"{i:04d}") for i in range(2000)]
    articles = (f" = Article {i} = \n\n{' '.join(names[i::10])}\n" for i in range(10))
    path = tmp_path / "text.txt"
    path.write_text("\n".join(articles), encoding="utf-8")
    return path


def test_an_item_asks_for_the_word_that_follows(tmp_path, text, capsys):
    out = tmp_path / "items"
    assert next_words.main(["--text", str(text), "--out", str(out), "--items", "30"]) == 0
    assert capsys.readouterr().out.startswith("30 items of 10 documents")
    items = [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]
    words = text.read_text().split()
    for item in items:
        context = item["context"].split()
        right = item["choices"][item["answer"]]
        assert len(context) == next_words.CONTEXT and len(set(item["choices"])) == 4
        place = words.index(right)
        assert words[place - len(context) : place] == context
    assert len({item["context"] for item in items}) == 30
    assert len({item["answer"] for item in items}) == 4
    again = tmp_path / "again"
    next_words.main(["--text", str(text), "--out", str(again), "--items", "30"])
    assert (again / "items.jsonl").read_bytes() == (out / "items.jsonl").read_bytes()


def test_a_document_without_words_to_choose_from_has_no_items():
    assert not list(next_words.items_of(Document("one", "word " * 500), 0))
    assert not list(next_words.items_of(Document("short", "some few words"), 0))


def test_too_little_text_is_refused(tmp_path, text, capsys):
    out = tmp_path / "items"
    assert next_words.main(["--text", str(text), "--out", str(out), "--items", "3000"]) != 0
    assert "--items is 3000; give it more text" in capsys.readouterr().err
    assert not out.exists()
