"""The view of a text's modulation: escaped, bounded, and able to take any content of a file."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from made_runs import Reader, make_run, modulation

from npt.report.generated import page as generated_page
from npt.report.page import page
from npt.report.run import read_run
from npt.report.token_view import COLOURS, TOKENS, brief, palette, token_view, visible

HOSTILE = "</script><script>alert(1)</script>"
TOKENS_SHOWN = ["<s>", " the", "\n\n", "<script>", HOSTILE, "\u202e", "</td>", "&amp;", "\t", ""]


def passage(tokens: list[str] | None = None, layers: int = 3, **changed: Any) -> dict[str, Any]:
    """As `ModulationMap.as_dict` gives it."""
    tokens = TOKENS_SHOWN if tokens is None else tokens
    draw = random.Random(3)

    def numbers(*size: int) -> Any:
        if not size:
            return float(f"{math.exp(draw.gauss(0, 1)):.3g}")
        return [numbers(*size[1:]) for _ in range(size[0])]

    count = len(tokens)
    return {
        "tokens": tokens,
        "layers": list(range(layers)),
        "targets": ["gate", "up", "down"],
        **{name: numbers(count, layers) for name in ("change", "of_stream", "distance")},
        "products": numbers(count, layers, 3),
        "kl": [None, *numbers(count - 1)],
        "teacher_p": [None, *numbers(count - 1)],
        "student_p": [None, *numbers(count - 1)],
        "teacher_first": [None, *tokens[1:]],
        "student_first": [None, *tokens[1:]],
        **changed,
    }


def made(*passages: dict[str, Any], titles: tuple[str, ...] = ("", "other")) -> str:
    pairs = list(zip(titles, passages, strict=False))
    return generated_page("Said", [("tokens", "3")], [("base", "tiny")], pairs)


def test_every_token_is_escaped_and_can_be_seen() -> None:
    text = made(passage())
    reader = Reader(text)
    assert "<script>alert" not in text and len(reader.of("script")) == 2
    shown = reader.sections["text"]
    for each in ("·the", "⏎⏎", "<script>", "⇥", "\\u202e", "∅", "&amp;"):
        assert each in shown, each
    assert len(reader.of("br")) == 2  # of the token of two line ends
    found = json.loads(reader.data)
    assert found["views"][0]["tokens"][3] == '"<script>"'
    assert not [a for _, names in reader.elements for a in names if a.startswith("on")]


def test_the_page_allows_its_own_style_and_script_alone() -> None:
    text = made(passage())
    policy = Reader(text).of("meta")[1]["content"]
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy
    assert policy.count("sha256-") == 2 and "http" not in text.replace("http-equiv", "")


def test_each_token_has_a_colour_and_each_layer_a_cell() -> None:
    reader = Reader(made(passage(layers=3)))
    spans = reader.of("span", class_="token")
    assert len(spans) == len(TOKENS_SHOWN)
    assert len(reader.of("td")) == len(TOKENS_SHOWN) * 4  # KL, and three layers
    assert {each.get("class") for each in reader.of("td")} <= {
        f"{letter}{i}" for letter in "hk" for i in [*range(COLOURS), "n"]
    }


def test_two_texts_lie_next_to_each_other_and_their_parting_is_marked() -> None:
    one, other = passage(start=2, parts=4), passage(["a", "b", "c", "d"], start=2, parts=3)
    reader = Reader(made(one, other, titles=("The teacher's text", "The student's text")))
    assert len(reader.of("div", class_="two")) == 1 and len(reader.of("article")) == 2
    assert len(reader.of("span", class_="p")) == 3  # one in each text, and the key
    assert len(reader.of("span", class_="q")) == 5
    assert "The teacher's text" in reader.text


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"tokens": "text", "layers": 3},
        {"tokens": ["a"], "layers": [0]},
        {"tokens": ["a"], "layers": [0], "change": [[None]]},
        {"tokens": [], "layers": [0], "change": []},
    ],
)
def test_without_numbers_there_is_no_view(found) -> None:
    assert token_view([("", found)]) is None
    assert "no token with a finite number" in made(found)


@pytest.mark.parametrize(
    "changed",
    [
        {"kl": None},
        {"kl": "many", "products": 3, "distance": [[1]]},
        {"targets": None, "teacher_first": 7, "student_first": [3]},
        {"tokens": ["a", 7, None], "layers": ["x" * 900, {}, []]},
        {"change": [[1e300, -5, 0.0], [None, 0.5, 2]], "start": "x", "parts": -1},
        {"change": [[1e308, 1e307, 0.0], [0, -1e308, 1e308]], "kl": [None, 5e-324]},
    ],
)
def test_wrong_values_are_left_out(changed) -> None:
    Reader(made({**passage(), **changed}))


def test_a_long_text_is_cut() -> None:
    view = token_view([("", passage(["a"] * (TOKENS + 5), layers=1))])
    assert view is not None and view["views"][0]["more"] == 5
    assert len(view["views"][0]["tokens"]) == TOKENS


def test_a_report_has_the_view_of_its_passage(tmp_path) -> None:
    found = modulation(12)
    plain = make_run(tmp_path / "plain", modulation=found)
    shown = make_run(tmp_path / "shown", modulation={**found, "passage": passage()})
    without, with_view = (page(read_run(f), f / "report.html") for f in (plain, shown))
    assert "Token by token" in Reader(with_view).sections["modulation"]
    assert "Token by token" not in without and "tokens" not in Reader(without).data
    assert "script-src" not in without and with_view.count("script-src") == 1


@pytest.mark.parametrize(("layers", "tokens"), [(4, 96), (32, 31), (80, 12)])
def test_a_reports_view_takes_sixty_kilobytes_at_most(tmp_path, layers, tokens) -> None:
    """With as many tokens as a run puts there."""
    found = modulation(12)
    folders = [
        make_run(tmp_path / "plain", modulation=found),
        make_run(
            tmp_path / "shown",
            modulation={**found, "passage": passage([" token"] * tokens, layers)},
        ),
    ]
    without, with_view = (len(page(read_run(f), f / "report.html")) for f in folders)
    assert with_view - without < 61_000


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" a", "·a"), ("\r\n", "␍⏎"), ("", "∅"), ("\u200b", "\\u200b"), (None, "∅")],
)
def test_whitespace_and_hidden_letters_are_shown(token, shown) -> None:
    assert visible(token) == shown
    assert len(visible("x" * 500)) <= 40


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.004, "4e-3"), (0.5, "0.50"), (1.26, "1.3"), (250.0, "250"), (2e5, "2e5"),
     (math.nan, "–"), (math.inf, "–")],
)  # fmt: skip
def test_numbers_in_cells_are_short(value, said) -> None:
    assert brief(value) == said


def test_every_colour_can_be_read() -> None:
    """The contrast of ink and colour is 4.5 at least, as WCAG asks of small letters."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    rules = [line.split() for line in palette().splitlines() if "background" in line]
    assert len(rules) == 4 * COLOURS
    for rule in rules:
        ground, ink = (light(rule[i].strip(";")) + 0.05 for i in (3, 5))
        assert max(ground, ink) / min(ground, ink) > 4.5, rule
