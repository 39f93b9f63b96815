"""`metrics.jsonl` as columns: a series of numbers over the steps for each key."""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from npt.report.lines import count, number

ABSENT, BAD = math.nan, math.inf
"""What stands in a column where a line lacks the key, and where it says null: a number that was not
finite.
"""

LAYERS = 512
"""Layers that are read at most; keys beyond are somebody's mistake."""

_NMSE = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.nmse")
_PLAIN = (
    "loss",
    "loss_nmse",
    "loss_reg",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "refused_total",
)


@dataclass
class Metrics:
    """steps: ascending. columns: by key, one number for each step, ABSENT or BAD where there is
    none. again: lines of steps that the file says were made again, which do not count."""

    steps: list[int] = field(default_factory=list)
    columns: dict[str, array[float]] = field(default_factory=dict)
    again: int = 0
    _seen: set[str] = field(default_factory=set)

    @property
    def layers(self) -> list[int]:
        """Indices of the layers that there is an NMSE of, ascending."""
        return sorted(int(match[1]) for key in self.columns if (match := _NMSE.fullmatch(key)))

    def last(self, key: str) -> float | None:
        """The last finite value; None where there is none."""
        return next(
            (value for value in reversed(self.columns.get(key, ())) if math.isfinite(value)), None
        )

    def last_step(self, key: str) -> int | None:
        """The step of `last`: lines are logged every so many steps, so it may be before the last
        one made.
        """
        places = zip(reversed(self.columns.get(key, ())), reversed(self.steps), strict=False)
        return next((step for value, step in places if math.isfinite(value)), None)

    def add(self, line: Mapping[str, Any]) -> bool:
        """One line of the file; False where it bears no step.

        A step that is not behind the one before was made again, by a run that was taken up further
        back: what stood from there on goes.
        """
        step = count(line.get("step"))
        if step is None:
            return False
        if self.steps and step <= self.steps[-1]:
            place = bisect_left(self.steps, step)
            self.again += len(self.steps) - place
            del self.steps[place:]
            for column in self.columns.values():
                del column[place:]
        for key in line.keys() - self._seen:
            self._seen.add(key)
            if _known(key) and len(self.columns) < LAYERS + len(_PLAIN):
                self.columns[key] = array("d", [ABSENT] * len(self.steps))
        self.steps.append(step)
        for key, column in self.columns.items():
            value = line.get(key, ABSENT)
            column.append(
                value if type(value) is float and -math.inf < value < math.inf else _cell(line, key)
            )
        return True


def read_metrics(lines: Iterable[Mapping[str, Any]]) -> Metrics:
    """All lines of a `metrics.jsonl`."""
    metrics = Metrics()
    for line in lines:
        metrics.add(line)
    return metrics


def _known(key: str) -> bool:
    return (
        key in _PLAIN
        or _NMSE.fullmatch(key) is not None
        or re.fullmatch(r"loss_[a-z_]{1,30}", key) is not None
    )


def _cell(line: Mapping[str, Any], key: str) -> float:
    if key not in line:
        return ABSENT
    value = BAD if line[key] is None else number(line[key])
    if value is None:
        return ABSENT
    return value if math.isfinite(value) else BAD
