"""A run as its folder has it, read once: every part that can be read, and why the others cannot.

A log may still be written to, may end in half a line, and may come from somebody else.
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

LINE_BYTES = 1 << 20  # longest line that is read; a thousand layers take a tenth of it

_MADE = frozenset({"save", "evaluation", "resume", "signal", "stopped", "error"})
"""Events with the step that was made last; others have the one that was tried."""

_UNDONE = frozenset({"refusal", "diagnosis", "evaluation", "epoch", "save", "save_failed", "trace"})
"""Events of steps, which are undone with them when a run resumes from before."""

_STEP_FOLDER = re.compile(r"step-[0-9]{1,18}(\.[a-z]+(-[0-9]+)?)?")
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.nmse")
_COLUMNS = re.compile(r"loss(_[a-z_]{1,30})?|grad_norm|lr|tokens|tokens_per_second")

Event = dict[str, Any]
"""A line of `events.jsonl`, with `step` None if it has none."""


class RunRecord:
    """The content of a run folder; what is missing there is empty here. Nothing in the folder
    changes, and nothing wrong with it raises.

    Attributes:
        run: the object of `run.json`.
        fidelity: of `fidelity.json`.
        steps: logged, ascending.
        columns: by key of `metrics.jsonl` a number for each step, NaN if the line lacks the key,
            infinite if it was not finite.
        events: without those of steps that a resume undid.
        checkpoints: their folders, those set aside included, oldest first.
        postmortems: their folders and records.
        notes: by file, why it says nothing, or what it is of instead of the run's end.
    """

    def __init__(self, folder: Path):
        self.folder, self.notes = folder, dict[str, str]()
        self.run, self.fidelity = (
            self._object(folder / f"{name}.json") for name in ("run", "fidelity")
        )
        self.steps, self.columns = list[int](), dict[str, list[float]]()
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
        if self.events and self.fidelity and self.end[0] != "done":
            self.notes["fidelity.json"] = "from an earlier end of this run"

    @property
    def name(self) -> str:
        return str(self.settings.get("run_name") or self.folder.absolute().name)

    @property
    def layers(self) -> list[int]:
        return sorted(int(match[1]) for key in self.columns if (match := _LAYER.fullmatch(key)))

    @property
    def step(self) -> int:
        made = [event["step"] for event in self.events if event["event"] in _MADE]
        done = [_count(event.get("steps")) for event in self.of("done")]
        return max((step for step in (*self.steps[-1:], *made, *done) if step), default=0)

    @property
    def total_steps(self) -> int | None:
        """The steps that the last start was to make."""
        return next((_count(e.get("total_steps")) for e in reversed(self.of("start"))), None)

    @property
    def refused_in(self) -> int | None:
        """The step of the last refusals, if it was never made."""
        step = max((event["step"] or 0 for event in self.of("refusal")), default=0)
        return step if step > self.step else None

    @property
    def end(self) -> tuple[str, Event]:
        """The end of the last start and its event; `open` if no end is on record, `unknown` if no
        start is.
        """
        last: dict[str, Event] = {}
        for event in self.events:
            last = {**({} if event["event"] == "start" else last), event["event"]: event}
        if "start" not in last:
            return "unknown", {}
        ends = ("done", "signal", "stopped", "error")
        return next(((kind, last[kind]) for kind in ends if kind in last), ("open", {}))

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def refused(self) -> Counter[str]:
        """Count refusals by kind."""
        return Counter(str(event.get("kind", "unknown")) for event in self.of("refusal"))

    def last(self, key: str) -> tuple[int, float] | None:
        """Return a column's last finite value with its step: not every step is logged."""
        cells = zip(reversed(self.steps), reversed(self.columns.get(key, ())), strict=False)
        return next(((step, value) for step, value in cells if math.isfinite(value)), None)

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
        """Yield the objects of a .jsonl file, and note lines that are none, but for a last one
        without an end, which may still be being written.
        """
        unreadable = 0
        try:
            with (self.folder / name).open("rb") as stream:
                while line := stream.readline(LINE_BYTES):
                    value = None
                    with contextlib.suppress(ValueError, RecursionError):
                        value = json.loads(line)
                    if isinstance(value, dict):
                        yield value
                    elif line.strip() and line.endswith(b"\n"):
                        unreadable += 1
        except FileNotFoundError:
            self.notes[name] = "missing"
        except OSError as error:
            self.notes[name] = f"cannot be read: {error.strerror}"
        if unreadable:
            self.notes[name] = f"{unreadable:,} damaged lines were skipped"

    def _add_metrics(self, line: Mapping[str, Any]) -> None:
        """Add a line that has a step. One that is not after the last was made again, by a run that
        resumed further back: lines from there on are dropped.
        """
        step, steps, columns = _count(line.get("step")), self.steps, self.columns
        if step is None:
            return
        position = bisect_left(steps, step)
        del steps[position:]
        for column in columns.values():
            del column[position:]
        for key in [key for key in line if key not in columns]:
            if _COLUMNS.fullmatch(key) or _LAYER.fullmatch(key):
                columns[key] = [math.nan] * len(steps)
        steps.append(step)
        for key, column in columns.items():
            try:
                column.append(as_number(line, key))
            except (TypeError, ValueError, OverflowError):
                column.append(math.nan)

    def _add_event(self, line: Mapping[str, Any]) -> None:
        """Add a line that names its event. A resume takes away the events of steps after the save
        that it continues from; all of them without one.
        """
        event, events = {**line, "step": _count(line.get("step"))}, self.events
        if line.get("event") == "resume":
            saves = [i for i, e in enumerate(events) if e["event"] == "save"]
            last = max((i for i in saves if events[i]["step"] == event["step"]), default=-1)
            events[last + 1 :] = [e for e in events[last + 1 :] if e["event"] not in _UNDONE]
        if isinstance(line.get("event"), str):
            events.append(event)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _step_folders(folder: Path) -> list[Path]:
    """Return the folders that are named for a step, by that; links are left out."""
    paths = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if _STEP_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    ]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").partition(".")[0])
