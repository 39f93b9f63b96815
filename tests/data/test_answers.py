"""What of a record is the answer: calls of functions that a template writes, weights, and records
of merged tables, whose missing columns and keys are null.
"""

from typing import Any

import pytest

import npt
from npt.base.source import load_tokenizer
from npt.data.encoding import RecordCounts, lost
from npt.data.samples import cut
from npt.tools.collect.prompts import prompt_record

CALLING = (
    "{% for m in messages %}[{{ m['role'] }}]{% if 'tool_calls' in m %}"
    "{% for call in m['tool_calls'] %}{{ call['function']['name'] }}"
    "({{ call['function']['arguments'] | tojson }}){% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""A template that reads keys as those of Llama 3.1 do: a null `tool_calls` is an error in it."""

USER = {"role": "user", "content": "add 1 and 2"}
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
WRITTEN = 'add({"a": 1, "b": 2})</s>'


def tokenizer_of(template: str) -> Any:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def calling() -> Any:
    return tokenizer_of(CALLING)


def assistant(content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def trained(
    record: dict[str, Any], tokenizer: Any, counts: RecordCounts | None = None
) -> list[str]:
    """The targets of a record's samples, as text."""
    counts = RecordCounts() if counts is None else counts
    samples = list(cut([record], tokenizer, npt.DataConfig(max_length=4096), counts))
    kept = [[i for i in sample.labels or sample.input_ids if i != -100] for sample in samples]
    return [tokenizer.decode(ids) for ids in kept]


class TestCalls:
    @pytest.mark.parametrize(
        "answer",
        [
            assistant(None, tool_calls=CALL),
            assistant("", tool_calls=CALL),
            {"role": "assistant", "tool_calls": CALL},
        ],
        ids=["null", "empty", "none"],
    )
    def test_a_call_without_a_text_is_the_answer(self, calling, answer) -> None:
        counts = RecordCounts()
        for record in ({"messages": [USER, answer]}, {"prompt": [USER], "completion": [answer]}):
            assert trained(record, calling, counts) == [WRITTEN]
        assert not counts.skipped and not lost(counts)

    def test_an_earlier_call_is_context_of_the_answer(self, calling) -> None:
        call, result = assistant(None, tool_calls=CALL), {"role": "tool", "content": "3"}
        record = {"messages": [USER, call, result, assistant("It is 3.")]}
        assert trained(record, calling) == ["It is 3.</s>"]
        assert WRITTEN in calling.decode(
            prompt_record(0, record, calling, npt.DataConfig(), 512)["input_ids"]
        )


class TestWeights:
    def test_an_answer_of_weight_zero_is_not_trained(self, calling) -> None:
        counts = RecordCounts()
        for zero in (0, 0.0):
            good, poor = assistant("good", weight=1), assistant("poor", weight=zero)
            assert trained({"messages": [USER, poor, USER, good]}, calling, counts) == ["good</s>"]
            assert trained({"messages": [USER, good, USER, poor]}, calling, counts) == ["good</s>"]
            assert trained({"messages": [USER, poor]}, calling, counts) == []
            assert trained({"prompt": [USER], "completion": [poor]}, calling, counts) == []
        assert counts.skipped == {"answer of weight 0": 4}
        assert "4 skipped (answer of weight 0)" in lost(counts)


class TestNulls:
    """Tables of several forms that were merged: a column that a record has not is null in it."""

    @pytest.mark.parametrize(
        ("record", "expected"),
        [
            ({"messages": [USER, assistant("3")]}, "3</s>"),
            ({"prompt": "a", "completion": "3"}, "3</s>"),
            ({"input_ids": [5, 6]}, None),
            ({"text": "a"}, "<s>a</s>"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_the_form_is_told_by_the_columns_that_are_filled(
        self, calling, record, expected
    ) -> None:
        columns = ("text", "messages", "prompt", "completion", "input_ids", "labels")
        merged = {**dict.fromkeys(columns), **record}
        alone = trained(record, calling)
        assert trained(merged, calling) == alone and expected in (None, *alone)
        one, other = (
            prompt_record(0, given, calling, npt.DataConfig(), 512) for given in (record, merged)
        )
        assert one == other

    def test_a_null_key_of_a_message_is_not_there(self, calling) -> None:
        record = {"messages": [{**USER, "tool_calls": None}, assistant("3", tool_calls=None)]}
        assert trained(record, calling) == ["3</s>"]

    def test_what_has_only_nulls_is_refused_by_its_name(self, calling) -> None:
        with pytest.raises(npt.NPTError, match="record 0 has null as 'text'"):
            trained({"text": None, "messages": None}, calling)
