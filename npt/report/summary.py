"""What a report says, in a few words and numbers."""

from __future__ import annotations

from typing import Any

from npt.evaluation.formatting import FIGURES
from npt.report.lines import number
from npt.report.run import RunRecord


def status(record: RunRecord) -> tuple[str, str]:
    """How the run stands: good, warn or bad, and a sentence."""
    state, event = record.events.end
    found = event.details if event is not None else {}
    at = f" at step {record.step:,}"
    if state == "done":
        return "good", f"Finished{at}"
    if state == "stopped":
        tried = record.refused_in
        at = at if tried is None else f" in step {tried:,}, after {record.step:,} that were made"
        return "bad", f"Stopped{at}: {found.get('reason', 'no reason on record')}"
    if state == "signal":
        return "warn", f"Ended by signal {found.get('number', '?')}{at}; it can be taken up again"
    if state == "error":
        return (
            "bad",
            f"Ended with an error{at}: {found.get('error', '')}: {found.get('message', '')}",
        )
    if record.writing:
        return "warn", f"Still running{at}"
    if state == "open":
        return "warn", f"No end is on record{at}: killed, or running on another machine"
    return "warn", "No start is on record"


def summary(record: RunRecord) -> dict[str, Any]:
    """The content of `npt report --json`: plain numbers, shares as fractions of 1."""
    metrics, student = record.metrics, record.fidelity.get("student")
    student = student if isinstance(student, dict) else {}
    return {
        "name": record.name,
        "state": "running" if record.state == "open" and record.writing else record.state,
        "status": status(record)[1],
        "step": record.step,
        "total_steps": record.total_steps,
        "refused_in_step": record.refused_in,
        "tokens": metrics.last("tokens"),
        "loss": metrics.last("loss"),
        "refused": sum(record.refused().values()),
        "refused_by_kind": record.refused(),
        **{name: number(student.get(name)) for key in FIGURES for name in (key, f"{key}_se")},
        "checkpoints": [
            {"step": saved.step, "folder": saved.path.name, "verified": saved.verified}
            for saved in record.checkpoints
        ],
        "postmortems": [bundle.path.name for bundle in record.postmortems],
        "missing": {**record.missing, **record.stale},
    }
