"""A run as its folder has it, read once: every part that can be read, and why the others cannot.

A log may still be written to, may end in half a line, and may come from somebody else.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from npt.errors import NPTError
from npt.report.words import as_number
from npt.stored import read_json

Verify = Callable[[Path], None]
"""Raises an NPTError if a checkpoint is not what was written."""

VERIFIED_BYTES = 16 << 30
"""Of checkpoints that are verified, newest first: a report may not take an hour."""

LINE_BYTES = 1 << 20  # longest line that is read; a thousand layers take a tenth of it
LAYERS = 1000  # columns that are kept at most: keys beyond are somebody's mistake

MADE = frozenset({"save", "evaluation", "resume", "signal", "stopped", "error"})
"""Events with the step that was made last; others have the one that was tried."""

_UNDONE = frozenset({"refusal", "diagnosis", "evaluation", "epoch", "save", "save_failed", "trace"})
"""Events of steps, which are undone with them when a run resumes from before."""

_ENDS = ("done", "signal", "stopped", "error")

_STEP_FOLDER = re.compile(r"step-([0-9]{1,18})(\.[a-z]+(-[0-9]+)?)?")
_LAYER = re.compile(r"layers\.(0|[1-9][0-9]{0,3})\.nmse")
_PLAIN = re.compile(r"loss(_[a-z_]{1,30})?|grad_norm|lr|tokens|tokens_per_second|refused_total")

Event = dict[str, Any]
"""A line of `events.jsonl`; `undone` is true if the run later resumed from before it."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint.

    Attributes:
        path: its folder.
        verified: whether every file is what was written; None if that was not looked into.
        problem: what verifying found, or why it was left out.
        size: in bytes.
    """

    path: Path
    verified: bool | None
    problem: str
    size: int

    @property
    def step(self) -> int:
        return _step_of(self.path)


@dataclass
class RunRecord:
    """The content of a run folder; what is missing there is empty here.

    Attributes:
        steps: logged, ascending.
        columns: by key of `metrics.jsonl` a number for each step, NaN if the line lacks the key,
            infinite if it was not finite.
        repeated: lines of steps that were made again later, which do not count.
        postmortems: their folders and records.
        notes: by file, why it says nothing, or what it is of instead of the run's end.
        writing: whether a process holds the folder; None if that cannot be seen.
    """

    folder: Path
    run: Mapping[str, Any] = field(default_factory=dict)
    fidelity: Mapping[str, Any] = field(default_factory=dict)
    modulation: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    columns: dict[str, array[float]] = field(default_factory=dict)
    repeated: int = 0
    events: list[Event] = field(default_factory=list)
    checkpoints: list[Saved] = field(default_factory=list)
    postmortems: list[tuple[Path, Mapping[str, Any]]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    writing: bool | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        settings = self.run.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def name(self) -> str:
        name = self.settings.get("run_name")
        return name if isinstance(name, str) and name.strip() else self.folder.absolute().name

    @property
    def layers(self) -> list[int]:
        """The indices of the layers that have an NMSE in `metrics.jsonl`, ascending."""
        return sorted(int(match[1]) for key in self.columns if (match := _LAYER.fullmatch(key)))

    @property
    def plain(self) -> dict[str, list[float]]:
        """The columns that are not a layer's."""
        return {key: list(v) for key, v in self.columns.items() if not _LAYER.fullmatch(key)}

    @property
    def step(self) -> int:
        """The last step on record."""
        made = [e["step"] for e in self.events if e["event"] in MADE and not e["undone"]]
        done = [event.get("steps") for event in self.of("done")]
        numbers = [step for step in (*made, *done) if isinstance(step, int)]
        return max([*self.steps[-1:], *numbers], default=0)

    @property
    def total_steps(self) -> int | None:
        """The steps that the last start was to make."""
        starts = self.of("start")
        return starts[-1].get("total_steps") if starts else None

    @property
    def refused_in(self) -> int | None:
        """The step of the last refusals, if it was never made."""
        steps = [e["step"] for e in self.of("refusal") if e["step"] and e["step"] > self.step]
        return max(steps, default=None)

    @property
    def end(self) -> tuple[str, Event]:
        """The end of the last start, one of `_ENDS`, and its event; `open` if no end is on record,
        `unknown` if no start is.
        """
        starts = [place for place, e in enumerate(self.events) if e["event"] == "start"]
        if not starts:
            return "unknown", {}
        last = {event["event"]: event for event in self.events[starts[-1] :]}
        kind = next((kind for kind in _ENDS if kind in last), "open")
        return kind, last.get(kind, {})

    def of(self, kind: str) -> list[Event]:
        """Return the events of a kind that were not undone."""
        return [e for e in self.events if e["event"] == kind and not e["undone"]]

    def refused(self) -> Counter[str]:
        """Count refusals that were not undone, by kind."""
        return Counter(str(event.get("kind", "unknown")) for event in self.of("refusal"))

    def last(self, key: str) -> tuple[int, float] | None:
        """Return a column's last finite value with its step: not every step is logged."""
        cells = zip(reversed(self.steps), reversed(self.columns.get(key, ())), strict=False)
        return next(((step, value) for step, value in cells if math.isfinite(value)), None)


def read_run(folder: Path, verify: Verify | None = None) -> RunRecord:
    """Read everything in a run folder that a report is made of; nothing there changes, and nothing
    wrong with it raises. verify: of a checkpoint; None leaves that out.
    """
    record = RunRecord(folder)
    for name in ("run", "fidelity", "modulation"):
        setattr(record, name, _object(record, folder / f"{name}.json"))
    if (folder / "best").is_dir():
        record.best = _object(record, folder / "best" / "fidelity.json")
    for line in _lines(record, "metrics.jsonl"):
        _add_metrics(record, line)
    for line in _lines(record, "events.jsonl"):
        _add_event(record.events, line)
    record.checkpoints = _checkpoints(folder / "checkpoints", verify)
    for path in _step_folders(folder / "postmortem"):
        record.postmortems.append((path, _object(record, path / "postmortem.json")))
    record.writing = _is_locked(folder)
    if record.events and record.fidelity and record.end[0] != "done":
        record.notes["fidelity.json"] = "it is of an earlier end of this run"
    step = record.modulation.get("step")
    if record.events and step is not None and step != record.step:
        record.notes["modulation.json"] = (
            f"it is of step {step}, the run has got to step {record.step:,}"
        )
    if not record.fidelity:
        _take_earlier_fidelity(record)
    return record


def _object(record: RunRecord, path: Path) -> Mapping[str, Any]:
    name = path.relative_to(record.folder).as_posix()
    if not path.exists():
        record.notes[name] = "it is not there"
        return {}
    try:
        return read_json(path, NPTError)
    except NPTError as error:
        record.notes[name] = str(error).replace(str(path), "it", 1).removesuffix("; copy it again")
        return {}


def _lines(record: RunRecord, name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a .jsonl file, and note lines that are none, but for a last one without
    an end, which may still be being written.
    """
    unreadable = 0
    try:
        with (record.folder / name).open("rb") as stream:
            while line := stream.readline(LINE_BYTES):
                value = None
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(line)
                if isinstance(value, dict):
                    yield value
                elif line.strip() and line.endswith(b"\n"):
                    unreadable += 1
    except FileNotFoundError:
        record.notes[name] = "it is not there"
    except OSError as error:
        record.notes[name] = f"it cannot be read: {error.strerror}"
    if unreadable:
        record.notes[name] = f"{unreadable:,} of its lines cannot be read and are left out"


def _count(value: Any) -> int | None:
    """Return a step of a JSON file; None for anything else."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < 2**53 else None


def _add_metrics(record: RunRecord, line: Mapping[str, Any]) -> None:
    """Add a line that has a step. One that is not after the last was made again, by a run that
    resumed further back: lines from there on are dropped.
    """
    step, steps, columns = _count(line.get("step")), record.steps, record.columns
    if step is None:
        return
    if steps and step <= steps[-1]:
        place = bisect_left(steps, step)
        record.repeated += len(steps) - place
        del steps[place:]
        for column in columns.values():
            del column[place:]
    for key in [key for key in line if key not in columns]:
        if len(columns) < LAYERS and (_PLAIN.fullmatch(key) or _LAYER.fullmatch(key)):
            columns[key] = array("d", [math.nan] * len(steps))
    steps.append(step)
    for key, column in columns.items():
        try:
            column.append(as_number(line, key))
        except (TypeError, ValueError, OverflowError):
            column.append(math.nan)


def _add_event(events: list[Event], line: Mapping[str, Any]) -> None:
    """Add a line that names its event. A resume undoes the events after its checkpoint; without one
    all of them.

    A refusal before that save still counts, whatever its step; so the save's place in the file
    decides, and the step only if the save is not found.
    """
    if not isinstance(line.get("event"), str):
        return
    event = {**line, "step": _count(line.get("step")), "undone": False}
    if event["event"] == "resume":
        checkpoint, step = event.get("checkpoint"), event["step"] or 0
        place: int | None = 0
        if checkpoint is not None:
            name = PurePosixPath(str(checkpoint)).name
            saves = [
                i for i, e in enumerate(events)
                if e["event"] == "save" and PurePosixPath(str(e.get("folder"))).name == name
            ]  # fmt: skip
            place = saves[-1] + 1 if saves else None
        for i, earlier in enumerate(events):
            later = i >= place if place is not None else (earlier["step"] or 0) > step
            earlier["undone"] |= earlier["event"] in _UNDONE and later
    events.append(event)


def _take_earlier_fidelity(record: RunRecord) -> None:
    """Take figures from before the end: of the start from the newest checkpoint that has them, of
    the student from the last evaluation under way.
    """
    shown = []
    for saved in reversed(record.checkpoints):
        if saved.verified is False:
            continue
        with contextlib.suppress(NPTError, KeyError, AttributeError, TypeError):
            initial = read_json(saved.path / "state.json", NPTError)["initial"]
            layers = {
                index: {key.replace("student", "initial"): value for key, value in values.items()}
                for index, values in initial.get("layers", {}).items()
            }
            record.fidelity = {
                "teacher": initial["teacher"], "floor": initial["floor"],
                "initial": initial["student"], "layers": layers,
            }  # fmt: skip
            shown.append(f"teacher, floor and start are those that {saved.path.name} has")
            break
    if evaluations := record.of("evaluation"):
        record.fidelity = {**record.fidelity, "student": evaluations[-1].get("student")}
        shown.append(f"the student is that of the evaluation at step {evaluations[-1]['step']}")
    if shown:
        record.notes["fidelity.json"] = "; ".join(["it is not there", *shown])


def _checkpoints(folder: Path, verify: Verify | None) -> list[Saved]:
    """Return all checkpoints, those set aside included, oldest first."""
    saved, read = list[Saved](), 0
    for path in reversed(_step_folders(folder)):
        size, problem = 0, ""
        with contextlib.suppress(OSError):  # a run may replace its files meanwhile
            size = sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
        if verify is None or read + size > VERIFIED_BYTES:
            saved.append(Saved(path, None, "not looked into", size))
            continue
        read += size
        try:
            verify(path)
        except (NPTError, OSError) as error:
            problem = str(error).replace(f"{folder}{os.sep}", "") or "broken"
        saved.append(Saved(path, not problem, problem, size))
    return saved[::-1]


def _step_folders(folder: Path) -> list[Path]:
    """Return the folders that are named for a step, by that; links are left out."""
    try:
        paths = [
            path
            for path in folder.iterdir()
            if _STEP_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        ]
    except OSError:
        return []
    return sorted(paths, key=lambda path: (_step_of(path), path.name))


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").partition(".")[0])


def _is_locked(folder: Path) -> bool | None:
    """Return whether a process on this machine holds the folder as a run does; None if that cannot
    be seen. The lock itself is not tried: a run that starts wants it.
    """
    try:
        inode = folder.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return any("FLOCK" in line and f":{inode} " in line for line in locks.splitlines())
