"""Every column of a record is used, or said not to be: Alpaca's input, masks beside token ids,
tools and variables of a chat template, nulls, and messages that are not quite a list.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import npt
from npt.base.source import load_tokenizer
from npt.data.encoding import RecordCounts, unused_columns
from npt.data.samples import cut
from npt.data.source import open_source
from npt.errors import DataError
from npt.tools.collect.prompts import prompt_record

CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if thinking %}<think>{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TOOL = {"type": "function", "function": {"name": "add", "description": None}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT
    return tokenizer


def one(
    record: dict[str, Any], tokenizer: Any, counts: RecordCounts | None = None, **more: Any
) -> tuple[str, str]:
    """The prompt and the completion of a record's only sample, as text."""
    (sample,) = cut([record], tokenizer, npt.DataConfig(max_length=512, **more), counts)
    labels = sample.labels
    assert labels is not None
    start = next(i for i, label in enumerate(labels) if label != -100)
    prompt, completion = sample.input_ids[:start], sample.input_ids[start:]
    return tokenizer.decode(list(prompt)), tokenizer.decode(list(completion))


def fault(record: dict[str, Any], tokenizer: Any) -> str:
    with pytest.raises(DataError) as caught:
        list(cut([record], tokenizer, npt.DataConfig()))
    return str(caught.value)


class TestUnused:
    def test_columns_that_nothing_is_made_of_are_counted(self, tokenizer) -> None:
        counts = RecordCounts()
        pair = {
            "id": "1",
            "prompt": "q",
            "completion": "a",
            "input": "more",
            "empty": "",
            "no": None,
        }
        list(cut([pair, {**pair, "weight": 1}], tokenizer, npt.DataConfig(), counts))
        assert counts.unused == {"input": 2, "weight": 1}
        assert unused_columns(counts) == "'input' in 2 records, 'weight' in 1 record"

    def test_a_text_leaves_the_pair_beside_it(self, tokenizer) -> None:
        counts = RecordCounts()
        record = {"text": "t", "prompt": "q", "completion": "a"}
        list(cut([record], tokenizer, npt.DataConfig(), counts))
        assert counts.unused == {"prompt": 1, "completion": 1}

    def test_how_a_record_was_collected_is_no_surprise(self, tokenizer) -> None:
        counts = RecordCounts()
        record = {"id": "1", "prompt": "q", "completion": "a", "input_ids": [5, 6], "kl": 0.5}
        list(cut([{**record, "base_hash": "x"}], tokenizer, npt.DataConfig(), counts))
        assert not counts.unused
        list(cut([{"text": "t", "kl": 0.5}], tokenizer, npt.DataConfig(), counts))
        assert counts.unused == {"kl": 1}

    def test_names_without_end_take_no_memory_without_end(self, tokenizer) -> None:
        counts = RecordCounts()
        records = [{"text": "t", str(number): 1} for number in range(300)]
        list(cut(records, tokenizer, npt.DataConfig(), counts))
        assert len(counts.unused) == 100


class TestNulls:
    @pytest.mark.parametrize(
        ("record", "column"),
        [
            ({"prompt": "q", "completion": None}, "completion"),
            ({"prompt": None, "completion": "a"}, "prompt"),
            ({"instruction": "q", "output": None}, "output"),
        ],
    )
    def test_a_null_is_named_with_its_line(self, tokenizer, tmp_path, record, column) -> None:
        path = tmp_path / "d.jsonl"
        path.write_text("\n" + json.dumps(record))
        records = open_source(npt.DataConfig(dataset_name=str(path)))
        with pytest.raises(DataError, match=rf"d\.jsonl:2 \(line 2\) has null as '{column}'; fill"):
            list(cut(records, tokenizer, npt.DataConfig()))

    def test_a_null_answer_to_messages_is_named(self, tokenizer) -> None:
        record = {"prompt": TALK[:1], "completion": None}
        assert "record 0 has null as 'completion'" in fault(record, tokenizer)


class TestMessages:
    @pytest.mark.parametrize(
        "messages",
        [TALK, tuple(TALK), json.dumps(TALK), np.array(TALK)],
        ids=["list", "tuple", "json", "array"],
    )
    def test_a_list_in_another_form_is_understood(self, tokenizer, messages) -> None:
        expected = ("[user]a</s>[assistant]", "b</s>")
        assert one({"messages": messages}, tokenizer) == expected
        assert one({"chat": messages}, tokenizer, prompt_column="chat") == expected
        prompt = prompt_record(0, {"messages": messages}, tokenizer, npt.DataConfig(), 99)
        assert tokenizer.decode(prompt["input_ids"]) == expected[0]

    def test_a_prompt_that_looks_like_json_is_a_text(self, tokenizer) -> None:
        prompt = json.dumps(TALK)
        assert one({"prompt": prompt, "completion": "a"}, tokenizer)[0] == f"<s>{prompt}"

    @pytest.mark.parametrize("messages", ["a text", "{}", "[" * 9999])
    def test_a_text_is_no_conversation(self, tokenizer, messages) -> None:
        told = fault({"messages": messages}, tokenizer)
        assert "'messages' is not a list of messages; correct it" in told


class TestTemplate:
    @pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
    def test_tools_reach_it_without_the_nulls_of_a_table(self, tokenizer, tools) -> None:
        counts = RecordCounts()
        record = {"messages": TALK, "tools": tools}
        written = '[{"type": "function", "function": {"name": "add"}}][user]a</s>[assistant]'
        assert one(record, tokenizer, counts) == (written, "b</s>")
        assert not counts.unused
        prompt = prompt_record(0, record, tokenizer, npt.DataConfig(), 99)
        assert tokenizer.decode(prompt["input_ids"]) == written

    @pytest.mark.parametrize("variables", [{"thinking": True}, '{"thinking": true}'])
    def test_variables_reach_it(self, tokenizer, variables) -> None:
        counts = RecordCounts()
        record = {"messages": TALK, "chat_template_kwargs": variables}
        assert one(record, tokenizer, counts)[0] == "<think>[user]a</s>[assistant]"
        assert not counts.unused

    def test_what_it_does_not_read_is_not_used(self) -> None:
        plain = load_tokenizer("tiny")
        plain.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        counts = RecordCounts()
        beside = {"tools": [TOOL], "chat_template_kwargs": {"thinking": True}}
        list(cut([{"messages": TALK, **beside}], plain, npt.DataConfig(), counts))
        assert counts.unused == {"tools": 1, "chat_template_kwargs": 1}

    @pytest.mark.parametrize(
        ("beside", "told"),
        [
            ({"tools": "add"}, "'tools' is not a list of JSON schemas"),
            ({"tools": ["add"]}, "'tools' is not a list of JSON schemas"),
            ({"chat_template_kwargs": [1]}, "'chat_template_kwargs' is not an object"),
            (
                {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
                "'chat_template_kwargs' cannot set 'chat_template'; remove it there",
            ),
        ],
    )
    def test_what_it_cannot_take_is_named(self, tokenizer, beside, told) -> None:
        assert told in fault({"messages": TALK, **beside}, tokenizer)


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}


class TestAlpaca:
    @pytest.mark.parametrize(
        "columns", [{}, {"prompt_column": "instruction", "completion_column": "output"}]
    )
    def test_the_input_follows_the_instruction(self, tokenizer, columns) -> None:
        counts = RecordCounts()
        assert one(ALPACA, tokenizer, counts, **columns) == ("<s>Add.\n\n1 2", "3</s>")
        assert not counts.unused
        without = {**ALPACA, "input": " "}
        assert one(without, tokenizer, **columns) == ("<s>Add.", "3</s>")
        prompt = prompt_record(0, ALPACA, tokenizer, npt.DataConfig(**columns), 99)
        assert tokenizer.decode(prompt["input_ids"]) == "<s>Add.\n\n1 2"

    def test_an_input_that_is_no_text_is_named(self, tokenizer) -> None:
        assert "has an int as 'input'" in fault({**ALPACA, "input": 3}, tokenizer)


class TestTokenIds:
    @pytest.mark.parametrize("mask", ["loss_mask", "completion_mask", "assistant_masks"])
    def test_a_mask_takes_labels_away(self, tokenizer, mask) -> None:
        record = {"input_ids": [5, 6, 7, 8], mask: [0, 0, 1, True]}
        (sample,) = cut([record], tokenizer, npt.DataConfig())
        assert sample.labels == (-100, -100, 7, 8)
        (sample,) = cut([{**record, "labels": [5, 6, -100, 9]}], tokenizer, npt.DataConfig())
        assert sample.labels == (-100, -100, -100, 9)

    def test_masks_leave_the_same_tokens_as_padding_does(self, tokenizer) -> None:
        record = {
            "input_ids": [2, 5, 6, 7],
            "attention_mask": [0, 1, 1, 1],
            "position_ids": [1, 0, 1, 2],
            "loss_mask": [1, 1, 0, 1],
            "assistant_masks": [1, 1, 1, 1],
            "seq_lengths": [3],
        }
        (sample,) = cut([record], tokenizer, npt.DataConfig())
        assert (sample.input_ids, sample.labels) == ((5, 6, 7), (5, -100, 7))

    @pytest.mark.parametrize(
        ("beside", "told"),
        [
            ({"loss_mask": [1]}, "3 input_ids, but loss_mask has length 1"),
            ({"loss_mask": [2]}, "3 input_ids, but loss_mask has length 1"),
            ({"loss_mask": [0, 1, 2]}, "2 in its loss_mask, expected 0 (no target) or 1"),
            ({"completion_mask": [0.5, 1, 1]}, "completion_mask that are not a list of 64-bit"),
            ({"position_ids": [0, 1, 0]}, "position_ids other than 0 to 2; make each packed"),
            ({"seq_lengths": [2, 1]}, "seq_lengths [2, 1] for 3 tokens; make each packed document"),
            ({"seq_lengths": [2]}, "seq_lengths [2] for 3 tokens"),
        ],
    )
    def test_what_is_unclear_is_named(self, tokenizer, beside, told) -> None:
        assert told in fault({"input_ids": [5, 6, 7], **beside}, tokenizer)
