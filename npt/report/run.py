"""Read a run folder once: everything that can be read, and why the rest cannot.

A log may still be growing, may end in half a line, and may be untrusted.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from npt.errors import NPTError
from npt.report.words import as_number
from npt.stored import read_json

LINE_BYTES = 1 << 20  # the longest line that is read; 1,000 layers need a quarter of it

_MADE = frozenset({"save", "evaluation", "resume", "signal", "stopped", "error"})
"""Events whose step is the last completed one; the step of others is the attempted one."""

_UNDONE = frozenset({"refusal", "diagnosis", "evaluation", "epoch", "save", "save_failed", "trace"})
"""Events that belong to a step, and are undone with it when the run resumes from before it."""

_STEP_FOLDER = re.compile(r"step-[0-9]{1,18}(\.[a-z]+(-[0-9]+)?)?")
_OF_LAYERS = ("nmse", "multiplier_change", "at_bounds", "code_norm", "shift_norm", "active")
_LAYER = re.compile(rf"layers\.(0|[1-9][0-9]{{0,3}})\.({'|'.join(_OF_LAYERS)})")
_COLUMN = re.compile(rf"loss(_[a-z_]{{1,30}})?|grad_norm|lr|tokens(_per_second)?|{_LAYER.pattern}")

Event = dict[str, Any]
"""A line of `events.jsonl`, with `step` None if it has none."""


class RunRecord:
    """The content of a run folder. Missing parts are empty. Reading changes nothing in the folder,
    and damage there raises nothing.

    Attributes:
        run: the object in `run.json`.
        fidelity: the object in `fidelity.json`.
        steps: the logged steps, ascending.
        columns: by key of `metrics.jsonl`, a number for each step: NaN if the line lacks the key,
            infinite if the value was not finite.
        events: all events, except those of steps that a resume undid.
        checkpoints: folders, including those set aside, oldest first.
        postmortems: pairs of a folder and its record.
        notes: by file, why it is empty here, or that it is out of date.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.notes: dict[str, str] = {}
        self.run = self._object(folder / "run.json")
        self.fidelity = self._object(folder / "fidelity.json")
        self.steps: list[int] = []
        self.columns: dict[str, list[float]] = {}
        for line in self._lines("metrics.jsonl"):
            self._add_metrics(line)
        self.events: list[Event] = []
        for line in self._lines("events.jsonl"):
            self._add_event(line)
        self.checkpoints = _step_folders(folder / "checkpoints")
        bundles = _step_folders(folder / "postmortem")
        self.postmortems = [(path, self._object(path / "postmortem.json")) for path in bundles]
        settings = self.run.get("settings")
        self.settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
        end, _ = self.end
        if self.events and end != "done":
            # figures of an earlier end are not those of what runs now
            if self.fidelity:
                self.notes["fidelity.json"] = "from an earlier end of this run"
            elif self.notes.get("fidelity.json") == "missing":
                why = {"open": "is written at the end"}
                self.notes["fidelity.json"] = why.get(end, "missing: the run did not finish")

    @property
    def name(self) -> str:
        return str(self.settings.get("run_name") or self.folder.absolute().name)

    def layers(self, *names: str) -> list[int]:
        """Return the layers that have one of these columns, `layers.I.NAME`."""
        matches = filter(None, map(_LAYER.fullmatch, self.columns))
        return sorted({int(match[1]) for match in matches if match[2] in names})

    @property
    def step(self) -> int:
        made = [event["step"] for event in self.events if event["event"] in _MADE]
        done = [_count(event.get("steps")) for event in self.of("done")]
        return max(filter(None, (*self.steps, *made, *done)), default=0)

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the last start planned."""
        starts = self.of("start")
        return _count(starts[-1].get("total_steps")) if starts else None

    @property
    def refused_in(self) -> int | None:
        """The step of the last refusals, if it was never completed."""
        step = max((event["step"] or 0 for event in self.of("refusal")), default=0)
        return step if step > self.step else None

    @property
    def end(self) -> tuple[str, Event]:
        """How the last start ended, and the event; `open` if no end is recorded, `unknown` if no
        start is.
        """
        last: dict[str, Event] = {}
        for event in self.events:
            if event["event"] == "start":
                last.clear()
            last[event["event"]] = event
        if "start" not in last:
            return "unknown", {}
        for kind in ("done", "signal", "stopped", "error"):
            if kind in last:
                return kind, last[kind]
        return "open", {}

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def refused(self) -> Counter[str]:
        """Count refusals by kind."""
        return Counter(str(event.get("kind", "unknown")) for event in self.of("refusal"))

    def finite(self, key: str) -> list[tuple[int, float]]:
        """Return step and value of a column's finite entries."""
        cells = zip(self.steps, self.columns.get(key, ()), strict=False)
        return [cell for cell in cells if math.isfinite(cell[1])]

    def first_and_last(self, key: str) -> tuple[float, float] | None:
        """Return a column's first and last finite entries."""
        values = [value for _, value in self.finite(key)]
        return (values[0], values[-1]) if values else None

    def last(self, key: str) -> tuple[int, float] | None:
        """Return step and value of a column's last finite entry."""
        return next(reversed(self.finite(key)), None)

    def _object(self, path: Path) -> Mapping[str, Any]:
        name = path.relative_to(self.folder).as_posix()
        try:
            if path.exists():
                return read_json(path, NPTError)
            self.notes[name] = "missing"
        except NPTError as error:
            words = str(error).removeprefix(f"{path} ")
            self.notes[name] = words.rpartition("; ")[0] or words  # without the remedy
        return {}

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the objects in a .jsonl file and note damaged lines, except an unfinished last
        one, which may still be being written.
        """
        damaged = 0
        path = self.folder / name
        if path.exists() and not path.is_file():  # a pipe would be waited for
            self.notes[name] = "not a regular file"
            return
        try:
            with path.open("rb") as stream:
                while line := stream.readline(LINE_BYTES):
                    value = None
                    with contextlib.suppress(ValueError, RecursionError):
                        value = json.loads(line)
                    if isinstance(value, dict):
                        yield value
                    # an overlong line comes in pieces, of which one ends it: it counts once
                    elif line.strip() and line.endswith(b"\n"):
                        damaged += 1
        except FileNotFoundError:
            self.notes[name] = "missing"
        except OSError as error:
            self.notes[name] = f"cannot be read: {error.strerror}"
        if damaged:
            self.notes[name] = f"damaged lines skipped: {damaged:,}"

    def _add_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a line of a step. If the run resumed from further back, the line replaces those from
        its step on. A line without a loss holds refusals after the last step, which events have.
        """
        step = _count(line.get("step"))
        if step is None or ("refused_total" in line and "loss" not in line):
            return
        position = bisect_left(self.steps, step)
        del self.steps[position:]
        for column in self.columns.values():
            del column[position:]
        for key in line:
            if key not in self.columns and _COLUMN.fullmatch(key):
                self.columns[key] = [math.nan] * position
        self.steps.append(step)
        for key, column in self.columns.items():
            column.append(as_number(line, key))

    def _add_event(self, line: Mapping[str, Any]) -> None:
        """Add a line that names its event. A resume removes the step events after the save that it
        continues from, or all of them if there is none.
        """
        step = _count(line.get("step"))
        kind = line.get("event")
        if kind == "resume":
            saves = [
                place
                for place, event in enumerate(self.events, 1)
                if event["event"] == "save" and event["step"] == step
            ]
            kept = max(saves, default=0)
            later = self.events[kept:]
            self.events[kept:] = [event for event in later if event["event"] not in _UNDONE]
        if isinstance(kind, str):
            self.events.append({**line, "step": step})


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _step_folders(folder: Path) -> list[Path]:
    """Return the folders named after a step, in order of steps. Symbolic links are skipped."""
    if not folder.is_dir():
        return []
    # not `glob`, which hides that a folder cannot be read
    named = [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)]
    paths = [path for path in named if path.is_dir() and not path.is_symlink()]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").partition(".")[0])
