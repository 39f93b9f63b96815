"""The text of `make real`, written by the embedded model in place of the real one."""

import json
from pathlib import Path

import pytest

import npt
import real_data

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def base(monkeypatch):
    """A base whose template a test may set, and sizes that it writes in seconds."""
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device="cpu")
    monkeypatch.setattr(tokenizer, "chat_template", None)
    monkeypatch.setattr(real_data.npt, "load_base", lambda *_, **__: (model, tokenizer))
    for name, value in {"BATCH": 3, "MESSAGE_TOKENS": 12, "ANSWER_TOKENS": 8}.items():
        monkeypatch.setattr(real_data, name, value)
    monkeypatch.setattr(real_data, "prose", lambda split: iter([(f"{split} topic", "A text.")]))
    monkeypatch.setattr(real_data, "QUESTIONS", real_data.QUESTIONS[:2])
    return model, tokenizer


def records(path):
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def test_prose_and_chats_are_written_once(base, tmp_path, capsys):
    base[1].chat_template = TEMPLATE
    arguments = ["--model", "tiny", "--chats", "4", "--out", str(tmp_path / "text")]
    assert real_data.main(arguments) == 0
    path = capsys.readouterr().out.strip()
    assert path == str(tmp_path / "text" / "train.jsonl")
    written = records(path)
    prose = [record["text"] for record in written if "text" in record]
    chats = [record["messages"] for record in written if "messages" in record]
    assert prose == ["A text."] and len(chats) == 4
    for user, assistant in chats:
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert len(user["content"]) >= real_data.SHORTEST and assistant["content"].strip()
        assert "<" not in user["content"][:1]
    assert len({user["content"] for user, _ in chats}) == 4
    asked = records(tmp_path / "text" / "questions.jsonl")
    assert [each["messages"][0]["content"] for each in asked] == list(real_data.QUESTIONS)
    before = Path(path).read_bytes()
    assert real_data.main(arguments) == 0 and Path(path).read_bytes() == before


def test_answers_are_the_most_likely_ones_whatever_they_are_padded_with(base):
    short, long = "def f(x):", "class Stack:\n    def push(self, item):\n        self."
    one = real_data.answers(*base, [short], 8, do_sample=False)
    both = real_data.answers(*base, [short, long], 8, do_sample=False)
    assert one[0] and both[0] == one[0]


def test_a_model_without_a_template_gets_prose_alone(base, tmp_path):
    assert real_data.main(["--model", "tiny", "--out", str(tmp_path)]) == 0
    assert records(tmp_path / "train.jsonl") == [{"text": "A text.", "id": "train topic"}]
    asked = records(tmp_path / "questions.jsonl")
    assert [record["prompt"] for record in asked] == list(real_data.QUESTIONS)


def test_a_model_that_does_not_exist_is_one_line(tmp_path, capsys):
    assert real_data.main(["--model", str(tmp_path / "none"), "--out", str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "o").exists()
