"""A window from its first micro-batch to its outcome.

A window starts as a `PendingWindow`. Each micro-batch that was computed is `Judged`. After the step
the window's figures travel from the device to the host as one tensor (`WindowFigures`), arrive as
`WindowNumbers`, and `outcome_of` turns them into an `Outcome`. `refusal.py` explains what was
refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor

from npt.distributed.processes import ProcessGroup
from npt.errors import DataError, ProcessError
from npt.guard.forensics import Finding, StoredMicroBatch
from npt.guard.lists import alike
from npt.guard.refusal import Refusal as Refusal
from npt.guard.refusal import describe_norms
from npt.guard.traces import Spoilt
from npt.guard.update import Snapshot, Update

NO_LIMITS = (math.inf, math.inf)


@dataclass(frozen=True)
class Judged:
    """What came of a micro-batch's backward, on the device.

    Attributes:
        loss: the loss times its weight, a scalar in fp32.
        flag: scalar bool, whether loss and gradients are finite.
        norm: norm over all gradients, a scalar.
        norms: [P] norm of each parameter's gradient, to name the bad one.
        codes: [processes] what is wrong on each, if backward sums gradients; micro-batches
            computed together then count together.
        reached: indices of the parameters with a gradient.
        spoilt: the buffers that may have become NaN or Inf.
    """

    loss: Tensor
    flag: Tensor
    norm: Tensor
    norms: Tensor
    codes: Tensor | None
    reached: frozenset[int]
    spoilt: Spoilt | None


@dataclass
class MicroBatch:
    """A micro-batch from its forward to the outcome of its window.

    Attributes:
        loss: the loss, assigned by the loop; it can be NaN while the gradients are finite. Once the
            outcome is known, its mean per token, a number; None if it was not computed.
        tokens: its weight.
        report: [n] the caller's own figures, returned with the outcome.
        index: its index in the window over all processes.
        judged: what came of its backward; None if it was refused before.
        grad_norm: the norm of its gradients, once the outcome is known.
        counts: whether it survived, once the outcome is known. It may fall without a refusal of its
            own, with another process's that was computed together with it.
        refusal: why it does not count, once the host knows.
        stored: what is needed to compute it again; None if that is not wanted.
        finding: the tracer's finding, if it was refused and traced.
    """

    loss: Tensor | float | None
    tokens: int
    report: Tensor = field(default_factory=lambda: torch.zeros(0))
    sample_ids: tuple[str, ...] = ()
    index: int = -1
    judged: Judged | None = None
    grad_norm: float | None = None
    counts: bool = False
    refusal: Refusal | None = None
    stored: StoredMicroBatch | None = None
    finding: Finding | None = None

    def as_dict(self) -> dict[str, object]:
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
        repaired: what `recheck` found changed and repaired on this process, in words.
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
    repaired: tuple[str, ...] = ()
    longest: int = 0
    limits: tuple[float, float] = NO_LIMITS
    snapshot: Snapshot | None = field(default=None, compare=False)
    update: Update | None = field(default=None, compare=False)
    halts: dict[int, int] = field(default_factory=dict)

    @property
    def places(self) -> list[int]:
        """Indices of this process's survivors in the window, in order."""
        return [micro.index for micro in self.own if micro.counts]

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
        if outcome.refused:
            bad = [r.micro_batch for r in outcome.refused if not (excused and r.overflowed)]
            longest = self._count_in_a_row(bad, outcome, processes)
        elif outcome.applied:
            self.in_a_row = 0
        self.windows += 1
        self.steps = outcome.steps
        self.refused += len(outcome.refused)
        return longest

    def _count_in_a_row(
        self, bad: list[int | None], outcome: Outcome, processes: ProcessGroup
    ) -> int:
        # refusals are the same on all processes, survivors are not
        survivors = processes.gather(outcome.places)
        # those of a window that was refused as a whole do not end a run of refusals
        order = sorted([*chain(*survivors), *bad]) if outcome.applied else bad
        longest = 0
        for index in order:
            self.in_a_row = self.in_a_row + 1 if index in bad else 0
            longest = max(longest, self.in_a_row)
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
        repaired: what was found changed and repaired, in words.
        divided: whether its gradient was divided; False if that would change nothing.
        go: scalar bool, whether to step; None if nothing ran.
        figures: its figures on the device; None if nothing ran.
        norms: [P] norms of the window's gradient, if it may be refused or flags are late.
        update: the guarded step, if it was made.
        record: the packed figures on the host, valid once `arrived`.
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
    repaired: list[str] = field(default_factory=list)
    divided: bool = False
    go: Tensor | None = None
    figures: WindowFigures | None = None
    update: Update | None = None
    norms: Tensor | None = None
    record: Tensor | None = None
    arrived: torch.cuda.Event | None = None
    landing: Landing | None = None

    def has_arrived(self) -> bool:
        """Return whether its figures can be read without waiting for the device."""
        return self.arrived is None or self.arrived.query()

    @property
    def ran(self) -> list[tuple[MicroBatch, Judged]]:
        """This process's micro-batches that were computed."""
        return computed(self.own)

    def numbers(self) -> WindowNumbers:
        """Return its figures from the host, where they have arrived; none if nothing ran."""
        if self.figures is None or self.record is None:
            return WindowNumbers({})
        return self.figures.unpacked(self.record)


def computed(micro_batches: Iterable[MicroBatch]) -> list[tuple[MicroBatch, Judged]]:
    """Return those of the micro-batches that were computed."""
    return [(micro, micro.judged) for micro in micro_batches if micro.judged is not None]


class Landing:
    """Pinned memory for a record, allocated before the step: nothing may fail after it."""

    def __init__(self, size: int):
        self.memory = torch.empty(size, dtype=torch.float64, pin_memory=True)
        self.arrived = torch.cuda.Event()

    def take(self, record: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Return the record on the host, and the event to wait for before reading it."""
        target = self.memory[: record.numel()]
        target.copy_(record, non_blocking=True)
        # the record may not be on the current device
        self.arrived.record(torch.cuda.current_stream(record.device))
        return target, self.arrived


@dataclass
class WindowFigures:
    """The figures of a window on the device.

    Attributes:
        tokens: the survivors' tokens; like `loss` to `survivors` a scalar over all processes.
        loss: their mean per token.
        norm: the norm of the window's gradient before clipping.
        spike: whether loss or norm is above its limit.
        survivors: their number.
        flags: [n] whether each micro-batch of this process that ran counts.
        losses: [n] their losses times their weights.
        norms: [n] the norms of their gradients.
        reports: [n * r] their reports.
        refused: the number of refused micro-batches; like `halts` and `data` with several
            processes only.
        halts: [processes] the code of each process that stops.
        data: [processes] fingerprints of the window's data.
        rate: the learning rate of the step, if the guard sets it.
        applied: whether the step stays; like `steps` known after the step.
        steps: the number of applied steps so far.
        states: [processes] fingerprints of the state after the step.
    """

    tokens: Tensor
    loss: Tensor
    norm: Tensor
    spike: Tensor
    survivors: Tensor
    flags: Tensor
    losses: Tensor
    norms: Tensor
    reports: Tensor
    refused: Tensor | None = None
    halts: Tensor | None = None
    data: Tensor | None = None
    rate: Tensor | None = None
    applied: Tensor | None = None
    steps: Tensor | None = None
    states: Tensor | None = None

    def known(self) -> dict[str, Tensor]:
        """Return those that there are, by name, in order."""
        each = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: figure for name, figure in each.items() if figure is not None}

    def packed(self) -> Tensor:
        """Return them as one tensor [all] in fp64, which holds every count exactly."""
        flat = [figure.reshape(-1) for figure in self.known().values()]
        sizes = [figure.numel() for figure in flat]
        record = flat[0].new_empty(sum(sizes), dtype=torch.float64)
        for values, parts in alike(flat, record.split(sizes)):
            torch._foreach_copy_(parts, values)
        return record

    def unpacked(self, record: Tensor) -> WindowNumbers:
        """Return what `packed` gave, from the host."""
        known = self.known()
        parts = record.split([figure.numel() for figure in known.values()])
        return WindowNumbers({name: part.tolist() for name, part in zip(known, parts, strict=True)})


@dataclass(frozen=True)
class WindowNumbers:
    """The figures of a window on the host, by name: see `WindowFigures`."""

    each: dict[str, list[float]]

    def one(self, name: str) -> float:
        """Return a scalar figure."""
        (number,) = self.each[name]
        return number

    def first(self, name: str) -> float | None:
        """Return a scalar figure, or None if there is none."""
        return next(iter(self.all_of(name)), None)

    def all_of(self, name: str) -> list[float]:
        """Return a figure of each micro-batch, or of each process; of one process there is none."""
        return self.each.get(name, [])


def send_record(window: PendingWindow) -> None:
    """Send a window's figures to the host."""
    assert window.figures is not None
    window.record = window.figures.packed()
    if window.landing is not None:
        window.record, window.arrived = window.landing.take(window.record)


def outcome_of(
    window: PendingWindow, names: Sequence[str], known_steps: int, processes: ProcessGroup
) -> Outcome:
    """Return the outcome of a window whose record has arrived, after `known_steps` applied steps.

    If micro-batches were refused, all processes must call this.
    """
    outcome = Outcome(window.index, window.micro_batches, False, known_steps, limits=window.limits)
    outcome.repaired = tuple(window.repaired)
    numbers = window.numbers()
    # a process that stops voids the window everywhere
    codes = numbers.all_of("halts") or [window.halt]
    outcome.halts = {process: int(code) for process, code in enumerate(codes) if code}
    if outcome.halts:
        return replace(outcome, micro_batches=0)
    _check_alike(numbers.each, window.index, known_steps, processes)
    outcome.own = sorted([*window.earlier, *window.own], key=attrgetter("index"))
    outcome.reports = _settle(window, numbers, names, processes)
    refusals = _refusals(outcome.own, numbers, processes)
    if not numbers.each:  # all were refused before anything was computed
        return replace(outcome, refused=tuple(refusals))
    outcome.tokens = int(numbers.one("tokens"))
    outcome.steps = int(numbers.one("steps"))
    outcome.rate = numbers.first("rate")
    if numbers.one("survivors"):
        outcome.loss = numbers.one("loss")
        outcome.grad_norm = numbers.one("norm")
        outcome.applied = bool(numbers.one("applied"))
        # survivors without tokens or gradients make no step, and are no fault
        if not outcome.applied and outcome.tokens and window.reached:
            refusals.append(window_refusal(window, names, numbers))
    outcome.update = window.update
    outcome.refused = tuple(refusals)
    # a refusal is traced with the weights that it was computed with
    if refusals and window.update is not None:
        outcome.snapshot = window.update.snapshot
    return outcome


def _settle(
    window: PendingWindow, numbers: WindowNumbers, names: Sequence[str], processes: ProcessGroup
) -> list[list[float]]:
    """Give each micro-batch its numbers or its refusal, and return the survivors' reports."""
    reports = []
    flat = numbers.all_of("reports")
    length = len(flat) // max(1, len(window.ran))
    for place, (micro, judged) in enumerate(window.ran):
        loss = numbers.all_of("losses")[place]
        micro.grad_norm = numbers.all_of("norms")[place]
        micro.loss = loss / max(1, micro.tokens)
        if numbers.all_of("flags")[place]:
            micro.counts = True
            reports.append(flat[place * length :][:length])
        elif micro.refusal is None:
            micro.refusal = refusal_of(micro, judged, loss, names, processes.index)
    return reports


def refusal_of(
    micro: MicroBatch, judged: Judged, loss: float, names: Sequence[str], process: int
) -> Refusal | None:
    """Return why this process's micro-batch with this summed loss was refused.

    None if another process's micro-batch, computed together with it, is to blame. If only their sum
    is not finite, the refusal is process 0's.
    """
    if judged.codes is not None and not _is_to_blame(judged.codes, process):
        return None
    refusal = partial(
        Refusal, micro_batch=micro.index, sample_ids=micro.sample_ids, process=process
    )
    bad = int((~judged.norms.isfinite()).sum())
    if not math.isfinite(loss):
        detail = f"loss is {loss}, and {bad} of {len(names)} gradients are not finite"
        return refusal("loss", detail)
    if not bad and judged.spoilt is not None and bool(judged.spoilt.flags.any()):
        buffer = judged.spoilt.names[judged.spoilt.flags.tolist().index(True)]
        return refusal("buffer", f"buffer {buffer} is not finite after the forward", tensor=buffer)
    tensor, detail = describe_norms(judged.norms, names)
    return refusal("gradient", detail, tensor=tensor)


def _is_to_blame(codes: Tensor, process: int) -> bool:
    """Return whether a refusal of micro-batches computed together is this process's."""
    if not bool(codes.any()):
        return process == 0
    return bool(codes[process])


def window_refusal(window: PendingWindow, names: Sequence[str], numbers: WindowNumbers) -> Refusal:
    loss = numbers.one("loss")
    norm = numbers.one("norm")
    if math.isfinite(norm) and not numbers.one("spike"):
        assert window.update is not None
        tensor = window.update.first_bad()
        detail = f"{tensor} was not finite after the step; the state before it was restored"
        return Refusal("update", detail, tensor=tensor)
    assert window.norms is not None
    tensor, description = describe_norms(window.norms, names)
    if not math.isfinite(norm):
        detail = f"gradient norm of the window is {norm}: {description}"
        return Refusal("norm", detail, tensor=tensor)
    above = [
        f"{name} {value:.4g} is above its limit {limit:.4g}"
        for name, value, limit in zip(("loss", "norm"), (loss, norm), window.limits, strict=True)
        if value > limit
    ]
    detail = f"{' and '.join(above)}; {tensor} has the largest gradient"
    return Refusal("spike", detail, tensor=tensor)


def _refusals(
    own: Sequence[MicroBatch], numbers: WindowNumbers, processes: ProcessGroup
) -> list[Refusal]:
    """Return the refusals of all processes, in the order of the window."""
    refusals = [micro.refusal for micro in own if micro.refusal is not None]
    if not numbers.first("refused"):  # a sum over processes: all gather, or none
        return refusals
    return sorted(chain(*processes.gather(refusals)), key=attrgetter("micro_batch"))


def _check_alike(
    figures: Mapping[str, Sequence[float]], window: int, steps: int, processes: ProcessGroup
) -> None:
    """Check that all processes had the same data in a window, and the same state after its step.

    Raises:
        ProcessError: data or states differ; a state is 0 if it is not finite.
    """
    data = figures.get("data", ())  # one process has none
    states = figures.get("states", ())
    other = next((process for process, mark in enumerate(data) if mark != data[0]), None)
    if other is not None:
        message = (
            f"process {other} reads different data from process 0 in window {window + 1}"
            f" (fingerprints {data[other]:.0f} and {data[0]:.0f}); give every process the same data"
            " in the same order"
        )
        raise processes.everywhere(ProcessError(message, DataError.exit_status))
    bad = [process for process, state in enumerate(states) if not state]
    wrong = bad or [process for process, state in enumerate(states) if state != states[0]]
    if wrong and len(bad) < len(states):
        where = ", ".join(map(str, wrong))
        message = (
            f"step {steps + 1} was undone: every process took the same step, but afterwards the"
            f" state of process {where} {'is not finite' if bad else 'differs'}; check its"
            " hardware, then continue from the last checkpoint (npt: --resume auto)"
        )
        raise processes.everywhere(ProcessError(message))
