"""Charts as SVG for pages: drawn by matplotlib, coloured by the page's style sheet.

A chart is as wide as a phone and grows with the screen. Colours with a role become CSS variables,
so that one picture serves light and dark. The same numbers give the same bytes. Numbers that are
not finite are left out or marked; the tables next to the charts hold all of them.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from npt.report.words import clean, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 400  # CSS pixels of a chart before it grows with the page
ROW = 20  # pixels of a row of marks
LEFT, RIGHT = 60, 14  # margins; the left one has room for a tick's number
COLUMNS = 480  # points of a line: of more steps a column shows the mean and the range
DOTS = 80  # points up to which each value gets a dot
LARGEST, SMALLEST = 1e100, 1e-100  # numbers beyond are drawn at the end of their scale

INK, SOFT, RULE, PAPER = "#1c2127", "#59636e", "#d3d9df", "#fefefe"
LINE, SECOND, BAD, ZERO, GOOD = "#0a58a8", "#a35200", "#c5162a", "#a9b0b7", "#0b7285"

_ROLES = {
    INK: "ink", SOFT: "soft", RULE: "rule", PAPER: "paper", LINE: "line", SECOND: "second",
    BAD: "bad", ZERO: "zero", GOOD: "good",
}  # fmt: skip
"""The variable of the style sheet that replaces a colour."""

_STYLE = Path(__file__).parent / "templates" / "charts.mplstyle"
_TOLD = "told: "
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


class Picture:
    """A figure of so many CSS pixels. `svg` is its text once the drawing is done."""

    def __init__(self, height: float, width: float):
        from matplotlib.figure import Figure

        self.height, self.width = height, width
        self.figure = Figure(figsize=(width / 72, height / 72))
        self.svg = Markup()

    def axes(self, top: float, height: float, left: float = LEFT, right: float = RIGHT) -> Axes:
        """Return axes at a place in pixels, from the top."""
        across, down = left / self.width, 1 - (top + height) / self.height
        size = (self.width - left - right) / self.width, height / self.height
        return self.figure.add_axes((across, down, *size))


def tell(artist: Any, said: str) -> None:
    """Give an artist a tooltip."""
    artist.set_gid(f"{_TOLD}{clean(said)}")


def steps_text(steps: Sequence[float], most: int = 20) -> str:
    """Return steps as a list in words."""
    shown = ", ".join(f"{step:,.0f}" for step in steps[:most])
    return f"step{'s' * (len(steps) > 1)} {shown}{' …' * (len(steps) > most)}"


@contextmanager
def picture(height: float, label: str, width: float = WIDTH) -> Iterator[Picture]:
    """Draw a chart of so many CSS pixels; `label` describes it to readers who do not see it. The
    user's settings of matplotlib neither count nor change.
    """
    import matplotlib

    with matplotlib.rc_context(fname=_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        made = Picture(height, width)
        yield made
        stream = io.StringIO()
        made.figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    made.svg = _page_svg(stream.getvalue(), clean(label), made)


def _page_svg(drawn: str, label: str, made: Picture) -> Markup:
    """Return matplotlib's SVG as a page can hold it: no style but attributes, colours by role, and
    ids that no other chart of the page has.
    """
    root = ET.fromstring(drawn)
    mark = hashlib.sha256((label + drawn).encode()).hexdigest()[:8]
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    for element in root.iter():
        _make_plain(element, mark)
    wide = made.width > WIDTH
    root.attrib = {
        "class": "wide" if wide else "chart",
        "viewBox": f"0 0 {made.width:g} {made.height:g}",
        "role": "img",
        "aria-label": label,
    } | ({"width": f"{made.width:g}"} if wide else {})
    return Markup(ET.tostring(root, encoding="unicode"))


def _make_plain(element: ET.Element, mark: str) -> None:
    """Turn an element's style into attributes, mark its ids and links, and add its tooltip."""
    element.tag = element.tag.removeprefix(_SVG)
    given = dict(element.attrib)
    for part in filter(None, given.pop("style", "").split(";")):
        name, _, value = (each.strip() for each in part.partition(":"))
        if name == "font":  # matplotlib before 3.10 has size and weight in one
            given["font-size"] = re.findall(r"[\d.]+px", value)[0]
            given |= {"font-weight": "bold"} if re.match(r"bold|700", value) else {}
        elif name != "font-family":
            given[name] = value
    told = given["id"].removeprefix(_TOLD) if given.get("id", "").startswith(_TOLD) else ""
    if element.tag in ("g", "image", "use", "rect"):
        given.pop("id", None)
    if "id" in given:
        given["id"] += mark
    if (target := given.pop(_LINK, None)) is not None:
        given["href"] = target + mark if target.startswith("#") else "".join(target.split())
    for name, value in given.items():
        value = value.replace(")", f"{mark})") if value.startswith("url(#") else value
        given[name] = f"var(--{_ROLES[value]})" if value in _ROLES else value
    if element.tag == "text" and given.get("transform", "").startswith("rotate(-0 "):
        given.pop("transform")
    if "d" in given:
        given["d"] = " ".join(given["d"].split())
    for name in given.keys() & {"d", "x", "y", "transform"}:
        given[name] = re.sub(r"(\.\d\d)\d+", r"\1", given[name])
    element.attrib = given
    if told:
        title = ET.Element("title")
        title.text = told
        element.insert(0, title)
    element.tail = None
    if element.text is not None and not element.text.strip():
        element.text = None


def drawable(values: Sequence[float | None], log: bool = False) -> np.ndarray:
    """Return numbers as float64, NaN for what cannot be drawn on such a scale."""
    found = np.array([math.nan if value is None else value for value in values], np.float64)
    kept = np.isfinite(found) & ((found > 0) | (not log))
    return np.clip(np.where(kept, found, math.nan), SMALLEST if log else -LARGEST, LARGEST)


def scale(axes: Axes, which: str, values: Sequence[float | None], log: bool | None = None) -> bool:
    """Give an axis (`x` or `y`) a scale that holds these numbers, and return whether it is
    logarithmic: by default if they are positive and spread over a factor of 8.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    found = drawable(values, bool(log))
    found = found[np.isfinite(found)]
    low, high = (float(found.min()), float(found.max())) if len(found) else (1.0, 1.0)
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


def columns(
    steps: Sequence[int], values: Sequence[float], first: int, last: int
) -> tuple[np.ndarray, ...]:
    """Put many steps, ascending from `first` to `last`, on few columns so that no extreme is lost;
    a value is NaN for none, infinite for not finite. Return by column that has one: its middle in
    steps, the mean, the smallest and the largest finite value (NaN for none), and the number of
    those that were not finite.
    """
    at, found = np.asarray(steps, np.int64), np.asarray(values, np.float64)
    at, found = at[~np.isnan(found)], found[~np.isnan(found)]
    if not len(at):
        return tuple(np.empty(0) for _ in range(5))
    span = last - first + 1
    count = min(COLUMNS, span)
    place = (at - first) * count // span
    starts = np.flatnonzero(np.diff(place, prepend=-1))
    finite = np.isfinite(found)
    number_of = np.add.reduceat(finite.astype(np.int64), starts)
    kept = np.where(finite, found, math.nan)
    weight = np.repeat(np.maximum(number_of, 1), np.diff([*starts, len(found)]))
    mean = np.add.reduceat(np.where(finite, found, 0.0) / weight, starts)
    low, high = np.fmin.reduceat(kept, starts), np.fmax.reduceat(kept, starts)
    middle = first - 0.5 + (place[starts] + 0.5) * span / count
    bad = np.add.reduceat((~finite).astype(np.int64), starts)
    return middle, np.where(number_of > 0, np.clip(mean, low, high), math.nan), low, high, bad


Series = tuple[str, Sequence[int], Sequence[float]]
"""A line's name, its steps and its values."""


def paint_lines(
    axes: Axes, span: tuple[int, int], series: Sequence[Series], unit: str, log: bool | None = None
) -> None:
    """Draw series over the steps of a span: the first solid, the second dashed. Their names make a
    legend if there are several.
    """
    found = [columns(steps, values, *span) for _, steps, values in series]
    logarithmic = scale(axes, "y", [x for _, _, low, high, _ in found for x in (*low, *high)], log)
    axes.set_title(unit + (", logarithmic" if logarithmic else ""), color=SOFT)
    for (name, _, _), (x, mean, low, high, bad), (colour, dash) in zip(
        series, found, ((LINE, "-"), (SECOND, "--")), strict=False
    ):
        marker = "o" if len(x) <= DOTS else ""
        line = drawable(list(np.where(bad > 0, math.nan, mean)), logarithmic)
        axes.plot(x, line, dash, color=colour, label=clean(name, 40), marker=marker, markersize=3)
        if (high > low).any():
            least, most = (drawable(list(end), logarithmic) for end in (low, high))
            axes.fill_between(x, least, most, color=colour, alpha=0.3)
        broken = x[bad > 0][:200]
        if len(broken):
            place = axes.get_xaxis_transform()
            (crosses,) = axes.plot(
                broken, [0.95] * len(broken), "x", color=BAD, transform=place, label="not finite"
            )
            tell(crosses, f"not finite at {steps_text(list(broken))}")
    paint_steps(axes, span)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best")  # above the axes it would lie on a long title


def paint_steps(axes: Axes, span: tuple[int, int], named: bool = True) -> None:
    """Make the x axis one of steps."""
    from matplotlib.ticker import MaxNLocator

    room = max(0.5, 0.01 * (span[1] - span[0]))
    axes.set_xlim(span[0] - room, span[1] + room)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("step" if named else "")
    axes.tick_params(labelbottom=named)


def layer_height(count: int) -> float:
    """Return the pixels that a line takes of a chart with so many layers."""
    return max(1.2, min(24.0, max(7.0, 320 / max(1, count)), 640 / max(1, count)))


def paint_layers(axes: Axes, names: Sequence[str]) -> None:
    """Name the lines of a chart, those that have room for it."""
    apart = math.ceil(13 / layer_height(len(names)))
    shown = range(0, len(names), apart)
    axes.set_yticks(shown, [clean(names[i], 8) for i in shown])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False)


def paint_heat(axes: Axes, cells: np.ndarray, extent: tuple[float, float]) -> tuple[float, float]:
    """Draw a matrix [lines, columns] by colour on a logarithmic scale, and return its ends. NaN is
    nothing, an infinity not finite (red), and 0 grey.
    """
    from matplotlib.colors import ListedColormap, LogNorm

    there = np.isfinite(cells) & (cells > 0)
    ends = (cells[there].min(), cells[there].max()) if there.any() else (1.0, 1.0)
    low, high = (float(np.clip(end, SMALLEST, LARGEST)) for end in ends)
    low, high = (low, high) if high > 1.01 * low else (low / 3, high * 3)
    place = (*extent, len(cells) - 0.5, -0.5)
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "none", "extent": place}
    shown = np.where(there, np.clip(cells, low, high), math.nan)
    axes.imshow(shown, cmap="viridis", norm=LogNorm(low, high), **look)
    special = np.where(np.isinf(cells), 1.0, np.where(cells == 0, 0.0, math.nan))
    if np.isfinite(special).any():
        axes.imshow(special, cmap=ListedColormap([ZERO, BAD]), vmin=0, vmax=1, **look)
    return low, high


def paint_ramp(made: Picture, top: float, low: float, high: float, words: str) -> None:
    """Draw the key of a logarithmic colour scale."""
    axes = made.axes(top, 10, LEFT, made.width - LEFT - 190)
    axes.imshow([np.linspace(0, 1, 64)], cmap="viridis", aspect="auto", interpolation="none")
    axes.set_axis_off()
    for at, side, said in ((-0.03, "right", number(low, 2)), (1.03, "left", number(high, 2))):
        axes.text(at, 0.5, said, ha=side, va="center", transform=axes.transAxes, color=SOFT)
    axes.text(0, -1.0, words, va="center", transform=axes.transAxes, color=SOFT)


@dataclass(frozen=True)
class Marks:
    """A mark in each row, and the ends of the line through it. name: of the legend, empty for none.
    look: marker, colour, and whether it is hollow.
    """

    name: str
    look: tuple[str, str, bool]
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()

    @classmethod
    def around(
        cls, name: str, look: tuple[str, str, bool], values: Sequence[float | None],
        errors: Sequence[float],
    ) -> Marks:  # fmt: skip
        """Return marks with a standard error on either side."""
        low, high = (
            [None if x is None else x + sign * e for x, e in zip(values, errors, strict=True)]
            for sign in (-1, 1)
        )
        return cls(name, look, values, low, high)


def _rows_height(names: Sequence[str]) -> float:
    """Return the pixels of so many rows."""
    return len(names) * (ROW if _are_short(names) else 1.6 * ROW)


def _are_short(names: Sequence[str]) -> bool:
    return max(map(len, names), default=0) <= 8


def _paint_rows(
    made: Picture, names: Sequence[str], marks: Sequence[Marks], what: str, log: bool | None,
    reach: Sequence[float],
) -> None:  # fmt: skip
    """Draw named rows of marks on a common scale: dots, not bars, for a scale need not begin at
    0.
    """
    short, legend = _are_short(names), any(each.name for each in marks)
    axes = made.axes(18 * legend, _rows_height(names), LEFT if short else RIGHT + 8, RIGHT + 8)
    ends = [x for each in marks for part in (each.values, each.low, each.high) for x in part]
    log = scale(axes, "x", [*ends, *reach], log)
    rows = np.arange(len(names))
    drawn = np.zeros(len(names), bool)
    for each in marks:
        drawn |= _paint_marks(axes, rows, each, log)
    edge = axes.get_yaxis_transform()
    for i in rows[~drawn]:
        axes.text(1, i, "not finite", ha="right", va="center", transform=edge)
    axes.set_ylim(len(names) - (0.5 if short else 0.3), -0.5 if short else -0.8)
    axes.set_yticks(rows, [clean(name, 8) for name in names] if short else [""] * len(names))
    for i, name in enumerate([] if short else names):  # a long one is above its row
        axes.text(0, i - 0.28, clean(name, 53), va="bottom", transform=edge)
    axes.set_xlabel(what + (", logarithmic" if log else ""))
    if legend:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, columnspacing=1.0)


def _paint_marks(axes: Axes, rows: np.ndarray, each: Marks, log: bool) -> np.ndarray:
    """Draw one kind of mark, and return which rows have one."""
    marker, colour, hollow = each.look
    values = drawable(each.values, log)
    if len(each.low):
        low, high = np.maximum(drawable(each.low), axes.get_xlim()[0]), drawable(each.high)
        there = np.isfinite(values) & np.isfinite(low) & np.isfinite(high) & (high > low)
        axes.hlines(rows[there], low[there], high[there], color=colour, linewidth=2)
    axes.plot(
        values, rows, marker, color=colour, label=each.name or None, linestyle="none",
        markerfacecolor=PAPER if hollow else colour, clip_on=False,
        markersize=11 if marker == "|" else 6, markeredgewidth={"|": 3, "x": 2}.get(marker, 1),
    )  # fmt: skip
    return np.isfinite(values)


def rows_chart(
    names: Sequence[str], marks: Sequence[Marks], what: str, label: str, log: bool | None = None,
    reach: Sequence[float] = (),
) -> Markup:  # fmt: skip
    """Return a chart of named rows of marks. what: name of the scale, with its unit. log: as for
    `scale`. reach: numbers that the scale holds in any case.
    """
    height = _rows_height(names) + 36 + 18 * any(each.name for each in marks)
    with picture(height, label) as made:
        _paint_rows(made, names, marks, what, log, reach)
    return made.svg
