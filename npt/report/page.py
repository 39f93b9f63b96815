"""The page about a run: how near the student is to its teacher, how it got there, and what happened
on the way.
"""

from __future__ import annotations

from pathlib import Path

from npt.report import history, recipe
from npt.report.fidelity import fidelity, layers
from npt.report.modulation import modulation
from npt.report.pages import render
from npt.report.run import RunRecord
from npt.report.summary import status
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
    """Return the HTML page about a run.

    Args:
        record: what its folder has.
        place: where the page will lie, for its links.
    """
    return render(
        "run.html.j2",
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
        refusals=history.refusals(record),
        layers=layers(record),
        modulation=modulation(record),
        saved=history.saved(record, place),
        events=history.events(record),
        configuration=recipe.configuration(record),
        environment=recipe.environment(record),
    )


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return a few numbers; a logged figure says of which step it is if the run has got further."""

    def as_of(key: str) -> str:
        step = record.metrics.last_step(key)
        return f", logged at step {step:,}" if step is not None and step != record.step else ""

    total, warnings = record.total_steps, len(record.events.of("warning"))
    tokens, loss = record.metrics.last("tokens"), record.metrics.last("loss")
    of = "" if total is None or total == record.step else f" of {total:,}"
    facts = [("steps", f"{record.step:,}{of}")]
    facts.append(("refusals", f"{sum(record.refused().values()):,}"))
    facts += [(f"tokens{as_of('tokens')}", f"{tokens:,.0f}")] if tokens is not None else []
    facts += [(f"last loss{as_of('loss')}", number(loss))] if loss is not None else []
    return facts + ([("warnings", f"{warnings:,}")] if warnings else [])
