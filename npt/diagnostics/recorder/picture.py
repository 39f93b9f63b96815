"""Pictures of recorded tensor health: a still one, and a page to search in.

Both show layer x checkpoint for each step. A tensor that is not finite has a colour that the scale
lacks and a symbol, and the first one of a pass is framed: it made the bad numbers or was given
them, all others passed them along.
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
from npt.report.words import clean

PANELS = 6
"""Steps that one picture shows; the page shows more."""

BAD, SOFT = "#d01c2c", "#444444"
_ZERO = "#a9b0b7"
_DPI = 110
_FONT = 6.5  # points
_LETTER = 0.062  # inches, of a wide letter in that size
_HEADINGS: dict[Direction, str] = {"forward": "Forward: values", "gradient": "Backward: gradients"}

# Inches: title and legend, a block's heading, a panel's caption, a gap, the profiles.
_TITLE, _HEADING, _CAPTION, _GAP, _PROFILE = 1.0, 0.4, 0.44, 0.25, 1.7

_PROFILES: tuple[tuple[str, Direction, Callable[[Row], float | None], bool], ...] = (
    ("largest size / dtype's maximum", "forward", lambda row: value(row, "maximum_share"), True),
    ("update RMS / stream RMS", "forward", lambda row: value(row, "update_ratio"), True),
    ("saturation of multipliers", "forward", lambda row: value(row, "saturation"), False),
    ("largest gradient norm", "gradient", lambda row: row.norm, True),
)
"""Figures by layer: title, direction, number of a row, and whether the scale is logarithmic."""


def write_pictures(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw the records of a run as `health.png` and `health.html` in `folder`, each replaced
    atomically, and return the files. The same records give the same bytes.

    Raises:
        ValueError: there is nothing to draw.
    """
    records = _drawable(records)
    folder = Path(folder)
    contents = {"health.png": draw(records), "health.html": page(records).encode("utf-8")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_bytes(folder / name, content)
    return [folder / name for name in contents]


def _drawable(records: Sequence[Record]) -> list[Record]:
    """Return them in order, and without token ids and positions, whose size is no activation's."""
    floats = (tuple(row for row in r.rows if maximum(row.dtype) is not None) for r in records)
    drawn = [replace(r, rows=rows) for r, rows in zip(records, floats, strict=True)]
    found = sorted((r for r in drawn if r.rows), key=lambda r: (r.step, r.micro_batch))
    if not found:
        raise ValueError(
            f"no tensor in any of {len(records)} records, so there is nothing to draw; record at"
            " least one step first"
        )
    return found


def draw(records: Sequence[Record]) -> bytes:
    """Return the PNG: at most `PANELS` steps, forward over backward, then figures by layer."""
    import matplotlib
    import matplotlib.style

    labels = step_labels(records)
    bad = next((i for i, r in enumerate(records) if r.bad), None)
    chosen = spread(len(records), PANELS, bad)
    # The settings of matplotlib's user stay out, and a `$` in a name is no formula.
    with (
        matplotlib.style.context("default"),
        matplotlib.rc_context({"text.parse_math": False, "font.size": _FONT}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = _figure(records, labels, chosen)
        stream = io.BytesIO()
        figure.savefig(
            stream, format="png", dpi=_DPI, metadata={"Software": None}, bbox_inches="tight",
            pad_inches=0.15,
        )  # fmt: skip
    return stream.getvalue()


@dataclass(frozen=True)
class _Block:
    """The panels of one direction, and the inches that each takes with its labels."""

    direction: Direction
    where: Layout
    columns: list[str]
    lines: list[str]
    low: float
    high: float
    extend: str
    width: float
    height: float
    left: float
    below: float


def _block(records: Sequence[Record], direction: Direction, alone: bool) -> _Block:
    where = layout(records, direction)
    rows = (row for r in records for row in r.rows if row.direction == direction)
    numbers = [x for row in rows if (x := value(row, "rms"))]
    low, high = scale(numbers, "rms")
    logs = [math.log10(x) for x in numbers]
    ends = (min(logs, default=low) < low - 1e-9, max(logs, default=high) > high + 1e-9)
    columns = [clean(name, 34) for name in where.columns]
    lines = [clean(name, 24) for name in where.labels]
    wide = 0.24 if alone else 0.14
    return _Block(
        direction, where, columns, lines, low, high,
        extend={(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[ends],
        width=max(2.2, min(7.5 if alone else 4.6, wide * len(columns))),
        height=max(0.5, min(8.6, 0.2 * len(lines))),
        left=max(0.6, _LETTER * max(map(len, lines)) + 0.3),
        below=_LETTER * max(map(len, columns)) + 0.1,
    )  # fmt: skip


def _figure(records: Sequence[Record], labels: Sequence[str], chosen: Sequence[int]) -> Any:
    from matplotlib.figure import Figure

    present = {row.direction for record in records for row in record.rows}
    blocks = [_block(records, d, len(chosen) == 1) for d in _HEADINGS if d in present]
    left = max(block.left for block in blocks)
    # side by side if there are many layers, else in two rows
    across = len(chosen) if max(b.height for b in blocks) > 3 else math.ceil(len(chosen) / 2)
    across = len(chosen) if len(chosen) <= 3 else across
    down = math.ceil(len(chosen) / across)
    width = max(9.0, left + across * (max(b.width for b in blocks) + _GAP) + 0.8)
    height = _TITLE + _HEADING + _PROFILE + left
    height += sum(_HEADING + down * (_CAPTION + b.height + b.below + _GAP) for b in blocks)
    figure = Figure(figsize=(width, height), facecolor="white")

    def axes(x: float, y: float, w: float, h: float) -> Any:
        """Return axes at inches from the left and from the top."""
        return figure.add_axes((x / width, 1 - (y + h) / height, w / width, h / height))

    def text(x: float, y: float, content: str, size: float = 8, **more: Any) -> None:
        figure.text(x / width, 1 - y / height, content, fontsize=size, va="top", **more)

    text(0.2, 0.16, f"Tensor health, {span(records)}", 13, weight="bold")
    some = f"{len(chosen)} of {len(records)} recorded steps shown. "
    said = "Colour: log10 of the RMS over the finite elements of a tensor. Layers run down, checkpoints to the right; gradients flow up and to the left."  # noqa: E501
    text(0.2, 0.46, some * (len(chosen) < len(records)) + said, color=SOFT)
    _legend(figure, 0.2 / width, 1 - 0.66 / height)
    top = _TITLE
    for block in blocks:
        text(0.2, top + 0.1, _HEADINGS[block.direction], 10, weight="bold")
        top += _HEADING
        for k, i in enumerate(chosen):
            row, column = divmod(k, across)
            x = left + column * (block.width + _GAP)
            y = top + row * (_CAPTION + block.height + block.below + _GAP)
            drawn = grid(records[i], block.direction, "rms", block.where)
            said, colour = _caption(drawn, int(block.width / 0.05))
            text(x, y, labels[i], weight="bold")
            text(x, y + 0.19, said, _FONT, color=colour)
            panel = axes(x, y + _CAPTION, block.width, block.height)
            image = _panel(panel, drawn, block, named=column == 0)
            if column == across - 1 or k == len(chosen) - 1:
                bar = axes(x + block.width + 0.15, y + _CAPTION, 0.12, block.height)
                figure.colorbar(image, cax=bar, extend=block.extend)
                bar.set_title("log10", fontsize=_FONT)
        top += down * (_CAPTION + block.height + block.below + _GAP)
    shown = [records[i] for i in chosen]
    _paint_profiles(figure, axes, text, top, left, shown, blocks, [labels[i] for i in chosen])
    return figure


def _legend(figure: Any, x: float, y: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    red = Patch(facecolor=BAD)
    look: dict[str, Any] = {"color": "white", "linestyle": "none", "markersize": 5}
    entries: dict[str, Any] = {
        "NaN": (red, Line2D([], [], marker="x", **look)),
        "+Inf or -Inf, no NaN": (red, Line2D([], [], marker="+", **look)),
        "first non-finite tensor of the pass, with pointers at the edges": Patch(
            facecolor=BAD, edgecolor="black", linewidth=1.4
        ),
        "exactly zero": Patch(facecolor=_ZERO),
        "not recorded": Patch(facecolor="white", edgecolor="#999999", linewidth=0.5),
    }
    figure.legend(
        list(entries.values()), list(entries), loc="upper left", bbox_to_anchor=(x, y),
        borderaxespad=0, borderpad=0, ncols=len(entries), frameon=False, fontsize=8,
        columnspacing=1.6, handlelength=1.4,
    )  # fmt: skip


def _caption(drawn: Grid, letters: int) -> tuple[str, str]:
    """Return where a panel's first non-finite tensor is, and the colour of the words."""
    if drawn.first is None:
        recorded = bool((drawn.marks > Mark.ABSENT).any())
        return ("all finite" if recorded else "not recorded"), SOFT
    line, column = drawn.first
    layer = "layer " if drawn.lines[line].isdecimal() else ""
    bad, total = int((drawn.marks >= Mark.INF).sum()), int((drawn.marks > Mark.ABSENT).sum())
    tail = f" ({bad} of {total} bad)"
    name = f"first: {layer}{drawn.lines[line]} {drawn.columns[column]}"
    return clean(name, max(8, letters - len(tail))) + tail, BAD


def _panel(axes: Any, drawn: Grid, block: _Block, named: bool) -> Any:
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Rectangle

    finite = (drawn.marks == Mark.FINITE) & ~np.isnan(drawn.values)
    zero = finite & (drawn.values == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.clip(np.log10(drawn.values), block.low, block.high)
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    shown = np.where(finite & ~zero, logs, np.nan)
    image = axes.imshow(shown, cmap="viridis", vmin=block.low, vmax=block.high, **look)
    special = np.where(drawn.marks >= Mark.INF, 1.0, np.where(zero, 0.0, np.nan))
    axes.imshow(special, cmap=ListedColormap([_ZERO, BAD]), vmin=0, vmax=1, **look)
    cell = block.width / len(block.columns), block.height / len(block.lines)
    size = max(1.5, min(6.0, 72 * 0.55 * min(cell)))
    for marked, symbol in ((Mark.NAN, "x"), (Mark.INF, "+")):
        down, right = np.nonzero(drawn.marks == marked)
        axes.plot(
            right, down, symbol, color="white", markersize=size, markeredgewidth=max(0.5, size / 6)
        )
    if drawn.first is not None:
        y, x = drawn.first
        box: dict[str, Any] = {"fill": False, "edgecolor": "black", "linewidth": 1.6}
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, clip_on=False, zorder=5, **box))
        # A frame is easily overlooked among 80 layers: pointers at the edges lead to it.
        pointer: dict[str, Any] = {"color": "black", "markersize": 5, "clip_on": False}
        above, beyond = 1.0 + 0.045 / block.height, 1.0 + 0.045 / block.width
        axes.plot(x, above, "v", transform=axes.get_xaxis_transform(), **pointer)
        axes.plot(beyond, y, "<", transform=axes.get_yaxis_transform(), **pointer)
    layered = [line.layer is not None for line in block.where.lines]
    for i in range(1, len(layered)):
        if layered[i] != layered[i - 1]:
            axes.axhline(i - 0.5, color="#777777", linewidth=0.6)
    _ticks(axes.xaxis, block.columns, cell[0], rotation=90)
    _ticks(axes.yaxis, block.lines if named else [""] * len(block.lines), cell[1])
    axes.tick_params(length=1.5, width=0.5, pad=1.5)
    return image


def _ticks(axis: Any, labels: Sequence[str], inches: float, rotation: float = 0) -> None:
    """Label every cell, or every second, fifth, tenth... if a line of text has no room."""
    every = next(m * 10**e for e in range(9) for m in (1, 2, 5) if m * 10**e * inches >= 0.1)
    shown = range(0, len(labels), every)
    axis.set_ticks(shown, [labels[i] for i in shown], fontsize=_FONT, rotation=rotation)


def _paint_profiles(
    figure: Any, axes: Callable[..., Any], text: Callable[..., None], top: float, left: float,
    records: Sequence[Record], blocks: Sequence[_Block], labels: Sequence[str],
) -> None:  # fmt: skip
    """Draw figures by layer, a curve per step, with crosses at layers that are not finite."""
    found = []
    for title, direction, of, log in _PROFILES:
        block = next((each for each in blocks if each.direction == direction), None)
        if block is not None:
            curves, bad = _curves(records, block, of, log)
            if not np.isnan(curves).all():
                found.append((title, block, curves, bad, log))
    if not found:
        return
    text(0.2, top + 0.1, "By layer", 10, weight="bold")
    said = "a red cross: a tensor there is not finite at one of these steps"
    text(1.0, top + 0.13, said * any(bad for *_, bad, _ in found), color=SOFT)
    room = (figure.get_figwidth() - left - 0.3) / len(found)
    for k, (title, block, curves, bad, log) in enumerate(found):
        text(left + k * room, top + _HEADING, title, _FONT, weight="bold")
        width = min(room - 0.55, 6.0)
        drawn = axes(left + k * room, top + _HEADING + 0.24, width, _PROFILE)
        _paint_curves(drawn, curves, bad, log, labels)
        drawn.set_xlim(-0.5, len(block.lines) - 0.5)
        _ticks(drawn.xaxis, block.lines, width / len(block.lines), 90)
        if k == len(found) - 1 and len(records) > 1:
            drawn.legend(fontsize=_FONT, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _curves(
    records: Sequence[Record], block: _Block, of: Callable[[Row], float | None], log: bool
) -> tuple[np.ndarray, list[int]]:
    """Return the largest number by record and line, and the lines with a non-finite tensor."""
    at = {line: i for i, line in enumerate(block.where.lines)}
    curves, bad = np.full((len(records), len(at)), np.nan), set()
    for curve, record in zip(curves, records, strict=True):
        for row in (row for row in record.rows if row.direction == block.direction):
            i, number = at[place(row)[0]], of(row)
            if not row.finite:
                bad.add(i)
            if number is not None and math.isfinite(number) and (number > 0 or not log):
                curve[i] = np.fmax(curve[i], number)
    return curves, sorted(bad)


def _paint_curves(
    axes: Any, curves: np.ndarray, bad: list[int], log: bool, labels: Sequence[str]
) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import LogLocator, NullLocator

    colours = colormaps["cividis"](np.linspace(0.0, 0.85, len(curves))[::-1])
    for curve, label, colour in zip(curves, labels, colours, strict=False):
        axes.plot(curve, color=colour, label=label, linewidth=1.0, marker=".", markersize=3)
    low = [0.03] * len(bad)
    axes.plot(bad, low, "x", color=BAD, markersize=4, transform=axes.get_xaxis_transform())
    least, most = float(np.nanmin(curves)), float(np.nanmax(curves))
    if log:
        middle = math.sqrt(least) * math.sqrt(most)
        low_end, high_end = min(least / 1.5, middle / 3), max(most * 1.5, middle * 3)
        axes.set_yscale("log")
        axes.set_ylim(low_end, high_end)
        subs = (1, 2, 5) if high_end / low_end < 100 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.1 * max(0.05, most))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.3g}")
    axes.grid(axis="y", color="#dddddd", linewidth=0.5)
