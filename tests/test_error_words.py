"""Words that messages are put together from."""

import pytest

from npt.errors import article, kind_of

WORDS = """
    an int, a str, a dict, an object, an NPTLlamaDecoderLayer, a LlamaDecoderLayer, a NoneType,
    an UpcastLinear, an MLP, a Linear4bit, an FSDPModule, an 'opt', a 'gpt2', an 8-bit, a 4-bit,
    an 11, a uint8, a float, a UserDict, an OPTDecoderLayer, a SiLU, an EmbeddingBag, a GPT2Block
"""


@pytest.mark.parametrize("words", [" ".join(words.split()) for words in WORDS.split(",")])
def test_a_word_has_the_article_that_is_spoken(words) -> None:
    said, word = words.split(" ", 1)
    assert article(word) == said


def test_the_type_of_a_value_is_named_with_its_article() -> None:
    assert [kind_of(value) for value in (3, "x", None, [])] == [
        "an int",
        "a str",
        "a NoneType",
        "a list",
    ]
