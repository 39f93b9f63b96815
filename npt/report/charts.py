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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from npt.report.words import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 400  # CSS pixels of a chart before it grows with the page
LEFT, RIGHT = 72, 14  # margins; the left one has room for a name
STRETCHES = 240  # parts of a long line, of which the smallest and the largest value are drawn
DOTS = 80  # points up to which each value gets a dot
LARGEST, SMALLEST = 1e100, 1e-100  # numbers beyond are drawn at the end of their scale

INK, SOFT, RULE, PAPER = "#1c2127", "#59636e", "#d3d9df", "#fefefe"
LINE, SECOND, BAD, ZERO, GOOD = "#0a58a8", "#a35200", "#c5162a", "#a9b0b7", "#0b7285"

_DARK = {
    INK: "#e4e7ea", SOFT: "#9da7b1", RULE: "#3a424a", PAPER: "#14171a", LINE: "#79b8ff",
    SECOND: "#f0a860", BAD: "#e5484d", ZERO: "#6a727a", GOOD: "#4cc2d4",
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


Span = tuple[int, int]
"""The first and the last step of a chart."""


class Series(NamedTuple):
    """A line over the steps. A value is NaN for none, infinite for one that was not finite."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


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


def paint_lines(
    axes: Axes, span: Span, series: Sequence[Series], unit: str, log: bool | None = None
) -> None:
    """Draw series over the steps of a span: the first solid, the second dashed. Their names make a
    legend if there are several.
    """
    log = scale(axes, "y", [value for each in series for value in each.values], log)
    axes.set_title(unit + (", logarithmic" if log else ""), color=SOFT)
    for each, colour, dash in zip(series, (LINE, SECOND), ("-", "--"), strict=False):
        steps, values = np.asarray(each.steps), np.asarray(each.values, np.float64)
        steps, values = steps[~np.isnan(values)], values[~np.isnan(values)]
        heights, broken = drawable(values, log), steps[np.isinf(values)]
        kept = thin(heights)
        axes.plot(
            steps[kept], heights[kept], dash, color=colour, label=clean(each.name, 40),
            marker="o" if len(kept) <= DOTS else "", markersize=3,
        )  # fmt: skip
        if len(broken):
            shown = broken[:: 1 + len(broken) // STRETCHES]
            axes.plot(
                shown, np.full(len(shown), 0.95), "x", color=BAD, label="not finite",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    paint_steps(axes, span)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best")  # above the axes it would lie on a long title


def paint_steps(axes: Axes, span: Span, named: bool = True) -> None:
    """Make the x axis one of steps."""
    from matplotlib.ticker import MaxNLocator

    room = max(0.5, 0.01 * (span[1] - span[0]))
    axes.set_xlim(span[0] - room, span[1] + room)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("step" if named else "")
    axes.tick_params(labelbottom=named)


def heat(
    cells: np.ndarray, names: Sequence[str], extent: tuple[float, float], label: str, unit: str
) -> Picture:
    """Return a matrix [lines, columns] by colour on a logarithmic scale. NaN is nothing, an
    infinity not finite (red), and 0 grey. extent: the x of the left and the right edge.
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    numbers = drawable(cells, log=True)
    there = numbers[np.isfinite(numbers)]
    low, high = (float(there.min()), float(there.max())) if len(there) else (1.0, 1.0)
    low, high = (low, high) if high > 1.01 * low else (low / 3, high * 3)
    numbers = np.where(np.isinf(cells), math.inf, np.where(cells == 0, low / 2, numbers))
    height = max(60.0, min(24.0 * len(names), 320.0))
    with picture(height + 84, label) as made:
        axes = made.axes(4, height)
        image = axes.imshow(
            numbers, cmap=colormaps["viridis"].with_extremes(under=ZERO, over=BAD),
            norm=LogNorm(low, high), aspect="auto", interpolation="none",
            extent=(*extent, len(names) - 0.5, -0.5),
        )  # fmt: skip
        shown = range(0, len(names), math.ceil(13 * len(names) / height))
        axes.set_yticks(shown, [clean(names[i], 8) for i in shown])
        axes.grid(False)
        axes.set_xlabel(unit)
        key = made.figure.colorbar(image, cax=made.axes(height + 52, 8), orientation="horizontal")
        key.set_ticks([low, high], labels=[number(low, 2), number(high, 2)])
        key.minorticks_off()
        key.outline.set_visible(False)
    return made


class Marks(NamedTuple):
    """A mark in each row of a chart, with a line of one standard error to either side."""

    name: str
    look: Mapping[str, Any]
    values: Sequence[float]
    errors: Sequence[float]


def rows(
    names: Sequence[str], marks: Sequence[Marks], what: str, label: str, log: bool = False
) -> Picture:
    """Return a chart of named rows of marks on a common scale: dots, not bars, for a scale need not
    begin at 0. what: name of the scale, with its unit.
    """
    height = 20.0 * len(names)
    with picture(height + 58, label) as made:
        axes = made.axes(20, height)
        scale(axes, "x", [value for each in marks for value in each.values], log)
        for each in marks:
            values, errors = drawable(each.values, log), drawable(each.errors)
            axes.errorbar(
                values, np.arange(len(names)), xerr=np.nan_to_num(np.maximum(errors, 0)),
                label=each.name, linestyle="none", elinewidth=2, **each.look,
            )  # fmt: skip
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), [clean(name, 12) for name in names])
        axes.set_xlabel(what + (", logarithmic" if log else ""))
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, columnspacing=1.0)
    return made
