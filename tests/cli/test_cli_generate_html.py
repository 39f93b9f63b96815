"""`npt generate --html`: the page of what was written."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
from made_runs import Reader
from students import moved

import npt
from npt.cli.main import main
from npt.report.generated import visible

PROMPT = "class Stack:\n    def __init__(self"
NEW = 6


@pytest.fixture(scope="module")
def base():
    return npt.load_base("tiny", quantization="nf4", device="cpu")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    model, _ = base
    npt.attach(model, npt.NPTConfig(rank=8, layers="6,7", residual="keep"))
    moved(model, 0.1)
    folder = npt.save_adapter(model, tmp_path_factory.mktemp("adapters") / "some")
    npt.detach(model)
    return folder


@pytest.fixture
def call(adapter, base, tmp_path, monkeypatch, capsys):
    """Return status, page and JSON of a call."""
    monkeypatch.setattr(npt, "load_base", lambda *_, **__: base)

    def call(*arguments: str, html: Path | None = None):
        page = tmp_path / "page.html" if html is None else html
        given = ["--adapter", str(adapter), "--prompt", PROMPT, "--max_new_tokens", str(NEW)]
        status = main(["generate", *given, "--html", str(page), *arguments])
        npt.detach(base[0])
        out, err = capsys.readouterr()
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        return status, text, json.loads(out) if "--json" in arguments and out else err

    return call


def test_the_page_has_the_prompt_and_the_text(call, base) -> None:
    _, text, found = call("--json")
    reader = Reader(text)
    ids = base[1](PROMPT)["input_ids"]
    tokens = reader.of("span", class_="token")
    assert len(tokens) == len(ids) + NEW + 2  # and the key
    assert len(reader.of("span", class_="q")) == len(ids) + 1
    assert len(reader.of("td")) == 2 * (len(ids) + NEW)  # of the layers 6 and 7
    assert visible(found["student"]["text"]) in reader.text
    assert "The student continued the prompt" in reader.text


def test_a_comparison_has_both_texts_and_where_they_part(call) -> None:
    _, text, found = call("--compare", "--json")
    reader = Reader(text)
    assert found["parts_at"] is not None
    assert f"They part after {found['parts_at']} token" in reader.text
    assert len(reader.of("span", class_="p")) == 3 and len(reader.of("table")) == 2
    hints = [each["title"] or "" for each in reader.of("span", class_="token") if "title" in each]
    assert sum(", KL " in hint for hint in hints) == len(hints) - 2


def test_a_page_that_cannot_be_written_is_refused_first(call, tmp_path) -> None:
    status, _, said = call(html=tmp_path / "nowhere" / "page.html")
    assert status == 2 and "--html" in said and "tokens/s" not in said
    (tmp_path / "full").mkdir()
    with mock.patch("tempfile.mkdtemp", side_effect=PermissionError(13, "Permission denied", "x")):
        status, _, said = call(html=tmp_path / "full" / "page.html")
    assert status == 2 and "page.html cannot be written: Permission denied; choose" in said
    assert "tokens/s" not in said
