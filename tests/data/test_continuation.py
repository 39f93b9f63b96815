"""Tokenizers that begin every text with a space of their own: after a prompt there is none, and
none becomes a target.
"""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from sentencepieces import EOS, PLAIN, PREFIXING, tokenizer_of

import npt
from npt.data.samples import cut
from npt.tools.collect.prompts import read_prompts

CONFIG = npt.DataConfig(max_length=512)
CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INST = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}"
    " [/INST]{% else %} {{ m['content'] }}{{ '</s>' }}{% endif %}{% endfor %}"
)

WORDS = st.lists(
    st.sampled_from(
        [
            "answer",
            "the",
            "ques",
            "tion",
            " ",
            "  ",
            "\n",
            "é",
            "日本",
            ".",
            "(4)",
            "1",
            "a",
            "</s>",
        ]
    ),
    max_size=6,
)


def bare(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encoded(
    tokenizer: Any, prompt: Any, completion: Any, config: npt.DataConfig = CONFIG
) -> tuple[list[int], list[int]]:
    """The prompt's tokens and the completion's, without those that open and close the sample."""
    (sample,) = cut([{"prompt": prompt, "completion": completion}], tokenizer, config)
    count = sum(label == -100 for label in sample.labels)
    ids, opening = list(sample.input_ids), tokenizer("a")["input_ids"][: -len(bare(tokenizer, "a"))]
    assert ids[: len(opening)] == opening and list(sample.labels[count:]) == ids[count:]
    end = [tokenizer.eos_token_id]
    return ids[len(opening) : count], ids[count : -1 if ids[-1:] == end else None]


@pytest.mark.parametrize("kind", PREFIXING)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("The question", " answer"),
        ("Question: the", " answer is 42"),
        ("The question:", "answer"),
        ("The capital of France is\n", "Paris"),
        ("(", "4) and"),
        ("The question", "  two spaces"),
        ("", "answer"),
    ],
)
def test_a_completion_has_the_tokens_that_it_has_in_the_whole_text(
    kind, prompt, completion
) -> None:
    tokenizer = tokenizer_of(kind)
    own, target = encoded(tokenizer, prompt, completion)
    assert own + target == bare(tokenizer, prompt + completion)


@pytest.mark.parametrize("kind", PREFIXING)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_prompt_and_completion_are_the_whole_text(kind, data) -> None:
    tokenizer = tokenizer_of(kind)
    texts = WORDS.map("".join)
    prompt, completion = data.draw(texts.filter(bool)), data.draw(texts.filter(str.strip))
    own, target = encoded(tokenizer, prompt, completion)
    whole = bare(tokenizer, prompt + completion)
    assert own == bare(tokenizer, prompt)  # as it is when something is generated after it
    if whole[-1] == EOS and completion.endswith("</s>"):
        whole = whole[:-1]
    assert tokenizer.decode(own + target) == tokenizer.decode(whole)
    if whole[: len(own)] == own:
        assert own + target == whole


@pytest.mark.parametrize("kind", PREFIXING)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("impo", "rt os"), ("The question: ", "the answer"), ("ques", "tion")],
)
def test_within_a_token_both_sides_keep_tokens_of_their_own(kind, prompt, completion) -> None:
    tokenizer = tokenizer_of(kind)
    own, target = encoded(tokenizer, prompt, completion)
    assert own == bare(tokenizer, prompt)
    assert tokenizer.decode(own + target) == tokenizer.decode(bare(tokenizer, prompt + completion))
    assert tokenizer.decode(own + target).strip() == prompt + completion


@pytest.mark.parametrize("kind", PLAIN)
@settings(deadline=None, max_examples=60)
@given(prompt=WORDS.map("".join).filter(bool), completion=WORDS.map("".join).filter(str.strip))
def test_without_such_a_space_both_are_tokenised_apart_as_ever(kind, prompt, completion) -> None:
    tokenizer = tokenizer_of(kind)
    target = bare(tokenizer, completion)
    assert encoded(tokenizer, prompt, completion) == (
        bare(tokenizer, prompt),
        target[:-1] if target[-1] == EOS else target,
    )


@pytest.mark.parametrize("kind", [*PREFIXING, *PLAIN])
@pytest.mark.parametrize("template", [CHAT, INST])
def test_an_answer_has_the_tokens_of_the_whole_conversation(kind, template) -> None:
    tokenizer = tokenizer_of(kind)
    tokenizer.chat_template = template
    turns = [
        ("user", "the question?"),
        ("assistant", "an answer"),
        ("user", "and one more?"),
        ("assistant", "the answer (4)"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        whole = bare(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False))
        (sample,) = cut(
            [{"m": messages}], tokenizer, npt.DataConfig(max_length=512, prompt_column="m")
        )
    finally:
        tokenizer.chat_template = None
    assert list(sample.input_ids) == whole
    targets = [label for label in sample.labels if label != -100]
    assert (
        targets == whole[-len(targets) :]
        and tokenizer.decode(targets).strip() == "the answer (4)</s>"
    )


@pytest.mark.parametrize("kind", PREFIXING)
def test_a_prompt_to_collect_from_is_the_prompt_that_is_trained_on(kind) -> None:
    tokenizer = tokenizer_of(kind)
    record = {"prompt": "The question: ", "completion": "the answer"}
    (prompt,) = read_prompts([record], tokenizer, CONFIG, length=64, seed=0)
    (sample,) = cut([record], tokenizer, CONFIG)
    assert prompt.input_ids == sample.input_ids[: sample.labels.count(-100)]
