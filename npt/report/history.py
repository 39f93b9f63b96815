"""What happened to a run and what it left: events, refusals, checkpoints, post-mortems."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from markupsafe import Markup

from npt.report.logs import Event, as_mapping
from npt.report.run import MADE, Postmortem, RunRecord
from npt.report.words import ALARM, SHOWN, address, both_ends, clean, cut, figure, flat

POSTMORTEMS = 20  # bundles that are shown, the last ones

_ROUTINE = frozenset({"save", "evaluation", "diagnosis", "epoch", "trace"})
"""Events that a long run has so many of that the others would be lost among them."""

_LOUD = ("warning", "error", "stopped", "save_failed")
_VERIFIED = {True: "verified", None: "not verified", False: ALARM.format("broken")}


def saved(record: RunRecord, place: Path) -> dict[str, Any]:
    """Return checkpoints, the best student, recorded steps and post-mortem bundles. place: of the
    page.
    """

    def link(path: Path, shown: str) -> Markup:
        return Markup('<a href="{}">{}</a>').format(address(path, place), clean(shown))

    checkpoints = [
        (
            f"{each.step:,}",
            link(each.path, each.path.name),
            f"{each.size / 2**20:,.1f}",
            _VERIFIED[each.verified],
            each.problem,
        )
        for each in both_ends(record.checkpoints)
    ]
    best, attribution = record.folder / "best", as_mapping(record.best.get("attribution"))
    student = attribution.get("unquantized_to_npt", record.best.get("student"))
    traces = sorted((record.folder / "trace").glob("*.html"))[:POSTMORTEMS]
    names = [event.details.get("postmortem") for event in record.events.of("stopped")]
    return {
        "checkpoints": checkpoints,
        "caption": cut(record.checkpoints, "Checkpoints"),
        "best": link(best, "best") if best.is_dir() else "",
        "best_step": record.best.get("step", "unknown"),
        "best_kl": figure(as_mapping(student), "kl"),
        "traces": [link(path, f"trace/{path.name}") for path in traces],
        "postmortems": [
            (b.path.relative_to(record.folder).as_posix(), address(b.path, place), _finding(b))
            for b in record.postmortems[-POSTMORTEMS:]
        ],
        "more": max(0, len(record.postmortems) - POSTMORTEMS),
        "gone": next((name for name in reversed(names) if isinstance(name, str)), None),
    }


def _finding(bundle: Postmortem) -> str:
    """Return why the run stopped, and which number was the first bad one."""
    if bundle.problem:
        return f"Its record says nothing: {bundle.problem}."
    found = [f"{clean(bundle.record.get('reason', 'no reason on record'))}."]
    refusals, verdict = bundle.record.get("refusals"), bundle.record.get("verdict")
    if isinstance(refusals, list) and refusals and isinstance(refusals[-1], dict):
        kind, detail = (refusals[-1].get(name, "") for name in ("kind", "detail"))
        found.append(f"Refused last: {clean(kind, 30)}: {clean(detail, 200)}.")
    if isinstance(verdict, dict):
        said = [verdict.get(name) for name in ("explanation", "remedy")]
        words = "; ".join(each for each in said if isinstance(each, str)) or flat(verdict)
        found.append(f"The first bad number: {clean(words, 400)}.")
    return " ".join(found)


def events(record: RunRecord) -> dict[str, Any]:
    """Return everything but the refusals, which are next to the loss."""
    found = [event for event in record.events.all if event.kind != "refusal"]
    many = len(found) > SHOWN
    shown = [event for event in found if not (many and event.kind in _ROUTINE)]
    left = len(found) - len(shown)
    rows = []
    for event in both_ends(shown):
        at = "" if event.step is None else f"{'after ' * (event.kind in MADE)}{event.step:,}"
        kind: str = clean(event.kind, 30)
        kind = ALARM.format(kind) if event.kind in _LOUD else kind
        undone = " (undone: the run was taken up further back)" * event.undone
        rows.append((_clock(event.time), at, kind, _told(event) + undone))
    caption = f"{left:,} saves, evaluations and other routine left out; " if left else ""
    return {"rows": rows, "caption": caption + cut(shown, "events" if left else "Events")}


def _told(event: Event) -> str:
    """Return an event's details in a line."""
    found = event.details
    if event.kind == "evaluation" and isinstance(found.get("student"), dict):
        student = as_mapping(found.get("unquantized")) or found["student"]
        return f"held-out KL {figure(student, 'kl')} nats, top-1 {figure(student, 'top1')}"
    if isinstance(found.get("message"), str):
        kind = found.get("error")
        return clean(f"{kind}: {found['message']}" if isinstance(kind, str) else found["message"])
    said = (f"{name} {flat(value)}" for name, value in found.items() if value not in (None, {}, []))
    return clean(", ".join(said))


def _clock(seconds: float | None) -> str:
    try:
        return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "–"


def refusals(record: RunRecord) -> dict[str, Any]:
    """Return what was refused, by kind and one by one with the reasons."""
    found, kinds = record.events.of("refusal", None), record.refused()
    rows = [
        (
            "–" if event.step is None else f"{event.step:,}",
            clean(event.details.get("kind", "–"), 30) + " (undone)" * event.undone,
            clean(_where(event), 60),
            clean(event.details.get("detail", "its reason is in events.jsonl"), 200),
            clean(_samples(event), 120),
        )
        for event in both_ends(found)
    ]
    return {
        "kept": kinds.total(),
        "undone": len(found) - kinds.total(),
        "kinds": ", ".join(f"{count:,} for {clean(k, 30)}" for k, count in sorted(kinds.items())),
        "rows": rows,
        "caption": cut(found, "Refusals"),
    }


def _where(event: Event) -> str:
    index, process = event.details.get("micro_batch"), event.details.get("rank")
    where = "the whole window" if index is None else f"micro-batch {clean(index, 20)}"
    return f"{where} on process {clean(process, 20)}" if process else where


def _samples(event: Event) -> str:
    samples = event.details.get("sample_ids")
    return ", ".join(map(str, samples[:8])) if isinstance(samples, list) else ""
