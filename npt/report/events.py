"""`events.jsonl` as a history: what happened, what of it was undone by taking the run up further
back, and how the run ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from npt.report.lines import count, number

DETAILED = 20_000
"""Events of a kind whose details are kept; of more than that, kind and step."""

_UNDONE = frozenset({"refusal", "diagnosis", "evaluation", "epoch", "save", "save_failed", "trace"})
"""Events of steps, which go with these when a run is taken up in front of them."""

_ENDS = ("done", "signal", "stopped", "error")

State = Literal["done", "signal", "stopped", "error", "open", "unknown"]
"""How the last start of a run ended: one of `_ENDS`; open where no end is on record; unknown where
no start is.
"""


@dataclass
class Event:
    """One line. step: None where it bears none. time: seconds since the epoch. undone: the run was
    taken up in front of it.
    """

    kind: str
    step: int | None = None
    time: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    undone: bool = False


@dataclass
class Events:
    """All lines in their order."""

    all: list[Event] = field(default_factory=list)

    def of(self, kind: str, undone: bool | None = False) -> list[Event]:
        """Those of one kind; `undone` says which, None for all."""
        return [
            event for event in self.all if event.kind == kind and undone in (None, event.undone)
        ]

    @property
    def last_start(self) -> list[Event]:
        """From the last start on."""
        starts = [place for place, event in enumerate(self.all) if event.kind == "start"]
        return self.all[starts[-1] :] if starts else []

    @property
    def end(self) -> tuple[State, Event | None]:
        """How the last start ended, and the event that says so."""
        last = self.last_start
        if not last:
            return "unknown", None
        for kind in _ENDS:
            found = [event for event in last if event.kind == kind]
            if found:
                return kind, found[-1]  # type: ignore[return-value]
        return "open", None


def read_events(lines: Iterable[Mapping[str, Any]]) -> Events:
    """All lines of an `events.jsonl`. Those without a kind are left out."""
    events = Events()
    seen: dict[str, int] = {}
    for line in lines:
        kind = line.get("event")
        if not isinstance(kind, str):
            continue
        seen[kind] = seen.get(kind, 0) + 1
        kept = {key: value for key, value in line.items() if key not in ("event", "time", "step")}
        event = Event(
            kind,
            count(line.get("step")),
            number(line.get("time")),
            kept if seen[kind] <= DETAILED else {},
        )
        if kind == "resume":
            _undo(events.all, event)
        events.all.append(event)
    return events


def _undo(before: list[Event], resume: Event) -> None:
    """Mark what a run did behind the checkpoint that it is taken up from: everything, where it
    starts anew.

    What was refused in front of that save still counts, whatever step it bears; so the save's place
    in the file decides, and only where it cannot be found the step does.
    """
    checkpoint, step = resume.details.get("checkpoint"), resume.step or 0
    place: int | None = 0
    if isinstance(checkpoint, str):
        name = PurePosixPath(checkpoint).name
        saves = [
            i for i, event in enumerate(before) if event.kind == "save" and _name(event) == name
        ]
        place = saves[-1] + 1 if saves else None
    for i, event in enumerate(before):
        if event.kind in _UNDONE and (
            i >= place if place is not None else event.step is not None and event.step > step
        ):
            event.undone = True


def _name(save: Event) -> str:
    folder = save.details.get("folder")
    return PurePosixPath(folder).name if isinstance(folder, str) else ""
