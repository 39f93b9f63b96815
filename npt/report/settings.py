"""What a run was made of: its settings, and what it ran on."""

from __future__ import annotations

from npt.report.markup import SHOWN, flat, lacking, table, text
from npt.report.run import RunRecord

ENTRIES = 40
"""Entries that are listed of one part of `run.json`."""

_FIRST = ("model_name", "dataset_name", "rank", "layers", "targets", "modulation")
_ELSEWHERE = ("settings", "wandb_run")


def configuration_section(record: RunRecord) -> str:
    """Every setting, and what it was before a resume changed it."""
    settings = record.settings
    if not settings:
        return lacking(record.missing, "run.json", "it holds no settings")
    before: dict[str, str] = {}
    for event in record.events.of("resume"):
        changed = event.details.get("changed")
        for name, values in changed.items() if isinstance(changed, dict) else ():
            old = flat(values[0]) if isinstance(values, list) and values else flat(values)
            before[name] = f"was {old} before step {event.step or 0:,}"
    order = [name for name in _FIRST if name in settings] + sorted(set(settings) - set(_FIRST))
    rows = [
        (text(name, 60), text(flat(settings[name])), text(before.get(name, "")))
        for name in order[:SHOWN]
    ]
    return table(("setting", "~value", "~changed"), rows, f"Settings, {len(settings)}")


def environment_section(record: RunRecord) -> str:
    """Versions, device, precision, base, layers and sizes."""
    if not record.run:
        return lacking(record.missing, "run.json", "it is empty")
    rows: list[tuple[str, str]] = []
    for name, value in record.run.items():
        if name in _ELSEWHERE:
            continue
        parts = (
            [(f"{name}: {key}", entry) for key, entry in list(value.items())[:ENTRIES]]
            if isinstance(value, dict)
            else [(name, value)]
        )
        rows += [
            (text(what, 60), text(f"{entry:,}" if type(entry) is int else flat(entry)))
            for what, entry in parts
        ]
    return table(("what", "~value"), rows[:SHOWN], "Environment")
