"""A window from its first micro-batch to its outcome.

A window starts as a `PendingWindow`. After the step, `send_record` sends its figures from the
device to the host as one tensor, and `read_record` turns them into an `Outcome`. `refusal.py`
explains what was refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from npt.distributed.processes import ProcessGroup
from npt.guard.lists import alike
from npt.guard.refusal import Refusal as Refusal
from npt.guard.refusal import check_alike, refusal_of, window_refusal

if TYPE_CHECKING:
    from npt.guard.forensics import Finding, StoredMicroBatch

Snapshot = dict[str, tuple[Tensor, dict[str, Any]]]
"""By parameter name, a copy of the parameter and of its optimizer state."""

NO_LIMITS = (math.inf, math.inf)


@dataclass
class MicroBatch:
    """A micro-batch from its forward to the outcome of its window.

    Attributes:
        loss: the loss, assigned by the loop; it can be NaN while the gradients are finite. Once the
            outcome is known, its mean per token, a number.
        tokens: its weight.
        report: [n] the caller's own figures, returned with the outcome.
        index: its index in the window over all processes.
        flag: scalar bool, whether loss and gradients are finite; None if it was refused before.
        norm: norm over all gradients, a scalar.
        norms: [P] norm of each parameter's gradient, to name the bad one.
        codes: [processes] what is wrong on each, if backward sums gradients; micro-batches
            computed together then count together.
        grad_norm: `norm` as a number, once the outcome is known.
        reached: indices of the parameters with a gradient; None for all.
        refusal: why it does not count, once the host knows.
        stored: what is needed to compute it again; None if that is not wanted.
        finding: the tracer's finding, if it was refused and traced.
    """

    loss: Any
    tokens: int
    report: Tensor = field(default_factory=lambda: torch.zeros(0))
    sample_ids: tuple[str, ...] = ()
    index: int = -1
    flag: Any = None
    norm: Any = None
    norms: Any = None
    codes: Any = None
    grad_norm: float | None = None
    reached: frozenset[int] | None = None
    refusal: Refusal | None = None
    stored: StoredMicroBatch | None = None
    finding: Finding | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return its figures for JSON, once the outcome is known."""
        figures = {"loss": self.loss, "grad_norm": self.grad_norm}
        return {"micro_batch": self.index, "sample_ids": self.sample_ids, **figures}


@dataclass
class Outcome:
    """The outcome of a window. With several processes, all fields but `own` and `reports` cover all
    of them.

    Attributes:
        index: the window's number, from 0.
        micro_batches: the number of micro-batches, refused ones included.
        applied: whether optimizer and scheduler stepped. They do not step if no parameter got a
            gradient, or if all overflowed under a loss scale that was too high (no refusal).
        steps: the number of applied steps so far, including this one.
        tokens: the survivors' tokens; the number of survivors if no tokens were given.
        rate: the learning rate of the step; None if the optimizer's groups hold the rates.
        loss: the survivors' mean per token (for `share`, their sum); None without survivors, 0 if
            no loss was assigned.
        grad_norm: the norm before clipping; None without survivors.
        own: this process's micro-batches, refused ones included.
        reports: the `report` of each of this process's survivors.
        refused: the refusals; `micro_batch` is None if the whole window was refused.
        longest: the longest run of refusals in a row up to the end of the window.
        limits: the spike guard's limits of loss and norm for this window.
        snapshot: the state from before the window, if something was refused and it may have changed
            since.
        update: the guarded update, which can be undone until the next one; holds copies.
        halts: the code of each process that stopped and so voided the window.
    """

    index: int
    micro_batches: int
    applied: bool
    steps: int
    tokens: int = 0
    rate: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    own: list[MicroBatch] = field(default_factory=list, compare=False, repr=False)
    reports: list[list[float]] = field(default_factory=list, compare=False)
    refused: tuple[Refusal, ...] = ()
    longest: int = 0
    limits: tuple[float, float] = NO_LIMITS
    snapshot: Snapshot | None = field(default=None, compare=False)
    update: Any = field(default=None, compare=False)
    halts: dict[int, int] = field(default_factory=dict)

    @property
    def places(self) -> list[int]:
        """Indices of this process's survivors in the window, in order."""
        return [
            micro.index
            for micro in self.own
            if micro.refusal is None and (micro.codes is None or bool(micro.flag))
        ]

    @property
    def findings(self) -> list[Finding]:
        """The tracer's findings about this process's refused micro-batches."""
        return [micro.finding for micro in self.own if micro.finding is not None]


@dataclass
class RunCounts:
    """Counts of a run so far.

    Attributes:
        windows: all windows, with a step or without.
        steps: applied steps.
        refused: refused micro-batches and windows.
        in_a_row: current refusals in a row, without overflows caused by the loss scale.
    """

    windows: int = 0
    steps: int = 0
    refused: int = 0
    in_a_row: int = 0

    def add(self, outcome: Outcome, processes: ProcessGroup, excused: bool = False) -> int:
        """Count a window; return its longest run of refusals, without overflows if `excused`."""
        longest = 0
        if outcome.refused:  # equal on all processes; their numbers of micro-batches may differ
            bad = [r for r in outcome.refused if not (excused and r.kind == "gradient")]
            refused = [refusal.micro_batch for refusal in bad]
            order = [*chain(*processes.gather(outcome.places)), *refused]
            # survivors of a window that was refused as a whole do not end a run of refusals
            for index in sorted(order) if outcome.applied else refused:
                self.in_a_row = self.in_a_row + 1 if index in refused else 0
                longest = max(longest, self.in_a_row)
        elif outcome.applied:
            self.in_a_row = 0
        self.windows, self.steps = self.windows + 1, outcome.steps
        self.refused += len(outcome.refused)
        return longest


@dataclass
class PendingWindow:
    """A window until its outcome is known.

    Attributes:
        own: this process's micro-batches.
        earlier: micro-batches that were refused before the window began again.
        closed: no micro-batch will follow; the fields below are set.
        micro_batches: the number of micro-batches over all processes.
        reached: whether a survivor's backward reached a parameter; True if that is not tracked.
        go: scalar bool, whether to step; None if nothing ran.
        figures: on the device, over the survivors, of each of `ran`, and of each process.
        norms: [P] norms of the window's gradient, if it may be refused or flags are late.
        record: the figures on the host, in parts of `sizes`, valid once `arrived`.
    """

    own: list[MicroBatch] = field(default_factory=list)
    earlier: list[MicroBatch] = field(default_factory=list)
    closed: bool = False
    index: int = 0
    micro_batches: int = 0
    halt: int = 0
    fingerprint: int = 0
    limits: tuple[float, float] = NO_LIMITS
    reached: bool = True
    go: Tensor | None = None
    figures: dict[str, Tensor] = field(default_factory=dict)
    update: Any = None
    norms: Tensor | None = None
    record: Tensor | None = None
    sizes: list[int] = field(default_factory=list)
    arrived: Any = None
    landing: Landing | None = None

    @property
    def ran(self) -> list[MicroBatch]:
        return [micro for micro in self.own if micro.flag is not None]


class Landing:
    """Pinned memory for a record, allocated before the step: nothing may fail after it."""

    def __init__(self, size: int):
        self.memory = torch.empty(size, dtype=torch.float64, pin_memory=True)
        self.arrived = torch.cuda.Event()

    def take(self, record: Tensor) -> tuple[Tensor, Any]:
        """Return the record on the host, and the event to wait for before reading it."""
        target = self.memory[: record.numel()]
        target.copy_(record, non_blocking=True)
        # the record may not be on the current device
        self.arrived.record(torch.cuda.current_stream(record.device))
        return target, self.arrived


def send_record(window: PendingWindow) -> None:
    figures = [figure.reshape(-1) for figure in window.figures.values()]
    window.sizes = [figure.numel() for figure in figures]
    record = figures[0].new_empty(sum(window.sizes), dtype=torch.float64)
    for values, parts in alike(figures, record.split(window.sizes)):
        torch._foreach_copy_(parts, values)
    window.record = record
    if window.landing is not None:
        window.record, window.arrived = window.landing.take(record)


def read_record(
    window: PendingWindow, names: Sequence[str], known_steps: int, processes: ProcessGroup
) -> Outcome:
    """Read the arrived record of a window, after `known_steps` applied steps.

    If micro-batches were refused, all processes must call this.
    """
    outcome = Outcome(window.index, window.micro_batches, False, known_steps, limits=window.limits)
    figures: dict[str, list[float]] = {}
    if window.record is not None:
        parts = window.record.split(window.sizes)
        figures = {name: part.tolist() for name, part in zip(window.figures, parts, strict=True)}
    codes = figures.get("halts", [window.halt])
    outcome.halts = {process: int(code) for process, code in enumerate(codes) if code}
    if outcome.halts:
        return replace(outcome, micro_batches=0)
    outcome.own = sorted([*window.earlier, *window.own], key=lambda micro: micro.index)
    if figures:
        if processes.size > 1:
            check_alike(figures, window.index, known_steps, processes)
        length = len(figures["reports"]) // max(1, len(window.ran))
        for number, micro in enumerate(window.ran):
            loss, micro.grad_norm = figures["losses"][number], figures["norms"][number]
            micro.loss = loss / max(1, micro.tokens)
            if figures["flags"][number]:
                outcome.reports.append(figures["reports"][number * length :][:length])
            elif micro.refusal is None:
                micro.refusal = refusal_of(micro, loss, names, processes.index)
    refusals = [micro.refusal for micro in outcome.own if micro.refusal is not None]
    if not figures:
        return replace(outcome, refused=tuple(refusals))
    scalars = {name: values[0] for name, values in figures.items() if values}
    if processes.size > 1 and scalars["refused"]:  # a sum over processes, so all come here
        everywhere = chain(*processes.gather(refusals))
        refusals = sorted(everywhere, key=lambda r: r.micro_batch or 0)
    outcome.tokens, outcome.rate = int(scalars["tokens"]), scalars.get("rate")
    if scalars["survivors"]:
        outcome.loss, outcome.grad_norm = scalars["loss"], scalars["norm"]
        outcome.applied = bool(scalars["applied"])
        # survivors without tokens or gradients make no step, and are no fault
        if not outcome.applied and outcome.tokens and window.reached:
            refusals.append(window_refusal(window, names, scalars))
    outcome.update, outcome.refused = window.update, tuple(refusals)
    if refusals and window.update is not None:
        outcome.snapshot = window.update.snapshot
    outcome.steps = int(scalars["steps"])
    return outcome
