"""What there is to know about a run, read from its folder: every part that is there, and of every
other one why it is not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npt.errors import NPTError
from npt.report.events import Events, State, read_events
from npt.report.lines import Lines, count
from npt.report.metrics import Metrics, read_metrics
from npt.stored import read_json

Verify = Callable[[Path], None]
"""Raises an NPTError where a checkpoint is not what was written."""

VERIFIED_BYTES = 16 << 30
"""Of checkpoints that are read through to verify them, newest first: a report is not to take an
hour.
"""

MADE = frozenset({"save", "evaluation", "resume", "signal", "stopped", "error"})
"""Events that bear the step that was made last; others bear the one that was tried."""

_CHECKPOINT = re.compile(r"step-[0-9]{8,18}(\.[a-z]+(-[0-9]+)?)?")
_POSTMORTEM = re.compile(r"step-[0-9]{1,18}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint's folder below the run. verified: None where that was not looked into. problem:
    what verifying found, or why it was left. size: bytes."""

    path: Path
    verified: bool | None
    problem: str
    size: int

    @property
    def step(self) -> int:
        return int(self.path.name.removeprefix("step-").partition(".")[0])


@dataclass(frozen=True)
class Postmortem:
    """A bundle's folder, and what its record says; empty where it cannot be read, and then
    `problem` says why.
    """

    path: Path
    record: Mapping[str, Any]
    problem: str = ""


@dataclass
class RunRecord:
    """A run as its folder has it.

    run, fidelity, modulation: the content of the files; empty where they are missing. missing: by
    file, why it says nothing. stale: by file, what it is of instead of the run's end. fidelity_of:
    what stands in for `fidelity.json`, if anything does. writing: a process holds the folder; None
    where that cannot be seen.
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
        return mapping(self.run.get("settings"))

    @property
    def name(self) -> str:
        """What the run is called."""
        name = self.settings.get("run_name")
        return name if isinstance(name, str) and name.strip() else self.folder.absolute().name

    @property
    def step(self) -> int:
        """The last step on record."""
        steps = [
            event.step
            for event in self.events.all
            if event.step is not None and not event.undone and event.kind in MADE
        ]
        done = [
            found
            for event in self.events.of("done")
            if (found := count(event.details.get("steps"))) is not None
        ]
        return max([*self.metrics.steps[-1:], *steps, *done], default=0)

    @property
    def total_steps(self) -> int | None:
        """Of the last start: how many the run was to make."""
        starts = self.events.of("start")
        return count(starts[-1].details.get("total_steps")) if starts else None

    @property
    def refused_in(self) -> int | None:
        """The step that was being tried when the last refusals came, if it has not been
        made since.
        """
        steps = [
            event.step
            for event in self.events.of("refusal")
            if event.step is not None and event.step > self.step
        ]
        return max(steps, default=None)

    @property
    def state(self) -> State:
        return self.events.end[0]

    def refused(self) -> dict[str, int]:
        """Refusals that still count, by kind."""
        kinds: dict[str, int] = {}
        for event in self.events.of("refusal"):
            kind = event.details.get("kind")
            kind = kind if isinstance(kind, str) else "unknown"
            kinds[kind] = kinds.get(kind, 0) + 1
        return kinds


def read_run(folder: Path, verify: Verify | None = None) -> RunRecord:
    """Everything in a run folder that a report is made of. Nothing in it is changed, and nothing
    that is wrong with it raises.

    Args:
        folder: the run's; it may be missing everything.
        verify: reads a checkpoint through; None to leave that out.
    """
    record = RunRecord(folder)
    for name, what in (
        ("run.json", "run"),
        ("fidelity.json", "fidelity"),
        ("modulation.json", "modulation"),
    ):
        setattr(record, what, _object(record, folder / name))
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
            record.missing[name] = _reason(error)
        else:
            if lines.unreadable:
                record.stale[name] = (
                    f"{lines.unreadable:,} of its lines cannot be read and are left out"
                )
    record.checkpoints = _checkpoints(folder / "checkpoints", verify)
    record.postmortems = _postmortems(record, folder / "postmortem")
    record.writing = _is_locked(folder)
    _judge(record)
    return record


def _object(record: RunRecord, path: Path) -> Mapping[str, Any]:
    name = path.relative_to(record.folder).as_posix()
    if not path.exists():
        record.missing[name] = "it is not there"
        return {}
    try:
        return read_json(path, NPTError)
    except NPTError as error:
        record.missing[name] = (
            str(error).replace(str(path), "it", 1).removesuffix("; copy it again")
        )
        return {}


def _judge(record: RunRecord) -> None:
    """Say of what else than the run's end its figures are, and find others where those of its end
    are missing.
    """
    if record.fidelity and record.events.all and record.state != "done":
        record.stale["fidelity.json"] = (
            "it is of an earlier end of this run, before it was taken up again"
        )
    step = count(record.modulation.get("step"))
    if record.modulation and record.events.all and step is not None and step != record.step:
        record.stale["modulation.json"] = (
            f"it is of step {step:,}, the run has got to step {record.step:,}"
        )
    if not record.fidelity:
        _stand_in(record)


def _stand_in(record: RunRecord) -> None:
    """Figures from before the end: the newest checkpoint has those of the start, the last
    evaluation under way those of the student.
    """
    for saved in reversed([saved for saved in record.checkpoints if saved.verified is not False]):
        path = saved.path / "state.json"
        try:
            found = read_json(path, NPTError)
        except NPTError:
            continue
        initial = mapping(found.get("initial"))
        if not initial:
            continue
        layers = {
            index: _renamed(values) for index, values in mapping(initial.get("layers")).items()
        }
        figures = {name: initial.get(name) for name in ("teacher", "floor")} | {
            "initial": initial.get("student"),
            "layers": layers,
        }
        record.fidelity, record.fidelity_of = (
            figures,
            f"teacher, floor and start are those that the checkpoint {saved.path.name} has",
        )
        break
    evaluations = record.events.of("evaluation")
    student = mapping(evaluations[-1].details.get("student")) if evaluations else {}
    if student:
        said = f"the student's are those of the evaluation at step {evaluations[-1].step or 0:,}"
        record.fidelity = {**record.fidelity, "student": student}
        record.fidelity_of = f"{record.fidelity_of}; {said}" if record.fidelity_of else said


def _renamed(values: Any) -> dict[str, Any]:
    """A layer's figures of a student that was not trained yet."""
    return {
        "nmse_initial" if key == "nmse_student" else key: value
        for key, value in mapping(values).items()
    }


def _checkpoints(folder: Path, verify: Verify | None) -> list[Saved]:
    """All that are there, those set aside included, oldest first."""
    found = _folders(folder, _CHECKPOINT)
    saved, read = [], 0
    for path in reversed(found):
        size = _size(path)
        if verify is None or read + size > VERIFIED_BYTES:
            why = (
                "not looked into"
                if verify is None
                else f"not looked into: the newer ones hold {read / 2**30:.1f} GiB already"
            )
            saved.append(Saved(path, None, why, size))
            continue
        read += size
        try:
            verify(path)
        except (NPTError, OSError) as error:
            saved.append(Saved(path, False, str(error).replace(f"{folder}{os.sep}", ""), size))
        else:
            saved.append(Saved(path, True, "", size))
    return saved[::-1]


def _postmortems(record: RunRecord, folder: Path) -> list[Postmortem]:
    bundles = []
    for path in _folders(folder, _POSTMORTEM):
        name = (path / "postmortem.json").relative_to(record.folder).as_posix()
        content = _object(record, path / "postmortem.json")
        bundles.append(Postmortem(path, content, record.missing.pop(name, "")))
    return bundles


def _folders(folder: Path, name: re.Pattern[str]) -> list[Path]:
    """The folders below it that are called so, by their step; links are none."""
    try:
        found = [
            path
            for path in folder.iterdir()
            if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        ]
    except OSError:
        return []
    return sorted(
        found, key=lambda path: (int(path.name.removeprefix("step-").partition(".")[0]), path.name)
    )


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
    """Whether a process on this machine holds the folder as a run does; asked without trying its
    lock, which a starting run wants.

    None where it cannot be seen.
    """
    try:
        inode = folder.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return any(
        "FLOCK" in line and re.search(rf":{inode}\s", line) is not None
        for line in locks.splitlines()
    )


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def _reason(error: OSError) -> str:
    return (
        "it is not there"
        if isinstance(error, FileNotFoundError)
        else f"it cannot be read: {error.strerror}"
    )
