"""`npt generate` as a user runs it: text on standard output, everything else on standard error."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path

import pytest
import torch
from sentencepieces import tokenizer_of

import npt
from npt.adapters.converted import adapter_mode, adapter_parameters
from npt.cli.main import main
from npt.evaluation.generate import shared_text

PROMPT = "class Stack:\n    def __init__(self"
NEW = 6


@pytest.fixture(scope="module")
def student():
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=8, residual="keep", targets=("gate", "up", "down")))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in adapter_parameters(model).values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, tokenizer


@pytest.fixture(scope="module")
def adapter(student, tmp_path_factory) -> Path:
    return npt.save_adapter(student[0], tmp_path_factory.mktemp("adapters") / "some")


@pytest.fixture(scope="module")
def base():
    return npt.load_base("tiny", quantization="nf4", device="cpu")


@pytest.fixture
def written(adapter, base, monkeypatch, capsys):
    """Return a call's standard output (`--json` read) and error. The base is loaded once for all
    calls.
    """
    monkeypatch.setattr(npt, "load_base", lambda *_, **__: base)

    def call(*arguments: str, prompt: str | None = PROMPT):
        given = [] if prompt is None else ["--prompt", prompt]
        settings = ["--max_new_tokens", str(NEW)]  # how its base was loaded the adapter knows
        assert main(["generate", "--adapter", str(adapter), *settings, *given, *arguments]) == 0
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


@pytest.mark.parametrize("mode", [None, "student", "teacher", "floor"])
def test_standard_output_is_the_prompt_and_the_text(written, student, mode) -> None:
    out, err = written(*([] if mode is None else ["--mode", mode]))
    assert out == PROMPT + own_text(student, mode or "student") + "\n"
    assert f"{mode or 'student'}: {NEW} tokens" in err and "NF4" in err


def test_the_prompt_may_be_piped_in(written, student, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    assert written(prompt=None)[0] == PROMPT + own_text(student, "student") + "\n"


def test_the_json_holds_text_and_settings(written, student) -> None:
    found, _ = written("--json")
    assert found["prompt"] == PROMPT and found["student"]["text"] == own_text(student, "student")
    assert (
        found["student"]["tokens"] == len(found["student"]["ids"]) == NEW
        and found["student"]["finish"] == "length"
    )
    assert found["max_new_tokens"] == NEW


def test_a_comparison_says_where_the_two_part(written, student) -> None:
    found, _ = written("--compare", "--json")
    teacher, own = found["teacher"]["ids"], found["student"]["ids"]
    position = next(i for i, (a, b) in enumerate(zip(teacher, own, strict=True)) if a != b)
    tokenizer = student[1]
    assert found["parts_at"] == position
    assert found["teacher_token"] == tokenizer.decode([teacher[position]]) != found["student_token"]
    assert (found["teacher"]["text"], found["student"]["text"]) == (
        own_text(student, "teacher"),
        own_text(student, "student"),
    )
    out, _ = written("--compare")
    assert f"they part after {position} tokens" in out and "teacher" in out and "student" in out


def test_a_character_that_two_tokens_share_is_not_torn(student) -> None:
    tokenizer = student[1]
    ids = tuple(tokenizer("naïve é", add_special_tokens=False)["input_ids"])
    for position in range(len(ids) + 1):
        common, rest = shared_text(tokenizer, [], ids, position)
        assert common + rest == "naïve é" and "�" not in common


def test_two_texts_keep_the_space_after_their_prompt() -> None:
    tokenizer = tokenizer_of("llama 2")
    prompt, ids = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in ("The question", "The question answer is 42")
    )
    new = tuple(ids[len(prompt) :])
    for position in (None, *range(len(new) + 1)):
        assert "".join(shared_text(tokenizer, prompt, new, position)) == " answer is 42"


def test_texts_that_are_the_same_are_said_to_be(adapter, tmp_path, capsys) -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cpu")
    npt.attach(model, npt.NPTConfig(rank=2, residual="keep"))
    folder = npt.save_adapter(model, tmp_path / "adapter")
    arguments = [
        "generate",
        "--adapter",
        str(folder),
        "--use_quantization",
        "--prompt",
        PROMPT,
        "--max_new_tokens",
        "4",
        "--compare",
    ]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parts_at"] is None and found["teacher"]["ids"] == found["student"]["ids"]
    assert main(arguments) == 0
    assert "the two texts are the same" in capsys.readouterr().out


def test_no_prompt_at_a_terminal_is_said(adapter, monkeypatch, capsys) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["generate", "--adapter", str(adapter)]) == 2
    assert "pass --prompt TEXT" in capsys.readouterr().err


def test_a_piped_prompt_that_is_no_text_is_said(adapter, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert main(["generate", "--adapter", str(adapter)]) == 2
    assert "is not UTF-8" in capsys.readouterr().err
