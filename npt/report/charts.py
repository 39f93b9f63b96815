"""Charts: SVG files that matplotlib draws, which a page holds as images.

A chart is as wide as a phone and grows with the screen. Its colours are variables of its own style,
so that one file serves light and dark. The same numbers give the same bytes. Numbers that are not
finite are left out or marked; tables next to the charts hold them.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from npt.report.words import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 400  # CSS pixels of a chart before it grows with the page
LEFT, RIGHT = 60, 14  # margins; the left one has room for a number
STRETCHES = 240  # parts of a long line, of which the smallest and the largest value are drawn
DOTS = 80  # points up to which each value gets a dot
LARGEST, SMALLEST = 1e100, 1e-100  # numbers beyond are drawn at the end of their scale

INK, SOFT, RULE, PAPER = "#1c2127", "#59636e", "#d3d9df", "#fefefe"
LINE, SECOND, BAD, GOOD = "#0a58a8", "#a35200", "#c5162a", "#0b7285"

_DARK = {
    INK: "#e4e7ea", SOFT: "#9da7b1", RULE: "#3a424a", PAPER: "#14171a", LINE: "#79b8ff",
    SECOND: "#f0a860", BAD: "#e5484d", GOOD: "#4cc2d4",
}  # fmt: skip
"""Each colour on a light page: what it is on a dark one."""

_SETTINGS = Path(__file__).parent / "templates" / "charts.mplstyle"


class Picture:
    """A figure of so many CSS pixels. `svg` is its file once the drawing is done."""

    def __init__(self, height: float, label: str, width: float):
        from matplotlib.figure import Figure

        self.height, self.label, self.width = height, clean(label), width
        self.figure = Figure(figsize=(width / 72, height / 72))
        self.svg = ""

    def axes(self, top: float, height: float, left: float = LEFT, right: float = RIGHT) -> Axes:
        """Return axes at a place in pixels, from the top."""
        across, down = left / self.width, 1 - (top + height) / self.height
        size = (self.width - left - right) / self.width, height / self.height
        return self.figure.add_axes((across, down, *size))

    @property
    def address(self) -> Markup:
        """The file as an address that an image on a page can have."""
        return Markup("data:image/svg+xml," + quote(self.svg, safe=" =:/,;()!*"))


@contextmanager
def picture(height: float, label: str, width: float = WIDTH) -> Iterator[Picture]:
    """Draw a chart of so many CSS pixels; `label` describes it to readers who do not see it. The
    user's settings of matplotlib neither count nor change.
    """
    import matplotlib

    with matplotlib.rc_context(fname=_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        made = Picture(height, label, width)
        yield made
        stream = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        made.figure.savefig(stream, format="svg", metadata=nothing)
    made.svg = _with_style(stream.getvalue())


def _with_style(drawn: str) -> str:
    """Return matplotlib's SVG in pixels, with its colours as variables."""
    opening, end, rest = drawn[drawn.index("<svg") :].partition(">")
    opening = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', opening)
    rest = re.sub("|".join(_DARK), lambda colour: f"var(--c{colour[0][1:]})", rest)
    light, dark = (
        ";".join(f"--c{name[1:]}:{colour}" for name, colour in colours.items())
        for colours in ({name: name for name in _DARK}, _DARK)
    )
    style = (
        f"<style>:root{{{light}}}@media(prefers-color-scheme: dark){{:root{{{dark}}}}}"
        f"svg{{background:var(--c{PAPER[1:]})}}text{{font-family:system-ui,sans-serif!important}}"
        "</style>"
    )
    return f"{opening}{end}{style}{rest}"


def drawable(values: Any, log: bool = False) -> np.ndarray:
    """Return numbers as float64, NaN for what cannot be drawn on such a scale."""
    numbers = np.array(values, np.float64)
    kept = np.isfinite(numbers) & ((numbers > 0) | (not log))
    return np.clip(np.where(kept, numbers, math.nan), SMALLEST if log else -LARGEST, LARGEST)


def scale(axes: Axes, which: str, values: Sequence[float], log: bool | None = None) -> bool:
    """Give an axis (`x` or `y`) a scale that holds these numbers, and return whether it is
    logarithmic: by default if they are positive and spread over a factor of 8.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    numbers = drawable(values, bool(log))
    numbers = numbers[np.isfinite(numbers)]
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (1.0, 1.0)
    log = low > 0 and high > 8 * low if log is None else log
    axis = getattr(axes, f"{which}axis")
    if log:
        low = max(low, SMALLEST)
        room = max(0.06 * math.log10(high / low), 0.02) if high > 1.05 * low else 0.5
        low, high = low / 10**room, high * 10**room
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=6))
        axis.set_minor_locator(NullLocator())
    else:
        room = 0.06 * (high - low)
        if high - low <= 1e-9 * max(abs(low), abs(high), SMALLEST):
            room = abs(low) / 2 or 1.0
        low, high = (max(0.0, low - room) if low >= 0 else low - room), high + room
        axis.set_major_locator(MaxNLocator(5))
    getattr(axes, f"set_{which}lim")(low, high)
    axis.set_major_formatter(lambda value, _: number(value))
    return log


Series = tuple[str, Sequence[float], Sequence[float]]
"""A line's name, its x and its y; a value is NaN for none, infinite for one that was not finite."""


def thin(values: np.ndarray) -> np.ndarray:
    """Return the indices of the values that are drawn: of many, the extremes of each stretch."""
    places = np.arange(len(values))
    if len(values) <= 2 * STRETCHES:
        return places
    kept: set[int] = set()
    for part in np.array_split(places, STRETCHES):
        if np.isfinite(values[part]).any():
            kept |= {part[np.nanargmin(values[part])], part[np.nanargmax(values[part])]}
    return np.array(sorted(kept), np.int64)


def lines(
    heading: str, unit: str, series: Sequence[Series], *, log: bool | None = None, x: str = "step",
    marks: Sequence[float] = (),
) -> Picture:  # fmt: skip
    """Return a chart of lines, described by what its first one does.

    Args:
        heading: what is drawn.
        unit: of the values.
        series: at least one line; their names make a legend if there are several.
        log: as for `scale`.
        x: what is from left to right, whole numbers.
        marks: refusals, red along the bottom.
    """
    from matplotlib.ticker import MaxNLocator

    with picture(220, _words(heading, series[0][2], len(marks))) as made:
        axes = made.axes(20, 140)
        log = scale(axes, "y", [value for _, _, values in series for value in values], log)
        axes.set_title(unit + (", logarithmic" if log else ""), color=SOFT)
        across = axes.get_xaxis_transform()
        for (name, places, values), colour, dash in zip(
            series, (LINE, SECOND, SOFT), ("-", "--", ":"), strict=False
        ):
            at, numbers = np.asarray(places), np.asarray(values, np.float64)
            at, numbers = at[~np.isnan(numbers)], numbers[~np.isnan(numbers)]
            heights, broken = drawable(numbers, log), at[np.isinf(numbers)]
            kept = thin(heights)
            marker = "o" if len(kept) <= DOTS else ""
            axes.plot(
                at[kept], heights[kept], dash, color=colour, label=name, marker=marker, markersize=3
            )
            if len(broken):
                broken = broken[:: 1 + len(broken) // STRETCHES]
                height = np.full(len(broken), 0.95)
                axes.plot(broken, height, "x", color=BAD, label="not finite", transform=across)
        if len(marks):
            marks = marks[:: 1 + len(marks) // STRETCHES]
            height = np.full(len(marks), 0.03)
            axes.plot(marks, height, "^", color=BAD, label="refused", transform=across)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(x)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=4)
    return made


def _words(heading: str, values: Sequence[float], refusals: int) -> str:
    """Return a chart in words, for readers who do not see it."""
    finite = [value for value in values if math.isfinite(value)]
    bad = sum(math.isinf(value) for value in values)
    words = f"{heading}: no finite value"
    if finite:
        words = (
            f"{heading}: {number(finite[0])} at first, {number(finite[-1])} at last, between"
            f" {number(min(finite))} and {number(max(finite))}"
        )
    words += f", {bad:,} times not finite" if bad else ""
    return words + (f"; {refusals:,} refusals" if refusals else "")
