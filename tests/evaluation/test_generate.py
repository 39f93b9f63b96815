"""Text after a prompt: what streams is what comes out, and drawing follows its settings and its
seed alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from sentencepieces import PLAIN, PREFIXING, speaker_of, tokenizer_of
from slow_greedy import alone

import npt
from npt.base.load import load_tokenizer
from npt.data.continuation import continuation_text
from npt.errors import ConfigError, DataError, NumericalError
from npt.evaluation.generate import Decoding, Streamer, first_difference, prompt_ids, write

PROMPT = "class Stack:\n    def __init__(self"
LIMIT = 12


def settings(**others) -> dict:
    return {"max_new_tokens": LIMIT, **others}


def test_generation_pads_with_a_token_of_the_base(tiny, monkeypatch) -> None:
    model, _ = tiny
    tokenizer = load_tokenizer("tiny")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    given: list[int] = []
    generate = model.generate
    monkeypatch.setattr(
        model, "generate", lambda **how: given.append(how["pad_token_id"]) or generate(**how)
    )
    write(model, tokenizer, prompt_ids(tokenizer, PROMPT), Decoding(2))
    assert given and all(0 <= pad < model.config.vocab_size for pad in given)


def test_greedy_text_is_that_of_recomputation_and_streams_whole(tiny) -> None:
    model, tokenizer = tiny
    ids = prompt_ids(tokenizer, PROMPT)
    parts: list[str] = []
    found = write(model, tokenizer, ids, Decoding(LIMIT), show=parts.append)
    assert list(found.ids) == alone(model, ids, LIMIT, [tokenizer.eos_token_id])
    assert (
        "".join(parts) == found.text == tokenizer.decode(list(found.ids), skip_special_tokens=True)
    )
    assert len(parts) > 2 and not found.ended
    assert found.as_dict().keys() == {
        "text",
        "tokens",
        "ids",
        "finish",
        "seconds",
        "tokens_per_second",
    }


@pytest.mark.parametrize("kind", [*PREFIXING, *PLAIN])
def test_text_keeps_its_leading_space_and_every_line_its_indentation(kind) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, text = "The question", " answer:\n    return os.path\n\n  and (4) is two,\n   spaces\n"
    before, ids = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, prompt + text)
    )
    assert ids[: len(before)] == before
    new = ids[len(before) :]
    assert continuation_text(tokenizer, before, new) == text
    parts = streamed(tokenizer, before, new)
    assert "".join(parts) == text and len(parts) > 8


def streamed(tokenizer, before, new) -> list[str]:
    parts: list[str] = []
    streamer = Streamer(tokenizer, parts.append, before)
    streamer.put(torch.tensor([before]))
    for token in new:
        streamer.put(torch.tensor([token]))
    streamer.end()
    return parts


@pytest.mark.parametrize("kind", [*PREFIXING, *PLAIN])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("the " + 9 * "日", "日日 the\n日日 is"),
        ("the", " 日\n日日 is"),
        ("the", " is\n<|user|> the"),
        ("the", " is\n</s>\n  the"),
    ],
    ids=[
        "a prompt that ends in bytes",
        "bytes on either side of a line's end",
        "a special token that begins a line",
        "one between two",
    ],
)
def test_streamed_text_is_whole_if_tokens_are_bytes_or_special(kind, prompt, text) -> None:
    tokenizer = tokenizer_of(kind)
    before, whole = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, prompt + text)
    )
    new = whole[len(before) :]
    assert "".join(streamed(tokenizer, before, new)) == continuation_text(tokenizer, before, new)


@pytest.mark.parametrize("kind", ["llama 2", "byte level"])
def test_what_is_written_is_the_text_behind_the_prompt(kind) -> None:
    tokenizer = tokenizer_of(kind)
    model, ids = speaker_of(kind), prompt_ids(tokenizer, "The question")
    parts: list[str] = []
    found = write(model, tokenizer, ids, Decoding(LIMIT), show=parts.append)
    whole = tokenizer.decode([*ids, *found.ids], skip_special_tokens=True)
    assert "".join(parts) == found.text and "The question" + found.text == whole
    assert found.text.startswith(" ")


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 1.0), (1.4, 0.8)])
def test_drawing_is_transformers_own_under_the_same_seed(tiny, temperature, top_p) -> None:
    model, tokenizer = tiny
    ids = torch.tensor([prompt_ids(tokenizer, PROMPT)])
    torch.manual_seed(3)
    drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    expected = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, **drawn
    )
    found = write(model, tokenizer, ids[0].tolist(), Decoding(LIMIT, temperature, top_p, 3))
    assert list(found.ids) == expected[0, ids.shape[1] :].tolist()


def test_the_seed_decides_and_the_random_state_outside_stays(tiny) -> None:
    model, tokenizer = tiny
    ids = prompt_ids(tokenizer, PROMPT)
    before = torch.get_rng_state()
    one, again, other = (
        write(model, tokenizer, ids, Decoding(LIMIT, temperature=1.0, seed=seed)).ids
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert torch.equal(torch.get_rng_state(), before)


def test_settings_that_come_with_the_model_do_not_decide(load_model, tokenizer) -> None:
    model = load_model()
    tokenizer.decode = lambda ids, skip_special_tokens: ""
    before = write(model, tokenizer, [5, 6, 7], Decoding(LIMIT)).ids
    model.generation_config.do_sample = True
    (
        model.generation_config.temperature,
        model.generation_config.top_k,
        model.generation_config.num_beams,
    ) = (5.0, 3, 4)
    assert write(model, tokenizer, [5, 6, 7], Decoding(LIMIT)).ids == before


def test_a_text_ends_at_its_end_token(load_model, tokenizer) -> None:
    model = load_model()
    tokenizer.decode = lambda ids, skip_special_tokens: ""
    free = write(model, tokenizer, [5, 6, 7], Decoding(LIMIT)).ids
    tokenizer.eos_token_id = free[3]
    found = write(model, tokenizer, [5, 6, 7], Decoding(LIMIT))
    end = free.index(free[3])
    assert found.ids == free[: end + 1] and found.ended and found.as_dict()["finish"] == "end"


def test_logits_that_are_not_finite_end_it(load_model, tokenizer) -> None:
    model = load_model()
    model.model.embed_tokens.weight.data[61] = math.nan
    with pytest.raises(NumericalError, match="after token 3 are not finite"):
        write(model, tokenizer, [5, 61, 7], Decoding(LIMIT))
    with pytest.raises(NumericalError, match="not finite"):
        write(model, tokenizer, [5, 61, 7], Decoding(LIMIT, temperature=1.0))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"temperature": 1.0, "top_p": math.nan}, "top_p is nan"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": 0.5}, "top_p 0.5 has no effect"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**40}, "seed is 1099511627776"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, named) -> None:
    with pytest.raises(ConfigError, match=named):
        Decoding(**given)


def test_a_prompt_that_does_not_fit_is_refused(load_model, tokenizer) -> None:
    model = load_model()
    with pytest.raises(
        ConfigError, match=r"100 tokens and --max_new_tokens 29 exceed the model's 128 positions"
    ):
        write(model, tokenizer, [5] * 100, Decoding(29))
    with pytest.raises(DataError, match=r"token id 128.*\[0, 128\)"):
        write(model, tokenizer, [5, 128], Decoding(2))


def test_prompts_are_tokenised_as_texts_or_by_the_chat_template() -> None:
    tokenizer = npt.load_base("tiny", quantization=None, device="cpu")[1]
    plain = tokenizer("hello")["input_ids"]
    assert prompt_ids(tokenizer, "hello") == plain and plain[0] == tokenizer.bos_token_id
    assert prompt_ids(tokenizer, "") == [tokenizer.bos_token_id]
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}>"
    )
    chat = prompt_ids(tokenizer, "hello")
    assert tokenizer.decode(chat) == "<s>[user]hello>" and chat.count(tokenizer.bos_token_id) == 1
    assert prompt_ids(tokenizer, "hello", chat=False) == plain
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(DataError, match="the chat template refuses the prompt: never"):
        prompt_ids(tokenizer, "hello")


def test_a_prompt_of_no_token_or_of_half_a_character_is_refused(tokenizer) -> None:
    real = npt.load_base("tiny", quantization=None, device="cpu")[1]
    with pytest.raises(DataError, match="no token"):
        prompt_ids(lambda texts, **_: {"input_ids": [[] for _ in texts]}, "")
    with pytest.raises(DataError, match="broken at character 1"):
        prompt_ids(real, "a\ud800")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [], None),
        ([1], [1], None),
        ([1, 2], [1, 3], 1),
        ([1], [1, 2], 1),
        ([], [1], 0),
        ([2, 1], [1, 1], 0),
    ],
)
def test_where_two_texts_differ_first(one, other, expected) -> None:
    assert first_difference(one, other) == first_difference(other, one) == expected
