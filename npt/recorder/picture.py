"""Draw records as a page and a picture: the RMS of every tensor, one map for each step."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from npt.files import write_bytes
from npt.recorder.ranking import FACTOR, explosions, growths
from npt.recorder.record import Direction, Record, Row, short_names
from npt.report.generated import colour
from npt.report.pages import TEMPLATES, render
from npt.report.words import clean, number

BAD = "#d01c2c"
INK = "#707a85"  # as in the settings
_SETTINGS = TEMPLATES / "recorder.mplstyle"
LISTED = 100  # the most non-finite tensors listed


def write_pictures(records: Iterable[Record], folder: Path, *, refused: int = 0) -> list[Path]:
    """Write `health.png` and `health.html` into `folder`, each atomically, and return their paths.

    The same records give the same bytes. A ValueError says that there is nothing to draw.

    Args:
        records: one for each step.
        folder: where the files go.
        refused: how many micro-batches the guard refused in the run, for the page.
    """
    ordered = [record for record in records if _drawn([record])]
    ordered.sort(key=lambda record: (record.step, record.micro_batch))
    if not ordered:
        raise ValueError("no record has a tensor, so there is nothing to draw; record a step first")
    picture = _png(ordered)
    contents = {"health.png": picture, "health.html": _page(ordered, picture, refused).encode()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_bytes(folder / name, content)
    return [folder / name for name in contents]


def _drawn(records: Sequence[Record]) -> list[Row]:
    """Return the rows of floating-point tensors, forward pass first."""
    rows = (row for record in records for row in record.rows if "float" in row.dtype)
    return sorted(rows, key=lambda row: row.direction)


def _png(records: Sequence[Record]) -> bytes:
    import matplotlib
    from matplotlib.figure import Figure

    rows = _drawn(records)
    lines = short_names(dict.fromkeys(row.cell[0] for row in rows))
    columns = list(dict.fromkeys(row.cell[1] for row in rows))
    directions = list(dict.fromkeys(row.direction for row in rows))
    # of one map, in inches: a label needs 0.13
    width = max(2.5, min(5, 0.13 * len(columns)))
    height = max(1.5, min(9, 0.14 * len(lines)))
    across = min(len(records), 2)
    down = len(directions) * math.ceil(len(records) / 2)
    size = (2 + across * (width + 0.2), 2 + down * (height + 0.5))
    # without the user's settings of matplotlib, and with `$` in a name as text
    with matplotlib.rc_context(fname=_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=size, layout="constrained")
        grids = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        # the maps of one direction share a colour scale; after an odd number one place is empty
        blocks = grids.reshape(len(directions), -1)
        for block, direction in zip(blocks, directions, strict=True):
            ends = _ends([row for row in rows if row.direction == direction])
            for axes, record in zip(block, records, strict=False):
                image = _paint(axes, record, direction, list(lines), columns, ends)
            for axes in block[len(records) :]:
                axes.axis("off")
            label = f"{direction}: RMS, log10"
            figure.colorbar(image, ax=list(block), extend="both", label=label)
        for axes in grids[:, 0]:
            _ticks(axes.yaxis, list(lines.values()), height)
        for axes in grids[-1]:
            _ticks(axes.xaxis, columns, width, rotation=90)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=96, metadata={"Software": None})
    return stream.getvalue()


def _ends(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the ends of a colour scale for log10 of the RMS, chosen so that one exploded tensor
    does not make all others look alike.
    """
    sizes = [math.log10(row.rms) for row in rows if row.rms]
    finite = [size for size in sizes if math.isfinite(size)]
    low, high = np.quantile(finite or [0.0], (0.02, 0.98))
    return low - 0.2, high + 0.2


def _paint(
    axes: Any,
    record: Record,
    direction: Direction,
    lines: list[str],
    columns: list[str],
    ends: tuple[float, float],
) -> Any:
    """Draw one direction of a record and return the image. If a module is called several times, the
    largest RMS is shown. `ends` are those of the colour scale, in log10.
    """
    from matplotlib.colors import ListedColormap

    sizes, bad = np.full((2, len(lines), len(columns)), np.nan)
    first = None
    for row in _drawn([record]):
        if row.direction != direction:
            continue
        name, stage = row.cell
        at = (lines.index(name), columns.index(stage))
        if not row.finite:
            bad[at] = 1.0
            first = first or at
        elif row.rms is not None:
            size = math.log10(row.rms) if row.rms > 0 else -math.inf
            sizes[at] = np.fmax(sizes[at], size)  # NaN is no size yet
    look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    image = axes.imshow(np.clip(sizes, -400, 400), vmin=ends[0], vmax=ends[1], **look)
    axes.imshow(bad, cmap=ListedColormap([BAD]), **look)
    # a cross, for readers who cannot tell red from the colour scale
    bad_lines, bad_columns = np.nonzero(bad == 1)
    axes.plot(bad_columns, bad_lines, "x", color="white", markersize=3)
    title = f"step {record.step}"
    if record.micro_batch:
        title += f", micro-batch {record.micro_batch}"
    if first is not None:
        line, column = first
        axes.plot(column, line, "s", markerfacecolor="none", color=INK, markersize=7)
        name = clean(f"{short_names(lines)[lines[line]]} {columns[column]}", 30)
        title += f"\n{int(np.nansum(bad))} not finite, first: {name}"
    axes.set_title(title, color=INK if first is None else BAD)
    return image


def _ticks(axis: Any, names: Sequence[str], inches: float, **look: Any) -> None:
    """Label every cell, or every n-th if there is no room."""
    shown = range(0, len(names), math.ceil(0.13 * len(names) / inches))
    axis.set_ticks(shown, [clean(names[i], 30) for i in shown], **look)


def _page(records: Sequence[Record], picture: bytes, refused: int) -> str:
    """Return the page."""
    bad = [(record.step, row) for record in records for row in record.bad]
    exploded = [(record.step, growth) for record in records for growth in explosions(record)]
    grown = [(record.step, growth) for record in records for growth in growths(record)]
    grown.sort(key=lambda pair: -pair[1].growth)
    total = sum(len(record.rows) for record in records)
    # the worst that was found, and what to do about it
    kind = "good"
    finding = f"All {total:,} recorded tensors are finite, and none exploded"
    advice = "If the loss still diverges, look for a layer that grows."
    if bad:
        kind = "bad"
        step, first = bad[0]
        where = "" if first.layer is None else f" in layer {first.layer}"
        finding = f"First non-finite tensor: {first.title}{where} at step {step}"
        advice = "Next: find the operation with npt replay POSTMORTEM or npt.trace(model, batch)."
    elif exploded:
        kind = "warn"
        step, largest = exploded[0]
        finding = f"Largest explosion of step {step}: {largest}"
        advice = "Next: lower the learning rate, and record the steps before this one."
    elif refused:
        kind = "warn"
        finding = f"All {total:,} recorded tensors are finite, but the run refused {refused:,}"
        finding += f" micro-batch{'es' if refused > 1 else ''}"
        advice = "Next: look at the refusals in the log, which name samples and operations."
    return render(
        "recorder.html.j2",
        title="Tensor health",
        sections={"layers": "Layers by step", "findings": "Findings", "picture": "Every tensor"},
        kind=kind,
        lines=[finding, advice, _shown(records)],
        total=total,
        bad=len(bad),
        listed=[
            (step, row.name, row.nan, row.pos_inf + row.neg_inf, row.count, row.direction)
            for step, row in bad[:LISTED]
        ],
        steps=["layer", *(f"step {record.step}" for record in records)],
        layers=_layers_by_step(records),
        exploded=len(exploded),
        factor=FACTOR,
        grown=[
            (step, f"× {g.growth:.3g}", f"{g.after.rms:.3g}", g.after.name, g.before.name)
            for step, g in grown[:10]
        ],
        image=Markup(f"data:image/png;base64,{base64.b64encode(picture).decode()}"),
    )


def _shown(records: Sequence[Record]) -> str:
    """Say what the page is about, so that nobody takes it for the whole run."""
    places = [f"{record.micro_batch} of step {record.step}" for record in records]
    if len(places) > LISTED:
        places = [*places[:LISTED], "..."]
    return f"Shown: micro-batch {', '.join(places)}. No other micro-batch or step is on this page."


def _layers_by_step(records: Sequence[Record]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return each layer with, by record, a colour and the largest forward RMS or the number of
    non-finite tensors.
    """
    lines = short_names(dict.fromkeys(row.cell[0] for row in _drawn(records)))
    places = {line: place for place, line in enumerate(lines)}
    sizes, bad = np.zeros((2, len(lines), len(records)))
    for column, record in enumerate(records):
        for row in _drawn([record]):
            line, _ = row.cell
            at = (places[line], column)
            bad[at] += not row.finite
            if row.direction == "forward":
                sizes[at] = np.fmax(sizes[at], row.rms or 0.0)
    coloured = np.isfinite(sizes) & (bad == 0)
    # at least the smallest fp32, so that the scale has an end if all numbers are 0
    high = float(np.max(sizes, where=coloured, initial=1e-45))

    def cell(size: float, count: float) -> tuple[str, str]:
        if count:
            return "hn", f"{count:.0f} bad"
        return colour(size, high), number(size or None, 3)

    grid = []
    for place, name in enumerate(lines.values()):
        grid.append((name, list(map(cell, sizes[place].tolist(), bad[place].tolist()))))
    return grid
