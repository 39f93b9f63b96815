"""The campaign: every case judged, the clean steps counted, and the scorecard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

from faults import scenarios
from faults.cases import LONG, all_cases
from faults.loops import OUTCOMES, compare
from faults.patterns import Case
from faults.verdict import Verdict, together

CLEAN_STEPS = 1000


class Judged(Protocol):
    """A line of a scorecard, of whatever was judged."""

    @property
    def case(self) -> Any: ...
    @property
    def verdict(self) -> Verdict: ...
    def as_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Line:
    """A judged case."""

    case: Case
    verdict: Verdict
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        of_case = {key: getattr(self.case, key) for key in ("id", "name", "group", "truth")}
        return {**of_case, **asdict(self.verdict), "seconds": round(self.seconds, 2)}


def judged(case: Case) -> Line:
    """Run a case in each of its modes. What it raises is a verdict too: a fault that ends the
    campaign was not survived.
    """
    started = time.perf_counter()
    verdicts = []
    for late in case.modes:
        try:
            verdicts.append(case.check(replace(case.setting, late=late)))
        except Exception as error:
            reading = "late" if late else "at once"
            said = f"read {reading}: {type(error).__name__}: {error}"
            verdicts.append(Verdict("crashed", False, False, detail=said))
    return Line(case, together(verdicts), time.perf_counter() - started)


def clean_steps(count: int = CLEAN_STEPS) -> Case:
    """Make the case of steps without a fault, spike refusal on."""
    name = f"{count:,} clean steps, spike refusal on"
    return Case("clean-steps", name, "no alarm", scenarios.clean, replace(LONG, windows=count))


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


def summary(lines: Sequence[Judged]) -> dict[str, Any]:
    """Return the campaign as JSON. A survived case that is wrongly located has not passed."""
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
    print_totals(console, lines)


def print_totals(console: Console, lines: Sequence[Judged]) -> None:
    """Print the details of the verdicts that have some, and how many cases passed."""
    for line in lines:
        if line.verdict.detail:
            console.print(f"{line.case.id}: {line.verdict.detail}", soft_wrap=True)
    figures = summary(lines)
    console.print(
        f"passed {figures['passed']} of {figures['total']}, {figures['false_alarms']} false alarms"
    )


def comparison(cases: Iterable[Case] | None = None) -> list[dict[str, str]]:
    """Return, for each case that plain loops can meet too, the fate of the run under each of them,
    and under the guarded step.
    """
    rows = []
    for case in cases if cases is not None else all_cases():
        if case.fault is not None:
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
