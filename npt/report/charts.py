"""Line charts, drawn by matplotlib as SVG images for a page: the same numbers, the same bytes."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from npt.report.words import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 400, 220  # CSS pixels: as wide as a phone; a chart grows with the page
MARKS = 240  # about the most marks of one kind, evenly chosen
DOTS = 80  # a line of at most so many points has a dot for each
LARGEST, SMALLEST = 1e100, 1e-100  # numbers beyond are drawn at the end of the scale

FLAT = 0.02  # of the room around them: numbers this close are drawn as a flat line

SOFT, LINE, SECOND, BAD = "#59636e", "#0a58a8", "#a35200", "#c5162a"

_SETTINGS = Path(__file__).parent / "templates" / "charts.mplstyle"


@dataclass(frozen=True)
class Chart:
    """A chart, WIDTH by HEIGHT CSS pixels.

    Attributes:
        label: what it shows, for screen readers.
        svg: the content of its file.
    """

    figure: Figure
    label: str
    svg: str
    width, height = WIDTH, HEIGHT

    @property
    def address(self) -> Markup:
        """The file as a data URL."""
        return Markup("data:image/svg+xml," + quote(self.svg, safe=" =:/,;()!*"))


def _with_style(drawn: str) -> str:
    opening, end, rest = drawn[drawn.index("<svg") :].partition(">")
    opening = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', opening)
    style = "<style>text{font-family:system-ui,sans-serif!important}</style>"
    return f"{opening}{end}{style}{rest}"


def drawable(values: Any, log: bool = False) -> np.ndarray:
    """Return numbers as float64, with NaN for those that the scale cannot show."""
    numbers = np.array(values, np.float64)
    kept = np.isfinite(numbers) & ((numbers > 0) | (not log))
    return np.clip(np.where(kept, numbers, math.nan), SMALLEST if log else -LARGEST, LARGEST)


def scale(axes: Axes, values: Sequence[float], log: bool | None = None) -> bool:
    """Scale the y axis for these numbers and return whether it is logarithmic: by default, if they
    are positive and span more than a factor of 8.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    numbers = drawable(values, bool(log))
    numbers = numbers[np.isfinite(numbers)]
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (1.0, 1.0)
    log = low > 0 and high > 8 * low if log is None else log
    if log:
        axes.set_yscale("log")
        subs = (1, 2, 5) if high < 100 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        around = 0.05 * max(abs(low), abs(high))
        if high - low < FLAT * around:  # ticks between them would differ in the fifth digit
            axes.set_ylim(low - around, high + around)
    return log


Series = tuple[str, Sequence[float], Sequence[float]]
"""A line's name, x and y. NaN is no value; infinity stands for one that was not finite."""


def lines(
    heading: str, unit: str, series: Sequence[Series], *, log: bool | None = None, x: str = "step",
    marks: Sequence[float] = (),
) -> Chart:  # fmt: skip
    """Return a line chart, independent of the user's settings of matplotlib. `log` is as for
    `scale`, `x` names the axis of whole numbers, `marks` are refusals, in red along the bottom.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(fname=_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
        # in pixels from the left and the top; the left margin has room for tick labels
        axes = figure.add_axes((60 / WIDTH, 1 - 160 / HEIGHT, (WIDTH - 74) / WIDTH, 140 / HEIGHT))
        _draw(axes, unit, series, log, x, marks)
        stream = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", metadata=nothing)
    label = clean(_words(heading, series[0][2], len(marks)))
    return Chart(figure, label, _with_style(stream.getvalue()))


def _draw(
    axes: Axes, unit: str, series: Sequence[Series], log: bool | None, x: str,
    marks: Sequence[float],
) -> None:  # fmt: skip
    from matplotlib.ticker import MaxNLocator

    log = scale(axes, [value for _, _, values in series for value in values], log)
    axes.set_title(unit + (", logarithmic" if log else ""), color=SOFT)
    across = axes.get_xaxis_transform()
    for (name, places, values), colour, dash in zip(
        series, (LINE, SECOND, SOFT), ("-", "--", ":"), strict=False
    ):
        at, numbers = np.asarray(places), np.asarray(values, np.float64)
        at, numbers = at[~np.isnan(numbers)], numbers[~np.isnan(numbers)]
        heights, broken = drawable(numbers, log), at[np.isinf(numbers)]
        marker = "o" if len(heights) <= DOTS else ""
        axes.plot(at, heights, dash, color=colour, label=name, marker=marker, markersize=3)
        if len(broken):
            broken = broken[:: 1 + len(broken) // MARKS]
            height = np.full(len(broken), 0.95)
            axes.plot(broken, height, "x", color=BAD, label="not finite", transform=across)
    if len(marks):
        marks = marks[:: 1 + len(marks) // MARKS]
        height = np.full(len(marks), 0.03)
        axes.plot(marks, height, "^", color=BAD, label="refused", transform=across)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")
    ticks = axes.get_yticks()
    digits = next((n for n in (4, 5) if len({number(y, n) for y in ticks}) == len(ticks)), 6)
    axes.yaxis.set_major_formatter(lambda value, _: number(value, digits))
    axes.set_xlabel(x)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=4)


def _words(heading: str, values: Sequence[float], refusals: int) -> str:
    """Describe a chart for screen readers."""
    finite = [value for value in values if math.isfinite(value)]
    bad = sum(math.isinf(value) for value in values)
    words = f"{heading}: no finite value"
    if finite:
        low, high = number(min(finite)), number(max(finite))
        words = f"{heading}: first {number(finite[0])}, last {number(finite[-1])}, {low} to {high}"
    words += f", {bad:,} times not finite" if bad else ""
    return words + (f"; {refusals:,} refusals" if refusals else "")
