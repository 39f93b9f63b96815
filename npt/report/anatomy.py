"""The anatomy of one refused batch: its window, the fault, what was kept out, and what became of
the step, from `events.jsonl` alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from npt.report.logs import Event, as_count
from npt.report.run import RunRecord
from npt.report.words import clean

BOXES = 32
"""Micro-batches of a window that are drawn."""

_TENSOR = re.compile(
    r"gradient of (\S{1,200}) has norm|^((?:\S{1,40} of )?\S{1,200}) was not finite after the step"
)
"""A tensor's name in the text of an event that has no entry for it."""

_FAULTS = {
    "data": "found in the data, before anything was computed",
    "loss": "found in the loss, after the forward pass",
    "gradient": "found in the gradients, after the backward pass",
    "norm": "found in the gradient of the whole window, before clipping",
    "spike": "found in the loss or gradient norm of the window, next to those of the last windows",
    "update": "found in weights or moments, after the step",
}

_KEPT_OUT = {
    "data": "Nothing was computed, so nothing was to be put back.",
    "loss": (
        "Its gradients lay in scratch memory. One flag, whether loss and gradients are finite,"
        " chose by torch.where between the window's sum with them and without: the sum stayed as it"
        " was."
    ),
    "norm": (
        "The window's gradient was dropped before the optimizer saw it. Weights and moments were"
        " not touched."
    ),
    "update": (
        "Weights, moments and step counts were restored from the copy that was made before the"
        " step."
    ),
}
_KEPT_OUT |= {"gradient": _KEPT_OUT["loss"], "spike": _KEPT_OUT["norm"]}


@dataclass
class _Window:
    """The refusals of one window, and what a diagnosis said of its micro-batches."""

    refusals: list[Event] = field(default_factory=list)
    diagnoses: list[Event] = field(default_factory=list)

    def takes(self, refusal: Event) -> bool:
        """Return whether a refusal is of this window: places ascend, a whole window is last."""
        if not self.refusals:
            return True
        last, place = _place(self.refusals[-1]), _place(refusal)
        same = refusal.step == self.refusals[-1].step
        return same and last is not None and (place is None or place > last)

    @property
    def told(self) -> Event:
        """The refusal that says most: one that names a tensor, else one of computed numbers."""
        return max(self.refusals, key=_telling)


def _place(refusal: Event) -> int | None:
    return as_count(refusal.details.get("micro_batch"))


def _kind(refusal: Event) -> str:
    kind = refusal.details.get("kind")
    return kind if isinstance(kind, str) else "unknown"


def _tensor(refusal: Event) -> str | None:
    named = refusal.details.get("tensor")
    if isinstance(named, str) and named:
        return named[:240]
    found = _TENSOR.search(str(refusal.details.get("detail", ""))[:1000])
    return next(filter(None, found.groups()), None) if found else None


def _telling(refusal: Event) -> int:
    return 2 * (_tensor(refusal) is not None) + (
        _kind(refusal) in _FAULTS and _kind(refusal) != "data"
    )


def _windows(events: Sequence[Event]) -> list[_Window]:
    found: list[_Window] = []
    for event in events:
        if event.undone or event.step is None:
            continue
        if event.kind == "refusal":
            if not found or not found[-1].takes(event):
                found.append(_Window())
            found[-1].refusals.append(event)
        elif event.kind == "diagnosis" and found:
            found[-1].diagnoses.append(event)
    return found


def anatomy(record: RunRecord) -> dict[str, Any] | None:
    """Return the window whose refusal says most, the first of them; None if nothing was refused."""
    windows = _windows(record.events.all)
    if not windows:
        return None
    window = max(windows, key=lambda window: _telling(window.told))  # the first of equals
    told = window.told
    step = told.step or 0
    places = {place for refusal in window.refusals if (place := _place(refusal)) is not None}
    count = max([_micro_batches(record), *(place + 1 for place in places)])
    whole = any(_place(refusal) is None for refusal in window.refusals)
    made = not whole and len(places) < count and record.refused_in != step
    state = "kept" if made else "dropped"
    boxes = [
        (str(i), "refused" if i in places or whole else state) for i in range(min(count, BOXES))
    ]
    samples = told.details.get("sample_ids")
    diagnosis = next(
        (
            each.details.get("message")
            for each in window.diagnoses
            if each.details.get("micro_batch") == told.details.get("micro_batch")
        ),
        None,
    )
    kind = _kind(told)
    facts = [
        ("fault", _FAULTS.get(kind, kind)),
        ("said", told.details.get("detail")),
        ("tensor", _tensor(told)),
        ("samples", ", ".join(map(str, samples[:8])) if isinstance(samples, list) else None),
        ("looked at again", diagnosis),
    ]
    return {
        "step": step,
        "of": len(windows),
        "boxes": boxes,
        "more": count - len(boxes),
        "where": "the whole window" if _place(told) is None else f"micro-batch {_place(told)}",
        "others": len(window.refusals) - 1,
        "facts": [(name, clean(said, 400)) for name, said in facts if said],
        "kept_out": _KEPT_OUT.get(kind, ""),
        "made": made,
        "end": _end(record, step, made, count - len(places)),
    }


def _micro_batches(record: RunRecord) -> int:
    """Return the micro-batches of a full window, of all processes."""
    starts = record.events.of("start")
    processes = as_count(starts[-1].details.get("processes")) if starts else None
    return (as_count(record.settings.get("gradient_accumulation_steps")) or 1) * (processes or 1)


def _end(record: RunRecord, step: int, made: bool, survivors: int) -> str:
    if made:
        others = (
            "the other micro-batch" if survivors == 1 else f"the other {survivors} micro-batches"
        )
        return (
            f"Step {step:,} was made with {others}, divided by their tokens alone: bit for bit the"
            " step of a window that never held the refused one."
        )
    if record.step >= step:
        return (
            "No step was made of this window: weights, moments, schedule and counters stayed as"
            f" they were. A later window made step {step:,}."
        )
    return f"No step was made of this window, and none after it: step {step:,} was never made."
