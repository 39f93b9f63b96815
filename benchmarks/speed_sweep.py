"""How the time of a step grows: with the tokens of a batch, with the length of its rows, with the
number of converted layers.

One of them is varied at a time. Lengths and layers go with the tokens of the comparison's own step;
the curve against tokens has rows of a quarter of those, 1 to 8 of them. Ours (`local`) and the
two-model loop are timed on two bases, all points in turn in every round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch

from npt.adapters.fit import format_layers, resolve_layers
from speed_runs import SHAPES, Setting, Student, make_base, make_batch

KINDS = ("local", "two_model")
BATCHES = (1, 2, 4, 8)

Turns = Callable[[Mapping[Any, Callable[[], Any]], int, torch.device], dict[Any, list[float]]]
"""`speed.in_turns`."""


class Point(NamedTuple):
    """A setting that is timed. converted: number of layers, counted from the top."""

    converted: int
    batch_size: int
    length: int


def curves(setting: Setting) -> dict[str, list[Point]]:
    """Return the points of each curve in their order."""
    layers, tokens, length = SHAPES[setting.shape].layers, setting.tokens, setting.length
    converted = len(resolve_layers(setting.layers, layers))
    lengths = {length, *(tokens // b for b in BATCHES if tokens % b == 0 and tokens // b >= 2)}
    counts = {converted, *(max(1, layers * part // 4) for part in (1, 2, 3, 4))}
    return {
        "tokens": [Point(converted, rows, max(2, tokens // 4)) for rows in BATCHES],
        "length": [Point(converted, tokens // length, length) for length in sorted(lengths)],
        "layers": [Point(count, setting.batch_size, length) for count in sorted(counts)],
    }


def sweep(
    setting: Setting, rounds: int, note: Callable[[str], None], in_turns: Turns
) -> dict[str, Any]:
    """Return every point's median seconds per step of each kind, the curves they are on, and how
    straight the one against tokens is.

    Args:
        setting: of the comparison.
        rounds: each point is timed so often.
        note: takes a line about progress.
        in_turns: times steps.
    """
    found = curves(setting)
    points = sorted(
        {point for curve in found.values() for point in curve},
        key=lambda p: (p.converted, p.batch_size * p.length, p.length),
    )
    teacher, base = make_base(setting), make_base(setting)
    device = torch.device(setting.device)
    seconds: dict[Point, dict[str, list[float]]] = {p: {k: [] for k in KINDS} for p in points}
    for number in range(rounds):
        for converted, group in groupby(points, key=lambda point: point.converted):
            steps = _steps(setting, base, teacher, converted, list(group))
            if number == 0:
                # kernels are found in the smallest step
                in_turns(dict(list(steps.items())[: len(KINDS)]), 1, device)
            for (point, kind), times in in_turns(steps, 1, device).items():
                seconds[point][kind] += times
        note(f"sweep: round {number + 1} of {rounds}")
    medians = {p: {k: statistics.median(seconds[p][k]) for k in KINDS} for p in points}
    return {
        "points": [
            {
                **point._asdict(),
                "tokens": point.batch_size * point.length,
                **{f"{kind}_seconds": medians[point][kind] for kind in KINDS},
                "all_seconds": seconds[point],
            }
            for point in points
        ],
        "curves": {name: [points.index(point) for point in curve] for name, curve in found.items()},
        "linearity": {
            kind: linearity([(p.batch_size * p.length, medians[p][kind]) for p in found["tokens"]])
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
    tokens, seconds = zip(*curve, strict=True)
    slope, fixed = statistics.linear_regression(tokens, seconds)
    lower = (seconds[-2] - seconds[0]) / (tokens[-2] - tokens[0])
    upper = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2])
    return {
        "seconds_per_token": slope,
        "fixed_seconds": fixed,
        "largest_deviation": max(abs(s - fixed - slope * n) / s for n, s in curve),
        "slope_ratio": upper / lower,
    }


def _steps(
    setting: Setting, base: Any, teacher: Any, converted: int, points: list[Point]
) -> dict[tuple[Point, str], Callable[[], Any]]:
    """Return the steps of points that convert the same layers, by point and kind."""
    layers = SHAPES[setting.shape].layers
    upper = format_layers(tuple(range(layers - converted, layers)))
    student = Student(replace(setting, layers=upper), teacher, base)
    runs = {kind: student.run(kind) for kind in KINDS}
    batches = {
        p: make_batch(replace(setting, batch_size=p.batch_size, length=p.length)) for p in points
    }
    return {(p, kind): partial(runs[kind].step, batches[p]) for p in points for kind in KINDS}
