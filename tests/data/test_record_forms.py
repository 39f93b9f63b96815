"""Which form a record has, and what is counted of one."""

from typing import Any

import pytest

import npt
from npt.base.source import load_tokenizer
from npt.data.encoding import RecordCounts
from npt.data.messages import messages_of
from npt.data.samples import cut

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chatting() -> Any:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT
    return tokenizer


def config(**more: Any) -> npt.DataConfig:
    return npt.DataConfig(**{"max_length": 4096, **more})


def one(
    record: dict[str, Any], tokenizer: Any, counts: RecordCounts | None = None, **more: Any
) -> tuple[str, str]:
    """Prompt and completion of a record's only sample, as text; the labels are the completion's
    tokens.
    """
    (sample,) = cut([record], tokenizer, config(**more), counts)
    start = next(i for i, label in enumerate(sample.labels) if label != -100)
    assert sample.labels == (-100,) * start + sample.input_ids[start:]
    return tuple(
        tokenizer.decode(list(ids)) for ids in (sample.input_ids[:start], sample.input_ids[start:])
    )


def talk(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns], **more}


def test_only_text_is_read_as_json() -> None:
    written = '[{"role": "user", "content": "a"}]'
    assert messages_of("a record", written, as_json=True) == [{"role": "user", "content": "a"}]
    # a binary column is not text
    assert messages_of("a record", written.encode(), as_json=True) is None


def test_ids_a_named_column_a_text_and_a_prompt_go_first(chatting) -> None:
    turns = talk(("user", "a"), ("assistant", "b"))
    assert one(turns, chatting) == ("[user]a</s>[assistant]", "b</s>")
    (sample,) = cut([{**turns, "text": "x = 1"}], chatting, config())
    assert sample.labels is None
    pair = {**turns, "prompt": "q", "completion": "r"}
    assert one(pair, chatting)[1] == "r</s>"
    named = {"prompt_column": "q", "completion_column": "a"}
    assert one({**pair, "text": "x", "q": "x", "a": "y"}, chatting, **named)[1] == "y</s>"
    (sample,) = cut([{**pair, "input_ids": [5, 6]}], chatting, config())
    assert sample.input_ids == (5, 6)


def test_earlier_answers_are_context_and_later_messages_left_out(chatting) -> None:
    turns = talk(
        ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")
    )
    prompt, answer = one(turns, chatting)
    assert (prompt, answer) == ("[user]a</s>[assistant]b</s>[user]c</s>[assistant]", "d</s>")
