"""The report on a run, as a page and as JSON: how near the student is to its teacher, how it got
there, and what happened on the way.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npt.evaluation.formatting import FIGURES
from npt.report import history, recipe
from npt.report.anatomy import anatomy
from npt.report.fidelity import fidelity, layers
from npt.report.logs import as_mapping, as_number
from npt.report.modulation import modulation
from npt.report.pages import render, template_text
from npt.report.run import RunRecord
from npt.report.token_view import palette, token_view
from npt.report.training import training
from npt.report.words import clean, number

SECTIONS = {
    "fidelity": "Fidelity",
    "training": "Training",
    "layers": "Layers",
    "modulation": "Modulation",
    "saved": "Checkpoints and post-mortems",
    "events": "Events",
    "configuration": "Configuration",
    "environment": "Environment",
}


def page(record: RunRecord, place: Path) -> str:
    """Return the HTML page about a run; `place` is where it will be, for its links."""
    told = token_view([("", as_mapping(record.modulation.get("passage")))], small=True)
    shown = {"script": "tokens.js", "css": template_text("tokens.css") + palette()} if told else {}
    return render(
        "run.html.j2",
        **shown,
        told=told,
        json=told["json"] if told else "",
        title=f"{clean(record.name, 80)}: report of a run",
        sections=SECTIONS,
        record=record,
        missing=record.missing,
        gaps=sorted({**record.missing, **record.stale}.items()),
        status=status(record),
        facts=_facts(record),
        recipe=recipe.recipe(record),
        fidelity=fidelity(record),
        training=training(record),
        anatomy=anatomy(record),
        layers=layers(record),
        modulation=modulation(record),
        saved=history.saved(record),
        place=place,
        events=history.events(record),
        configuration=recipe.configuration(record),
        environment=recipe.environment(record),
    )


def status(record: RunRecord) -> tuple[str, str]:
    """Return `good`, `warn` or `bad`, and a sentence on how the run is or ended."""
    state, event = record.events.end
    found = event.details if event is not None else {}
    at = f" at step {record.step:,}"
    if state == "done":
        causes = found.get("diverged")
        if isinstance(causes, list) and causes:
            ruined = "; ".join(clean(str(cause), 200) for cause in causes[:3])
            return "bad", f"Finished{at}, but diverged: {ruined}"
        return "good", f"Finished{at}"
    if state == "stopped":
        tried = record.refused_in
        at = at if tried is None else f" in step {tried:,}, after {record.step:,} that were made"
        return "bad", f"Stopped{at}: {found.get('reason', 'no reason on record')}"
    if state == "signal":
        return "warn", f"Ended by signal {found.get('number', '?')}{at}; it can be taken up again"
    if state == "error":
        said = f"{found.get('error', '')}: {found.get('message', '')}"
        return "bad", f"Ended with an error{at}: {said}"
    if record.writing:
        return "warn", f"Still running{at}"
    if state == "open":
        return "warn", f"No end is on record{at}: killed, or running on another machine"
    return "warn", "No start is on record"


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return a few numbers; a logged figure names its step if the run has got further."""
    total, warnings = record.total_steps, len(record.events.of("warning"))
    of = "" if total is None or total == record.step else f" of {total:,}"
    facts = [("steps", f"{record.step:,}{of}")]
    facts.append(("refusals", f"{record.refused().total():,}"))
    for key, name, write in (("tokens", "tokens", "{:,.0f}".format), ("loss", "last loss", number)):
        if last := record.metrics.last(key):
            step, value = last
            at = f", logged at step {step:,}" if step != record.step else ""
            facts.append((f"{name}{at}", write(value)))
    return facts + ([("warnings", f"{warnings:,}")] if warnings else [])


def summary(record: RunRecord) -> dict[str, Any]:
    """Return the content of `npt report --json`: plain numbers, shares as fractions of 1."""
    student, state = as_mapping(record.fidelity.get("student")), record.events.end[0]
    last = {key: record.metrics.last(key) for key in ("tokens", "loss")}
    return {
        "name": record.name,
        "state": "running" if state == "open" and record.writing else state,
        "status": status(record)[1],
        "step": record.step,
        "total_steps": record.total_steps,
        "refused_in_step": record.refused_in,
        **{key: found and found[1] for key, found in last.items()},
        "refused": record.refused().total(),
        "refused_by_kind": dict(record.refused()),
        **{name: as_number(student.get(name)) for key in FIGURES for name in (key, f"{key}_se")},
        "checkpoints": [
            {"step": saved.step, "folder": saved.path.name, "verified": saved.verified}
            for saved in record.checkpoints
        ],
        "postmortems": [bundle.path.name for bundle in record.postmortems],
        "missing": {**record.missing, **record.stale},
    }
