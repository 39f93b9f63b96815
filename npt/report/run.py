"""A run as its folder has it: every part that can be read, and why the others cannot."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npt.errors import NPTError
from npt.report.logs import Events, Lines, Metrics, as_count, as_mapping, read_events, read_metrics
from npt.stored import read_json

Verify = Callable[[Path], None]
"""Raises an NPTError if a checkpoint is not what was written."""

VERIFIED_BYTES = 16 << 30
"""Of checkpoints that are verified, newest first: a report may not take an hour."""

MADE = frozenset({"save", "evaluation", "resume", "signal", "stopped", "error"})
"""Events with the step that was made last; others have the one that was tried."""

_CHECKPOINT = re.compile(r"step-[0-9]{8,18}(\.[a-z]+(-[0-9]+)?)?")
_POSTMORTEM = re.compile(r"step-[0-9]{1,18}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint. verified: None if it was not read. problem: what verifying found, or why it was
    left out. size: bytes.
    """

    path: Path
    verified: bool | None
    problem: str
    size: int

    @property
    def step(self) -> int:
        return _step_of(self.path)


@dataclass(frozen=True)
class Postmortem:
    """A bundle's folder, and what its record says, or the problem of reading it."""

    path: Path
    record: Mapping[str, Any]
    problem: str = ""


@dataclass
class RunRecord:
    """The content of a run folder, empty if missing. missing: by file, why it says nothing. stale:
    by file, what it is of instead of the run's end. fidelity_of: what replaces a missing
    `fidelity.json`. writing: a process holds the folder; None if that cannot be seen.
    """

    folder: Path
    metrics: Metrics = field(default_factory=Metrics)
    events: Events = field(default_factory=Events)
    run: Mapping[str, Any] = field(default_factory=dict)
    fidelity: Mapping[str, Any] = field(default_factory=dict)
    modulation: Mapping[str, Any] = field(default_factory=dict)
    best: Mapping[str, Any] = field(default_factory=dict)
    fidelity_of: str = ""
    checkpoints: list[Saved] = field(default_factory=list)
    postmortems: list[Postmortem] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    stale: dict[str, str] = field(default_factory=dict)
    writing: bool | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        return as_mapping(self.run.get("settings"))

    @property
    def name(self) -> str:
        name = self.settings.get("run_name")
        return name if isinstance(name, str) and name.strip() else self.folder.absolute().name

    @property
    def step(self) -> int:
        """The last step on record."""
        made = [e.step for e in self.events.all if e.kind in MADE and not e.undone]
        done = [as_count(event.details.get("steps")) for event in self.events.of("done")]
        steps = [*self.metrics.steps[-1:], *made, *done]
        return max((step for step in steps if step is not None), default=0)

    @property
    def total_steps(self) -> int | None:
        """The steps that the last start was to make."""
        starts = self.events.of("start")
        return as_count(starts[-1].details.get("total_steps")) if starts else None

    @property
    def refused_in(self) -> int | None:
        """The step of the last refusals, if it was never made."""
        steps = [e.step for e in self.events.of("refusal") if e.step and e.step > self.step]
        return max(steps, default=None)

    def refused(self) -> Counter[str]:
        """Count refusals that were not undone, by kind."""
        kinds = (event.details.get("kind") for event in self.events.of("refusal"))
        return Counter(kind if isinstance(kind, str) else "unknown" for kind in kinds)


def read_run(folder: Path, verify: Verify | None = None) -> RunRecord:
    """Read everything in a run folder that a report is made of; nothing there changes, and nothing
    wrong with it raises. verify: of a checkpoint; None leaves that out.
    """
    record = RunRecord(folder)
    for name in ("run", "fidelity", "modulation"):
        setattr(record, name, _object(record, folder / f"{name}.json"))
    if (folder / "best").is_dir():
        record.best = _object(record, folder / "best" / "fidelity.json")
    for name in ("metrics.jsonl", "events.jsonl"):
        lines = Lines(folder / name)
        try:
            if name == "metrics.jsonl":
                record.metrics = read_metrics(lines)
            else:
                record.events = read_events(lines)
        except OSError as error:
            gone = isinstance(error, FileNotFoundError)
            record.missing[name] = (
                "it is not there" if gone else f"it cannot be read: {error.strerror}"
            )
        else:
            if lines.unreadable:
                said = f"{lines.unreadable:,} of its lines cannot be read and are left out"
                record.stale[name] = said
    record.checkpoints = _checkpoints(folder / "checkpoints", verify)
    for path in _folders(folder / "postmortem", _POSTMORTEM):
        name = (path / "postmortem.json").relative_to(folder).as_posix()
        content = _object(record, path / "postmortem.json")
        record.postmortems.append(Postmortem(path, content, record.missing.pop(name, "")))
    record.writing = _is_locked(folder)
    _note_stale(record)
    if not record.fidelity:
        _take_earlier_fidelity(record)
    return record


def _object(record: RunRecord, path: Path) -> Mapping[str, Any]:
    name = path.relative_to(record.folder).as_posix()
    if not path.exists():
        record.missing[name] = "it is not there"
        return {}
    try:
        return read_json(path, NPTError)
    except NPTError as error:
        said = str(error).replace(str(path), "it", 1).removesuffix("; copy it again")
        record.missing[name] = said
        return {}


def _note_stale(record: RunRecord) -> None:
    """Note which figures are of something other than the run's end."""
    if not record.events.all:
        return
    if record.fidelity and record.events.end[0] != "done":
        said = "it is of an earlier end of this run, before it was taken up again"
        record.stale["fidelity.json"] = said
    step = as_count(record.modulation.get("step"))
    if step is not None and step != record.step:
        said = f"it is of step {step:,}, the run has got to step {record.step:,}"
        record.stale["modulation.json"] = said


def _take_earlier_fidelity(record: RunRecord) -> None:
    """Take figures from before the end: of the start from the newest checkpoint that has them, of
    the student from the last evaluation under way.
    """
    said = []
    for saved in reversed(record.checkpoints):
        if saved.verified is False:
            continue
        try:
            state = read_json(saved.path / "state.json", NPTError)
        except NPTError:
            continue
        if initial := as_mapping(state.get("initial")):
            record.fidelity = {
                **{name: initial.get(name) for name in ("teacher", "floor")},
                "initial": initial.get("student"),
                "layers": {
                    index: {
                        "nmse_initial" if key == "nmse_student" else key: value
                        for key, value in as_mapping(values).items()
                    }
                    for index, values in as_mapping(initial.get("layers")).items()
                },
            }
            said = [f"teacher, floor and start are those that the checkpoint {saved.path.name} has"]
            break
    evaluations = record.events.of("evaluation")
    student = as_mapping(evaluations[-1].details.get("student")) if evaluations else {}
    if student:
        record.fidelity = {**record.fidelity, "student": student}
        at = evaluations[-1].step or 0
        said.append(f"the student's are those of the evaluation at step {at:,}")
    record.fidelity_of = "; ".join(said)


def _checkpoints(folder: Path, verify: Verify | None) -> list[Saved]:
    """Return all checkpoints, those set aside included, oldest first."""
    saved, read = [], 0
    for path in reversed(_folders(folder, _CHECKPOINT)):
        size = _size(path)
        if verify is None or read + size > VERIFIED_BYTES:
            more = f": the newer ones hold {read / 2**30:.1f} GiB already" if verify else ""
            saved.append(Saved(path, None, f"not looked into{more}", size))
            continue
        read += size
        problem = ""
        try:
            verify(path)
        except (NPTError, OSError) as error:
            problem = str(error).replace(f"{folder}{os.sep}", "") or "broken"
        saved.append(Saved(path, not problem, problem, size))
    return saved[::-1]


def _folders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """Return the folders with such a name by their step; links are left out."""
    try:
        found = [
            path
            for path in folder.iterdir()
            if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        ]
    except OSError:
        return []
    return sorted(found, key=lambda path: (_step_of(path), path.name))


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-").partition(".")[0])


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                continue
    return total


def _is_locked(folder: Path) -> bool | None:
    """Return whether a process on this machine holds the folder as a run does; None if that cannot
    be seen. The lock itself is not tried: a run that starts wants it.
    """
    try:
        inode = folder.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    held = re.compile(rf":{inode}\s")
    return any("FLOCK" in line and held.search(line) for line in locks.splitlines())
