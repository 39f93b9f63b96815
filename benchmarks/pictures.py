"""Draw the pictures of README and docs/ from the JSON in benchmarks/results/.

A picture is an SVG image on white, for pages of any colour. Its last line is a comment with its
points: two versions of matplotlib draw the same points with different bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from npt.report.charts import HEIGHT, WIDTH, Series, lines

Json = Mapping[str, Any]

FIXED = ("start-small", "start")
CHOSEN = ("64/4/4", "code-small", "code")
TRAINED = ("code-small-trained", "code-trained")


def numbers(figures: Json) -> str:
    """Return the KL of `real.py`'s students by the numbers of their codes."""
    rows = {row["name"]: row for row in figures["rows"]}

    def series(name: str, chosen: tuple[str, ...]) -> Series:
        points = sorted((rows[row]["numbers"], rows[row]["figures"]["kl"]) for row in chosen)
        return name, [x for x, _ in points], [kl for _, kl in points]

    drawn = [
        series("by token", CHOSEN),
        series("by token, trained", TRAINED),
        series("fixed", FIXED),
    ]
    return picture("KL, nats", drawn, x="numbers per token and layer", log=True)


def bits_by_layer(figures: Json) -> str:
    """Return the bits of `real.py`'s rounded codes by layer."""
    row = next(row for row in figures["rows"] if row["name"] == "bits")
    drawn: list[Series] = []
    for entry in row["rounded"]:
        by_layer = entry["bits_by_layer"]
        name = f"KL {entry['figures']['kl']:.3f}"
        drawn.append((name, list(map(int, by_layer)), list(by_layer.values())))
    return picture("bits per token", drawn, x="layer", log=False)


def picture(unit: str, series: list[Series], *, x: str, log: bool) -> str:
    """Return a line chart with its points in the last line."""
    drawn = lines(unit, unit, series, x=x, log=log).svg
    opening, style, rest = drawn.partition("<style>")
    card = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    points = json.dumps([[name, *map(rounded, axes)] for name, *axes in series])
    return f"{opening}{card}{style}{rest.rstrip()}\n<!-- {points} -->\n"


def rounded(values: Any) -> list[float]:
    return [float(f"{value:.5g}") for value in values]
