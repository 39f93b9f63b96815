"""A study's pictures, as PNG. Colours are told apart by every eye, and each meaning has a shape or a word beside its colour.

The same table gives the same bytes.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from npt.sweep.analysis import Analysis, Map, frontier, training_seconds

_DPI = 130
_BAD, _WORSE, _INK, _LINE = "#c5162a", "#f0a860", "#1c2127", "#0a58a8"
_HARMLESS = 1.25
"""Factor of the loss on each side of 1 that the axis of harm has at least."""

Row = Mapping[str, Any]


def _drawn(make: Callable[[Any], None], width: float, height: float) -> bytes:
    import matplotlib
    import matplotlib.style
    from matplotlib.figure import Figure

    # The settings of whoever uses matplotlib in this process stay out of the picture, and a `$` in a name is no formula.
    settings: Any = {"text.parse_math": False, "font.size": 9}
    with matplotlib.style.context("default"), matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(width, height), layout="constrained")
        make(figure)
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=_DPI, metadata={"Software": None})
    return stream.getvalue()


def map_figure(found: Map) -> bytes:
    """Outcomes by learning rate and setting, with the edge of what trains drawn through them."""
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    kls = [math.log10(cell.kl) for cell in found.cells.values() if not cell.failed and cell.kl]
    scale = Normalize(min(kls, default=0.0), max(max(kls, default=1.0), min(kls, default=0.0) + 1e-6))

    def make(figure: Any) -> None:
        axes = figure.add_subplot()
        colours = _viridis()
        for (i, j), cell in found.cells.items():
            value = None if cell.kl is None else math.log10(max(cell.kl, 1e-12))
            shade = None if cell.failed or value is None else float(scale(value))
            fine = shade is not None
            colour = colours(shade) if fine else _BAD if cell.diverged else _WORSE
            axes.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="white", linewidth=1))
            bright = not cell.diverged if shade is None else shade > 0.6
            shown = f"{cell.kl:.3g}" if fine else f"{'✕' if cell.diverged else '↑'} {_share(cell.failed, cell.count)}"
            axes.text(j + 0.5, i + 0.5, shown, ha="center", va="center", fontsize=7.5, color=_INK if bright else "white")
        _edge(axes, found)
        axes.set_xlim(0, len(found.heads))
        axes.set_ylim(len(found.lines), 0)
        axes.set_xticks([j + 0.5 for j in range(len(found.heads))], found.heads, rotation=45, ha="right")
        axes.set_yticks([i + 0.5 for i in range(len(found.lines))], [_short(line) for line in found.lines])
        axes.set_xlabel("learning rate", fontsize=8)
        figure.supxlabel("number: KL where all trained, dark is near   ↑ ended worse   ✕ diverged   black: the edge", fontsize=8)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)

    return _drawn(make, max(6.2, 2.6 + 0.72 * len(found.heads)), 1.5 + 0.34 * len(found.lines))


def _edge(axes: Any, found: Map) -> None:
    """The line between the rates that train and the others, through all lines of the map."""
    columns = [sorted(j for k, j in found.cells if k == i) for i in range(len(found.lines))]
    place = [next((j for j in there if found.cells[i, j].failed), there[-1] + 1) for i, there in enumerate(columns)]
    xs, ys = [], []
    for i, x in enumerate(place):
        xs += [x, x]
        ys += [i, i + 1]
    axes.plot(xs, ys, color="white", linewidth=5, solid_joinstyle="miter", clip_on=False)
    axes.plot(xs, ys, color="black", linewidth=2.5, solid_joinstyle="miter", clip_on=False)


def limits_figure(rows: Sequence[tuple[str, float | None, float | None]], setting: str) -> bytes:
    """Brackets of the largest value that trains: a dot where it still does, a cross where it does not any more."""

    def make(figure: Any) -> None:
        axes = figure.add_subplot()
        for i, (_, low, high) in enumerate(rows):
            if low is not None and high is not None:
                axes.plot([low, high], [i, i], color=_LINE, linewidth=2)
            if low is not None:
                axes.plot([low], [i], "o", color=_LINE, markersize=6)
            if high is not None:
                axes.plot([high], [i], "x", color=_BAD, markersize=7, markeredgewidth=2)
        _logarithmic(axes, "x")
        axes.set_yticks(range(len(rows)), [_short(name) for name, _, _ in rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"{setting}: ● trains   ✕ does not")
        axes.grid(axis="x", alpha=0.3)

    return _drawn(make, 7.5, 1.1 + 0.32 * len(rows))


def pareto_figure(rows: Sequence[Row], numbers: Mapping[int, int]) -> bytes:
    """KL against parameters and against seconds of training, stable runs; the frontier joined. numbers: by which the table beside the
    picture calls some of the rows."""
    points = [(float(row["parameters"]), training_seconds(row), float(row["kl"])) for row in rows]

    def make(figure: Any) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, x, called in zip(panels, (0, 1), ("trainable parameters", "seconds of start and training"), strict=True):
            pairs = [(point[x], point[2]) for point in points]
            best = frontier(pairs)
            axes.plot([pairs[i][0] for i in best], [pairs[i][1] for i in best], color=_LINE, linewidth=1.5, drawstyle="steps-post")
            axes.plot([a for a, _ in pairs], [b for _, b in pairs], "o", color="#8a949e", markersize=3.5, zorder=1)
            axes.plot([pairs[i][0] for i in best], [pairs[i][1] for i in best], "D", color=_LINE, markersize=5, zorder=3)
            for i in best:
                axes.annotate(str(numbers[i]), pairs[i], xytext=(4, 4), textcoords="offset points", fontsize=7.5)
            axes.set_xlabel(called)
            if len({a for a, _ in pairs}) > 1:
                _logarithmic(axes, "x")
            _logarithmic(axes, "y")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("KL(teacher, student), nats")

    return _drawn(make, 10.5, 4.2)


def effects_figure(found: Sequence[Analysis]) -> bytes:
    """Main effects with their intervals: a panel for each setting, a line of panels for each response."""
    settings = list(dict.fromkeys(effect.setting for analysis in found for effect in analysis.effects))
    widths = [max(1.4, 0.42 * len({e.level for a in found for e in a.effects if e.setting == name})) for name in settings]

    def make(figure: Any) -> None:
        grid = figure.subplots(len(found), len(settings), sharey="row", squeeze=False, width_ratios=widths)
        for line, analysis in zip(grid, found, strict=True):
            for axes, name in zip(line, settings, strict=True):
                own = [effect for effect in analysis.effects if effect.setting == name]
                if not own:
                    axes.set_axis_off()
                    continue
                for i, effect in enumerate(own):
                    if effect.low is not None:
                        axes.plot([i, i], [effect.low, effect.high], color=_INK, linewidth=1.5)
                joined = "o-" if all(_is_number(effect.level) for effect in own) else "o"
                axes.plot(range(len(own)), [effect.mean for effect in own], joined, color=_LINE, markersize=5, linewidth=1)
                axes.set_xticks(range(len(own)), [_short(effect.level, 18) for effect in own], rotation=50, ha="right", fontsize=7.5)
                axes.set_xlim(-0.6, len(own) - 0.4)
                axes.set_title(name, fontsize=8.5)
                axes.grid(axis="y", alpha=0.3)
            line[0].set_ylabel(analysis.response, fontsize=8.5)

    return _drawn(make, min(14.0, 1.5 + sum(widths)), 0.8 + 2.5 * len(found))


def shares_figure(found: Sequence[tuple[str, Analysis]]) -> bytes:
    """Which setting explains the variance: a bar for each part and response, cut into shares."""
    settings = list(dict.fromkeys(name for _, analysis in found for name in analysis.shares))

    def make(figure: Any) -> None:
        axes = figure.add_subplot()
        colours = [_viridis()(x) for x in np.linspace(0.05, 0.95, max(2, len(settings)))]
        named: set[str] = set()
        for i, (_, analysis) in enumerate(found):
            left = 0.0
            parts = [(name, analysis.shares.get(name, 0.0), colours[k]) for k, name in enumerate(settings)]
            parts += [(analysis.rest, analysis.together, "#b9c0c7"), ("seeds", analysis.seeds or 0.0, "#e4e7ea")]
            for k, (name, share, colour) in enumerate(parts):
                axes.barh(i, share, left=left, color=colour, edgecolor="white", height=0.7, label=None if name in named else name)
                named.add(name)
                if share > 0.045:
                    dark = k < len(settings) and k < 0.6 * len(settings)
                    axes.text(
                        left + share / 2, i, f"{100 * share:.0f}", ha="center", va="center", fontsize=7.5, color="white" if dark else _INK
                    )
                left += share
        axes.set_yticks(range(len(found)), [_short(name, 46) for name, _ in found])
        axes.invert_yaxis()
        axes.set_xlim(0, max(1.0, *(sum(a.shares.values()) + a.together + (a.seeds or 0.0) for _, a in found)))
        axes.set_xlabel("share of the variance; together: what settings do together; seeds: noise")
        axes.legend(ncols=4, fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)

    return _drawn(make, 10.0, 1.5 + 0.42 * len(found) + 0.2 * (len(settings) // 4))


def faults_figure(rows: Sequence[Row], names: Sequence[str]) -> bytes:
    """What a fault did: the loss of one window right behind it over that right before, and the KL that the run ended with."""

    def make(figure: Any) -> None:
        harm, end = figure.subplots(1, 2, sharey=True)
        for i, row in enumerate(rows):
            refused = bool(row["fault_refused"])
            if row["fault_harm"] is None:
                harm.text(0.98, i, "not finite", transform=harm.get_yaxis_transform(), ha="right", va="center", fontsize=7.5, color=_BAD)
            elif row["fault_harm"] > 0:
                harm.plot([row["fault_harm"]], [i], "x" if refused else "o", color=_BAD if refused else _LINE, markersize=6)
            if row["kl"] is not None and row["kl"] > 0:
                end.plot([row["kl"]], [i], "D", color=_INK, markersize=5)
        harm.axvline(1.0, color="#8a949e", linewidth=1, zorder=0)
        harm.set_yticks(range(len(rows)), [_short(name) for name in names])
        harm.invert_yaxis()
        harm.update_datalim([(1 / _HARMLESS, 0), (_HARMLESS, 0)], updatey=False)  # what is no harm is not to look like some
        for axes, called in ((harm, "loss behind over before:  ● applied   ✕ refused"), (end, "KL in the end")):
            _logarithmic(axes, "x")
            axes.set_xlabel(called)
            axes.grid(axis="x", alpha=0.3)

    return _drawn(make, 10.0, 1.1 + 0.3 * len(rows))


def _logarithmic(axes: Any, which: str) -> None:
    """A logarithmic axis whose numbers are written out: matplotlib's own are formulas, which are switched off."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    span = high / low if 0 < low <= high < math.inf else 1.0  # without a point the interval is turned round
    if span < 4:  # a decade's round numbers may all lie outside
        axis.set_major_locator(MaxNLocator(6))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if span < 100 else (1.0,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _viridis() -> Any:
    import matplotlib

    return matplotlib.colormaps["viridis"]


def _is_number(level: str) -> bool:
    try:
        float(level)
    except ValueError:
        return False
    return True


def _share(failed: float, count: int) -> str:
    return f"{round(failed * count)}/{count}" if count > 1 else ""


def _short(name: str, letters: int = 48) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "…"
