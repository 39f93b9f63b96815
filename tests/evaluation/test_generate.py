"""Text after a prompt: the most likely tokens, and the text behind the prompt."""

import math

import pytest
from sentencepieces import PLAIN, PREFIXING, speaker_of, tokenizer_of
from slow_greedy import alone

import npt
from npt.data.continuation import continuation_text
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.generate import first_difference, prompt_ids, write

PROMPT = "class Stack:\n    def __init__(self"
LIMIT = 12


def test_the_text_is_that_of_greedy_recomputation(tiny) -> None:
    model, tokenizer = tiny
    ids = prompt_ids(tokenizer, PROMPT)
    written = write(model, tokenizer, ids, LIMIT)
    assert list(written.ids) == alone(model, ids, LIMIT, [tokenizer.eos_token_id])
    assert written.text == tokenizer.decode(list(written.ids), skip_special_tokens=True)
    figures = written.as_dict()
    assert figures["finish"] == "length" and figures["tokens"] == len(figures["ids"]) == LIMIT
    assert figures["tokens_per_second"] == pytest.approx(LIMIT / figures["seconds"])


@pytest.mark.parametrize("kind", [*PREFIXING, *PLAIN])
def test_text_keeps_its_leading_space_and_every_line_its_indentation(kind) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, text = "The question", " answer:\n    return os.path\n\n  and (4) is two,\n   spaces\n"
    before, ids = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, prompt + text)
    )
    assert ids[: len(before)] == before
    assert continuation_text(tokenizer, before, ids[len(before) :]) == text


@pytest.mark.parametrize("kind", ["llama 2", "byte level"])
def test_what_is_written_is_the_text_behind_the_prompt(kind) -> None:
    tokenizer = tokenizer_of(kind)
    ids = prompt_ids(tokenizer, "The question")
    written = write(speaker_of(kind), tokenizer, ids, LIMIT)
    whole = tokenizer.decode([*ids, *written.ids], skip_special_tokens=True)
    assert "The question" + written.text == whole and written.text.startswith(" ")


def test_a_text_ends_at_its_end_token_whatever_settings_come_with_the_model(
    load_model, tokenizer
) -> None:
    model = load_model()
    tokenizer.decode = lambda ids, skip_special_tokens: ""
    free = write(model, tokenizer, [5, 6, 7], LIMIT).ids
    model.generation_config.do_sample, model.generation_config.num_beams = True, 4
    tokenizer.eos_token_id = free[3]
    written = write(model, tokenizer, [5, 6, 7], LIMIT)
    assert written.ids == free[: free.index(free[3]) + 1]
    assert written.ended and written.as_dict()["finish"] == "end"


def test_what_cannot_be_continued_is_refused(load_model, tokenizer) -> None:
    model = load_model()
    told = r"100 tokens and --max_new_tokens 29 exceed the model's 128 positions"
    with pytest.raises(ConfigError, match=told):
        write(model, tokenizer, [5] * 100, 29)
    with pytest.raises(ConfigError, match="token ids outside 0 to 127"):
        write(model, tokenizer, [5, 128], 2)
    model.model.embed_tokens.weight.data[61] = math.nan
    with pytest.raises(NumericalError, match="after token 3 of the prompt are not finite"):
        write(model, tokenizer, [5, 61, 7], LIMIT)


def test_prompts_are_tokenised_as_texts_or_by_the_chat_template() -> None:
    tokenizer = npt.load_base("tiny", quantization=None, device="cpu")[1]
    plain = tokenizer("hello")["input_ids"]
    assert prompt_ids(tokenizer, "hello") == plain and plain[0] == tokenizer.bos_token_id
    assert prompt_ids(tokenizer, "") == [tokenizer.bos_token_id]
    with pytest.raises(DataError, match="not valid text at character 1"):
        prompt_ids(tokenizer, "a\ud800")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"
    )
    chat = prompt_ids(tokenizer, "hello")
    assert tokenizer.decode(chat) == "<s>[user]hello>" and chat.count(tokenizer.bos_token_id) == 1
    assert prompt_ids(tokenizer, "hello", chat=False) == plain
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(DataError, match="the chat template refuses the prompt: never"):
        prompt_ids(tokenizer, "hello")
    with pytest.raises(DataError, match="no token"):
        prompt_ids(lambda texts, **_: {"input_ids": [[] for _ in texts]}, "")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([], [], None), ([1], [1], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0)],
)
def test_where_two_texts_differ_first(one, other, expected) -> None:
    assert first_difference(one, other) == first_difference(other, one) == expected
