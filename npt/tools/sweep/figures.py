"""A study's charts, in its page and as files. A meaning has a shape or a word in addition to its
colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from markupsafe import Markup

from npt.report import charts, pages
from npt.report.charts import BAD, INK, LINE, RIGHT, RULE, SOFT, WIDTH, ZERO, Marks, picture
from npt.report.words import clean, number
from npt.tools.sweep.analysis import Cell, Map, Row, frontier, training_seconds
from npt.tools.sweep.effects import Analysis

CELL, ROW = 44.0, 38.0
"""Least width of a map's cell, which holds a number of three digits, and height of its row."""

HARMLESS = 1.25  # factor of the loss on each side of 1 that the axis of harm has at least

WORSE, LETTERS = "#f0a860", 53
BRIGHT, DARK = "#10141a", "#ffffff"  # text on a colour

_GOOD, _FAILS = ("o", LINE, False), ("x", BAD, False)


def standalone(svg: str) -> str:
    """Return a chart as a file of its own, with the page's colours, light or dark."""
    sheet = pages.style()
    style = f"{sheet[: sheet.index('* {')]}svg {{ background: var(--paper) }}"
    named = str(svg).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return named.replace(">", f"><style>{style} text {{ font-family: sans-serif }}</style>", 1)


def map_figure(found: Map) -> Markup:
    """Return outcomes by learning rate and setting, with the edge of what trains through them."""
    from matplotlib.patches import Rectangle

    count, lines = len(found.heads), len(found.lines)
    width = max(WIDTH, 2 * RIGHT + CELL * count)
    stable = [c for line in found.lines for c in line.cells.values() if not c.failed]
    kls = [c.kl for c in stable if c.kl and math.isfinite(c.kl)]
    low, high = (min(kls), max(kls)) if kls else (1.0, 1.0)
    heads = [clean(head).replace(" to ", "\nto ") for head in found.heads]
    below = 32 + 13 * max(head.count("\n") for head in heads)
    body = 20 + ROW * lines
    label = f"Outcomes of part {found.part} by learning rate, {lines} settings."
    with picture(body + below + 62 + 40 * bool(kls), label, width) as made:
        axes = made.axes(20, ROW * lines, RIGHT, RIGHT)
        axes.set_title(f"rows: {clean(found.setting, LETTERS)}", fontweight="bold")
        for i, line in enumerate(found.lines):
            for j, cell in line.cells.items():
                colour, ink, said = _cell_look(cell, low, high)
                box = Rectangle((j + 0.01, i + 0.4), 0.98, 0.55, facecolor=colour, linewidth=0)
                charts.tell(
                    axes.add_patch(box),
                    f"{line.name}, learning rate {found.heads[j]}: median KL {number(cell.kl)},"
                    f" {cell.failed} of {cell.count} failed",
                )
                axes.text(j + 0.5, i + 0.69, said, ha="center", va="center", color=ink)
        for i, line in enumerate(found.lines):
            axes.text(0, i + 0.35, clean(line.name, LETTERS), va="bottom")
            edge = next((j for j, cell in line.cells.items() if cell.failed), max(line.cells) + 1)
            for colour, size in ((charts.PAPER, 6), (INK, 3)):
                axes.vlines(edge, i + 0.34, i + 1.0, color=colour, linewidth=size, clip_on=False)
        axes.set(xlim=(0, count), ylim=(lines, 0))
        axes.set_xticks(np.arange(count) + 0.5, heads)
        axes.set_yticks([])
        axes.grid(False)
        axes.set_xlabel("columns: learning rate, one for each that was tried")
        if kls:
            words = "colour and number: median KL in the end, nats, logarithmic"
            charts.paint_ramp(made, body + below + 4, low, high, words)
        keys = [
            ("s", WORSE, "↑ ended worse, of so many"),
            ("s", BAD, "✕ diverged, of so many"),
            ("|", INK, "the edge: from here on some trial failed"),
        ]
        _key(made, keys, 58)
    return made.svg


def _key(made: charts.Picture, keys: Sequence[tuple[str, str, str]], height: float) -> None:
    """Name marks and colours at the lower end of a picture."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker=marker, color=colour, linestyle="none", markersize=9, label=said)
        for marker, colour, said in keys
    ]
    at = (RIGHT / made.width, height / made.height)
    made.figure.legend(handles=handles, loc="upper left", bbox_to_anchor=at)


def _cell_look(cell: Cell, low: float, high: float) -> tuple[str, str, str]:
    """Return a cell's colour, the colour of its text, and the text."""
    if cell.failed:
        count = f" {cell.failed}/{cell.count}" if cell.count > 1 else ""
        return (BAD, DARK, f"✕{count}") if cell.diverged else (WORSE, BRIGHT, f"↑{count}")
    if not cell.kl or not math.isfinite(cell.kl):
        return ZERO, BRIGHT, "–"
    place = math.log(cell.kl / low) / math.log(high / low) if high > low else 0.5
    return *_shade(place), number(cell.kl, 3)


def _shade(place: float) -> tuple[str, str]:
    """Return the colour at a place of the scale, and one that can be read on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return to_hex(colormaps["viridis"](place)), DARK if place < 0.5 else BRIGHT


def limits_figure(rows: Sequence[tuple[str, float | None, float | None]], setting: str) -> Markup:
    """Return brackets of the largest value that trains."""
    names, lows, highs = zip(*rows, strict=True)
    marks = [Marks("trains", _GOOD, lows, lows, highs), Marks("does not", _FAILS, highs)]
    return charts.rows_chart(names, marks, setting, f"Limits of {len(rows)} settings.", log=True)


def faults_figure(rows: Sequence[Row], names: Sequence[str]) -> Markup:
    """Return the loss of one window right after a fault over that right before, and the KL that the
    run ended with.
    """
    harm = []
    for name, look, refused in (("applied", _GOOD, False), ("refused", _FAILS, True)):
        own = [r["fault_harm"] if bool(r["fault_refused"]) == refused else None for r in rows]
        harm.append(Marks(name, look, own))
    errors = [row.get("kl_se") or 0.0 for row in rows]
    kl = [Marks.around("", ("D", LINE, False), [row["kl"] for row in rows], errors)]
    label = f"Loss around the fault, and KL in the end, of {len(rows)} trials."
    with picture(2 * charts.rows_height(names), label) as made:
        what = "loss after the fault over before"
        reach = (1 / HARMLESS, HARMLESS)  # no harm is not to look like some
        y = charts.paint_rows(made, 0, names, harm, what, True, reach, "harm")
        what = "KL in the end, nats; line: standard error"
        charts.paint_rows(made, y, names, kl, what, True, title="KL")
    return made.svg


def effects_figure(found: Sequence[Analysis]) -> Markup:
    """Return main effects with their intervals: a row for each level, for each response."""
    named = [[f"{e.setting}: {e.level}, {e.count} trials" for e in a.effects] for a in found]
    told = "; ".join(f"{len(a.effects)} effects on {a.response}" for a in found)
    with picture(sum(map(charts.rows_height, named)), f"Main effects: {told}.") as made:
        y = 0.0
        for names, analysis in zip(named, found, strict=True):
            mean, low, high = zip(*((e.mean, e.low, e.high) for e in analysis.effects), strict=True)
            y = charts.paint_rows(
                made, y, names, [Marks("", _GOOD, mean, low, high)],
                f"{analysis.response}; line: 95% interval", False,
                (0.0, 1.0) if analysis.chance else (), analysis.response,
            )  # fmt: skip
    return made.svg


def shares_figure(found: Sequence[tuple[str, Analysis]]) -> Markup:
    """Return which setting explains the variance: a bar for each part and response, cut into
    shares.
    """
    settings = list(dict.fromkeys(name for _, analysis in found for name in analysis.shares))
    tones = np.linspace(0.05, 0.95, len(settings))
    looks = {name: _shade(tone) for name, tone in zip(settings, tones, strict=True)}
    keys = [("s", colour, clean(name, LETTERS)) for name, (colour, _) in looks.items()]
    keys += [("s", ZERO, "together: what settings do together"), ("s", RULE, "seeds: noise")]
    height = len(found) * ROW
    label = f"Shares of the variance by setting, of {len(found)} parts and responses."
    with picture(height + 44 + 18 * len(keys), label) as made:
        axes = made.axes(0, height, RIGHT + 8, RIGHT + 8)
        for i, (name, analysis) in enumerate(found):
            axes.text(0, i - 0.08, clean(name, LETTERS), va="bottom")
            cut = [(n, share, *looks[n]) for n, share in analysis.shares.items()]
            cut += [(analysis.rest, analysis.together, ZERO, BRIGHT)]
            cut += [("seeds", analysis.seeds or 0.0, RULE, INK)]
            x = 0.0
            for what, share, colour, ink in cut:
                share = 100 * max(0.0, share)
                (bar,) = axes.barh(i + 0.2, share, 0.45, x, color=colour)
                charts.tell(bar, f"{name}: {what} {share:.1f}%")
                if share > 6:
                    at = (x + share / 2, i + 0.2)
                    axes.text(*at, f"{share:.0f}", ha="center", va="center", color=ink)
                x += share
        axes.set(ylim=(len(found) - 0.5, -0.5), xlim=(0, max(100.0, axes.get_xlim()[1])))
        axes.set_yticks([])
        axes.set_xlabel("share of the variance, %")
        _key(made, keys, 18 * len(keys) + 4)
    return made.svg


def pareto_figure(rows: Sequence[Row], numbers: Mapping[int, int]) -> Markup:
    """Return KL against parameters and against seconds of training, stable runs; the frontier
    joined. numbers: by which the table next to the chart calls some of the rows.
    """
    kls = np.maximum(charts.drawable([row["kl"] for row in rows]), charts.SMALLEST)
    errors = charts.drawable([row.get("kl_se") or 0.0 for row in rows])
    errors = np.where(np.isfinite(errors), errors, 0.0)
    label = f"KL against parameters and seconds of {len(rows)} stable trials."
    with picture(2 * 260, label) as made:
        for top, xs, called in (
            (20, [float(row["parameters"]) for row in rows], "trainable parameters"),
            (280, [training_seconds(row) for row in rows], "seconds of start and training"),
        ):
            axes = made.axes(top, 190)
            ends = [*kls, *(kls + errors), *(kls - errors)]
            charts.scale(axes, "y", ends, log=True)
            across = charts.scale(axes, "x", xs)
            best = frontier(list(zip(xs, kls, strict=True)))
            floor = np.maximum(kls - errors, axes.get_ylim()[0])
            axes.vlines(xs, floor, kls + errors, color=RULE)
            axes.plot(xs, kls, "o", color=ZERO, markersize=3)
            axes.step(
                [xs[i] for i in best], kls[best], where="post", color=LINE, marker="D", markersize=5
            )
            axes.vlines([xs[i] for i in best], floor[best], (kls + errors)[best], color=INK)
            for i in best:
                axes.annotate(str(numbers[i]), (xs[i], kls[i]), (4, 3), textcoords="offset points")
            axes.set_xlabel(called + (", logarithmic" if across else ""))
            axes.set_title(
                "KL(teacher, student), nats, logarithmic; line: standard error", color=SOFT
            )
    return made.svg
