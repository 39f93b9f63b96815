"""What happened to a run and what it left: events, checkpoints, post-mortems."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from npt.report.events import Event
from npt.report.markup import SHOWN, both_ends, clean, cut, figure, flat, lacking, link, table, text
from npt.report.run import MADE, Postmortem, RunRecord, Saved

POSTMORTEMS = 20
"""Bundles that are shown, the last ones."""

_ROUTINE = frozenset({"save", "evaluation", "diagnosis", "epoch", "trace"})
"""Events of which a long run has so many that the others would be lost among them."""

_LOUD = ("warning", "error", "stopped", "save_failed")


def saved_section(record: RunRecord, place: Path) -> str:
    """Checkpoints with what verifying them found, the best student, recorded steps, and post-mortem
    bundles.
    """
    return "\n".join(
        [*_checkpoints(record, place), *_others(record, place), *_postmortems(record, place)]
    )


def _checkpoints(record: RunRecord, place: Path) -> Iterator[str]:
    if not record.checkpoints:
        yield '<p class="missing">There is no checkpoint.</p>'
        return

    def row(saved: Saved) -> tuple[str, ...]:
        verdict = {True: "verified", False: "broken", None: "not verified"}[saved.verified]
        told = f'<span class="{"alarm" if saved.verified is False else "soft"}">{verdict}</span>'
        size = f"{saved.size / 2**20:,.1f}"
        return (
            f"{saved.step:,}",
            link(saved.path, place, saved.path.name),
            size,
            told,
            text(saved.problem),
        )

    rows = [row(saved) for saved in both_ends(record.checkpoints)]
    yield table(
        ("*step", "folder", "*MiB", "sums", "~what was found"),
        rows,
        cut(record.checkpoints, "Checkpoints"),
    )
    yield '<p class="soft">Verified: every file has the sha256 sum that it was written with.</p>'


def _others(record: RunRecord, place: Path) -> Iterator[str]:
    best = record.folder / "best"
    if best.is_dir():
        against = record.best.get("attribution")
        student = (against if isinstance(against, dict) else {}).get(
            "unquantized_to_npt", record.best.get("student")
        )
        figures = student if isinstance(student, dict) else {}
        kl = figure(figures, "kl")
        step = clean(record.best.get("step", "unknown"), 20)
        yield (
            f"<p>The best student so far: {link(best, place, 'best')}, of step {text(step)}, KL"
            f" {kl} nats.</p>"
        )
    pages = sorted((record.folder / "trace").glob("*.html"))[:POSTMORTEMS]
    if pages:
        yield (
            "<p>Tensor health of the recorded steps:"
            f" {', '.join(link(path, place, f'trace/{path.name}') for path in pages)}.</p>"
        )


def _postmortems(record: RunRecord, place: Path) -> Iterator[str]:
    for bundle in record.postmortems[-POSTMORTEMS:]:
        name = bundle.path.relative_to(record.folder).as_posix()
        yield (
            "<h3>Post-mortem"
            f" {link(bundle.path, place, name)}</h3>\n<p>{text(_finding(bundle), 900)}</p>"
        )
        yield f"<p>Look into it with <code>npt replay {text(name)}</code>, in the run's folder.</p>"
    if len(record.postmortems) > POSTMORTEMS:
        yield f"<p>Before these: {len(record.postmortems) - POSTMORTEMS:,} more.</p>"
    if not record.postmortems:
        said = [event.details.get("postmortem") for event in record.events.of("stopped")]
        gone = next((clean(path, 60) for path in reversed(said) if isinstance(path, str)), None)
        yield (
            "<p>There is no post-mortem.</p>"
            if gone is None
            else f'<p class="missing">The post-mortem {text(gone)} is not there.</p>'
        )


def _finding(bundle: Postmortem) -> str:
    """Why the run stopped, and which number was the first bad one."""
    if bundle.problem:
        return f"Its record says nothing: {bundle.problem}."
    found = [f"{clean(bundle.record.get('reason', 'no reason on record'))}."]
    refusals, verdict = bundle.record.get("refusals"), bundle.record.get("verdict")
    if isinstance(refusals, list) and refusals and isinstance(refusals[-1], dict):
        found.append(
            f"Refused last: {clean(refusals[-1].get('kind', ''), 30)}:"
            f" {clean(refusals[-1].get('detail', ''), 200)}."
        )
    if isinstance(verdict, dict):
        said = [
            verdict[name]
            for name in ("explanation", "remedy")
            if isinstance(verdict.get(name), str)
        ]
        found.append(f"The first bad number: {clean('; '.join(said) or flat(verdict), 400)}.")
    return " ".join(found)


def events_section(record: RunRecord) -> str:
    """Everything but the refusals, which stand beside the loss."""
    if "events.jsonl" in record.missing:
        return lacking(record.missing, "events.jsonl", "")
    events = [event for event in record.events.all if event.kind != "refusal"]
    if not events:
        return '<p class="missing">No event is on record.</p>'

    def row(event: Event) -> tuple[str, ...]:
        kind = text(event.kind, 30)
        kind = f'<span class="alarm">{kind}</span>' if event.kind in _LOUD else kind
        undone = (
            ' <span class="soft">(undone: the run was taken up further back)</span>'
            if event.undone
            else ""
        )
        return _clock(event.time), _step(event), kind, text(_told(event)) + undone

    others = [event for event in events if event.kind not in _ROUTINE]
    shown = events if len(events) <= SHOWN else others
    left = (
        f"{len(events) - len(others):,} saves, evaluations and other routine left out; "
        if shown is others
        else ""
    )
    rows = [row(event) for event in both_ends(shown)]
    return table(
        ("time, UTC", "*step", "event", "~what"),
        rows,
        left + cut(shown, "events" if left else "Events"),
    )


def _step(event: Event) -> str:
    """An event's step: the one that was tried, or the one after which it came."""
    return (
        ""
        if event.step is None
        else f"after {event.step:,}"
        if event.kind in MADE
        else f"{event.step:,}"
    )


def _told(event: Event) -> str:
    """An event's details in a line."""
    found = event.details
    if event.kind == "evaluation" and isinstance(found.get("student"), dict):
        student = (
            found["unquantized"] if isinstance(found.get("unquantized"), dict) else found["student"]
        )
        return f"held-out KL {figure(student, 'kl')} nats, top-1 {figure(student, 'top1')}"
    if isinstance(found.get("message"), str):
        kind = found.get("error")
        return f"{kind}: {found['message']}" if isinstance(kind, str) else found["message"]
    return ", ".join(
        f"{name} {flat(value)}" for name, value in found.items() if value not in (None, {}, [])
    )


def _clock(seconds: float | None) -> str:
    try:
        return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "–"
