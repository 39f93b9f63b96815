"""The page of `npt generate --html`: a text whose tokens are coloured by their modulation.

It shows `ModulationMap.as_dict` of npt/evaluation/modulation_map.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from npt.report.pages import render
from npt.report.words import clean, number

COLOURS = 8  # steps of the colour scale: `.h0` to `.h7` in style.css
LETTERS = 40  # the most that are shown of one token
NUMBERS = 4  # the most active numbers of a layer in a token's hint

SPACES = str.maketrans(" \n\r\t", "·⏎␍⇥")

Facts = Sequence[tuple[str, str]]
Passages = Sequence[tuple[str, Mapping[str, Any]]]
"""Pairs of a title and an `as_dict`. Optional keys: `start`, the index of the first token after the
prompt, and `parts`, that of the first token on which two texts differ.
"""


def page(
    words: str, facts: Facts, recipe: Facts, passages: Passages, numbers: Sequence[Any] = ()
) -> str:
    """Return the page. `words` is its opening sentence, `recipe` names the adapter and settings,
    and `numbers` are rows of the table of active numbers.
    """
    sections = {"text": "Text and modulation"}
    if numbers:
        sections["numbers"] = "What its largest numbers stand for"
    return render(
        "generated.html.j2", title="Modulation, token by token", view=token_view(passages),
        sections={**sections, "recipe": "Settings"}, words=words, facts=facts, numbers=numbers,
        recipe=recipe, next="Next: measure agreement on held-out text with npt evaluate.",
    )  # fmt: skip


def token_view(passages: Passages) -> dict[str, Any] | None:
    """Return the data for `generated.html.j2`, or None if no passage has a finite number."""
    changes = [np.array(measured["change"], np.float64) for _, measured in passages]
    finite = np.concatenate([change[np.isfinite(change)] for change in changes])
    if not len(finite):
        return None
    high = max(float(np.quantile(finite, 0.99)), 1e-12)
    return {
        "texts": [
            _text(title, measured, change, high)
            for (title, measured), change in zip(passages, changes, strict=True)
        ],
        "high": number(high, 2),
        "colours": range(COLOURS),
        "prompt": any(measured.get("start") for _, measured in passages),
    }


def _text(
    title: str, measured: Mapping[str, Any], change: np.ndarray, high: float
) -> dict[str, Any]:
    finite = np.isfinite(change)
    counts = finite.sum(axis=1)
    # the mean over the layers that have a finite number; NaN, and so no colour, if none has
    sums = np.where(finite, change, 0).sum(axis=1)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    tokens = []
    rows = []
    for i, text in enumerate(measured["tokens"]):
        kind = colour(means[i], high)
        if i < measured.get("start", 0):
            kind += " q"
        if i == measured.get("parts"):
            kind += " p"
        hint = _hint(measured, i, means[i])
        tokens.append((visible(text), kind, text.count("\n"), hint))
        cells = [("kl", number(measured["kl"][i], 2))]
        cells += [(colour(value, high), number(value, 2)) for value in change[i]]
        rows.append((visible(text), cells))
    head = ["token", "KL", *measured["layers"]]
    return {"title": title, "tokens": tokens, "rows": rows, "head": head}


def _hint(measured: Mapping[str, Any], i: int, mean: float) -> str:
    hint = f"token {i + 1}, change {number(mean, 3)}"
    if i:  # nothing predicts the first
        teacher = visible(measured["teacher_first"][i])
        student = visible(measured["student_first"][i])
        hint += f"; most likely: teacher {teacher}, student {student}"
    if "active" in measured:
        hint += "".join(map(_numbers, measured["layers"], measured["active"][i]))
    return hint


def _numbers(layer: int, pairs: Sequence[Sequence[float]]) -> str:
    """Return a part of a hint: how many numbers of a layer are active, and the largest."""
    largest = ", ".join(f"#{int(index)} {value:+.2g}" for index, value in pairs[:NUMBERS])
    more = ", ..." if len(pairs) > NUMBERS else ""
    return f"; layer {layer}, {len(pairs)} numbers: {largest}{more}"


def colour(value: float, high: float) -> str:
    """Return the CSS class of a colour, or `hn` if the value is not finite."""
    if not math.isfinite(value):
        return "hn"
    return f"h{max(0, min(COLOURS - 1, int(COLOURS * (value / high))))}"


def passage(*tokens: str) -> str:
    """Return the end of a passage on one line, with its last token in brackets."""
    *before, last = tokens
    text = "".join(before)
    words = " ".join(text.split())
    if text[-1:].isspace():
        words += " "
    return clean(words[-LETTERS:] + f"[{visible(last)}]", 2 * LETTERS)


def visible(text: Any) -> str:
    """Return a token with its white space made visible: `·` space, `⏎` line end, `⇥` tab."""
    shown = text.translate(SPACES) if isinstance(text, str) else ""
    return clean(shown, LETTERS) or "∅"
