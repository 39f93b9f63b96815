"""The page: how near the student is to its teacher, how it got there, and what happened on the way,
in one file that needs nothing else.

It may be mailed and kept, and what stands in a run folder may be anybody's: it loads nothing, every
text is escaped, and its policy lets no script run but its own. The pictures are drawn before and
can be read without that script, which only reads off numbers.
"""

from __future__ import annotations

from pathlib import Path

from npt.report.charts import PALETTE
from npt.report.fidelity import fidelity_section
from npt.report.frame import frame
from npt.report.history import events_section, saved_section
from npt.report.layers import layers_section
from npt.report.markup import number, text
from npt.report.modulation import modulation_section
from npt.report.recipe import recipe
from npt.report.run import RunRecord
from npt.report.settings import configuration_section, environment_section
from npt.report.summary import status
from npt.report.training import Training


def page(record: RunRecord, place: Path) -> str:
    """The HTML page about a run.

    Args:
        record: what its folder has.
        place: where the page will lie, for its links.
    """
    palette = "\n".join(
        f".c{i} {{ fill: {colour}; background: {colour} }}" for i, colour in enumerate(PALETTE)
    )
    script = (Path(__file__).parent / "script.js").read_text(encoding="utf-8")
    training = Training(record)
    sections = (
        ("fidelity", "Fidelity", fidelity_section(record)),
        ("training", "Training", training.section()),
        ("layers", "Layers", layers_section(record)),
        ("modulation", "Modulation", modulation_section(record)),
        ("saved", "Checkpoints and post-mortems", saved_section(record, place)),
        ("events", "Events", events_section(record)),
        ("configuration", "Configuration", configuration_section(record)),
        ("environment", "Environment", environment_section(record)),
    )
    title = f"{text(record.name, 80)}: report of a run"
    return frame(title, _head(record), sections, style=palette, script=script, data=training.data())


def _head(record: RunRecord) -> str:
    """How the run stands, a few numbers, and what is missing."""
    kind, words = status(record)
    total = record.total_steps
    steps = f"{record.step:,}" + (
        f" of {total:,}" if total is not None and total != record.step else ""
    )
    facts = [("steps", steps), ("refusals", f"{sum(record.refused().values()):,}")]
    tokens, loss, warnings = (
        record.metrics.last("tokens"),
        record.metrics.last("loss"),
        len(record.events.of("warning")),
    )
    facts += [(f"tokens{_as_of(record, 'tokens')}", f"{tokens:,.0f}")] if tokens is not None else []
    facts += [(f"last loss{_as_of(record, 'loss')}", number(loss))] if loss is not None else []
    facts += [("warnings", f"{warnings:,}")] if warnings else []
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    missing = sorted({**record.missing, **record.stale}.items())
    items = "".join(f"<li><code>{text(name)}</code>: {text(why)}</li>" for name, why in missing)
    said = (
        f'<div class="missing"><p>Not all of the run is here:</p><ul>{items}</ul></div>'
        if items
        else ""
    )
    return (
        f'<p class="status {kind}"><strong>{text(words)}</strong></p>\n<dl'
        f' class="facts">{cells}</dl>\n{recipe(record)}\n{said}'
    )


def _as_of(record: RunRecord, key: str) -> str:
    """What a logged figure is of, where the run has got further than its last logged step."""
    step = record.metrics.last_step(key)
    return f", logged at step {step:,}" if step is not None and step != record.step else ""
