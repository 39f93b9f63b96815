"""What a report says, in a few words and numbers."""

from __future__ import annotations

from typing import Any

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
        return "bad", f"Stopped{at}: {found.get('reason', 'no reason on record')}"
    if state == "signal":
        return "warn", f"Ended by signal {found.get('number', '?')}{at}; it can be taken up again"
    if state == "error":
        return "bad", f"Ended with an error{at}: {found.get('error', '')}: {found.get('message', '')}"
    if record.writing:
        return "warn", f"Still running{at}"
    if state == "open":
        return "warn", f"No end is on record{at}: killed, or running on another machine"
    return "warn", "No start is on record"


def summary(record: RunRecord) -> dict[str, Any]:
    """The content of `npt report --json`."""
    metrics, student = record.metrics, record.fidelity.get("student")
    student = student if isinstance(student, dict) else {}
    return {
        "name": record.name,
        "state": "running" if record.state == "open" and record.writing else record.state,
        "status": status(record)[1],
        "step": record.step,
        "tokens": metrics.last("tokens"),
        "loss": metrics.last("loss"),
        "refused": sum(record.refused().values()),
        "refused_by_kind": record.refused(),
        "kl": number(student.get("kl")),
        "kl_se": number(student.get("kl_se")),
        "checkpoints": [{"step": saved.step, "folder": saved.path.name, "verified": saved.verified} for saved in record.checkpoints],
        "postmortems": [bundle.path.name for bundle in record.postmortems],
        "missing": {**record.missing, **record.stale},
    }
