"""How the time of a step grows: with the tokens of a batch, with the length of its rows, with the
number of converted layers.

One of them is varied at a time. Lengths and layers go with the tokens of the comparison's own step;
the curve against tokens has rows of a quarter of those, 1 to 8 of them. Ours (`local`) and the
two-model loop are timed on two bases, all points in turn in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from npt.adapters.fit import format_layers, resolve_layers
from speed_runs import SHAPES, Setting, Student, make_base, make_batch

KINDS = ("local", "two_model")
BATCHES = (1, 2, 4, 8)

Turns = Callable[[Mapping[str, Callable[[], Any]], int, torch.device], dict[str, list[float]]]
"""`speed.in_turns`."""


@dataclass(frozen=True)
class Point:
    """A setting that is timed. converted: number of layers, counted from the top."""

    converted: int
    batch_size: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch_size * self.length


def curves(setting: Setting) -> dict[str, list[Point]]:
    """The points of each curve in their order."""
    layers = SHAPES[setting.shape].layers
    own = Point(len(resolve_layers(setting.layers, layers)), setting.batch_size, setting.length)
    quarter = max(2, own.tokens // 4)
    lengths = sorted(
        {
            own.length,
            *(own.tokens // b for b in BATCHES if own.tokens % b == 0 and own.tokens // b >= 2),
        }
    )
    counts = sorted({own.converted, *(max(1, layers * part // 4) for part in (1, 2, 3, 4))})
    return {
        "tokens": [replace(own, batch_size=b, length=quarter) for b in BATCHES],
        "length": [
            replace(own, batch_size=own.tokens // length, length=length) for length in lengths
        ],
        "layers": [replace(own, converted=count) for count in counts],
    }


def sweep(
    setting: Setting, rounds: int, note: Callable[[str], None], in_turns: Turns
) -> dict[str, Any]:
    """Every point's median seconds per step of each kind, the curves they are on, and how straight
    the one against tokens is.

    Args:
        setting: of the comparison.
        rounds: each point is timed so often.
        note: takes a line about progress.
        in_turns: times steps.
    """
    found = curves(setting)
    points = sorted(
        {point for curve in found.values() for point in curve},
        key=lambda p: (p.converted, p.tokens, p.length),
    )
    teacher, base = make_base(setting), make_base(setting)
    device = torch.device(setting.device)
    seconds: dict[Point, dict[str, list[float]]] = {
        point: {kind: [] for kind in KINDS} for point in points
    }
    for number in range(rounds):
        for converted in sorted({point.converted for point in points}):
            chosen = {i: point for i, point in enumerate(points) if point.converted == converted}
            steps = _steps(setting, base, teacher, chosen)
            if number == 0:
                # kernels are found in the smallest step
                in_turns(dict(list(steps.items())[: len(KINDS)]), 1, device)
            for name, times in in_turns(steps, 1, device).items():
                kind, index = name.split()
                seconds[points[int(index)]][kind] += times
        note(f"sweep: round {number + 1} of {rounds}")
    return {
        "points": [
            {
                **asdict(p),
                "tokens": p.tokens,
                **{f"{kind}_seconds": median(seconds[p][kind]) for kind in KINDS},
                "all_seconds": seconds[p],
            }
            for p in points
        ],
        "curves": {name: [points.index(point) for point in curve] for name, curve in found.items()},
        "linearity": {
            kind: linearity([(p.tokens, median(seconds[p][kind])) for p in found["tokens"]])
            for kind in KINDS
        },
    }


def linearity(curve: list[tuple[int, float]]) -> dict[str, float]:
    """Measure how straight seconds are against tokens, in order.

    seconds_per_token, fixed_seconds: of the straight line through the points, by least squares.
    largest_deviation: of a point from that line, over its own seconds. slope_ratio: seconds per
    token in the upper part of the curve over those in its lower part, parted at the point before
    the last.
    """
    tokens, seconds = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*curve, strict=True)
    )
    centred = tokens - tokens.mean()
    slope = (centred * seconds).sum() / centred.square().sum()
    line = seconds.mean() + slope * centred
    lower = (seconds[-2] - seconds[0]) / (tokens[-2] - tokens[0])
    upper = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
    return {
        "seconds_per_token": slope.item(),
        "fixed_seconds": (seconds.mean() - slope * tokens.mean()).item(),
        "largest_deviation": ((seconds - line).abs() / seconds).max().item(),
        "slope_ratio": (upper / lower).item(),
    }


def _steps(
    setting: Setting, base: Any, teacher: Any, points: Mapping[int, Point]
) -> dict[str, Callable[[], Any]]:
    """The steps of points that convert the same layers, by kind and number."""
    layers = SHAPES[setting.shape].layers
    (converted,) = {point.converted for point in points.values()}
    student = Student(
        replace(setting, layers=format_layers(tuple(range(layers - converted, layers)))),
        teacher,
        base,
    )
    runs = {kind: student.run(kind) for kind in KINDS}
    batches = {
        number: make_batch(replace(setting, batch_size=point.batch_size, length=point.length))
        for number, point in points.items()
    }
    return {
        f"{kind} {number}": partial(runs[kind].step, batch)
        for number, batch in batches.items()
        for kind in KINDS
    }
