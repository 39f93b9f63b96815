"""The fault campaign: every case, the clean steps and the scorecard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from faults import scenarios
from faults.cases import LONG, all_cases
from faults.patterns import Case
from faults.verdict import Line, Verdict, together

CLEAN_STEPS = 1000


def judged(case: Case) -> Line:
    """Run a case in each of its modes. An error that escapes is a verdict too: the fault was not
    survived.
    """
    started = time.perf_counter()
    verdicts = []
    for late in case.modes:
        try:
            verdicts.append(case.check(replace(case.setting, late=late)))
        except Exception as error:
            reading = "late" if late else "at once"
            detail = f"read {reading}: {type(error).__name__}: {error}"
            verdicts.append(Verdict("crashed", False, False, detail=detail))
    return Line(case, together(verdicts), time.perf_counter() - started)


def clean_steps(count: int = CLEAN_STEPS) -> Case:
    """Return the case of clean steps with spike refusal on."""
    name = f"{count:,} clean steps, spike refusal on"
    return Case("clean-steps", name, "no alarm", scenarios.clean, replace(LONG, windows=count))


def every_case() -> list[Case]:
    return [*all_cases(), clean_steps()]


def summary(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the campaign as JSON. A survived case that is located wrongly has not passed."""
    return {
        "cases": [line.as_dict() for line in lines],
        "passed": sum(line.verdict.passed for line in lines),
        "total": len(lines),
        "false_alarms": sum(line.verdict.false_alarms for line in lines),
    }


def print_scorecard(
    console: Console, lines: Sequence[Line], title: str = "fault campaign", remark: str = "time"
) -> None:
    """Print a row for each case, the details of failures, and how many cases passed.

    remark: heading of the last column.
    """
    table = Table(title=title)
    for heading in ("case", "planted", "verdict", "located", remark):
        table.add_column(heading, overflow="fold")
    for line in lines:
        v = line.verdict
        verdict = _coloured(v.verdict if v.passed else f"FAILED: {v.verdict}", v.passed)
        located = _coloured("exactly" if v.located else "no", v.located)
        table.add_row(
            line.case.id,
            line.case.name,
            verdict,
            located,
            line.unguarded or f"{line.seconds:.1f} s",
        )
    console.print(table)
    for line in lines:
        if line.verdict.detail:
            console.print(f"{line.case.id}: {line.verdict.detail}", soft_wrap=True)
    figures = summary(lines)
    console.print(
        f"passed {figures['passed']} of {figures['total']}, {figures['false_alarms']} false alarms"
    )


def _coloured(text: str, good: bool) -> Text:
    return Text(text, style="green" if good else "red")
