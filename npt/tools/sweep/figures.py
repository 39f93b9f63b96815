"""A study's pictures, as SVG that stands in a page and by itself.

Each is about as wide as a phone, so that its letters can be read there, and grows with the screen
from that. Colours are the page's, light or dark; those of a map are told apart by every eye, and
each meaning has a shape or a word beside its colour. What is not finite is left out: the tables
beside the pictures say so. The same table gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npt.report import charts
from npt.report.charts import PALETTE, Scale, brief
from npt.report.markup import clean, number, text
from npt.tools.sweep.analysis import Map, frontier, training_seconds
from npt.tools.sweep.effects import Analysis

WIDTH, EDGE = 400.0, 22.0
"""Of a picture, and of its margin on each side: half of a tick's number has room there."""

CELL = 44.0
"""Least width of a map's cell, which holds a number of three digits."""

HARMLESS = 1.25
"""Factor of the loss on each side of 1 that the axis of harm has at least."""

_ROW, _LINE, _TICK_ROOM, _LETTERS = 30.0, 14.0, 34.0, 53

Row = Mapping[str, Any]

STYLE = """
.drawn { display: block; width: 100%; max-width: 30rem; height: auto; overflow: hidden }
.drawn.wide { max-width: none }
.drawn text { fill: var(--ink); font: 11px system-ui, sans-serif }
.drawn .soft { fill: var(--soft) }
.drawn .head { font-weight: 600 }
.drawn .mid { text-anchor: middle }
.drawn .end { text-anchor: end }
.drawn .rule { stroke: var(--rule); stroke-width: 1; fill: none }
.drawn .error { stroke: var(--ink); stroke-width: 1.5 }
.drawn .bracket { stroke: var(--line); stroke-width: 2.5; fill: none }
.drawn .good { fill: var(--line) }
.drawn .other { fill: var(--zero) }
.drawn .bad { stroke: var(--bad); stroke-width: 2.2; fill: none }
.drawn .edge { stroke: var(--ink); stroke-width: 3; fill: none }
.drawn .under { stroke: var(--paper); stroke-width: 6; fill: none }
.drawn .failed { fill: var(--bad) }
.drawn .worse { fill: #f0a860 }
.drawn .rest { fill: var(--zero) }
.drawn .seeds { fill: var(--rule) }
.drawn .on-dark { fill: #ffffff }
.drawn .on-bright { fill: #10141a }
"""


def standalone(svg: str) -> str:
    """The picture as a file of its own: with the page's colours, light or dark, and its own style."""
    sheet = (Path(charts.__file__).parent / "style.css").read_text(encoding="utf-8")
    colours = sheet[: sheet.index("* {")] + "svg { background: var(--paper) }"
    palette = "".join(f".c{i} {{ fill: {colour} }}" for i, colour in enumerate(PALETTE))
    return svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "<desc>", f"<style>{colours}{palette}{STYLE}</style><desc>", 1
    )


@dataclass(frozen=True)
class _Mark:
    """A figure on a line. kind: dot, diamond or cross. low, high: of its interval."""

    value: float | None
    kind: str = "dot"
    low: float | None = None
    high: float | None = None


_SHAPES = {
    "dot": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "diamond": "M0-5 5 0 0 5-5 0z",
    "cross": "M-4-4 4 4M4-4-4 4",
    "small": "M-2 0a2 2 0 1 0 4 0a2 2 0 1 0-4 0z",
}
_CLASSES = {"dot": "good", "diamond": "good", "cross": "bad", "small": "other"}


def map_figure(found: Map) -> str:
    """Outcomes by learning rate and setting, with the edge of what trains drawn through them."""
    columns = len(found.heads)
    cell = max(CELL, (WIDTH - 2 * EDGE) / columns)
    width = 2 * EDGE + cell * columns
    kls = [
        cell.kl
        for cell in found.cells.values()
        if not cell.failed and cell.kl and math.isfinite(cell.kl)
    ]
    scale = Scale.of(kls, log=True)
    parts = [_text(EDGE, 12, f"rows: {found.setting}", "head")]
    top = 18.0
    for i, line in enumerate(found.lines):
        y = top + i * (_ROW + 8)
        parts.append(_text(EDGE, y + 11, _short(line)))
        for j in range(columns):
            if (i, j) in found.cells:
                parts.append(
                    _map_cell(found, i, j, scale, EDGE + j * cell, y + _LINE, cell, _ROW - 8)
                )
    parts.append(_edge(found, top, cell))
    y = top + len(found.lines) * (_ROW + 8) + 10
    for j, head in enumerate(found.heads):
        for k, word in enumerate(head.split(" to ")):
            parts.append(
                _text(EDGE + (j + 0.5) * cell, y + 12 * k, f"to {word}" if k else word, "mid soft")
            )
    y += 12 * max(len(head.split(" to ")) for head in found.heads) + 4
    parts.append(
        _text(width / 2, y, "columns: learning rate, one for each that was tried", "mid head")
    )
    legend, y = _map_legend(scale, y + 10)
    told = f"Outcomes of part {found.part} by learning rate, {len(found.lines)} settings."
    return _svg(width, y, told, [*parts, legend])


def _map_cell(
    found: Map, i: int, j: int, scale: Scale | None, x: float, y: float, width: float, height: float
) -> str:
    cell = found.cells[i, j]
    shade = None
    if not cell.failed and cell.kl is not None and math.isfinite(cell.kl) and scale is not None:
        shade = min(len(PALETTE) - 1, int(scale.place(cell.kl) * len(PALETTE)))
    failed = f"{round(cell.failed * cell.count)}/{cell.count}" if cell.count > 1 else ""
    shown = (
        number(cell.kl, 3)
        if shade is not None
        else "–"
        if not cell.failed
        else f"{'✕' if cell.diverged else '↑'} {failed}".strip()
    )
    kind = (
        f"c{shade}"
        if shade is not None
        else "rest"
        if not cell.failed
        else "failed"
        if cell.diverged
        else "worse"
    )
    ink = "on-dark" if kind == "failed" or (shade is not None and shade <= 7) else "on-bright"
    failures = f"{round(cell.failed * cell.count)} of {cell.count} failed"
    told = text(
        f"{found.lines[i]}, learning rate {found.heads[j]}: median KL {number(cell.kl)}, {failures}"
    )
    return (
        f'<rect class="{kind}" x="{x + 0.5:.1f}" y="{y:.1f}" width="{width - 1:.1f}"'
        f' height="{height:.1f}"><title>{told}</title></rect>'
        + _text(x + width / 2, y + height / 2 + 4, shown, f"mid {ink}")
    )


def _edge(found: Map, top: float, cell: float) -> str:
    """The line between the rates that train and the others, through the cells of every line of the
    map.
    """
    path = ""
    for i in range(len(found.lines)):
        there = sorted(j for k, j in found.cells if k == i)
        place = next((j for j in there if found.cells[i, j].failed), there[-1] + 1)
        y = top + i * (_ROW + 8) + _LINE
        path += f"M{EDGE + place * cell:.1f} {y - 2:.1f}v{_ROW - 4:.1f}"
    return f'<path class="under" d="{path}"/><path class="edge" d="{path}"/>'


def _map_legend(scale: Scale | None, y: float) -> tuple[str, float]:
    """What the colours and signs of a map mean; and where that ends."""
    parts = []
    if scale is not None:
        parts.append(
            _text(EDGE, y + 10, "colour and number: median KL in the end, nats, logarithmic")
        )
        parts += [
            f'<rect class="c{i}" x="{EDGE + 40 + 12 * i:.0f}" y="{y + 16:.1f}" width="12"'
            ' height="10"/>'
            for i in range(len(PALETTE))
        ]
        parts.append(_text(EDGE + 36, y + 25, number(10**scale.low, 3), "end soft"))
        parts.append(
            _text(EDGE + 44 + 12 * len(PALETTE), y + 25, number(10**scale.high, 3), "soft")
        )
        y += 32
    for kind, ink, sign, words in (
        ("worse", "on-bright", "↑", "ended worse, of so many"),
        ("failed", "on-dark", "✕", "diverged, of so many"),
    ):
        parts.append(f'<rect class="{kind}" x="{EDGE:.0f}" y="{y:.1f}" width="16" height="12"/>')
        parts += [_text(EDGE + 8, y + 10, sign, f"mid {ink}"), _text(EDGE + 22, y + 10, words)]
        y += 16
    parts.append(
        f'<path class="edge" d="M{EDGE + 8:.0f} {y:.1f}v12"/>'
        + _text(EDGE + 22, y + 10, "the edge: from here on some trial failed")
    )
    return "".join(parts), y + 20


def limits_figure(rows: Sequence[tuple[str, float | None, float | None]], setting: str) -> str:
    """Brackets of the largest value that trains: a dot where it still does, a cross where it does
    not any more.
    """
    lines = [
        (name, [_Mark(low, "dot", low, high), _Mark(high, "cross")]) for name, low, high in rows
    ]
    drawn, y = _rows(
        lines, _scale(lines, log=True), f"{setting}, logarithmic: ● trains   ✕ does not", 4
    )
    return _svg(WIDTH, y, f"Limits of {len(rows)} settings.", [drawn])


def faults_figure(rows: Sequence[Row], names: Sequence[str]) -> str:
    """What a fault did: the loss of one window right behind it over that right before, and the KL
    that the run ended with.
    """
    harm = [
        (name, [_Mark(row["fault_harm"], "cross" if row["fault_refused"] else "dot")])
        for name, row in zip(names, rows, strict=True)
    ]
    end = [
        (name, [_with_error(row["kl"], row.get("kl_se"), "diamond")])
        for name, row in zip(names, rows, strict=True)
    ]
    # what is no harm is not to look like some
    reach = [("", [_Mark(1 / HARMLESS), _Mark(HARMLESS)])]
    first, y = _rows(
        harm,
        _scale(harm + reach, log=True),
        "loss behind the fault over before:  ● applied   ✕ refused",
        20,
    )
    second, end_y = _rows(
        end, _scale(end, log=True), "KL in the end, nats; line: one standard error", y + 30
    )
    heads = [_text(EDGE, 14, "harm", "head"), _text(EDGE, y + 24, "KL", "head")]
    return _svg(
        WIDTH,
        end_y,
        f"Loss around the fault, and KL in the end, of {len(rows)} trials.",
        [*heads, first, second],
    )


def effects_figure(found: Sequence[Analysis]) -> str:
    """Main effects with their intervals: a line for each level, under each other by setting, for
    each response.
    """
    parts, y = [], 0.0
    for analysis in found:
        parts.append(_text(EDGE, y + 14, analysis.response, "head"))
        y += 20
        lines: list[tuple[str, list[_Mark]]] = []
        for effect in analysis.effects:
            lines.append(
                (
                    f"{effect.setting}: {effect.level}, {effect.count} trials",
                    [_Mark(effect.mean, "dot", effect.low, effect.high)],
                )
            )
        scale = Scale(-0.04, 1.04, False) if analysis.chance else _scale(lines, log=False)
        drawn, y = _rows(lines, scale, f"{analysis.response}; line: 95% interval", y)
        parts.append(drawn)
        y += 12
    told = "; ".join(
        f"{len(analysis.effects)} effects on {analysis.response}" for analysis in found
    )
    return _svg(WIDTH, y, f"Main effects: {told}.", parts)


def shares_figure(found: Sequence[tuple[str, Analysis]]) -> str:
    """Which setting explains the variance: a bar for each part and response, cut into shares."""
    settings = list(dict.fromkeys(name for _, analysis in found for name in analysis.shares))
    shade = {
        name: round(i * (len(PALETTE) - 1) / max(1, len(settings) - 1))
        for i, name in enumerate(settings)
    }
    whole = max([1.0, *(sum(a.shares.values()) + a.together + (a.seeds or 0.0) for _, a in found)])
    room = (WIDTH - 2 * EDGE) / whole
    parts, y = [], 4.0
    for name, analysis in found:
        parts.append(_text(EDGE, y + 11, _short(name)))
        cut = [(setting, share, f"c{shade[setting]}") for setting, share in analysis.shares.items()]
        cut += [
            (analysis.rest, analysis.together, "rest"),
            ("seeds", analysis.seeds or 0.0, "seeds"),
        ]
        x = EDGE
        for what, share, kind in cut:
            width = max(0.0, share) * room
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y + _LINE:.1f}" width="{width:.1f}"'
                ' height="16">'
                f"<title>{text(f'{name}: {what} {100 * share:.1f}%')}</title></rect>"
            )
            if width > 24:
                ink = (
                    "on-dark"
                    if kind[1:].isdigit() and int(kind[1:]) <= 7
                    else "on-bright"
                    if kind[0] == "c"
                    else ""
                )
                parts.append(
                    _text(x + width / 2, y + _LINE + 12, f"{100 * share:.0f}", f"mid {ink}")
                )
            x += width
        y += _ROW + 6
    parts.append(f'<path class="rule" d="M{EDGE:.1f} {y:.1f}h{WIDTH - 2 * EDGE:.1f}"/>')
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_text(EDGE + part * room, y + 14, f"{100 * part:.0f}", "mid soft"))
    parts.append(_text(WIDTH / 2, y + 28, "share of the variance, %", "mid head"))
    y += 36
    named = [(name, f"c{shade[name]}") for name in settings] + [
        ("together: what settings do together", "rest"),
        ("seeds: noise", "seeds"),
    ]
    for name, kind in named:
        parts.append(
            f'<rect class="{kind}" x="{EDGE:.0f}" y="{y:.1f}" width="16" height="12"/>'
            + _text(EDGE + 22, y + 10, _short(name))
        )
        y += 16
    return _svg(
        WIDTH,
        y + 4,
        f"Shares of the variance by setting, of {len(found)} parts and responses.",
        parts,
    )


def pareto_figure(rows: Sequence[Row], numbers: Mapping[int, int]) -> str:
    """KL against parameters and against seconds of training, stable runs; the frontier joined.
    numbers: by which the table beside the picture calls some of the rows."""
    kls = [float(row["kl"]) for row in rows]
    errors = [_finite(row.get("kl_se")) or 0.0 for row in rows]
    up = Scale.of(
        [
            end
            for kl, error in zip(kls, errors, strict=True)
            for end in (kl, kl + error, kl - error)
            if end > 0
        ],
        log=True,
    )
    assert up is not None
    parts, y, height = (
        [_text(EDGE, 12, "KL(teacher, student), nats, logarithmic", "head")],
        38.0,
        180.0,
    )
    parts.append(
        _text(EDGE, 26, "line: one standard error; joined: none is better in both", "soft")
    )
    left = EDGE + 30
    for xs, called in (
        ([float(row["parameters"]) for row in rows], "trainable parameters"),
        ([training_seconds(row) for row in rows], "seconds of start and training"),
    ):
        across = Scale.of(xs)
        assert across is not None
        at = [
            (left + across.place(x) * (WIDTH - EDGE - left), y + (1 - up.place(kl)) * height)
            for x, kl in zip(xs, kls, strict=True)
        ]
        for tick in _apart(up, height, 16):
            place = y + (1 - up.place(tick)) * height
            parts.append(
                f'<path class="rule" d="M{left:.1f} {place:.1f}H{WIDTH - EDGE:.1f}"/>'
                + _text(left - 4, place + 4, brief(tick), "end soft")
            )
        for tick in _apart(across, WIDTH - EDGE - left, _TICK_ROOM + 14):
            place = left + across.place(tick) * (WIDTH - EDGE - left)
            parts.append(
                f'<path class="rule" d="M{place:.1f} {y:.1f}v{height:.1f}"/>'
                + _text(place, y + height + 13, brief(tick), "mid soft")
            )
        best = frontier(list(zip(xs, kls, strict=True)))
        joined = f"M{at[best[0]][0]:.1f} {at[best[0]][1]:.1f}" + "".join(
            f"H{at[i][0]:.1f}V{at[i][1]:.1f}" for i in best[1:]
        )
        parts.append(f'<path class="bracket" d="{joined}"/>')
        for i, (kl, error) in enumerate(zip(kls, errors, strict=True)):
            if error > 0:
                low, high = (
                    y + (1 - up.place(max(end, 0.0))) * height for end in (kl - error, kl + error)
                )
                parts.append(
                    f'<path class="{"error" if i in best else "rule"}" d="M{at[i][0]:.1f}'
                    f' {low:.1f}V{high:.1f}"/>'
                )
        parts += [_shape("diamond" if i in best else "small", *at[i]) for i in range(len(rows))]
        parts += [_text(min(at[i][0] + 6, WIDTH - 14), at[i][1] - 5, str(numbers[i])) for i in best]
        parts.append(
            _text(
                (left + WIDTH - EDGE) / 2,
                y + height + 28,
                called + (", logarithmic" if across.log else ""),
                "mid head",
            )
        )
        y += height + 46
    return _svg(
        WIDTH, y - 10, f"KL against parameters and seconds of {len(rows)} stable trials.", parts
    )


def _with_error(value: float | None, error: float | None, kind: str) -> _Mark:
    value, error = _finite(value), _finite(error)
    return (
        _Mark(value, kind)
        if value is None or not error
        else _Mark(value, kind, value - error, value + error)
    )


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _scale(lines: Iterable[tuple[str, Sequence[_Mark]]], log: bool) -> Scale | None:
    ends = [
        end
        for _, marks in lines
        for mark in marks
        for x in (mark.value, mark.low, mark.high)
        if (end := _finite(x)) is not None
    ]
    return Scale.of([end for end in ends if end > 0] if log else ends, log)


def _rows(
    lines: Sequence[tuple[str, Sequence[_Mark]]], scale: Scale | None, called: str, y: float
) -> tuple[str, float]:
    """A named line for each row with its marks on a common scale; and where it ends."""
    room = WIDTH - 2 * EDGE
    bottom = y + len(lines) * _ROW + 2
    parts = []
    for tick in _apart(scale, room, _TICK_ROOM) if scale is not None else ():
        x = EDGE + scale.place(tick) * room if scale is not None else EDGE
        parts.append(
            f'<path class="rule" d="M{x:.1f} {y:.1f}V{bottom:.1f}"/>'
            + _text(x, bottom + 13, brief(tick), "mid soft")
        )
    for i, (name, marks) in enumerate(lines):
        middle = y + i * _ROW + 22
        parts.append(_text(EDGE, y + i * _ROW + 12, _short(name)))
        parts.append(f'<path class="rule" d="M{EDGE:.1f} {middle:.1f}h{room:.1f}"/>')
        drawn = [
            mark
            for mark in marks
            if scale is not None
            and (_finite(mark.value) is not None)
            and not (scale.log and (mark.value or 0) <= 0)
        ]
        for mark in drawn:
            assert scale is not None and mark.value is not None
            if mark.low is not None and mark.high is not None:
                ends = [EDGE + scale.place(end) * room for end in (mark.low, mark.high)]
                kind = "bracket" if len(marks) > 1 else "error"
                parts.append(
                    f'<path class="{kind}" d="M{ends[0]:.1f} {middle:.1f}H{ends[1]:.1f}"/>'
                )
        for mark in drawn:
            assert scale is not None and mark.value is not None
            parts.append(
                _shape(
                    mark.kind,
                    EDGE + scale.place(mark.value) * room,
                    middle,
                    f"{name}: {number(mark.value)}",
                )
            )
        if not drawn:
            parts.append(_text(WIDTH - EDGE, middle - 10, "not finite", "end"))
    parts.append(_text(WIDTH / 2, bottom + 28, called, "mid head"))
    return "".join(parts), bottom + 36


def _apart(scale: Scale, room: float, least: float) -> list[float]:
    """The scale's ticks, but for those whose numbers would touch."""
    found: list[float] = []
    for tick in scale.ticks():
        if not found or (scale.place(tick) - scale.place(found[-1])) * room >= least:
            found.append(tick)
    return found


def _shape(kind: str, x: float, y: float, told: str = "") -> str:
    title = f"<title>{text(told)}</title>" if told else ""
    return (
        f'<path class="{_CLASSES[kind]}" transform="translate({x:.1f} {y:.1f})"'
        f' d="{_SHAPES[kind]}">{title}</path>'
    )


def _text(x: float, y: float, content: str, kind: str = "") -> str:
    return f'<text class="{kind.strip()}" x="{x:.1f}" y="{y:.1f}">{text(content)}</text>'


def _svg(width: float, height: float, told: str, parts: Iterable[str]) -> str:
    wide = f'class="drawn wide" width="{width:.0f}"' if width > WIDTH else 'class="drawn"'
    size = "" if width > WIDTH else ' width="400"'
    return (
        f'<svg {wide}{size} viewBox="0 0 {width:.0f} {math.ceil(height)}" role="img"'
        f' aria-label="{text(told)}"><desc>{text(told)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _short(name: str) -> str:
    name = clean(name)
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"
