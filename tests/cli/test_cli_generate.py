"""`npt generate` as a user runs it: text on standard output, everything else on standard error, and
the page of what was written.
"""

import functools
import json
from pathlib import Path

import pytest
import torch
from cli_words import flags, saved_adapter
from made_runs import Reader

import npt
from npt.adapters.converted import adapter_mode
from npt.cli.main import main
from npt.report.generated import visible

PROMPT = "class Stack:\n    def __init__(self"
NEW = 6


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    form = {"rank": 8, "residual": "keep", "layers": "6,7", "targets": ("gate", "up", "down")}
    return saved_adapter(tmp_path_factory.mktemp("adapters") / "some", 0.1, **form)


@pytest.fixture(scope="module")
def student(adapter):
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.load_adapter(model, adapter)
    return model, tokenizer


@pytest.fixture(scope="module")
def base():
    return npt.load_base("tiny", quantization="nf4", device="cpu")


@pytest.fixture
def written(adapter, base, monkeypatch, capsys):
    """Return a call's standard output (`--json` read) and error. The base is loaded once for all
    calls.
    """
    monkeypatch.setattr(npt, "load_base", lambda *_, **__: base)

    def call(line: str = "", *more: object, status: int = 0):
        common = [*flags("--max_new_tokens 6 --adapter", adapter), "--prompt", PROMPT]
        arguments = flags(line, *more)
        assert main(["generate", *common, *arguments]) == status
        npt.detach(base[0])
        out, err = capsys.readouterr()
        return (json.loads(out) if "--json" in arguments else out), err

    return call


@functools.cache
def own_text(student, mode: str) -> str:
    model, tokenizer = student
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with adapter_mode(model, mode):
        new = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
        )
    return tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("mode", [None, "floor"])
def test_standard_output_is_the_prompt_and_the_text(written, student, mode) -> None:
    out, err = written("" if mode is None else f"--mode {mode}")
    assert out == PROMPT + own_text(student, mode or "student") + "\n"
    assert f"{mode or 'student'}: {NEW} tokens" in err and "NF4" in err


def test_the_json_holds_text_and_settings(written, student) -> None:
    found, _ = written("--json")
    text = found["student"]
    assert found["prompt"] == PROMPT and text["text"] == own_text(student, "student")
    assert text["tokens"] == len(text["ids"]) == NEW and text["finish"] == "length"
    assert found["max_new_tokens"] == NEW


def test_a_comparison_says_where_the_two_part(written, student) -> None:
    found, _ = written("--compare --json")
    teacher, own = found["teacher"]["ids"], found["student"]["ids"]
    position = next(i for i, (a, b) in enumerate(zip(teacher, own, strict=True)) if a != b)
    tokenizer = student[1]
    assert found["parts_at"] == position
    assert found["teacher_token"] == tokenizer.decode([teacher[position]]) != found["student_token"]
    for mode in ("teacher", "student"):
        assert found[mode]["text"] == own_text(student, mode)
    out, _ = written("--compare")
    assert (
        f"the texts differ after {position} tokens" in out and "teacher" in out and "student" in out
    )


def test_texts_that_are_the_same_are_said_to_be(tmp_path, capsys) -> None:
    folder = saved_adapter(tmp_path / "adapter", rank=2, residual="keep")
    line = flags("generate --use_quantization --max_new_tokens 4 --compare --adapter", folder)
    assert main([*line, "--prompt", PROMPT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts_at"] is None and found["teacher"]["ids"] == found["student"]["ids"]
    assert main([*line, "--prompt", PROMPT]) == 0
    assert "teacher and student write the same text" in capsys.readouterr().out


def test_the_page_has_the_prompt_and_the_text(written, base, tmp_path) -> None:
    page = tmp_path / "page.html"
    found, _ = written("--json --html", page)
    reader = Reader(page.read_text(encoding="utf-8"))
    ids = base[1](PROMPT)["input_ids"]
    tokens = reader.of("span", class_="token")
    assert len(tokens) == len(ids) + NEW + 2  # and the key
    assert len(reader.of("span", class_="q")) == len(ids) + 1
    cells = [each["class"][0] for each in reader.of("td") if each.get("class")]
    assert cells.count("h") == 2 * cells.count("k") == 2 * (len(ids) + NEW)  # layers 6 and 7; KL
    assert visible(found["student"]["text"]) in reader.text
    assert "The student continued the prompt" in reader.text


def test_the_page_shows_what_active_numbers_stand_for(tmp_path, capsys) -> None:
    form = {"rank": 8, "active": 3, "token_rank": 4, "layers": "6,7"}
    adapter = saved_adapter(tmp_path / "adapter", **form)
    page = tmp_path / "page.html"
    line = flags("generate --max_new_tokens 2 --adapter", adapter, "--html", page)
    assert main([*line, "--prompt", PROMPT]) == 0
    reader = Reader(page.read_text(encoding="utf-8"))
    assert "largest in its data" in reader.sections["numbers"]
    assert reader.sections["numbers"].count("#") >= 16
    hints = [each.get("title") or "" for each in reader.of("span", class_="token")]
    assert any("; layer 6, " in hint and "; layer 7, " in hint for hint in hints)
    said = capsys.readouterr().err
    assert "no passages" not in said


def test_the_page_of_a_comparison_has_both_texts_and_where_they_part(written, tmp_path) -> None:
    page = tmp_path / "page.html"
    found, _ = written("--compare --json --html", page)
    reader = Reader(page.read_text(encoding="utf-8"))
    assert f"The texts differ after {found['parts_at']} token" in reader.text
    assert len(reader.of("span", class_="p")) == 3
    assert len(reader.of("table", class_="grid")) == 2
    tokens = [each for each in reader.of("span", class_="token") if "title" in each]
    assert len(reader.of("td", class_="kl")) == len(tokens)


def test_a_page_in_no_folder_is_refused_first(written, tmp_path) -> None:
    for page in (tmp_path / "nowhere" / "page.html", tmp_path):
        _, err = written("--html", page, status=2)
        assert f"--html {page}" in err and "folder" in err and "tokens/s" not in err
