"""The tracer's demo: plant and trace every fault, and trace the clean model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from faults.bench import Fill, Student, no_fault
from faults.tracer_cases import CLEAN, PLACE, Case, Truth, sentence
from faults.transient_faults import eager
from npt.data.batch import Batch
from npt.tracer.trace import trace
from npt.tracer.verdict import Verdict


@dataclass(frozen=True)
class Line:
    """The result of a case."""

    case: Case
    truth: Truth
    verdict: Verdict | None
    error: str = ""

    @property
    def passed(self) -> bool:
        return self.verdict is not None and self.truth.fits(self.verdict)

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


def find_fault(case: Case) -> Line:
    """Plant a case in a fresh student and trace it."""
    student, batch, truth = Student(case.setting), case.setting.batch(PLACE), case.truth
    if not isinstance(truth, Truth):
        truth = truth(Student(case.setting), batch)
    if case.act is not None:
        case.act(student)
    try:
        with case.fault(student, batch) as (used, fill):
            return Line(case, truth, _trace(student, used, fill, case.plain))
    except Exception as error:  # a tracer that fails has not found the fault; the demo continues
        return Line(case, truth, None, f"{type(error).__name__}: {error}")


def false_alarms() -> int:
    """Return the number of verdicts on the clean model."""
    count = 0
    for setting in CLEAN:
        student, batch = Student(setting), setting.batch(PLACE)
        for fault in (no_fault, eager()):
            with fault(student, batch):
                verdicts = [_trace(student, batch, None, plain) for plain in (False, True)]
                count += sum(verdict is not None for verdict in verdicts)
    return count


def _trace(student: Student, batch: Batch, fill: Fill | None, plain: bool) -> Verdict | None:
    if plain:
        return trace(student.model, batch)
    return trace(student.model, batch, run=fill or (lambda: student.fill(batch)))


def summary(lines: list[Line], alarms: int) -> dict[str, Any]:
    """Return the demo as JSON."""
    return {
        "cases": [line.as_dict() for line in lines],
        "passed": sum(line.passed for line in lines),
        "total": len(lines),
        "false_alarms": alarms,
    }


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
        f"located {passed} of {len(lines)} faults exactly, {alarms} false alarms on the clean model"
    )


def _short(text: str) -> str:
    """Shorten a sentence for a table by dropping the words that every line has."""
    for word, short in ((" in model.", ", "), (" in ", ", "), (" at [", " ["), ("layers.", "")):
        text = text.replace(word, short, 1)
    return text
