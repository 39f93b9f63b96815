"""Prompts are the tokens that training would put before a completion, whatever the data look
like.
"""

import pytest

from npt.base.source import load_tokenizer
from npt.config import DataConfig
from npt.data.samples import cut
from npt.errors import DataError
from npt.tools.collect.prompts import prompt_record, read_prompts

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if"
    " add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer("tiny")


def ids_of(record: object, tokenizer, length: int = 64, **columns: str) -> list[int]:
    return prompt_record(7, record, tokenizer, DataConfig(**columns), length)["input_ids"]


def prompts(
    records, tokenizer, length: int = 4, seed: int = 0, **columns: str
) -> dict[str, tuple[int, ...]]:
    return {
        p.id: p.input_ids
        for p in read_prompts(records, tokenizer, DataConfig(**columns), length=length, seed=seed)
    }


def test_a_text_is_a_prompt_without_an_end_token(tokenizer):
    assert ids_of({"text": "ab"}, tokenizer) == tokenizer("ab")["input_ids"]
    assert ids_of({"body": "ab"}, tokenizer, text_column="body") == tokenizer("ab")["input_ids"]


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"prompt": "ab"}, {}),
        ({"prompt": "ab", "completion": "cd"}, {}),
        ({"prompt": "ab", "completion": None}, {}),
        ({"q": "ab", "text": "no"}, {"prompt_column": "q"}),
    ],
)
def test_a_prompt_needs_no_completion(tokenizer, record, columns):
    assert ids_of(record, tokenizer, **columns) == tokenizer("ab")["input_ids"]


def test_a_prompt_is_tokenised_as_in_front_of_its_completion(tiny):
    record = {"prompt": "def f(x):\n", "completion": "    return x"}
    (sample,) = cut([record], tiny, DataConfig())
    prompt = sample.input_ids[: sample.labels.count(-100)]
    assert ids_of({"prompt": "def f(x):\n"}, tiny) == list(prompt)


@pytest.mark.parametrize(
    "answer", [[], [{"role": "assistant", "content": "no"}]], ids=["open", "answered"]
)
def test_a_conversation_is_a_prompt_up_to_its_last_answer(tiny, answer):
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = CHAT
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "so"},
    ]
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert ids_of({"chat": messages + answer}, tokenizer, prompt_column="chat") == expected


def test_of_ids_with_labels_the_masked_front_is_the_prompt(tokenizer):
    assert ids_of(
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100], "prompt": "other"}, tokenizer
    ) == [5, 6]
    assert ids_of({"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, tokenizer) == [5, 6, 7]
    assert ids_of({"input_ids": [5, 6, 1]}, tokenizer) == [5, 6]


def test_a_long_prompt_keeps_its_end_and_a_long_text_gives_several(tokenizer):
    assert (
        ids_of({"prompt": "abcdef"}, tokenizer, length=3) == tokenizer("abcdef")["input_ids"][-3:]
    )
    ids = tuple(tokenizer("abcdef")["input_ids"])
    assert prompts([{"id": "t", "text": "abcdef"}], tokenizer) == {"t@0": ids[:4], "t@4": ids[4:]}


def test_what_has_no_two_tokens_is_passed_over(tokenizer):
    assert prompts([{"text": ""}, {"id": "p", "prompt": "a"}, {"input_ids": [5]}], tokenizer) == {
        "p@0": (0, *tokenizer("a")["input_ids"][1:])
    }
    with pytest.raises(DataError, match="no sample to train on"):
        prompts([{"text": ""}], tokenizer)


def test_the_order_is_seeded_and_a_stream_gives_the_same_prompts(tokenizer):
    records = [{"id": str(i), "prompt": f"p{i}"} for i in range(50)]
    one, again, other = (list(prompts(records, tokenizer, seed=seed)) for seed in (0, 0, 1))
    assert one == again != other
    assert sorted(one) == sorted(prompts((r for r in records), tokenizer))


@pytest.mark.parametrize(
    ("record", "columns", "told"),
    [
        ({"q": "x"}, {}, r"record 7 has no column 'text' \(columns: q\); set --text_column"),
        (
            {"q": "x"},
            {"prompt_column": "p"},
            r"record 7 has no column 'p' \(columns: q\); set --prompt_column",
        ),
        ({"id": "mine", "prompt": 3}, {}, r"record mine has an int as 'prompt'"),
        ("text", {}, r"record 7 is a str"),
        ({"prompt": [1, 2]}, {}, r"'prompt' is not a list of messages"),
    ],
)
def test_a_record_without_a_prompt_is_named(tokenizer, record, columns, told):
    with pytest.raises(DataError, match=told):
        ids_of(record, tokenizer, **columns)
