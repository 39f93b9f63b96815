"""Training of other people's kind, judged: does it equal the run that never saw the fault?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from faults.campaign import print_totals
from faults.row_cases import TENSOR, RowCase
from faults.row_trainers import TRAINERS
from faults.verdict import Verdict, verdict_of
from npt.guard import Refusal


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Return where two states differ in a bit, or None."""
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"the entries of {place}"
        found = (difference(one[key], other[key], f"{place} {key}".strip()) for key in one)
        return next((where for where in found if where is not None), None)
    same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
    return None if same else place


@dataclass(frozen=True)
class RowLine:
    """A judged case. unguarded: the fate of the same trainer without a guard."""

    case: RowCase
    verdict: Verdict
    unguarded: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        v = self.verdict
        return {
            "id": self.case.id,
            "name": self.case.name,
            "truth": self.case.truth,
            "verdict": v.verdict,
            "unguarded": self.unguarded,
            "located": v.located,
            "passed": v.passed,
            "false_alarms": v.false_alarms,
            "detail": v.detail,
            "seconds": round(self.seconds, 2),
        }


def judged(case: RowCase, trainer: str) -> RowLine:
    """Train three times, and compare."""
    started = time.perf_counter()
    train = TRAINERS[trainer]
    clean = train(case, False, False)
    try:
        bare = difference(train(case, True, False).state, clean.state)
        fate = "equal" if bare is None else "changed"
    except Exception as error:
        fate = f"ended by {type(error).__name__}"
    complaints, located, strangers = [], False, 0
    try:
        guarded = train(case, True, True)
    except Exception as error:
        complaints.append(f"{type(error).__name__}: {error}")
    else:
        where = difference(guarded.state, clean.state)
        if where is not None:
            complaints.append(f"{where} differs from the run without")
        located, strangers = _located(case, guarded.refusals)
    if fate == "equal":
        complaints.append("the fault does nothing to an unguarded run")
    verdict = verdict_of("survived", complaints, located, strangers)
    return RowLine(case, verdict, fate, time.perf_counter() - started)


def _located(case: RowCase, refusals: Sequence[Refusal]) -> tuple[bool, int]:
    """Return whether every refusal names what was planted, and the number of others."""
    fits = [r for r in refusals if r.kind == case.kind and r.micro_batch in case.refused]
    one = case.fault is not None and case.fault.startswith("tensor-")
    named = all(TENSOR in (refusal.tensor or "") for refusal in fits) if one else True
    said = [refusal.micro_batch for refusal in fits]
    return named and said == case.refused, len(refusals) - len(fits)


def print_lines(console: Console, lines: Sequence[RowLine], trainer: str) -> None:
    """Print the scorecard."""
    table = Table(title=f"faults in other people's trainers: {trainer}")
    for heading in ("case", "planted", "guarded", "located", "unguarded"):
        table.add_column(heading, overflow="fold")
    for line in lines:
        v = line.verdict
        said = v.verdict if v.passed else f"FAILED: {v.verdict}"
        located = "exactly" if v.located else "no"
        table.add_row(line.case.id, line.case.name, said, located, line.unguarded)
    console.print(table)
    print_totals(console, lines)
