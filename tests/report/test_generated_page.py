"""The page of a text's modulation: every token can be seen, has a colour, and is escaped."""

import math
import random
from typing import Any

from made_runs import Reader

from npt.report.generated import COLOURS, LETTERS
from npt.report.generated import page as generated_page
from npt.report.generated import passage as text_of

HOSTILE = "</script><script>alert(1)</script>"
TOKENS_SHOWN = ["<s>", " the", "\n\n", "<script>", HOSTILE, "\u202e", "</td>", "&amp;", "\t", ""]


def passage(tokens: list[str] | None = None, layers: int = 3, **changed: Any) -> dict[str, Any]:
    """As `ModulationMap.as_dict` gives it."""
    tokens = TOKENS_SHOWN if tokens is None else tokens
    draw = random.Random(3)
    return {
        "tokens": tokens,
        "layers": list(range(layers)),
        "change": [[math.exp(draw.gauss(0, 1)) for _ in range(layers)] for _ in tokens],
        "kl": [None, *(draw.random() for _ in tokens[1:])],
        "teacher_first": [None, *tokens[1:]],
        "student_first": [None, *tokens[1:]],
        **changed,
    }


def made(*passages: dict[str, Any]) -> str:
    titles = ("The teacher's text", "The student's text")
    pairs = list(zip(titles, passages, strict=False))
    return generated_page("Said", [("tokens", "3")], [], pairs)


def test_every_token_is_escaped_and_can_be_seen() -> None:
    reader = Reader(made(passage()))
    assert not reader.of("script") and len(reader.of("br")) == 2  # of the token of two line ends
    shown = reader.sections["text"]
    for each in ("·the", "⏎⏎", "<script>", "⇥", "\\u202e", "∅", "&amp;"):
        assert each in shown, each
    assert not [a for _, names in reader.elements for a in names if a.startswith("on")]


def test_each_token_has_a_colour_and_each_layer_a_cell() -> None:
    reader = Reader(made(passage(layers=3)))
    spans = reader.of("span", class_="token")
    assert len(spans) == len(TOKENS_SHOWN) and len(reader.of("td")) == (1 + 3) * len(TOKENS_SHOWN)
    assert {each["class"] for each in reader.of("td")} <= {"kl", *(f"h{i}" for i in range(COLOURS))}
    assert "teacher ·the" in (spans[1]["title"] or "")


def test_the_prompt_and_the_parting_of_two_texts_are_marked() -> None:
    one, other = passage(start=2, parts=4), passage(["a", "b", "c", "d"], start=2, parts=3)
    reader = Reader(made(one, other))
    assert len(reader.of("span", class_="p")) == 3  # one in each text, and the key
    assert len(reader.of("span", class_="q")) == 5
    assert "The teacher's text" in reader.text and "The student's text" in reader.text


def test_numbers_that_are_not_finite_have_no_colour() -> None:
    text = Reader(made(passage(["a", "b"], change=[[math.nan] * 3, [0.5, math.inf, math.nan]])))
    assert [each["class"] for each in text.of("td")] == ["kl", *["hn"] * 3, "kl", "h7", "hn", "hn"]
    nothing = made(passage(["a"], change=[[math.nan] * 3]))
    assert "No token has a finite number" in nothing


def test_active_numbers_are_in_the_hints_and_their_passages_in_a_table() -> None:
    active = [[[[7, 0.5], [2, -0.25]], [], [[k, 1.0 / (k + 1)] for k in range(9)]]]
    with_numbers = passage(["a"], active=active)
    rows = [["4", "#7", "+0.5", HOSTILE, f"{HOSTILE}[b] +0.9"]]
    reader = Reader(generated_page("Said", [], [], [("", with_numbers)], rows))
    (span,) = reader.of("span", class_="token h7")[:1] or reader.of("span", class_="token")[:1]
    hint = span["title"] or ""
    assert "; layer 0, 2 numbers: #7 +0.5, #2 -0.25; layer 1, 0 numbers: ; layer 2, 9" in hint
    assert hint.endswith(", ...") and hint.count("#") == 2 + 4
    assert "#7" in reader.sections["numbers"] and not reader.of("script")
    assert "numbers" not in Reader(made(passage())).sections


def test_a_passage_ends_with_its_token_in_brackets() -> None:
    assert text_of("def f(\n", "    ", "x") == "def f( [x]"
    assert text_of("word " * 30, "x").endswith("word word [x]") and text_of("a") == "[a]"
    assert len(text_of("word " * 30, "x")) == LETTERS + 3
