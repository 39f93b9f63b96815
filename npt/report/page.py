"""The report on a run, as a page and as JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup

from npt.figures import FIGURES, Verdict
from npt.report.pages import render
from npt.report.run import Event, RunRecord, step_of
from npt.report.sections import (
    change,
    fidelity,
    layers,
    layers_by_step,
    modulation,
    refusals,
    training,
)
from npt.report.words import as_number, clean, figure, flat, number

SECTIONS = {
    "fidelity": "Fidelity",
    "training": "Training",
    "layers": "Layers",
    "saved": "Checkpoints and post-mortems",
    "events": "Events",
    "configuration": "Configuration",
}

LISTED = 200  # the most events listed, the last ones


def page(record: RunRecord, output: Path) -> str:
    """Return the HTML page about a run. Its links are relative to `output`, the page's path."""
    built = {
        "fidelity": _part(record, "fidelity.json", fidelity),
        "training": _part(record, "metrics.jsonl", training),
        "refusals": _part(record, "events.jsonl", refusals),
        "layers": _part(record, "fidelity.json", layers),
        "causes": _part(record, "postmortem", _causes) or {},
        "worst_layers": _part(record, "metrics.jsonl", layers_by_step),
        "modulation": _part(record, "metrics.jsonl", modulation),
        "events": _part(record, "events.jsonl", _events),
        "configuration": _part(record, "run.json", _configuration),
    }
    kind, words = status(record)
    changed = None
    # after the parts above, since each may have found fault with the file
    if "fidelity.json" not in record.notes:
        changed = _part(record, "fidelity.json", change)
    trained, line = changed or (None, "")
    if kind == "good" and trained is not None:
        kind = {"lower": "good", "noise": "warn"}.get(trained, "bad")
    return render(
        "run.html.j2",
        title=f"{clean(record.name, 80)}: run report",
        sections=SECTIONS,
        record=record,
        kind=kind,
        lines=[words, line],
        next=Markup("Next: {} <code>{}</code>").format(*_next(record, trained)),
        facts=_facts(record),
        output=output,
        notes=record.notes,
        **built,
    )


def _part(record: RunRecord, file: str, build: Callable[[RunRecord], Any]) -> Any:
    """Return a part of the page. If its file has unexpected content, note that and return None."""
    try:
        return build(record)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        record.notes[file] = f"unexpected content: {type(error).__name__}: {error}"
        return None


def status(record: RunRecord) -> tuple[str, str]:
    """Return `good`, `warn` or `bad`, and one sentence about the state of the run."""
    state, event = record.end
    at = f" at step {record.step:,}"
    if state == "done":
        causes = event.get("diverged")
        if isinstance(causes, list) and causes:
            why = "; ".join(clean(cause, 200) for cause in causes[:3])
            return "bad", f"Finished{at}, but diverged: {why}"
        return "good", f"Finished{at}"
    if state == "stopped":
        # the step that was refused was never completed
        if (tried := record.refused_in) is not None:
            at = f" in step {tried:,} ({record.step:,} completed)"
        return "bad", f"Stopped{at}: {event.get('reason', 'no recorded reason')}"
    if state == "error":
        what = f"{event.get('error', '')}: {event.get('message', '')}"
        return "bad", f"Ended with an error{at}: {what}"
    others = {
        "signal": f"Ended by signal {event.get('number', '?')}{at}",
        "open": f"Still running or killed{at}: no end is recorded",
        "unknown": "No start is recorded: events.jsonl is missing or incomplete",
    }
    return "warn", others[state]


def _next(record: RunRecord, trained: Verdict | None) -> tuple[str, str]:
    """Return what to do next, and the command, flag or file for it; `trained` tells what training
    changed.
    """
    kind, _ = status(record)
    state, _ = record.end
    if state == "done":
        if kind == "good":
            return _after_training(record, trained)
        return "train with a lower learning rate and", "--trace_steps 1-8"
    if state == "stopped" and record.postmortems:
        path, _ = record.postmortems[-1]
        return "to find the cause, run in this folder", f"npt replay postmortem/{path.name}"
    if state in ("stopped", "unknown"):
        return "for the last events, read", "events.jsonl"
    why = "if it was killed" if state == "open" else "to resume"
    return f"{why}, repeat the command with", "--resume auto"


def _after_training(record: RunRecord, trained: Verdict | None) -> tuple[str, str]:
    """Return what to do after a finished run, and the command or flag for it."""
    if trained in ("lower", None):
        words = "to compare student and teacher, run in this folder"
        return words, "npt generate --adapter . --compare --prompt TEXT"
    if trained == "noise" and record.settings.get("init") == "random":
        words = "train longer, or at a higher rate, such as"
        return words, _rate(record, 3.0)
    if trained == "noise":
        words = "train longer; if that changes nothing, the start is the best that this rank allows"
        return f"{words} ({record.settings.get('rank')}), so raise", "--adapter_rank"
    losses = record.first_and_last("loss")
    if trained == "higher" and losses is not None and losses[1] < losses[0]:
        words = "the loss on training text fell, but not that on held-out text: train on more text"
        return f"{words} with", "--dataset_name"
    words = "train at a lower rate, such as"
    return words, _rate(record, 0.1)


def _rate(record: RunRecord, factor: float) -> str:
    rate = record.settings.get("learning_rate")
    return f"--learning_rate {factor * rate:.3g}" if isinstance(rate, float) else "--learning_rate"


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return the key figures; one logged before the last step names its step."""
    steps = f"{record.step:,}"
    if record.total_steps not in (None, record.step):
        steps += f" of {record.total_steps}"
    facts = [("steps", steps), ("refusals", f"{record.refused().total():,}")]
    for key, name, write in (("tokens", "tokens", "{:,.0f}".format), ("loss", "last loss", number)):
        if last := record.last(key):
            step, value = last
            at = "" if step == record.step else f" at step {step:,}"
            facts.append((f"{name}{at}", write(value)))
    if warnings := record.of("warning"):
        facts.append(("warnings", f"{len(warnings):,}"))
    return facts


def _causes(record: RunRecord) -> dict[Path, str]:
    """Return the cause of the stop and the first bad operation, by post-mortem."""
    causes = {}
    for path, bundle in record.postmortems[-LISTED:]:
        words = [str(bundle.get("reason", "no recorded reason"))]
        if refusals := bundle.get("refusals"):
            words.append(f"Last refusal: {refusals[-1].get('detail')}")
        findings = bundle.get("findings") or ()
        verdicts = [finding["verdict"] for finding in findings if finding.get("verdict")]
        if verdicts:
            operation = verdicts[-1].get("explanation") or flat(verdicts[-1])
            words.append(f"First bad operation: {operation}")
        causes[path] = ". ".join(words)
    return causes


def _events(record: RunRecord) -> list[tuple[str, str, str, str]]:
    rows = []
    events = [event for event in record.events if event["event"] != "refusal"]
    for event in events[-LISTED:]:
        at = "–"
        if (seconds := event.get("time")) is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
        step = "" if event["step"] is None else str(event["step"])
        rows.append((at, step, event["event"], _words(event)))
    return rows


def _words(event: Event) -> str:
    if event["event"] == "evaluation":
        student = event.get("unquantized") or event["student"]
        return f"held-out KL {figure(student, 'kl')} nats, top-1 {figure(student, 'top1')}"
    message = event.get("message")
    if isinstance(message, str):
        error = event.get("error")
        return f"{error}: {message}" if error else message
    # floats with four digits
    event = json.loads(json.dumps(event), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    details = []
    for key, value in event.items():
        if key not in ("event", "step", "time") and value not in (None, {}, []):
            details.append(f"{key} {flat(value)}")
    return ", ".join(details)


def _configuration(record: RunRecord) -> list[tuple[str, str]]:
    """Return all settings, then the other entries of `run.json`."""
    others = {k: v for k, v in record.run.items() if k not in ("settings", "wandb_run")}
    entries = [*sorted(record.settings.items()), *others.items()]
    return [(name, flat(value)) for name, value in entries]


def summary(record: RunRecord) -> dict[str, Any]:
    """Return the data of `npt report --json`: plain numbers, with shares as fractions of 1."""
    student = record.fidelity.get("student")
    if not isinstance(student, dict):
        student = {}
    figures = {}
    for key in FIGURES:
        for name in (key, f"{key}_se"):
            value = as_number(student, name)
            # null, since NaN and Infinity are no JSON
            figures[name] = value if math.isfinite(value) else None
    tokens = record.last("tokens")
    loss = record.last("loss")
    return {
        "name": record.name,
        "state": record.end[0],
        "status": status(record)[1],
        "step": record.step,
        "total_steps": record.total_steps,
        "refused_in_step": record.refused_in,
        "tokens": tokens and tokens[1],
        "loss": loss and loss[1],
        "refused": record.refused().total(),
        "refused_by_kind": dict(record.refused()),
        **figures,
        "change": record.fidelity.get("change"),
        "checkpoints": [
            {"step": step_of(path), "folder": path.name} for path in record.checkpoints
        ],
        "postmortems": [path.name for path, _ in record.postmortems],
        "missing": dict(record.notes),
    }
