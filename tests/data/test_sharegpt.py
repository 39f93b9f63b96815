"""ShareGPT's conversations are the samples of the same conversation as messages."""

import json
from typing import Any

import pytest

import npt
from npt.base.source import load_tokenizer
from npt.data.samples import cut
from npt.errors import DataError
from npt.tools.collect.prompts import prompt_record

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi."},
]
TURNS = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "system", "value": "Be brief."}, *TURNS]},
        {"conversations": TURNS, "system": "Be brief."},
        {"conversations": MESSAGES},
        {"conversations": tuple(TURNS), "system": "Be brief."},
        {"conversations": json.dumps(TURNS)},
        {"messages": [MESSAGES[0], *TURNS]},
        {"messages": [m | {"role": {"user": "human"}.get(m["role"], "gpt")} for m in MESSAGES[1:]]},
        {"prompt": [MESSAGES[0], TURNS[0]], "completion": [TURNS[1]]},
    ],
)
def test_turns_are_messages(tokenizer, record):
    expected = MESSAGES if "Be brief." in str(record) else MESSAGES[1:]
    (wanted,) = cut([{"messages": expected}], tokenizer, npt.DataConfig())
    (sample,) = cut([record], tokenizer, npt.DataConfig())
    assert (sample.input_ids, sample.labels) == (wanted.input_ids, wanted.labels)
    prompt = sample.input_ids[: sample.labels.count(-100)]
    made = prompt_record(0, record, tokenizer, npt.DataConfig(), 64)
    assert made["input_ids"] == list(prompt)


def test_a_speaker_that_is_unknown_is_named(tokenizer):
    record = {"id": "a:1", "conversations": [TURNS[0], {"from": "parrot", "value": "Hi."}]}
    with pytest.raises(DataError, match=r"record a:1: a turn is from 'parrot'; rename it to one"):
        list(cut([record], tokenizer, npt.DataConfig()))


def test_a_weight_of_0_counts_and_other_lists_are_left_alone(tokenizer):
    record = {"conversations": [TURNS[0], {**TURNS[1], "weight": 0}]}
    assert not list(cut([record], tokenizer, npt.DataConfig()))
    (sample,) = cut(
        [{"text": "a", "from": [{"value": 1}], "system": "b"}], tokenizer, npt.DataConfig()
    )
    assert len(sample.input_ids) > 1
