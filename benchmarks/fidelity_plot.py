"""Fidelity against parameters: KL(teacher, student) of every row of `real.py`, as one plot.

    python benchmarks/fidelity_plot.py [FILE ...] [--out benchmarks/results/fidelity.svg]

FILE is what `real.py --out` wrote; without one the files `real*.json` in benchmarks/results are
read. Each model has a colour; a dashed line is the KL that NF4 itself costs it, a dotted one its
floor, the upper half without attention. The picture has the colours of the reader's screen, light
or dark.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npt.errors import ConfigError, NPTError
from npt.files import write_text
from npt.report import charts
from real_tables import QUANTIZATION_ROW

RESULTS = Path(__file__).parent / "results"
OUT = RESULTS / "fidelity.svg"

LINES = {QUANTIZATION_ROW: ("--", "cost of NF4 itself"), "floor": (":", "without attention")}
"""Rows without parameters: how they are drawn, and what they are."""

COLOURS = (charts.LINE, charts.SECOND, charts.GOOD, charts.BAD)
MARKERS = ("o", "s", "D", "^")
WIDTH, HEIGHT, SHOWN = 480, 400, 1.5  # drawn for a phone, and shown larger elsewhere


@dataclass(frozen=True)
class Point:
    """One row: trainable parameters, KL and its standard error in nats."""

    name: str
    parameters: int
    kl: float
    error: float

    @property
    def drawn(self) -> bool:
        """True if a logarithmic axis has a place for it."""
        return math.isfinite(self.kl) and self.kl > 0


@dataclass(frozen=True)
class Measured:
    """The rows of one model. heldout: tokens that they are measured on."""

    model: str
    heldout: int
    points: list[Point]

    def line(self, name: str) -> float | None:
        """Return the KL of a row without parameters, None if there is none to draw."""
        return next((p.kl for p in self.points if p.name == name and p.drawn), None)

    @property
    def lines(self) -> dict[str, float]:
        """Of LINES, the KL of those that are drawn."""
        return {name: kl for name in LINES if (kl := self.line(name)) is not None}

    @property
    def students(self) -> list[Point]:
        return [p for p in self.points if p.parameters > 0 and p.drawn]


def of_json(found: Mapping[str, Any]) -> Measured:
    """Return the rows of a file that `real.py` wrote."""
    points = []
    for row in found["rows"]:
        kl, error = (row["figures"].get(key) for key in ("kl", "kl_se"))
        values = (math.nan if value is None else float(value) for value in (kl, error))
        points.append(Point(row["name"], row.get("parameters") or 0, *values))
    return Measured(found["model"], found["text"]["heldout_tokens"], points)


def read(path: Path) -> Measured:
    """Return the rows of a file.

    Raises:
        ConfigError: it cannot be read, or is of something else.
    """
    try:
        return of_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} has no rows of benchmarks/real.py: {error}") from error


def plot(models: Sequence[Measured]) -> str:
    """Return the picture, an SVG file of its own.

    Raises:
        ConfigError: no row has parameters.
    """
    points = [point for measured in models for point in measured.students]
    if not points:
        raise ConfigError("no row has trainable parameters and a KL: there is nothing to draw")
    lines = [kl for measured in models for kl in measured.lines.values()]
    label = f"KL(teacher, student) of {len(points)} students by their trainable parameters."
    with charts.picture(HEIGHT, label, WIDTH) as made:
        axes = made.axes(44, HEIGHT - 44 - 46, 44, 104)
        charts.scale(axes, "x", [p.parameters for p in points], log=True)
        charts.scale(axes, "y", [*(p.kl for p in points), *lines], log=True)
        low, high = axes.get_xlim()
        axes.set_xlim(low / 1.25, high * 1.25)
        axes.xaxis.set_major_formatter(lambda value, _: short_count(value))
        axes.set_xlabel("trainable parameters, logarithmic")
        axes.set_title(
            "KL(teacher, student) on held-out text, nats, logarithmic", color=charts.SOFT
        )
        for place, measured in enumerate(models):
            _paint(axes, measured, COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)])
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.06), ncols=len(models))
    return own_file(made.svg, HEIGHT, WIDTH)


def _paint(axes: Any, measured: Measured, colour: str, marker: str) -> None:
    students = sorted(measured.students, key=lambda point: point.parameters)
    x, y = [p.parameters for p in students], [p.kl for p in students]
    axes.errorbar(x, y, [0 if math.isnan(p.error) else p.error for p in students], fmt="none",
                  ecolor=colour, elinewidth=2)  # fmt: skip
    axes.plot(x, y, marker, color=colour, markersize=7, linestyle="none", label=measured.model)
    lines = measured.lines
    for point, (across, side) in zip(students, _sides(students), strict=True):
        crossed = any(0.83 < line / point.kl < 1.2 for line in lines.values())
        beside = (across, -9 if crossed else 0)  # below a line that would strike it through
        axes.annotate(
            point.name, (point.parameters, point.kl), xytext=beside, ha=side, va="center",
            textcoords="offset points", color=charts.INK,
        )  # fmt: skip
    for name, line in lines.items():
        dash, said = LINES[name]
        axes.axhline(line, color=colour, linestyle=dash, linewidth=1.3)
        model = measured.model if len(measured.model) < 14 else f"{measured.model[:12]}…"
        axes.text(1.01, line, f"{model}\n{said}", color=colour, va="center",
                  transform=axes.get_yaxis_transform(), fontsize=10)  # fmt: skip


def _sides(points: Sequence[Point]) -> list[tuple[int, str]]:
    """Return the side of each name: the left one if its place on the right is another point's."""
    found: list[tuple[int, str]] = []
    for place, point in enumerate(points):
        taken = any(
            0.75 < other.kl / point.kl < 1.34 and other.parameters < 6 * point.parameters
            for other in points[place + 1 :]
        )
        found.append((-9, "right") if taken else (9, "left"))
    return found


def short_count(value: float) -> str:
    """Return a number with its first digits and k, M or B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def own_file(svg: str, height: float, width: float) -> str:
    """Return a page's chart as a file that is shown larger."""
    size = 'width="{:g}" height="{:g}"'
    return svg.replace(size.format(width, height), size.format(SHOWN * width, SHOWN * height), 1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=OUT, help="the picture, an SVG file")
    args = parser.parse_args(argv)
    try:
        models = [read(path) for path in args.files or sorted(RESULTS.glob("real*.json"))]
        write_text(args.out, plot(models))
    except (NPTError, OSError) as error:
        print(error, file=sys.stderr)
        return getattr(error, "exit_status", 2)
    for measured in models:
        print(f"{measured.model}: {len(measured.students)} students, {measured.heldout:,} tokens")
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
