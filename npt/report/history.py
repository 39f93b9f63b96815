"""The events of a run in words, and what it left: checkpoints and post-mortems."""

from __future__ import annotations

import time
from typing import Any

from npt.report.logs import Event, as_mapping
from npt.report.run import MADE, Postmortem, RunRecord
from npt.report.words import SHOWN, cut, figure, flat

POSTMORTEMS = 20  # bundles that are shown, the last ones

_ROUTINE = frozenset({"save", "evaluation", "diagnosis", "epoch", "trace"})
"""Events that a long run has so many of that the others would be lost among them."""


def saved(record: RunRecord) -> dict[str, Any]:
    """Return the best student, recorded steps and post-mortem bundles."""
    best, attribution = record.folder / "best", as_mapping(record.best.get("attribution"))
    student = attribution.get("unquantized_to_npt", record.best.get("student"))
    names = [event.details.get("postmortem") for event in record.events.of("stopped")]
    return {
        "best": best if best.is_dir() else None,
        "best_step": record.best.get("step", "unknown"),
        "best_kl": figure(as_mapping(student), "kl"),
        "traces": sorted((record.folder / "trace").glob("*.html"))[:POSTMORTEMS],
        "postmortems": [
            (bundle.path.relative_to(record.folder).as_posix(), bundle.path, _finding(bundle))
            for bundle in record.postmortems[-POSTMORTEMS:]
        ],
        "more": max(0, len(record.postmortems) - POSTMORTEMS),
        "gone": next((name for name in reversed(names) if isinstance(name, str)), None),
    }


def _finding(bundle: Postmortem) -> dict[str, Any]:
    """Return why the run stopped, and which number was the first bad one."""
    refusals, verdict = bundle.record.get("refusals"), bundle.record.get("verdict")
    last = as_mapping(refusals[-1]) if isinstance(refusals, list) and refusals else {}
    first_bad = ""
    if isinstance(verdict, dict):
        said = [verdict.get(name) for name in ("explanation", "remedy")]
        first_bad = "; ".join(each for each in said if isinstance(each, str)) or flat(verdict)
    return {
        "problem": bundle.problem,
        "reason": bundle.record.get("reason", "no reason on record"),
        "kind": last.get("kind", ""),
        "detail": last.get("detail", ""),
        "refused": bool(last),
        "first_bad": first_bad,
    }


def events(record: RunRecord) -> dict[str, Any]:
    """Return everything but the refusals, which are next to the loss."""
    found = [event for event in record.events.all if event.kind != "refusal"]
    many = len(found) > SHOWN
    shown = [event for event in found if not (many and event.kind in _ROUTINE)]
    left = len(found) - len(shown)
    caption = f"{left:,} saves, evaluations and other routine left out; " if left else ""
    return {
        "rows": [
            (event, _clock(event.time), "after " * (event.kind in MADE), _told(event))
            for event in shown
        ],
        "caption": caption + cut(shown, "events" if left else "Events"),
    }


def _told(event: Event) -> str:
    """Return an event's details in a line."""
    found = event.details
    if event.kind == "evaluation" and isinstance(found.get("student"), dict):
        student = as_mapping(found.get("unquantized")) or found["student"]
        return f"held-out KL {figure(student, 'kl')} nats, top-1 {figure(student, 'top1')}"
    if isinstance(found.get("message"), str):
        kind = found.get("error")
        return f"{kind}: {found['message']}" if isinstance(kind, str) else found["message"]
    said = (f"{name} {flat(value)}" for name, value in found.items() if value not in (None, {}, []))
    return ", ".join(said)


def _clock(seconds: float | None) -> str:
    try:
        return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "–"
