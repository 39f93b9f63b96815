"""Line charts, drawn by matplotlib as SVG images for a page: the same numbers, the same bytes."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from npt.report.pages import TEMPLATES
from npt.report.words import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 400  # CSS pixels: as wide as a phone; a chart grows with the page
HEIGHT = 220
MARKS = 240  # about the most marks of one kind, evenly chosen
DOTS = 80  # a line of at most so many points has a dot for each
LARGEST = 1e100  # numbers beyond are drawn at the end of the scale
SMALLEST = 1e-100

FLAT = 0.02  # of the room around them: numbers this close are drawn as a flat line

SOFT = "#59636e"
BAD = "#c5162a"
_LOOKS = (("#0a58a8", "-"), ("#a35200", "--"), (SOFT, ":"))  # colour and dashes of each line
_SETTINGS = TEMPLATES / "charts.mplstyle"


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
    width = WIDTH
    height = HEIGHT

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
    kept = np.isfinite(numbers)
    lowest = -LARGEST
    if log:
        kept &= numbers > 0
        lowest = SMALLEST
    return np.clip(np.where(kept, numbers, math.nan), lowest, LARGEST)


def scale(axes: Axes, values: Sequence[float], log: bool | None = None) -> bool:
    """Scale the y axis for these numbers and return whether it is logarithmic: by default, if they
    are positive and span more than a factor of 8.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    numbers = drawable(values, bool(log))
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        numbers = np.ones(1)
    low = float(numbers.min())
    high = float(numbers.max())
    if log is None:
        log = low > 0 and high > 8 * low
    if log:
        axes.set_yscale("log")
        # over two decades and more the ticks between powers of ten would be too many
        subs = (1, 2, 5) if high < 100 * low else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
        return True
    axes.yaxis.set_major_locator(MaxNLocator(5))
    around = 0.05 * max(abs(low), abs(high))
    if high - low < FLAT * around:  # ticks between them would differ in the fifth digit
        axes.set_ylim(low - around, high + around)
    return False


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
        left = 60 / WIDTH  # room for tick labels
        bottom = 1 - 160 / HEIGHT
        axes = figure.add_axes((left, bottom, (WIDTH - 74) / WIDTH, 140 / HEIGHT))
        _draw(axes, unit, series, log, x, marks)
        stream = io.StringIO()
        # a date would make every file another one
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
    for (name, places, values), (colour, dashes) in zip(series, _LOOKS, strict=False):
        numbers = np.asarray(values, np.float64)
        there = ~np.isnan(numbers)
        numbers = numbers[there]
        at = np.asarray(places)[there]
        # dots show single points, and hide the course of many
        marker = "o" if len(at) <= DOTS else ""
        heights = drawable(numbers, log)
        axes.plot(at, heights, dashes, color=colour, label=name, marker=marker, markersize=3)
        _mark(axes, at[np.isinf(numbers)], 0.95, "x", "not finite")
    _mark(axes, marks, 0.03, "^", "refused")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")
    ticks = axes.get_yticks()
    for digits in (4, 5, 6):  # as many as tell the ticks apart
        if len({number(tick, digits) for tick in ticks}) == len(ticks):
            break
    axes.yaxis.set_major_formatter(lambda value, _: number(value, digits))
    axes.set_xlabel(x)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.27), ncols=4)


def _mark(axes: Axes, places: Any, height: float, sign: str, label: str) -> None:
    """Draw a row of red signs at these places, at this share of the chart's height."""
    if not len(places):
        return
    places = places[:: 1 + len(places) // MARKS]
    heights = np.full(len(places), height)
    across = axes.get_xaxis_transform()
    axes.plot(places, heights, sign, color=BAD, label=label, transform=across)


def _words(heading: str, values: Sequence[float], refusals: int) -> str:
    """Describe a chart for screen readers."""
    finite = [value for value in values if math.isfinite(value)]
    words = f"{heading}: no finite value"
    if finite:
        ends = f"first {number(finite[0])}, last {number(finite[-1])}"
        words = f"{heading}: {ends}, {number(min(finite))} to {number(max(finite))}"
    if bad := sum(math.isinf(value) for value in values):
        words += f", {bad:,} times not finite"
    if refusals:
        words += f"; {refusals:,} refusals"
    return words
