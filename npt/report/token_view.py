"""The modulation along a text, for a page: its tokens coloured, and a grid of tokens by layers.

What is shown is `ModulationMap.as_dict` of npt/evaluation/modulation_map.py, from a file as a rule:
anything in it may be missing or wrong. Without its script a page shows the change of the MLP's
output, the mean of all layers in the text and each layer in the grid; `tokens.js` shows other
quantities and single layers, and all numbers of the token that is pointed at.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from npt.report.logs import LAYERS, as_count, as_mapping, as_number
from npt.report.words import clean, number

TOKENS = 2000
"""Tokens of a text that a page shows."""

COLOURS = 12
"""Steps of a colour scale."""

NAMED = 12
"""Layers up to which the cells of the grid hold numbers."""

LETTERS = 40
"""Of a token that are shown."""

_TARGETS = ("stream", "gate", "up", "down")

_LABELS = {
    "change": "change of the MLP's output",
    "of_stream": "the same change, over the residual stream",
    "stream": "change of the attention output",
    "gate": "change of gate's product",
    "up": "change of up's product",
    "down": "change of down's product",
    "distance": "student's stream from the teacher's, NMSE",
    "kl": "KL(teacher, student) of the prediction, nats",
}
"""Quantities in the order of the menu; `kl` has one number a token, the others one a layer."""

_LOGARITHMIC = frozenset({"distance", "kl"})

_MAPS = {"h": (("YlOrRd", 0.0, 0.92), ("inferno", 0.1, 0.86)),
         "k": (("PuBu", 0.0, 0.92), ("Blues_r", 0.02, 0.9))}  # fmt: skip
"""By the letter of a class: the colour map, and the part of it, of a light and of a dark page."""

Scale = tuple[float, float]

Passages = Sequence[tuple[str, Mapping[str, Any]]]
"""Titles and what `as_dict` gave, each with `start`, the first token after the prompt, and `parts`,
the first that another text does not have, if there are such."""


class Passage:
    """One text, as far as its numbers can be read. by: values of a quantity, [T, L] or [T]."""

    def __init__(self, title: str, found: Mapping[str, Any]):
        texts, layers = found.get("tokens"), found.get("layers")
        texts = texts if isinstance(texts, list) else []
        self.title = title
        self.count = len(texts)
        self.texts = [text if isinstance(text, str) else "?" for text in texts[:TOKENS]]
        self.layers = [clean(name, 8) for name in layers] if isinstance(layers, list) else []
        self.layers = self.layers[:LAYERS]
        self.start, self.parts = as_count(found.get("start")) or 0, as_count(found.get("parts"))
        size = (len(self.texts), len(self.layers))
        named = found.get("targets")
        targets = named[: len(_TARGETS)] if isinstance(named, list) else []
        self.by = {name: _array(found.get(name), size) for name in ("change", "of_stream")}
        products = _array(found.get("products"), (*size, len(targets)))
        for target in _TARGETS:
            if target in targets:
                self.by[target] = products[..., targets.index(target)]
        self.by["distance"] = _array(found.get("distance"), size)
        self.by["kl"] = _array(found.get("kl"), size[:1])
        self.shares = {p: _array(found.get(p), size[:1]) for p in ("teacher_p", "student_p")}
        self.firsts = {
            name: [None if each is None else visible(each) for each in given[:TOKENS]]
            for name in ("teacher_first", "student_first")
            if isinstance(given := found.get(name), list)
        }

    @property
    def shown(self) -> bool:
        return bool(self.texts and self.layers and np.isfinite(self.by["change"]).any())


def _array(values: Any, size: tuple[int, ...]) -> np.ndarray:
    """Return numbers as an array of this size, NaN for what is missing or no number."""
    made = np.full(size, math.nan)
    if not size:
        value = as_number(values)
        in_fp32 = value is not None and (value == 0 or 1e-38 < abs(value) < 1e38)
        return np.array(value) if in_fp32 else made
    for place, each in enumerate(values[: size[0]] if isinstance(values, list) else []):
        made[place] = _array(each, size[1:])
    return made


def token_view(passages: Passages, small: bool = False) -> dict[str, Any] | None:
    """Return what `tokens.html.j2` and `tokens.js` show; None if no passage has numbers. small:
    fewer quantities, of two digits instead of three, for a page that is about more.
    """
    read = [Passage(title, as_mapping(found)) for title, found in passages]
    read = [passage for passage in read if passage.shown]
    for passage in read if small else []:
        del passage.by["of_stream"]
    if not read:
        return None
    scales, means = dict[str, Scale](), dict[str, Scale]()
    for name in _LABELS:
        values, log = [p.by[name] for p in read if name in p.by], name in _LOGARITHMIC
        if scale := _scale(values, log):
            scales[name] = scale
            means[name] = _scale([_means(each) for each in values], log, least=0.02) or scale
    return {
        "views": [_shown(passage, scales, means["change"]) for passage in read],
        "quantities": [(name, _LABELS[name]) for name in scales],
        "layers": list(dict.fromkeys(name for passage in read for name in passage.layers)),
        "ends": [(number(means["change"][i], 2), number(scales["change"][i], 2)) for i in (0, 1)],
        "colours": range(COLOURS),
        "parts": any(passage.parts is not None for passage in read),
        "prompt": any(passage.start for passage in read),
        "json": _json(read, scales, means, 2 if small else 3),
    }


def _scale(values: Sequence[np.ndarray], log: bool, least: float = 0.0) -> Scale | None:
    """Return the ends of a scale, without the outermost hundredth; None if there is no number.
    least: share of the numbers below a linear scale, which begins at 0 for none.
    """
    found = np.concatenate([each.ravel() for each in values]) if values else np.empty(0)
    found = found[np.isfinite(found) & ((found > 0) | (not log))]
    if not len(found):
        return None
    high = float(np.quantile(found, 0.99))
    low = float(np.quantile(found, least or 0.02)) if log or least else 0.0
    return (low, high) if high > low else (low / 2, high + 1e-12)


def _means(values: np.ndarray) -> np.ndarray:
    """Return the means over the layers that have a finite number: [T, L] -> [T], NaN for none."""
    if values.ndim < 2:
        return values
    finite = np.isfinite(values)
    sums = np.where(finite, values, 0.0).sum(axis=1)
    return np.where(finite.any(axis=1), sums / np.maximum(finite.sum(axis=1), 1), math.nan)


def _level(value: float, scale: Scale, log: bool) -> str:
    """Return the number of a colour as `tokens.js` does, `n` if the value is not finite."""
    if not math.isfinite(value):
        return "n"
    low, high = scale
    if log:
        value, low, high = math.log(max(value, 1e-30)), math.log(low), math.log(high)
    return str(max(0, min(COLOURS - 1, int(COLOURS * (value - low) / (high - low)))))


def _shown(passage: Passage, scales: Mapping[str, Scale], of_means: Scale) -> dict[str, Any]:
    change, kl = passage.by["change"], passage.by["kl"]
    means = _means(change)
    named = len(passage.layers) <= NAMED
    tokens = []
    for place, text in enumerate(passage.texts):
        classes = [f"h{_level(float(means[place]), of_means, False)}"]
        classes += ["q"] * (place < passage.start) + ["p"] * (place == passage.parts)
        cells = [("kn", "")]
        if "kl" in scales and place:
            one = float(kl[place])
            cells = [(f"k{_level(one, scales['kl'], True)}", brief(one))]
        cells += [
            (f"h{_level(value, scales['change'], False)}", brief(value) if named else "")
            for value in map(float, change[place])
        ]
        tokens.append((visible(text), " ".join(classes), text.count("\n"), cells))
    return {
        "title": passage.title,
        "tokens": tokens,
        "layers": passage.layers,
        "more": passage.count - len(passage.texts),
        "narrow": not named,
    }


def visible(text: Any) -> str:
    """Return a token so that every letter of it can be seen: `·` is a space, `⏎` an end of line,
    `⇥` a tab.
    """
    text = text if isinstance(text, str) else ""
    for letter, shown in ((" ", "·"), ("\n", "⏎"), ("\r", "␍"), ("\t", "⇥")):
        text = text.replace(letter, shown)
    return clean(text, LETTERS) or "∅"


def brief(value: float) -> str:
    """Return a number for a cell, in at most five letters."""
    if not math.isfinite(value):
        return "–"
    if value >= 99.5:
        return f"{value:.0f}" if value < 9999.5 else f"{value:.0e}".replace("e+0", "e")
    shown = f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"
    if value < 0.00995:
        shown = "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")
    return shown


def _json(
    read: Sequence[Passage], scales: Mapping[str, Scale], means: Mapping[str, Scale], digits: int
) -> Markup:
    """Return what the script needs, as JSON that cannot end the element that holds it."""
    quantities = [
        {
            "key": name,
            "label": _LABELS[name],
            "log": name in _LOGARITHMIC,
            "scale": list(ends),
            "means": list(means[name]),
        }
        for name, ends in scales.items()
    ]
    views = [
        {
            "tokens": [clean(json.dumps(text, ensure_ascii=False), 80) for text in passage.texts],
            "layers": passage.layers,
            "start": passage.start,
            "by": {name: _plain(passage.by[name], digits) for name in scales if name in passage.by},
            **{name: _plain(values, digits) for name, values in passage.shares.items()},
            **passage.firsts,
        }
        for passage in read
    ]
    found = {"colours": COLOURS, "named": NAMED, "quantities": quantities, "views": views}
    return Markup(json.dumps(found, separators=(",", ":")).replace("<", "\\u003c"))


def _plain(values: np.ndarray, digits: int) -> Any:
    """Return nested lists of rounded numbers, None for what is not finite."""
    if values.ndim:
        return [_plain(each, digits) for each in values]
    value = float(values)
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{digits}g}")
    return int(value) if value.is_integer() and abs(value) < 1e6 else value


def palette() -> str:
    """Return the style of the colour scales, for light and dark pages."""
    return "\n".join(
        opening + "\n".join(_shades(letter, *maps[dark]) for letter, maps in _MAPS.items()) + end
        for dark, (opening, end) in enumerate(
            (("", ""), ("@media (prefers-color-scheme: dark) {\n", "\n}"))
        )
    )


def _shades(letter: str, name: str, low: float, high: float) -> str:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    made = []
    for i in range(COLOURS):
        shade = colormaps[name](low + (high - low) * i / (COLOURS - 1))[:3]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shade]
        light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        ink = "#000000" if light > 0.18 else "#ffffff"  # the larger contrast of the two
        made.append(f".{letter}{i} {{ background: {to_hex(shade)}; color: {ink} }}")
    return "\n".join(made)
