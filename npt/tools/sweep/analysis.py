"""A study's table by part: which settings differ there, and up to which rate each trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npt.tools.sweep.table import MEASURES

Row = Mapping[str, Any]

RATE = "learning_rate"
OUTCOMES = ("stable", "worse", "diverged", "failed")


@dataclass(frozen=True)
class Edge:
    """The rates that one setting of a part bears. good: the largest up to which every trial was
    stable. bad: the smallest at which one was not. best: the stable trial with the smallest KL.
    """

    name: str
    good: float | None
    bad: float | None
    best: Row | None


def parts_of(rows: Sequence[Row]) -> list[str]:
    """Return the parts' names, in the design's order."""
    return list(dict.fromkeys(part for row in rows for part in row["parts"].split(";")))


def of_part(rows: Sequence[Row], part: str) -> list[Row]:
    """Return the rows of a part, each with the arm that it has there; twice if it has two."""
    return [
        {**row, "parts": part, "arms": arm}
        for row in rows
        for own, arm in zip(row["parts"].split(";"), row["arms"].split(";"), strict=True)
        if own == part
    ]


def factors(rows: Sequence[Row]) -> list[str]:
    """Return the names that differ in the rows of a part, seeds left out: the arms, and the
    settings that no arm decides.
    """
    settings = [name for name in rows[0] if name not in ("key", "parts", "arms", "seed", *MEASURES)]

    def varied(group: Sequence[Row]) -> list[str]:
        return [name for name in settings if len({repr(row[name]) for row in group}) > 1]

    arms = list(dict.fromkeys(row["arms"] for row in rows))
    if len(arms) < 2:
        return varied(rows)
    within = {name for arm in arms for name in varied([r for r in rows if r["arms"] == arm])}
    return ["arms", *(name for name in varied(rows) if name in within)]


def level_text(value: Any) -> str:
    """Return a setting's value in a few letters."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def row_name(row: Row, names: Sequence[str]) -> str:
    """Return a row in a few words: these settings of it."""
    words = [row["arms"]] if "arms" in names else []
    words += [
        f"{'lr' if name == RATE else name} {level_text(row[name])}"
        for name in names
        if name != "arms"
    ]
    return ", ".join(words) or "all"


def sought(row: Row) -> bool:
    """Return whether the trial sought a limit: its figures are of no one value that was chosen."""
    return row["limit_low"] is not None or row["limit_high"] is not None


def stable(row: Row) -> bool:
    """Return whether the trial trained and has a KL to compare."""
    kl = row["kl"]
    return row["outcome"] == "stable" and kl is not None and math.isfinite(kl)


def edges(rows: Sequence[Row]) -> list[Edge]:
    """Return the edge of each setting of a part; none where no setting has more than one rate, as
    in a random design, or the rate itself is sought.
    """
    names = [name for name in factors(rows) if name != RATE]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["outcome"] in OUTCOMES[:3] and row[RATE] is not None and not sought(row):
            groups.setdefault(row_name(row, names), []).append(row)
    if all(len({row[RATE] for row in group}) < 2 for group in groups.values()):
        return []
    return [_edge(name, group) for name, group in groups.items()]


def _edge(name: str, rows: Sequence[Row]) -> Edge:
    bad = min((row[RATE] for row in rows if row["outcome"] != "stable"), default=None)
    good = [row[RATE] for row in rows if bad is None or row[RATE] < bad]
    best = min(filter(stable, rows), key=lambda row: row["kl"], default=None)
    return Edge(name, max(good, default=None), bad, best)
