"""The tracer's demo: plant and trace every fault, and trace the clean models. With rivals, other
tools are asked about the same faults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from faults.bench import Fill, Student, no_fault
from faults.module_cases import MODULE_CASES, ModuleCase, Subject
from faults.places import Truth, marked_lines, sentence
from faults.rivals import RIVALS, Score, ask, of_verdict, score
from faults.tracer_cases import CLEAN, PLACE, Case
from faults.transient_faults import eager
from npt.batch import Batch
from npt.tracer.trace import trace
from npt.tracer.verdict import Verdict

SEEDS = (0, 1)
"""Of the clean passes of each small model."""


@dataclass(frozen=True)
class Line:
    """The result of a case."""

    case: Case | ModuleCase
    truth: Truth
    verdict: Verdict | None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.truth.fits(self.verdict) and self.line_is_right

    @property
    def line_is_right(self) -> bool:
        """Whether the marked line is named, if there is one. Without a place there is no line."""
        marked = marked_lines().get(self.case.id)
        assert self.verdict is not None
        source = self.verdict.source.partition(" in ")[0]
        return marked is None or not self.truth.operation or source == marked

    @property
    def found(self) -> str:
        v = self.verdict
        nothing = self.error or "nothing"
        return nothing if v is None else sentence(v.phase, v.operation, v.module, v.index)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.case.id,
            "name": self.case.name,
            "group": self.case.group,
            "planted": str(self.truth),
            "found": self.found,
            "cause": self.truth.cause,
            "cause_found": None if self.verdict is None else self.verdict.cause,
            "passed": self.passed,
        }


def find_fault(case: Case | ModuleCase) -> Line:
    """Plant a case in a fresh model and trace it."""
    truth = truth_of(case)
    try:
        with planted(case) as subject:
            return Line(case, truth, _trace(subject))
    except Exception as error:  # a tracer that fails has not found the fault; the demo continues
        return Line(case, truth, None, f"{type(error).__name__}: {error}")


def truth_of(case: Case | ModuleCase) -> Truth:
    if isinstance(case.truth, Truth):
        return case.truth
    assert isinstance(case, Case)
    return case.truth(Student(case.setting), case.setting.batch(PLACE))


@contextmanager
def planted(case: Case | ModuleCase) -> Iterator[Subject]:
    """Plant a case in a fresh model."""
    if isinstance(case, ModuleCase):
        yield small(case, bad=True)
        return
    student, batch = Student(case.setting), case.setting.batch(PLACE)
    if case.act is not None:
        case.act(student)
    with case.fault(student, batch) as (used, fill):
        yield _subject(student, used, fill, case.plain)


def small(case: ModuleCase, *, bad: bool, seed: int = 0) -> Subject:
    """Return a small model with its fault or without, from a seed."""
    torch.manual_seed(seed)
    return case.build(bad)


def _subject(student: Student, batch: Batch, fill: Fill | None, plain: bool) -> Subject:
    run = None if plain else fill or (lambda: student.fill(batch))
    return Subject(student.model, batch, run)


def clean() -> Iterator[Subject]:
    """Yield every clean pass: of the embedded model, and of the small ones."""
    for setting in CLEAN:
        student, batch = Student(setting), setting.batch(PLACE)
        for fault in (no_fault, eager()):
            with fault(student, batch):
                for plain in (False, True):
                    yield _subject(student, batch, None, plain)
    for case in MODULE_CASES:
        for seed in SEEDS:
            yield small(case, bad=False, seed=seed)


def false_alarms() -> int:
    """Return the number of verdicts on the clean models."""
    return sum(_trace(subject) is not None for subject in clean())


def _trace(subject: Subject) -> Verdict | None:
    return trace(subject.model, subject.batch, run=subject.run)


# --- other tools


@dataclass(frozen=True)
class ToolRow:
    """What a tool named of all faults. lines: how many faults are in a marked line."""

    name: str
    scores: Mapping[str, Score]
    false_alarms: int

    def as_dict(self) -> dict[str, Any]:
        scores = self.scores.values()
        return {
            "name": self.name,
            "operation": sum(s.operation for s in scores),
            "module": sum(s.module for s in scores),
            "line": sum(s.line is True for s in scores),
            "phase": sum(s.phase for s in scores),
            "nothing": sum(s.said is None for s in scores),
            "false_alarms": self.false_alarms,
            "total": len(scores),
            "lines": sum(s.line is not None for s in scores),
        }


def compare(lines: Iterable[Line], alarms: int, *, passes: bool = True) -> list[ToolRow]:
    """Return the row of `npt.trace`, from its lines, and of every rival, asked anew.

    passes: also count the rivals' alarms on the clean models.
    """
    lines = list(lines)
    rows = [
        ToolRow("npt.trace", {x.case.id: _score(x, of_verdict(x.verdict)) for x in lines}, alarms)
    ]
    for name, tool in RIVALS.items():
        scores = {}
        for line in lines:
            with planted(line.case) as subject:
                scores[line.case.id] = _score(line, ask(tool, subject))
        false = sum(ask(tool, subject) is not None for subject in clean()) if passes else 0
        rows.append(ToolRow(name, scores, false))
    return rows


def _score(line: Line, finding: Any) -> Score:
    made = line.case.made if isinstance(line.case, Case) else None
    return score(finding, made or line.truth, marked_lines().get(line.case.id))


def summary(lines: list[Line], alarms: int, rows: list[ToolRow] | None = None) -> dict[str, Any]:
    """Return the demo as JSON."""
    figures: dict[str, Any] = {
        "cases": [line.as_dict() for line in lines],
        "passed": sum(line.passed for line in lines),
        "total": len(lines),
        "false_alarms": alarms,
        "clean_passes": 4 * len(CLEAN) + len(SEEDS) * len(MODULE_CASES),
    }
    if rows is None:
        return figures
    for case in figures["cases"]:
        case["named"] = {row.name: _named(row.scores[case["id"]]) for row in rows}
    return {**figures, "tools": [row.as_dict() for row in rows]}


def _named(score: Score) -> list[str] | None:
    """Return what a tool named rightly; None if it reported nothing."""
    parts = ("operation", "module", "line", "phase")
    return None if score.said is None else [part for part in parts if getattr(score, part)]


def print_lines(console: Console, lines: list[Line], alarms: int) -> None:
    """Print each planted fault with the tracer's verdict."""
    table = Table(title="planted faults, and where the tracer found them")
    for heading in ("case", "planted", "found", "cause"):
        table.add_column(heading, overflow="fold")
    for line in lines:
        cause = "" if line.verdict is None else line.verdict.cause
        text = Text(_short(line.found), style="green" if line.passed else "red")
        table.add_row(line.case.id, _short(str(line.truth)), text, cause)
    console.print(table)
    console.print("phase: operation, layer.module [first bad index]")
    passed = sum(line.passed for line in lines)
    console.print(
        f"located {passed} of {len(lines)} faults exactly, {alarms} false alarms on clean models"
    )


def print_rows(console: Console, rows: list[ToolRow]) -> None:
    """Print what each tool named."""
    table = Table(title="what each tool named rightly")
    columns = ("operation", "module", "line", "phase", "nothing", "false_alarms")
    for heading in ("tool", *columns):
        table.add_column(
            heading.replace("_", " "), justify="left" if heading == "tool" else "right"
        )
    for row in rows:
        figures = row.as_dict()
        table.add_row(row.name, *(str(figures[column]) for column in columns))
    console.print(table)
    total, lines = (rows[0].as_dict()[key] for key in ("total", "lines"))
    console.print(f"of {total} faults, {lines} of them in a line of the demo's own code")
    if "sherlorch" not in RIVALS:
        console.print("sherlorch is not installed, and was left out")


def _short(text: str) -> str:
    """Shorten a sentence for a table by dropping the words that every line has."""
    for word, short in ((" in model.", ", "), (" in ", ", "), (" at [", " ["), ("layers.", "")):
        text = text.replace(word, short, 1)
    return text
