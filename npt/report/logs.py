"""The logs of a run: `metrics.jsonl` as columns, and `events.jsonl` as a history.

A log may still be written to, may end in half a line, and may come from somebody else.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

LINE_BYTES = 1 << 20  # longest line that is read; a thousand layers take a tenth of it
LAYERS = 512  # layers that are read at most; keys beyond are somebody's mistake
DETAILED = 20_000  # events of a kind whose details are kept

ABSENT, BAD = math.nan, math.inf
"""Cells of a column: the line lacks the key; the line says null, a number that was not finite."""

_NMSE = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.nmse")
_PLAIN = re.compile(r"loss(_[a-z_]{1,30})?|grad_norm|lr|tokens|tokens_per_second|refused_total")

_UNDONE = frozenset({"refusal", "diagnosis", "evaluation", "epoch", "save", "save_failed", "trace"})
"""Events of steps, which are undone with them when a run resumes from before."""

_ENDS = ("done", "signal", "stopped", "error")


class Lines:
    """The objects of a .jsonl file. unreadable: lines so far that were none, but for a last one
    without an end, which may still be being written.
    """

    def __init__(self, path: Path):
        self._path = path
        self.unreadable = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as stream:
            while line := stream.readline(LINE_BYTES):
                value = None
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(line)
                if isinstance(value, dict):
                    yield value
                elif line.strip() and line.endswith(b"\n"):
                    self.unreadable += 1


def as_number(value: Any) -> float | None:
    """Return a number of a JSON file as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def as_count(value: Any) -> int | None:
    """Return a step or another count of a JSON file; None for anything else."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < 2**53 else None


def as_mapping(value: Any) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


@dataclass
class Metrics:
    """Logged figures. steps: ascending. columns: by key, a number for each step, ABSENT or BAD.
    again: lines of steps that were made again later, which do not count.
    """

    steps: list[int] = field(default_factory=list)
    columns: dict[str, array[float]] = field(default_factory=dict)
    again: int = 0

    @property
    def layers(self) -> list[int]:
        """The indices of the layers that have an NMSE, ascending."""
        return sorted(int(match[1]) for key in self.columns if (match := _NMSE.fullmatch(key)))

    def last(self, key: str) -> tuple[int, float] | None:
        """Return the last finite value with its step: not every step is logged."""
        cells = zip(reversed(self.steps), reversed(self.columns.get(key, ())), strict=False)
        return next(((step, value) for step, value in cells if math.isfinite(value)), None)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line that has a step. One that is not after the last was made again, by a run that
        resumed further back: lines from there on are dropped.
        """
        step = as_count(line.get("step"))
        if step is None:
            return
        if self.steps and step <= self.steps[-1]:
            place = bisect_left(self.steps, step)
            self.again += len(self.steps) - place
            del self.steps[place:]
            for column in self.columns.values():
                del column[place:]
        for key in [key for key in line if key not in self.columns]:
            known = _PLAIN.fullmatch(key) or _NMSE.fullmatch(key)
            if known and len(self.columns) < LAYERS + 8:
                self.columns[key] = array("d", [ABSENT] * len(self.steps))
        self.steps.append(step)
        for key, column in self.columns.items():
            column.append(_cell(line[key]) if key in line else ABSENT)


def _cell(value: Any) -> float:
    found = BAD if value is None else as_number(value)
    if found is None:
        return ABSENT
    return found if math.isfinite(found) else BAD


def read_metrics(lines: Iterable[Mapping[str, Any]]) -> Metrics:
    """Return the columns of a `metrics.jsonl`."""
    metrics = Metrics()
    for line in lines:
        metrics.add(line)
    return metrics


@dataclass
class Event:
    """A line of `events.jsonl`. time: seconds since the epoch. undone: the run later resumed from
    before it.
    """

    kind: str
    step: int | None = None
    time: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    undone: bool = False


@dataclass
class Events:
    """All events in their order."""

    all: list[Event] = field(default_factory=list)

    def of(self, kind: str, undone: bool | None = False) -> list[Event]:
        """Return the events of a kind, undone or not; None: both."""
        return [e for e in self.all if e.kind == kind and undone in (None, e.undone)]

    @property
    def end(self) -> tuple[str, Event | None]:
        """The end of the last start, one of `_ENDS`, and its event; `open` if no end is on record,
        `unknown` if no start is.
        """
        starts = [place for place, event in enumerate(self.all) if event.kind == "start"]
        if not starts:
            return "unknown", None
        last = {event.kind: event for event in self.all[starts[-1] :]}
        kind = next((kind for kind in _ENDS if kind in last), "open")
        return kind, last.get(kind)


def read_events(lines: Iterable[Mapping[str, Any]]) -> Events:
    """Return the events of an `events.jsonl`; lines without a kind are left out."""
    events, seen = Events(), Counter[str]()
    for line in lines:
        kind = line.get("event")
        if not isinstance(kind, str):
            continue
        seen[kind] += 1
        rest = {key: value for key, value in line.items() if key not in ("event", "time", "step")}
        event = Event(kind, as_count(line.get("step")), as_number(line.get("time")))
        if seen[kind] <= DETAILED:
            event.details = rest
        if kind == "resume":
            _undo(events.all, event)
        events.all.append(event)
    return events


def _undo(before: list[Event], resume: Event) -> None:
    """Mark the events after the checkpoint that a run resumes from; all of them without one.

    A refusal before that save still counts, whatever its step; so the save's place in the file
    decides, and the step only if the save is not found.
    """
    checkpoint, step = resume.details.get("checkpoint"), resume.step or 0
    place: int | None = 0
    if isinstance(checkpoint, str):
        name = PurePosixPath(checkpoint).name
        saves = [i for i, e in enumerate(before) if e.kind == "save" and _folder_name(e) == name]
        place = saves[-1] + 1 if saves else None
    for i, event in enumerate(before):
        later = i >= place if place is not None else event.step is not None and event.step > step
        event.undone |= event.kind in _UNDONE and later


def _folder_name(save: Event) -> str:
    folder = save.details.get("folder")
    return PurePosixPath(folder).name if isinstance(folder, str) else ""
