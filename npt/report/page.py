"""The report on a run, as a page and as JSON: how near the student is to its teacher, how it got
there, and what happened on the way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from npt.evaluation.formatting import FIGURES
from npt.report.fidelity import fidelity, layers
from npt.report.generated import token_view
from npt.report.modulation import modulation
from npt.report.pages import render
from npt.report.run import Event, RunRecord
from npt.report.training import training
from npt.report.words import as_number, clean, figure, flat, number

SECTIONS = {
    "fidelity": "Fidelity",
    "training": "Training",
    "layers": "Layers",
    "modulation": "Modulation",
    "saved": "Checkpoints and post-mortems",
    "events": "Events",
    "configuration": "Configuration",
}

EVENTS = 200  # the last ones, which are listed
POSTMORTEMS = 20  # the last ones, which are listed
HASH_LETTERS = 12  # of a hash, at the head

_ROUTINE = frozenset({"refusal", "save", "evaluation", "diagnosis", "epoch", "trace"})
"""Events that a long run has so many of that the others would be lost among them."""

_VERSIONS = ("npt", "torch", "transformers", "bitsandbytes", "python")


def page(record: RunRecord, place: Path) -> str:
    """Return the HTML page about a run; `place` is where it will be, for its links."""
    parts = {
        "recipe": _part(record, "run.json", _recipe) or [],
        "fidelity": _part(record, "fidelity.json", fidelity),
        "training": _part(record, "metrics.jsonl", training),
        "layers": _part(record, "fidelity.json", layers),
        "modulation": _part(record, "modulation.json", modulation),
        "passage": _part(record, "modulation.json", _passage),
        "saved": _part(record, "postmortem", _saved),
        "events": _part(record, "events.jsonl", _events) or [],
        "configuration": _part(record, "run.json", _configuration) or [],
    }
    return render(
        "run.html.j2", title=f"{clean(record.name, 80)}: report of a run", sections=SECTIONS,
        record=record, status=status(record), facts=_facts(record), place=place,
        notes=record.notes, **parts,
    )  # fmt: skip


def _part(record: RunRecord, file: str, build: Callable[[RunRecord], Any]) -> Any:
    """Return a part of the page; None, and a note, if its file is not as a run writes it."""
    try:
        return build(record)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        record.notes[file] = f"it is not what a run writes: {type(error).__name__}: {error}"
        return None


def status(record: RunRecord) -> tuple[str, str]:
    """Return `good`, `warn` or `bad`, and a sentence on how the run is or ended."""
    state, event = record.end
    at = f" at step {record.step:,}"
    if state == "done":
        causes = event.get("diverged")
        if isinstance(causes, list) and causes:
            ruined = "; ".join(clean(str(cause), 200) for cause in causes[:3])
            return "bad", f"Finished{at}, but diverged: {ruined}"
        return "good", f"Finished{at}"
    if state == "stopped":
        if (tried := record.refused_in) is not None:
            at = f" in step {tried:,}, after {record.step:,} that were made"
        return "bad", f"Stopped{at}: {event.get('reason', 'no reason on record')}"
    if state == "signal":
        return "warn", f"Ended by signal {event.get('number', '?')}{at}; it can be taken up again"
    if state == "error":
        message = f"{event.get('error', '')}: {event.get('message', '')}"
        return "bad", f"Ended with an error{at}: {message}"
    if record.writing:
        return "warn", f"Still running{at}"
    if state == "open":
        return "warn", f"No end is on record{at}: killed, or running on another machine"
    return "warn", "No start is on record"


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    """Return a few numbers; a logged figure names its step if the run has got further."""
    total, warnings = record.total_steps, len(record.of("warning"))
    of = "" if total is None or total == record.step else f" of {total}"
    facts = [("steps", f"{record.step:,}{of}"), ("refusals", f"{record.refused().total():,}")]
    for key, name, write in (("tokens", "tokens", "{:,.0f}".format), ("loss", "last loss", number)):
        if last := record.last(key):
            at = f", logged at step {last[0]:,}" if last[0] != record.step else ""
            facts.append((f"{name}{at}", write(last[1])))
    return facts + ([("warnings", f"{warnings:,}")] if warnings else [])


def _recipe(record: RunRecord) -> list[tuple[str, str]]:
    """Return base, adapters, training, data and versions, a line each; nothing that `run.json` does
    not say.
    """
    run, settings = record.run, record.settings

    def words(name: str, form: str = "{}", source: Mapping[str, Any] = settings) -> str:
        value = source.get(name)
        return "" if value is None else form.format(flat(value))

    quantization = run.get("precision", {}).get("quantization")
    versions = run.get("versions", {})
    lines = {
        "base": [
            words("model_name"),
            words("quantization", "a GGUF in {}", run.get("base_origin") or {}),
            words("base_hash", "hash {}", {"base_hash": run.get("base_hash", "")[:HASH_LETTERS]}),
            str(quantization or "unquantised").upper() if "precision" in run else "",
            words("device", "on {}", run),
        ],
        "adapters": [
            words("layers", "layers {}", run), words("rank", "rank {}"),
            words("targets", "targets {}"), words("modulation", "modulation {}"),
            words("trainable_parameters", "{} parameters", run),
        ],
        "start": [
            words("init"), words("adapter", "from {}"),
            words("additive_scale", "alpha {}"), words("mult_bound", "beta {}"),
        ],
        "training": [
            words("strategy"), words("loss", "loss {}"), words("learning_rate", "rate {}"),
            words("scheduler_type", "schedule {}"), words("batch_size", "batch {}")
            + words("gradient_accumulation_steps", " x {}"),
            words("processes", "processes {}"), words("seed", "seed {}", run),
        ],
        "data": [
            words("dataset_name"), words("dataset_config"), words("num_samples", "{} samples"),
            words("max_length", "up to {} tokens each"),
        ],
        "versions": [words(name, name + " {}", versions) for name in _VERSIONS],
    }  # fmt: skip
    return [(name, ", ".join(filter(None, line))) for name, line in lines.items() if any(line)]


def _passage(record: RunRecord) -> dict[str, Any] | None:
    passage = record.modulation.get("passage")
    return token_view([("", passage)]) if passage else None


def _saved(record: RunRecord) -> dict[str, Any]:
    """Return the best student, recorded steps and post-mortem bundles."""
    best, folder = record.folder / "best", record.folder
    attribution = record.best.get("attribution") or {}
    student = attribution.get("unquantized_to_npt", record.best.get("student", {}))
    names = [event.get("postmortem") for event in record.of("stopped")]
    return {
        "best": best if best.is_dir() else None,
        "best_words": f"of step {record.best.get('step', 'unknown')}, KL {figure(student, 'kl')}",
        "traces": sorted((folder / "trace").glob("*.html"))[-POSTMORTEMS:],
        "postmortems": [
            (path.relative_to(folder).as_posix(), path, _cause(bundle))
            for path, bundle in record.postmortems[-POSTMORTEMS:]
        ],
        "gone": next((name for name in reversed(names) if name is not None), None),
    }


def _cause(bundle: Mapping[str, Any]) -> str:
    """Return why the run stopped, and which number was the first bad one."""
    if not bundle:
        return ""
    words = [str(bundle.get("reason", "no reason on record"))]
    if refusals := bundle.get("refusals"):
        words.append(f"Refused last: {refusals[-1].get('kind')}: {refusals[-1].get('detail')}")
    if verdict := bundle.get("verdict"):
        parts = [verdict[name] for name in ("explanation", "remedy") if name in verdict]
        words.append(f"The first bad number: {'; '.join(parts) or flat(verdict)}")
    return ". ".join(words)


def _events(record: RunRecord) -> list[tuple[Event, str, str]]:
    """Return the last events with time and details; routine ones only if there is room. Refusals
    are next to the loss.
    """
    events = [event for event in record.events if event["event"] != "refusal"]
    if len(events) > EVENTS:
        events = [event for event in events if event["event"] not in _ROUTINE]
    return [(event, _clock(event.get("time")), _words(event)) for event in events[-EVENTS:]]


def _words(event: Event) -> str:
    """Return an event's details in a line."""
    message, error = event.get("message"), event.get("error")
    if event["event"] == "evaluation":
        student = event.get("unquantized") or event["student"]
        return f"held-out KL {figure(student, 'kl')} nats, top-1 {figure(student, 'top1')}"
    if isinstance(message, str):
        return f"{error}: {message}" if error else message
    details = {
        name: value for name, value in event.items()
        if name not in ("event", "step", "time", "undone") and value not in (None, {}, [])
    }  # fmt: skip
    return ", ".join(f"{name} {flat(value)}" for name, value in details.items())


def _clock(seconds: float | None) -> str:
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _configuration(record: RunRecord) -> list[tuple[str, str, str]]:
    """Return every setting, and what it was before a resume changed it; then versions, device and
    everything else of `run.json`.
    """
    before = {
        name: f"was {flat(values[0])} before step {event['step']}"
        for event in record.of("resume")
        for name, values in event.get("changed", {}).items()
    }
    rows = [(name, flat(v), before.get(name, "")) for name, v in sorted(record.settings.items())]
    others = {k: v for k, v in record.run.items() if k not in ("settings", "wandb_run")}
    return rows + [(name, flat(value), "") for name, value in others.items()]


def summary(record: RunRecord) -> dict[str, Any]:
    """Return the content of `npt report --json`: plain numbers, shares as fractions of 1."""
    student, state = record.fidelity.get("student") or {}, record.end[0]
    last = {key: record.last(key) for key in ("tokens", "loss")}
    figures = {name: as_number(student, name) for key in FIGURES for name in (key, f"{key}_se")}
    return {
        "name": record.name,
        "state": "running" if state == "open" and record.writing else state,
        "status": status(record)[1],
        "step": record.step,
        "total_steps": record.total_steps,
        "refused_in_step": record.refused_in,
        **{key: logged and logged[1] for key, logged in last.items()},
        "refused": record.refused().total(),
        "refused_by_kind": dict(record.refused()),
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        "checkpoints": [
            {"step": saved.step, "folder": saved.path.name, "verified": saved.verified}
            for saved in record.checkpoints
        ],
        "postmortems": [path.name for path, _ in record.postmortems],
        "missing": dict(record.notes),
    }
