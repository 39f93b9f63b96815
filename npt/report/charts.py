"""Pictures as inline SVG that stretches with the page while its letters keep their size.

Places along a picture are percentages; lines lie in an inner picture that is stretched as a whole,
with strokes that are not. All colours are the style sheet's, so that light and dark need one
picture only, and nothing but a class stands for a meaning without a shape or a word beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from npt.report.buckets import Axis, Bucket
from npt.report.markup import number, text

PALETTE = (
    "#470d60", "#482374", "#453781", "#3e4989", "#375b8d", "#2f6b8e", "#297a8e", "#23898e",
    "#1f988b", "#22a785", "#32b67a", "#4ec36b", "#70cf57", "#98d83e", "#c2df23", "#ece51b",
)  # fmt: skip
"""Small to large: viridis, which keeps its order for every eye and in grey."""

DOTS = 80
"""Columns up to which each value gets a dot of its own."""

CROWDED = 60
"""Marks in a lane from which each is a line only."""

LARGEST, SMALLEST = 1e300, 1e-290
"""Size of a number beyond which it is drawn at the end of its scale, and of a span below which
numbers are drawn as one: neither their difference nor a tick between them is to overflow, or to
lose its digits."""

_POWER = math.floor(math.log10(LARGEST))  # of ten, whose multiples are numbers as well

_ROW = 20  # of lanes and bars, in pixels


@dataclass(frozen=True)
class Scale:
    """From a number to its place, 0 at the low end and 1 at the high one."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], log: bool | None = None) -> Scale | None:
        """The scale that these finite numbers need; None of none. log: default where they are
        positive and spread over a factor of 8.
        """
        if not values:
            return None
        low, high = (max(-LARGEST, min(LARGEST, value)) for value in (min(values), max(values)))
        if log is None:
            log = low > 0 and high > 8 * low
        if log:
            low, high = math.log10(max(low, SMALLEST)), math.log10(max(high, SMALLEST))
        if log and high - low < 1e-6:
            room = 0.5
        elif high - low <= max(SMALLEST, 1e-9 * max(abs(low), abs(high))):
            room = abs(low) / 2 if abs(low) > SMALLEST else 1.0
        else:
            room = 0.06 * (high - low)
        low_end = low - room
        return cls(max(0.0, low_end) if not log and low >= 0 else low_end, high + room, log)

    def place(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def ticks(self, count: int = 4) -> list[float]:
        """Round numbers along the scale, about so many."""
        if not self.log:
            return _round_numbers(self.low, self.high, count)
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        if len(powers) >= 3:
            apart = -(-len(powers) // count)
            return [10.0**power for power in powers if power % apart == 0 and power <= _POWER]
        decades = range(math.floor(self.low), min(_POWER, math.ceil(self.high)) + 1)
        round_ = [factor * 10.0**power for power in decades for factor in (1, 2, 5)]
        found = [value for value in round_ if self.low <= math.log10(value) <= self.high]
        if len(found) >= 2:
            return found
        return [value for value in _round_numbers(10**self.low, 10**self.high, count) if value > 0]


def _round_numbers(low: float, high: float, count: int) -> list[float]:
    size = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(size))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [
        round(i * step, 12 - math.floor(math.log10(step)))
        for i in range(first, math.floor(high / step + 1e-9) + 1)
    ]


def line_chart(
    axis: Axis,
    series: Sequence[tuple[str, Mapping[int, Bucket]]],
    label: str,
    log: bool | None = None,
    unit: str = "",
) -> str:
    """Lines over the steps. Of columns that hold several values a line shows the mean, a band
    around it all of them.

    Args:
        axis: of the steps.
        series: a class for the style sheet, and the columns; several share the scale.
        label: what a reader who does not see it is told.
        log: whether the scale is logarithmic; default where that shows more.
        unit: of the values, which stands over their scale.
    """
    finite = [
        x
        for _, found in series
        for bucket in found.values()
        if bucket.count
        for x in (bucket.low, bucket.high)
    ]
    scale = Scale.of(finite, log)
    parts = [_grid(scale), _steps(axis)]
    if scale is not None:
        parts.append(
            '<text class="tick" x="0"'
            f' y="-6">{text(", ".join(filter(None, (unit, "logarithmic" * scale.log))))}</text>'
        )
        for kind, found in series:
            parts.append(_inner(_paths(axis, found, scale, kind)))
            if len(found) <= DOTS:
                parts += [
                    f'<circle class="dot {kind}" cx="{_percent(axis.middle(i))}"'
                    f' cy="{_percent(1 - scale.place(x))}" r="2.5"/>'
                    for i, bucket in found.items()
                    for x in ({bucket.low, bucket.high} if bucket.count else ())
                ]
    bad = sorted({i for _, found in series for i, bucket in found.items() if bucket.bad})
    parts += [
        _mark(axis.middle(i), "5%", "cross", f"not finite at {step_text(axis, i)}")
        for i in bad[:200]
    ]
    return _svg("plot", 150, label, "".join(parts))


def _stretches(found: Mapping[int, Bucket]) -> list[list[tuple[int, Bucket]]]:
    """The columns in stretches that end where a number was not finite: a line through that would
    hide it.
    """
    stretches: list[list[tuple[int, Bucket]]] = [[]]
    for column, bucket in found.items():
        if bucket.count:
            stretches[-1].append((column, bucket))
        if bucket.bad:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _paths(axis: Axis, found: Mapping[int, Bucket], scale: Scale, kind: str) -> str:
    """The line of the means, and around it a band from the smallest to the largest values where a
    column has several.
    """
    line, band = [], []

    def points(ends: Iterable[tuple[int, float]]) -> str:
        return "L".join(
            f"{1000 * axis.middle(i):.1f} {1000 * (1 - scale.place(value)):.1f}"
            for i, value in ends
        )

    for stretch in _stretches(found):
        line.append(f"M{points((i, b.mean) for i, b in stretch)}")
        if any(b.low < b.high for _, b in stretch):
            there, back = (
                points((i, b.high) for i, b in stretch),
                points((i, b.low) for i, b in reversed(stretch)),
            )
            band.append(f"M{there}L{back}z")
    drawn = f'<path class="band {kind}" d="{"".join(band)}"/>' if band else ""
    return f'{drawn}<path class="line {kind}" d="{"".join(line)}"/>'


@dataclass(frozen=True)
class Mark:
    """What stands in one column of a lane. told: in words. hollow: it was undone."""

    told: str
    hollow: bool = False


def lanes(axis: Axis, rows: Sequence[tuple[str, str, Mapping[int, Mark]]], label: str) -> str:
    """Events over the steps, a lane for each kind.

    Args:
        axis: of the steps.
        rows: the kind's name, its shape (`_SHAPES`), and its marks by column.
        label: what a reader who does not see it is told.
    """
    height = _ROW * len(rows)
    parts = []
    for i, (name, shape, marks) in enumerate(rows):
        y = _ROW * i + _ROW // 2
        parts.append(
            f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/><text class="tick end" dx="-8"'
            f' y="{y}" dy="4">{text(name, 12)}</text>'
        )
        thin = " thin" if len(marks) > CROWDED else ""
        parts += [
            _mark(axis.middle(column), str(y), shape + thin, mark.told, mark.hollow)
            for column, mark in marks.items()
        ]
    return _svg("plot lanes", height, label, "".join(parts))


_SHAPES = {
    "refusal": "M-4.5-4.5h9L0 5z",
    "cross": "M-4-4 4 4M4-4-4 4",
    "bar": "M0-8V8",
    "thin": "M0-6V6",
    "square": "M-3-3h6v6h-6z",
    "diamond": "M0-5 5 0 0 5-5 0z",
}


def _mark(x: float, y: str, shape: str, told: str, hollow: bool = False) -> str:
    kind = f"mark {shape}{' hollow' if hollow else ''}"
    outline = _SHAPES["thin" if shape.endswith("thin") else shape]
    return (
        f'<svg class="at" x="{_percent(x)}" y="{y}"><path class="{kind}"'
        f' d="{outline}"><title>{told}</title></path></svg>'
    )


def heat_map(
    axis: Axis,
    layers: Sequence[int],
    cells: Mapping[int, Mapping[int, Bucket]],
    label: str,
    last: int | None = None,
) -> tuple[str, Scale | None]:
    """A line for each layer, a column for some steps, the largest value of each by its colour; and
    the scale of the colours.

    Where a run logs every so many steps, a value stands until the next one; the last one stands for
    no step behind `last`.
    """
    end = axis.columns if last is None else axis.column(last) + 1
    largest = [b.high for found in cells.values() for b in found.values() if b.count and b.high > 0]
    scale = Scale.of(largest, log=True)
    paths: dict[str, list[str]] = {}
    for row, layer in enumerate(layers):
        for start, width, kind in _runs(end, cells.get(layer, {}), scale):
            paths.setdefault(kind, []).append(f"M{start} {row}h{width}v1h-{width}z")
    body = "".join(
        f'<path class="{kind}" d="{"".join(found)}"/>' for kind, found in sorted(paths.items())
    )
    height = max(48, min(640, max(7, min(24, 320 // max(1, len(layers)))) * len(layers)))
    inner = (
        f'<svg width="100%" height="100%" viewBox="0 0 {axis.columns} {max(1, len(layers))}"'
        f' preserveAspectRatio="none" shape-rendering="crispEdges">{body}</svg>'
    )
    apart = max(1, math.ceil(13 * len(layers) / height))
    names = "".join(
        f'<text class="tick end" dx="-8" y="{_percent((row + 0.5) / len(layers))}"'
        f' dy="4">{layer}</text>'
        for row, layer in enumerate(layers)
        if row % apart == 0
    )
    return _svg("plot heat", height, label, inner + names + _steps(axis, lines=False)), scale


def _runs(
    columns: int, found: Mapping[int, Bucket], scale: Scale | None
) -> list[tuple[int, int, str]]:
    """Stretches of one colour along a line: (first column, columns, class)."""
    runs: list[tuple[int, int, str]] = []
    kind = ""
    for column in range(columns):
        bucket = found.get(column)
        if bucket is not None:
            kind = colour(bucket, scale)
        if not kind:
            continue
        if runs and runs[-1][2] == kind and sum(runs[-1][:2]) == column:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, kind)
        else:
            runs.append((column, 1, kind))
    return runs


def colour(bucket: Bucket, scale: Scale | None) -> str:
    """The class of a cell."""
    if bucket.bad or not bucket.count:
        return "broken"
    if scale is None or bucket.high <= 0:
        return "nought"
    return f"c{min(len(PALETTE) - 1, int(scale.place(bucket.high) * len(PALETTE)))}"


@dataclass(frozen=True)
class Stop:
    """A model on the way from floor to teacher. kind: of the style sheet. told: in words. low,
    high: the ends of its whisker.
    """

    kind: str
    place: float
    low: float
    high: float
    told: str


def track(stops: Sequence[Stop], label: str) -> str:
    """The way from floor (0) to teacher (1), and where models stand on it; it reaches as far as
    they do.
    """
    ends = [x for stop in stops for x in (stop.low, stop.high)]
    low, high = min([0.0, *ends]), max([1.0, *ends])
    room = 0.02 * (high - low)

    def at(x: float) -> str:
        return _percent((x - low + room) / (high - low + 2 * room))

    y = "50%"
    parts = [f'<line class="way" x1="{at(0)}" x2="{at(1)}" y1="{y}" y2="{y}"/>']
    student = next((stop for stop in stops if stop.kind == "student"), None)
    if student is not None:
        parts.append(
            f'<line class="gone" x1="{at(0)}" x2="{at(student.place)}" y1="{y}" y2="{y}"/>'
        )
    for stop in stops:
        if stop.high > stop.low:
            parts.append(
                f'<line class="whisker" x1="{at(stop.low)}" x2="{at(stop.high)}" y1="{y}"'
                f' y2="{y}"/>'
            )
    for stop in stops:
        parts.append(f'<svg class="at" x="{at(stop.place)}" y="{y}"><path class="stop {stop.kind}" d="{_STOPS[stop.kind]}">'
                     f"<title>{stop.told}</title></path></svg>")  # fmt: skip
    return _svg("track", 30, label, "".join(parts))


_STOPS = {
    "floor": "M-2-9h4V9h-4z",
    "teacher": "M-2-9h4V9h-4z",
    "initial": "M0-6 6 0 0 6-6 0z",
    "student": "M-6.5 0a6.5 6.5 0 1 0 13 0a6.5 6.5 0 1 0-13 0z",
}


@dataclass(frozen=True)
class Point:
    """A figure and its standard error, which is 0 where there is none."""

    value: float
    error: float = 0.0


def dots(
    rows: Sequence[tuple[str, Mapping[str, Point]]], scale: Scale, name: str, label: str
) -> str:
    """A line for each row with a mark for each figure, and its standard error as a whisker.

    Marks, not bars: a scale that is logarithmic or does not begin at 0 has no length that would say
    anything.

    Args:
        rows: a name, and by `student`, `initial`, `floor` the finite figures that there are.
        scale: of the figures.
        name: of the scale, with its unit.
        label: what a reader who does not see it is told.
    """
    height = _ROW * len(rows)
    parts = []
    for tick in scale.ticks():
        x = _percent(scale.place(tick))
        parts.append(
            f'<line class="grid" x1="{x}" x2="{x}" y2="{height}"/><text class="tick mid" x="{x}"'
            f' y="{height}" dy="14">{brief(tick)}</text>'
        )
    parts.append(f'<text class="tick mid" x="50%" y="{height}" dy="30">{text(name)}</text>')
    for i, (row, points) in enumerate(rows):
        y = _ROW * i + _ROW // 2
        parts.append(
            f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/><text class="tick end" dx="-8"'
            f' y="{y}" dy="4">{text(row, 12)}</text>'
        )
        for kind in (kind for kind in ("floor", "initial", "student") if kind in points):
            point = points[kind]
            told = f"{kind} {number(point.value)}" + (
                f" ± {number(point.error, 2)}" if point.error > 0 else ""
            )
            if point.error > 0:
                ends = (
                    _percent(scale.place(end))
                    for end in (point.value - point.error, point.value + point.error)
                )
                parts.append(
                    f'<line class="whisker {kind}" x1="{next(ends)}" x2="{next(ends)}" y1="{y}"'
                    f' y2="{y}"/>'
                )
            x = _percent(scale.place(point.value))
            parts.append(
                f'<svg class="at" x="{x}" y="{y}"><path class="stop {kind}"'
                f' d="{_STOPS[kind]}"><title>{text(f"{row}: {told}")}</title></path></svg>'
            )
    return _svg("plot dots", height, label, "".join(parts))


def histogram(counts: Sequence[int], label: str) -> str:
    """Counts over equal parts of a range, by the root of their share, so that what is rare is still
    seen.
    """
    peak = math.sqrt(max(counts, default=0)) or 1.0
    width = max(1, len(counts))
    outline = "".join(f"V{100 - 100 * math.sqrt(max(0, n)) / peak:.0f}h1" for n in counts)
    body = (
        f'<path class="hist" d="M0 100{outline}V100z"/><path class="one" d="M{width / 2:g} 0V100"/>'
    )
    return (
        f'<svg class="small" viewBox="0 0 {width} 100" preserveAspectRatio="none" role="img"'
        f' aria-label="{label}">{body}</svg>'
    )


def legend(scale: Scale | None) -> str:
    """The colours of a heat map, with the numbers at their ends."""
    if scale is None:
        return ""
    colours = "".join(f'<i class="c{i}"></i>' for i in range(len(PALETTE)))
    return (
        f'<p class="legend"><span>{number(10**scale.low, 2)}</span><span class="ramp"'
        f' aria-hidden="true">{colours}</span><span>{number(10**scale.high, 2)}</span><span'
        ' class=soft>logarithmic</span><span><i class="broken">×</i> not finite</span></p>'
    )


def step_text(axis: Axis, column: int) -> str:
    """The steps of a column in words."""
    low, high = axis.steps(column)
    return f"step {low:,}" if low >= high else f"steps {low:,} to {high:,}"


def _svg(kind: str, height: int, label: str, body: str) -> str:
    return f'<svg class="{kind}" height="{height}" role="img" aria-label="{label}">{body}</svg>'


def _inner(body: str) -> str:
    return (
        '<svg width="100%" height="100%" viewBox="0 0 1000 1000"'
        f' preserveAspectRatio="none">{body}</svg>'
    )


def _grid(scale: Scale | None) -> str:
    if scale is None:
        return ""
    parts = []
    for tick in scale.ticks():
        y = _percent(1 - scale.place(tick))
        parts.append(
            f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/><text class="tick end" dx="-8"'
            f' y="{y}" dy="4">{brief(tick)}</text>'
        )
    return "".join(parts)


def _steps(axis: Axis, lines: bool = True) -> str:
    """The steps below a picture."""
    span = axis.last - axis.first
    wanted = (
        [axis.first]
        if span == 0
        else [int(x) for x in _round_numbers(axis.first, axis.last, 5) if x == int(x)]
    )
    parts = ['<text class="tick mid" x="50%" y="100%" dy="29">step</text>']
    for step in wanted:
        x = _percent(axis.middle(axis.column(step)))
        line = f'<line class="grid" x1="{x}" x2="{x}" y1="0" y2="100%"/>' if lines else ""
        parts.append(f'{line}<text class="tick mid" x="{x}" y="100%" dy="15">{step:,}</text>')
    return "".join(parts)


def brief(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return (
            f"{value:.0e}".replace("e-0", "e−")
            .replace("e+0", "e")
            .replace("e-", "e−")
            .replace("e+", "e")
        )
    return f"{value:,.10g}".replace("-", "−")


def _percent(part: float) -> str:
    return f"{100 * part:.2f}".rstrip("0").rstrip(".") + "%"
