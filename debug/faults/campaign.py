"""The campaign: every case judged, the clean steps counted, and the scorecard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from faults.bench import run
from faults.cases import LONG, Case, all_cases
from faults.loops import OUTCOMES, compare
from faults.verdict import Verdict, together

CLEAN_STEPS = 1000


@dataclass(frozen=True)
class Line:
    """A judged case."""

    case: Case
    verdict: Verdict
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        v = self.verdict
        return {
            "id": self.case.id,
            "name": self.case.name,
            "group": self.case.group,
            "truth": self.case.truth,
            "verdict": v.verdict,
            "located": v.located,
            "passed": v.passed,
            "false_alarms": v.false_alarms,
            "detail": v.detail,
            "seconds": round(self.seconds, 2),
        }


def judged(case: Case) -> Line:
    """Run a case in each of its modes. What it raises is a verdict too: a fault that ends the
    campaign was not survived.
    """
    started = time.perf_counter()
    verdicts = []
    for late in case.modes:
        try:
            verdicts.append(case.check(late))
        except Exception as error:
            reading = "late" if late else "at once"
            verdicts.append(
                Verdict(
                    "crashed",
                    False,
                    False,
                    detail=f"read {reading}: {type(error).__name__}: {error}",
                )
            )
    return Line(case, together(verdicts), time.perf_counter() - started)


def clean_steps(count: int = CLEAN_STEPS) -> Case:
    """Steps without a fault, spike refusal on: every refusal is a false alarm."""

    def check(late: bool) -> Verdict:
        setting = replace(LONG, late=late, windows=count)
        _, outcome = run(setting)
        alarms = len(outcome.refusals)
        good = alarms == 0 and outcome.steps == setting.windows
        return Verdict(
            "unharmed" if good else "alarmed",
            good,
            good,
            alarms,
            "; ".join(str(r) for _, r in outcome.refusals[:3]),
        )

    return Case("clean-steps", f"{count:,} clean steps, spike refusal on", "no alarm", check)


def every_case() -> list[Case]:
    return [*all_cases(), clean_steps()]


def find(cases: Iterable[Case], id: str) -> Case | None:
    return next((case for case in cases if case.id == id), None)


def campaign(
    cases: Iterable[Case] | None = None, watch: Callable[[Line], None] | None = None
) -> list[Line]:
    """Judge the cases (default: all, and the clean steps), telling `watch` of each."""
    lines = []
    for case in cases if cases is not None else every_case():
        lines.append(judged(case))
        if watch is not None:
            watch(lines[-1])
    return lines


def summary(lines: list[Line]) -> dict[str, Any]:
    """The campaign as JSON. A case that is cleanly survived but wrongly located has not passed."""
    return {
        "cases": [line.as_dict() for line in lines],
        "passed": sum(line.verdict.passed for line in lines),
        "total": len(lines),
        "false_alarms": sum(line.verdict.false_alarms for line in lines),
    }


def print_scorecard(console: Console, lines: list[Line]) -> None:
    table = Table(title="fault campaign")
    for heading in ("case", "planted", "verdict", "located", "s"):
        table.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    for line in lines:
        v = line.verdict
        verdict = _coloured(v.verdict if v.passed else f"FAILED: {v.verdict}", v.passed)
        table.add_row(
            line.case.id,
            line.case.name,
            verdict,
            _coloured("exactly" if v.located else "no", v.located),
            f"{line.seconds:.1f}",
        )
    console.print(table)
    for line in lines:
        if line.verdict.detail:
            console.print(f"{line.case.id}: {line.verdict.detail}", soft_wrap=True)
    figures = summary(lines)
    console.print(
        f"passed {figures['passed']} of {figures['total']}, {figures['false_alarms']} false alarms"
    )


def comparison(cases: Iterable[Case] | None = None) -> list[dict[str, str]]:
    """Each case that plain loops can meet too: what became of the run under each of them, and under
    the transaction.
    """
    rows = []
    for case in cases if cases is not None else all_cases():
        if case.plant is not None:
            line = judged(case)
            ours = "survives" if line.verdict.passed else line.verdict.verdict
            rows.append({"id": case.id, "name": case.name, "ours": ours, **compare(case)})
    return rows


def print_comparison(console: Console, rows: list[dict[str, str]]) -> None:
    table = Table(title="the same faults in plain loops")
    columns = [key for key in rows[0] if key not in ("id", "name")] if rows else []
    for heading in ("planted", *columns):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(
            row["name"], *(_coloured(row[column], row[column] == "survives") for column in columns)
        )
    console.print(table)
    for outcome, meaning in OUTCOMES.items():
        console.print(f"{outcome}: {meaning}", soft_wrap=True)


def _coloured(text: str, good: bool) -> Text:
    return Text(text, style="green" if good else "red")
