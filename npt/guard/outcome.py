"""A window from its last backward to its outcome.

On the device it is a `LaunchedWindow`, whose figures `send_record` sends to the host as one tensor.
There `read_record` makes an `Outcome` of it; what was refused is explained in `refusal.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from npt.distributed.processes import ProcessGroup
from npt.guard.refusal import Refusal as Refusal
from npt.guard.refusal import check_alike, gathered, refusal_of, window_refusal

Snapshot = dict[str, tuple[Tensor, dict[str, Any]]]
"""By parameter name, a copy of the parameter and of all that the optimizer keeps for it."""

NO_LIMITS = (math.inf, math.inf)


@dataclass
class MicroBatch:
    """A micro-batch while it is computed, and in its window.

    Attributes:
        loss: scalar or number, told to the guard by assigning it: a loss can be NaN with gradients
            that are not.
        tokens: what it weighs.
        report: [n] figures that are wanted with the outcome.
        sample_ids: of it.
        index: in the window.
        flag: scalar bool, loss and gradients are finite.
        norms: [P] of the parameters' gradients, to name the bad one.
        reached: places of the parameters with a gradient, None for all.
    """

    loss: Any
    tokens: int
    report: Tensor = field(default_factory=lambda: torch.zeros(0))
    sample_ids: tuple[str, ...] = ()
    index: int = -1
    flag: Any = None
    norms: Any = None
    reached: frozenset[int] | None = None


@dataclass(frozen=True)
class MicroBatchRecord:
    """The mean loss and gradient norm of a micro-batch, refused or not, for a post-mortem."""

    window: int
    micro_batch: int
    sample_ids: tuple[str, ...]
    loss: float
    grad_norm: float


@dataclass
class Outcome:
    """The outcome of a window. With several processes all figures are over all of them, except
    `places` and `reports`.

    Attributes:
        index: of the window.
        micro_batches: their number, refused ones included.
        applied: the optimizer and the scheduler stepped; not if no parameter got a gradient.
        steps: applied so far, including this one.
        tokens: of the survivors; their number if none were given.
        rate: learning rate of the step, None if the optimizer's groups have theirs.
        loss: mean per token of the survivors (for `share` their sum), None without survivors; 0 if
            no loss was told.
        grad_norm: before clipping, None without survivors.
        places: of this process's survivors in the window, in order.
        reports: the `report` of each of them.
        refused: by micro-batch; `micro_batch` is None if the window was refused as a whole.
        findings: about this process's refused micro-batches that were traced.
        longest: refusals in a row up to the window's end.
        limits: of the spike guard when it decided.
        snapshot: the state before the window, if something was refused and the state may have
            changed since.
        update: of the optimizer, to take it back as long as no later one was made; holds copies.
        halts: by process, the code with which it stopped the window, which is then void.
    """

    index: int
    micro_batches: int
    applied: bool
    steps: int
    tokens: int = 0
    rate: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    places: list[int] = field(default_factory=list, compare=False)
    reports: list[list[float]] = field(default_factory=list, compare=False)
    refused: tuple[Refusal, ...] = ()
    findings: tuple[Any, ...] = field(default=(), compare=False)
    longest: int = 0
    limits: tuple[float, float] = NO_LIMITS
    snapshot: Snapshot | None = field(default=None, compare=False)
    update: Any = field(default=None, compare=False)
    halts: dict[int, int] = field(default_factory=dict)


@dataclass
class RunCounts:
    """Counts of a run so far.

    Attributes:
        windows: with a step and without.
        steps: applied.
        refused: micro-batches and windows.
        in_a_row: refusals since the last micro-batch that counted.
    """

    windows: int = 0
    steps: int = 0
    refused: int = 0
    in_a_row: int = 0

    def add(self, outcome: Outcome, processes: ProcessGroup) -> int:
        """Count a window; return the longest run of refusals up to its end."""
        longest = 0
        if outcome.refused:  # the same on all processes, whose numbers of micro-batches may differ
            refused = [r.micro_batch for r in outcome.refused]
            order = [*chain(*processes.gather(outcome.places)), *refused]
            # of a window that was refused as a whole no survivor ends a run of refusals
            for index in sorted(order) if outcome.applied else refused:
                self.in_a_row = self.in_a_row + 1 if index in refused else 0
                longest = max(longest, self.in_a_row)
        elif outcome.applied:
            self.in_a_row = 0
        self.windows, self.steps = self.windows + 1, outcome.steps
        self.refused += len(outcome.refused)
        return longest


@dataclass
class LaunchedWindow:
    """A window without further micro-batches.

    Attributes:
        ran: the micro-batches that ran on this process.
        refusals: of those that did not.
        halt: this process's code.
        limits: of loss and gradient norm.
        reached: a survivor's backward reached a parameter, as far as that is tracked.
        go: scalar bool, it is to be stepped; None if nothing ran.
        figures: on the device: of its survivors, of each of `ran`, of each process.
        update: of the optimizer.
        norms: [P] of the window's gradient, if it may be refused or flags are late.
        record: the figures on the host, in parts of `sizes`, valid once `arrived`.
    """

    index: int
    micro_batches: int
    ran: list[MicroBatch]
    refusals: list[Refusal]
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


def to_host(record: Tensor) -> tuple[Tensor, Any]:
    """Return the record on the host, and the event to wait for before it is read."""
    if record.device.type != "cuda":
        return record, None
    pinned = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
    pinned.copy_(record, non_blocking=True)
    arrived = torch.cuda.Event()
    # the current device may be another one
    arrived.record(torch.cuda.current_stream(record.device))
    return pinned, arrived


def send_record(window: LaunchedWindow) -> None:
    """Send the record of a window that was stepped: all on the device, without waiting."""
    parts = [figure.reshape(-1).to(torch.float64) for figure in window.figures.values()]
    window.sizes = [part.numel() for part in parts]
    window.record, window.arrived = to_host(torch.cat(parts))


def read_record(
    window: LaunchedWindow,
    names: Sequence[str],
    known_steps: int,
    processes: ProcessGroup,
    history: deque[MicroBatchRecord],
) -> Outcome:
    """Read a window's record, which has arrived; with refusals all processes must call this.

    Args:
        window: that was committed.
        names: of the parameters.
        known_steps: applied before it.
        processes: that share the window.
        history: receives a record of each of its micro-batches.
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
    refusals = list(window.refusals)
    if not figures:
        return replace(outcome, refused=tuple(refusals))
    if processes.size > 1:
        check_alike(figures, window.index, known_steps, processes)
    length = len(figures["reports"]) // max(1, len(window.ran))
    for number, micro in enumerate(window.ran):
        loss, index, norm = figures["losses"][number], micro.index, figures["norms"][number]
        mean = loss / max(1, micro.tokens)
        history.append(MicroBatchRecord(window.index, index, micro.sample_ids, mean, norm))
        if figures["flags"][number]:
            outcome.places.append(index)
            outcome.reports.append(figures["reports"][number * length :][:length])
        else:
            refusals.append(refusal_of(micro, loss, names, processes.index))
    scalars = {name: values[0] for name, values in figures.items() if values}
    if processes.size > 1 and scalars["refused"]:  # over all processes: all come here
        refusals = gathered(refusals, Refusal, processes)
    refusals.sort(key=lambda r: r.micro_batch or 0)
    outcome.tokens, outcome.rate = int(scalars["tokens"]), scalars.get("rate")
    if scalars["survivors"]:
        outcome.loss, outcome.grad_norm = scalars["loss"], scalars["norm"]
        outcome.applied = bool(scalars["applied"])
        # survivors without a token, or without a gradient, are nothing to step on, and no fault
        if not outcome.applied and outcome.tokens and window.reached:
            refusals.append(window_refusal(window, names, scalars))
    outcome.update, outcome.refused = window.update, tuple(refusals)
    if refusals and window.update is not None:
        outcome.snapshot = window.update.snapshot
    outcome.steps = int(scalars["steps"])
    return outcome
