"""Recorded tensor health to look at: a still picture for a report or a ticket, and a page to search
in.

Both show layer x checkpoint for each step. What is not finite is told apart by a colour that the
scale does not have and by a symbol, and the first such tensor of a pass is framed: that one made
the bad numbers or was given them, all others passed them on.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from npt.diagnostics.recorder.grid import (
    Grid,
    Layout,
    Mark,
    grid,
    layout,
    maximum,
    place,
    scale,
    span,
    spread,
    step_labels,
    value,
)
from npt.diagnostics.recorder.page import page
from npt.diagnostics.recorder.record import Direction, Record, Row
from npt.files import write_bytes

PANELS = 6
"""Steps that one picture shows; the page shows more."""

BAD = "#d01c2c"
_ZERO = "#a9b0b7"
_DPI = 110
_FONT = 6.5  # points
_LETTER = 0.05  # inches, the mean width of a letter in that size
_HEADINGS: dict[Direction, str] = {"forward": "Forward: values", "gradient": "Backward: gradients"}


def write_pictures(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the records as `health.png` and `health.html` in `folder`, each replaced atomically.

    The same records give the same bytes.

    Args:
        records: of one run, in any order.
        folder: made if it is missing.

    Returns:
        The files.

    Raises:
        ValueError: there is nothing to draw.
    """
    records = _drawable(records)
    folder = Path(folder)
    contents: dict[str, bytes] = {}
    contents["health.png"] = draw(records)
    contents["health.html"] = page(records).encode("utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_bytes(folder / name, content)
    return [folder / name for name in contents]


def _drawable(records: Sequence[Record]) -> list[Record]:
    """In order, and without token ids and positions: the size of a whole number is no activation's."""
    drawn = [
        replace(r, rows=tuple(row for row in r.rows if maximum(row.dtype) is not None))
        for r in records
    ]
    found = sorted((r for r in drawn if r.rows), key=lambda r: (r.step, r.micro_batch))
    if not found:
        raise ValueError(
            f"no tensor in any of {len(records)} records, so there is nothing to draw; record at"
            " least one step first"
        )
    return found


def draw(records: Sequence[Record]) -> bytes:
    """The PNG: at most `PANELS` steps side by side, forward over backward, and under them four
    figures by layer.
    """
    import matplotlib
    import matplotlib.style

    labels = step_labels(records)
    bad = next((i for i, r in enumerate(records) if any(not row.finite for row in r.rows)), None)
    chosen = spread(len(records), PANELS, bad)
    # The settings of whoever uses matplotlib in this process stay out of the picture, and a `$` in
    # a name is no formula.
    with (
        matplotlib.style.context("default"),
        matplotlib.rc_context({"text.parse_math": False}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = _figure(records, labels, chosen)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=_DPI, metadata={"Software": None})
    return stream.getvalue()


@dataclass(frozen=True)
class _Block:
    """The panels of one direction, and the inches that they take."""

    direction: Direction
    where: Layout
    columns: list[str]
    lines: list[str]
    low: float
    high: float
    clipped: tuple[bool, bool]
    width: float
    height: float
    left: float
    below: float


# Inches that a thing takes: the title with the legend, a block's heading, a panel's caption, the
# gap between panels, ...
_TITLE, _HEADING, _CAPTION, _GAP, _BAR, _PROFILE = 1.0, 0.4, 0.44, 0.25, 0.8, 1.7


def _block(records: Sequence[Record], direction: Direction, alone: bool) -> _Block:
    where = layout(records, direction)
    numbers = [
        x
        for r in records
        for row in r.rows
        if row.direction == direction and (x := value(row, "rms"))
    ]
    low, high = scale(numbers, "rms")
    finite = [math.log10(x) for x in numbers if math.isfinite(x)]
    clipped = (
        bool(finite) and min(finite) < low - 1e-9,
        any(x == math.inf for x in numbers) or (bool(finite) and max(finite) > high + 1e-9),
    )
    columns, lines = (
        [_shorten(c, 34) for c in where.columns],
        [_shorten(x, 24) for x in where.labels],
    )
    return _Block(
        direction,
        where,
        columns,
        lines,
        low,
        high,
        clipped,
        width=max(2.2, min(7.5, 0.24 * len(columns)) if alone else min(4.6, 0.14 * len(columns))),
        height=max(0.5, min(8.6, 0.2 * len(lines))),
        left=max(0.6, _inches(lines) + 0.3),
        below=_inches(columns) + 0.1,
    )


def _inches(labels: Sequence[str]) -> float:
    """Width of the longest of them as it will be drawn."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.font_manager import FontProperties

    renderer, font = RendererAgg(1, 1, 72), FontProperties(size=_FONT)
    return (
        max(
            renderer.get_text_width_height_descent(label, font, ismath=False)[0] for label in labels
        )
        / 72
    )


def _figure(records: Sequence[Record], labels: Sequence[str], chosen: Sequence[int]) -> Any:
    from matplotlib.figure import Figure

    directions: tuple[Direction, ...] = ("forward", "gradient")
    present = {row.direction for record in records for row in record.rows}
    blocks = [
        _block(records, direction, alone=len(chosen) == 1)
        for direction in directions
        if direction in present
    ]
    left = max(b.left for b in blocks)
    profiles = _profiles([records[i] for i in chosen], blocks)

    def size(across: int) -> tuple[float, float]:
        down = math.ceil(len(chosen) / across)
        tall = (
            sum(_HEADING + down * (_CAPTION + b.height + b.below + _GAP) for b in blocks) + _TITLE
        )
        # names of lines are as long here as at the left
        tall += _HEADING + _PROFILE + left + 0.1 if profiles else 0
        return max(9.0, left + across * (max(b.width for b in blocks) + _GAP) + _BAR), tall

    even = {math.ceil(len(chosen) / down) for down in range(1, len(chosen) + 1)}
    across = min(
        sorted(n for n in even if n == 1 or size(n)[0] <= 32),
        key=lambda n: abs(math.log(size(n)[0] / size(n)[1])),
    )
    width, height = size(across)
    figure = Figure(figsize=(width, height), facecolor="white")

    def axes(x: float, y: float, w: float, h: float) -> Any:
        """Inches from the left and from the top; the corner that is highest and leftmost."""
        return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    def text(x: float, y: float, content: str, size: float, **more: Any) -> None:
        figure.text(x / width, 1 - y / height, content, fontsize=size, va="top", **more)

    text(0.2, 0.16, f"Tensor health, {span(records)}", 13, weight="bold")
    shown = (
        f"{len(chosen)} of {len(records)} recorded steps shown. "
        if len(chosen) < len(records)
        else ""
    )
    reading = "Colour: log10 of the RMS over the finite elements of a tensor. "
    text(
        0.2,
        0.46,
        shown
        + reading
        + "Layers run down, checkpoints to the right; gradients flow up and to the left.",
        8,
        color="#444444",
    )
    _legend(figure, 0.2 / width, 1 - 0.66 / height)
    top = _TITLE
    for block in blocks:
        text(0.2, top + 0.1, _HEADINGS[block.direction], 10, weight="bold")
        top += _HEADING
        for start in range(0, len(chosen), across):
            for k, i in enumerate(chosen[start : start + across]):
                x = left + k * (block.width + _GAP)
                drawn = grid(records[i], block.direction, "rms", block.where)
                _caption(text, x, top, labels[i], drawn, block)
                image = _panel(
                    axes(x, top + _CAPTION, block.width, block.height), drawn, block, named=k == 0
                )
                if start + k + 1 == min(start + across, len(chosen)):
                    bar = axes(x + block.width + 0.15, top + _CAPTION, 0.12, block.height)
                    extend = {
                        (False, False): "neither",
                        (True, False): "min",
                        (False, True): "max",
                        (True, True): "both",
                    }[block.clipped]
                    figure.colorbar(image, cax=bar, extend=extend).ax.tick_params(labelsize=_FONT)
                    bar.set_title("log10", fontsize=_FONT)
            top += _CAPTION + block.height + block.below + _GAP
    if profiles:
        text(0.2, top + 0.1, "By layer", 10, weight="bold")
        if any(profile.bad for profile in profiles):
            text(
                1.0,
                top + 0.13,
                "a red cross: a tensor there is not finite at one of these steps",
                8,
                color="#444444",
            )
        top += _HEADING
        room = (width - left - 0.3) / len(profiles)
        for k, profile in enumerate(profiles):
            text(left + k * room, top, profile.title, 8, weight="bold")
            _curves(
                axes(left + k * room, top + 0.24, min(room - 0.55, 6.0), _PROFILE),
                profile,
                [labels[i] for i in chosen],
                legend=k == len(profiles) - 1 and len(chosen) > 1,
            )
    return figure


def _legend(figure: Any, x: float, y: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    red = Patch(facecolor=BAD)

    def symbol(marker: str) -> Line2D:
        return Line2D([], [], color="white", marker=marker, linestyle="none", markersize=5)

    entries: list[tuple[Any, str]] = [
        ((red, symbol("x")), "NaN"),
        ((red, symbol("+")), "+Inf or -Inf, no NaN"),
        (
            Patch(facecolor=BAD, edgecolor="black", linewidth=1.4),
            "first non-finite tensor of the pass, with pointers at the edges",
        ),
        (Patch(facecolor=_ZERO), "exactly zero"),
        (Patch(facecolor="white", edgecolor="#999999", linewidth=0.5), "not recorded"),
    ]
    figure.legend(
        [handle for handle, _ in entries],
        [name for _, name in entries],
        loc="upper left",
        bbox_to_anchor=(x, y),
        borderaxespad=0,
        borderpad=0,
        ncols=len(entries),
        frameon=False,
        fontsize=8,
        columnspacing=1.6,
        handlelength=1.4,
    )


def _caption(
    text: Callable[..., None], x: float, y: float, label: str, drawn: Grid, block: _Block
) -> None:
    """Two lines over a panel: the step, and where its first non-finite tensor stands."""
    text(x, y, label, 8, weight="bold")
    letters = int(block.width / _LETTER)
    if drawn.first is not None:
        line, column = drawn.first
        layer = "layer " if drawn.lines[line].isdecimal() else ""
        bad = int((drawn.marks >= Mark.INF).sum())
        tail = f" ({bad} of {int((drawn.marks > Mark.ABSENT).sum())} bad)"
        text(
            x,
            y + 0.19,
            _shorten(
                f"first: {layer}{drawn.lines[line]} {drawn.columns[column]}", letters - len(tail)
            )
            + tail,
            _FONT,
            color=BAD,
        )
    elif (drawn.marks > Mark.ABSENT).any():
        text(x, y + 0.19, "all finite", _FONT, color="#444444")
    else:
        text(x, y + 0.19, "not recorded", _FONT, color="#444444")


def _panel(axes: Any, drawn: Grid, block: _Block, named: bool) -> Any:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    finite = (drawn.marks == Mark.FINITE) & ~np.isnan(drawn.values)
    zero = finite & (drawn.values == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.clip(np.log10(drawn.values), block.low, block.high)
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(
        np.where(finite & ~zero, logs, np.nan),
        cmap="viridis",
        vmin=block.low,
        vmax=block.high,
        **look,
    )
    special = np.where(drawn.marks >= Mark.INF, 1.0, np.where(zero, 0.0, np.nan))
    axes.imshow(special, cmap=ListedColormap([_ZERO, BAD]), vmin=0, vmax=1, **look)
    cell = block.width / len(block.columns), block.height / len(block.lines)
    size = max(1.5, min(6.0, 72 * 0.55 * min(cell)))
    for marked, symbol in ((Mark.NAN, "x"), (Mark.INF, "+")):
        down, right = np.nonzero(drawn.marks == marked)
        axes.plot(
            right,
            down,
            linestyle="none",
            marker=symbol,
            color="white",
            markersize=size,
            markeredgewidth=max(0.5, size / 6),
        )
    if drawn.first is not None:
        y, x = drawn.first
        axes.add_patch(
            Rectangle(
                (x - 0.5, y - 0.5),
                1,
                1,
                fill=False,
                edgecolor="black",
                linewidth=1.6,
                clip_on=False,
                zorder=5,
            )
        )
        # A frame of that size is easily overlooked among 80 layers: pointers at the panel's edges
        # lead to it.
        pointer: dict[str, Any] = {
            "color": "black",
            "markersize": 5,
            "linestyle": "none",
            "clip_on": False,
        }
        axes.plot(
            x,
            1.0 + 0.045 / block.height,
            marker="v",
            transform=axes.get_xaxis_transform(),
            **pointer,
        )
        axes.plot(
            1.0 + 0.045 / block.width,
            y,
            marker="<",
            transform=axes.get_yaxis_transform(),
            **pointer,
        )
    layered = [line.layer is not None for line in block.where.lines]
    for i in range(1, len(layered)):
        if layered[i] != layered[i - 1]:
            axes.axhline(i - 0.5, color="#777777", linewidth=0.6)
    _ticks(axes.xaxis, block.columns, cell[0], rotation=90)
    _ticks(
        axes.yaxis,
        block.lines if named else [""] * len(block.lines),
        cell[1],
        [line.layer for line in block.where.lines],
    )
    axes.tick_params(length=1.5, width=0.5, pad=1.5)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)
    return image


def _ticks(
    axis: Any,
    labels: Sequence[str],
    inches: float,
    layers: Sequence[int | None] = (),
    rotation: float = 0,
) -> None:
    """Labels at every cell where there is room for a line of text, else at every second, fifth,
    tenth...

    `layers`, where the cells are lines: those that are no layer come first, and of the layers round
    numbers.
    """
    every = next(m * 10**e for e in range(9) for m in (1, 2, 5) if m * 10**e * inches >= 0.1)
    numbers = list(layers) or list(range(len(labels)))
    shown: list[int] = []
    for i in sorted(range(len(labels)), key=lambda i: numbers[i] is not None):
        number = numbers[i]
        if (number is None or number % every == 0) and all(
            abs(i - j) * inches >= 0.099 for j in shown
        ):
            shown.append(i)
    axis.set_ticks(shown, [labels[i] for i in shown], fontsize=_FONT, rotation=rotation)


@dataclass(frozen=True)
class _Profile:
    """One figure by layer: a curve per step, and the layers that hold a non-finite tensor at any of
    them.
    """

    title: str
    lines: list[str]
    layers: list[int | None]
    curves: list[list[float]]
    bad: list[int]
    logarithmic: bool


def _profiles(records: Sequence[Record], blocks: Sequence[_Block]) -> list[_Profile]:
    found = []
    kinds: tuple[tuple[str, Direction, Callable[[Row], float | None], bool], ...] = (
        (
            "largest size / dtype's maximum",
            "forward",
            lambda row: value(row, "maximum_share"),
            True,
        ),
        ("update RMS / stream RMS", "forward", lambda row: value(row, "update_ratio"), True),
        ("saturation of multipliers", "forward", lambda row: value(row, "saturation"), False),
        ("largest gradient norm", "gradient", lambda row: row.norm, True),
    )
    for title, direction, of, logarithmic in kinds:
        block = next((b for b in blocks if b.direction == direction), None)
        if block is None:
            continue
        at = {line: i for i, line in enumerate(block.where.lines)}
        curves, bad = [], set()
        for record in records:
            curve = [math.nan] * len(at)
            for row in record.rows:
                if row.direction != direction:
                    continue
                i, number = at[place(row)[0]], of(row)
                if not row.finite:
                    bad.add(i)
                if (
                    number is not None
                    and math.isfinite(number)
                    and not (logarithmic and number <= 0)
                ):
                    curve[i] = max(number, -math.inf if math.isnan(curve[i]) else curve[i])
            curves.append(curve)
        if any(not math.isnan(x) for curve in curves for x in curve):
            found.append(
                _Profile(
                    title,
                    block.lines,
                    [line.layer for line in at],
                    curves,
                    sorted(bad),
                    logarithmic,
                )
            )
    return found


def _curves(axes: Any, profile: _Profile, labels: Sequence[str], legend: bool) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    colours = colormaps["cividis"](np.linspace(0.0, 0.85, len(labels))[::-1])
    for curve, label, colour in zip(profile.curves, labels, colours, strict=True):
        axes.plot(curve, color=colour, label=label, linewidth=1.0, marker=".", markersize=3)
    axes.plot(
        profile.bad,
        [0.03] * len(profile.bad),
        "x",
        color=BAD,
        markersize=4,
        transform=axes.get_xaxis_transform(),
    )
    numbers = [x for curve in profile.curves for x in curve if not math.isnan(x)]
    if profile.logarithmic:
        middle = math.sqrt(min(numbers)) * math.sqrt(max(numbers))
        low, high = min(min(numbers) / 1.5, middle / 3), max(max(numbers) * 1.5, middle * 3)
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(
            LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,), numticks=6)
        )
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.1 * max(0.05, *numbers))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:.3g}"))
    axes.set_xlim(-0.5, len(profile.lines) - 0.5)
    _ticks(
        axes.xaxis,
        profile.lines,
        axes.get_position().width * axes.figure.get_figwidth() / len(profile.lines),
        profile.layers,
        90,
    )
    axes.tick_params(labelsize=_FONT, width=0.5, length=2)
    for spine in axes.spines.values():
        spine.set_linewidth(0.5)
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
    if legend:
        axes.legend(
            fontsize=_FONT,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.2,
        )


def _shorten(name: str, letters: int) -> str:
    """`name` on one line, its middle left out where it is longer."""
    name = "".join(c if c.isprintable() else " " for c in name)
    if len(name) <= letters:
        return name
    tail = (letters - 1) * 2 // 3
    return f"{name[: max(0, letters - 1 - tail)]}…{name[len(name) - tail :]}"
