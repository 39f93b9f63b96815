"""A window of micro-batches from its last backward to its outcome.

On the device: flags, losses and norms of the micro-batches (`MicroBatchFlags`), the gradient on its
way to the optimizer (`ClosedWindow`), and the record that is sent to the host (`LaunchedWindow`,
`send_record`). On the host: the record, read into an `Outcome` (`read_record`) with its `Refusal`s
and a `MicroBatchRecord` of each micro-batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from npt.distributed.processes import ProcessGroup
from npt.guard.shared import AcrossProcesses, gathered

Snapshot = dict[str, tuple[Tensor, dict[str, Any]]]
"""By parameter name, a copy of the parameter and of all that the optimizer keeps for it."""

SHOWN_ROWS = 4
"""Rows of a refused micro-batch that its message describes."""

SCALARS = ("tokens", "loss", "norm", "finite_norm", "spike", "applied", "steps", "rate")
"""Figures of a window in its record."""


class Sums(Protocol):
    """Sums over the tokens of one micro-batch. report: [n] figures wanted with the outcome."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def tokens(self) -> int: ...

    @property
    def report(self) -> Tensor: ...


@dataclass(frozen=True)
class Refusal:
    """One refused micro-batch or step.

    Attributes:
        kind: `data` (refused before any computation), `error`, `loss` or `gradient`; for a whole
            window `norm`, `spike` or `update` (parameters or moments after the step).
        detail: in words.
        micro_batch: index in the window over all processes, None for a whole window.
        sample_ids: of the micro-batch.
        process: that computed it.
        tensor: the first that was not finite, by name; of finite gradients that are too large, the
            largest.
        rows: a line about each of its rows, if they are known.
    """

    kind: str
    detail: str
    micro_batch: int | None = None
    sample_ids: tuple[str, ...] = ()
    process: int = 0
    tensor: str | None = None
    rows: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as events and post-mortems store it: the process as `rank`, the tensor in
        `detail` alone.
        """
        values = asdict(self)
        process = values.pop("process")
        del values["tensor"]
        if not self.rows:
            del values["rows"]
        return {**values, "rank": process}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Refusal:
        """Return what `as_dict` gave."""
        names = {**values, "sample_ids": tuple(map(str, values["sample_ids"]))}
        names["rows"] = tuple(map(str, values.get("rows", ())))
        process = names.pop("rank")
        return cls(**names, process=process)

    def __str__(self) -> str:
        where = (
            "the whole window" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        )
        where += f" on process {self.process}" if self.process else ""
        samples = f" (samples {', '.join(self.sample_ids)})" if self.sample_ids else ""
        return f"{where}{samples}: {self.kind}: {self.detail}{self._shown_rows()}"

    def _shown_rows(self) -> str:
        """Return the lines about the first rows, each with its name."""
        names: Sequence[str] = [f"row {i}" for i in range(len(self.rows))]
        if len(self.sample_ids) == len(self.rows):
            names = [f"sample {name}" for name in self.sample_ids]
        pairs = list(zip(names, self.rows, strict=True))
        lines = [f"{name}: {line}" for name, line in pairs[:SHOWN_ROWS] if line]
        lines += [f"{len(pairs) - SHOWN_ROWS} rows more"] if len(pairs) > SHOWN_ROWS else []
        return "".join(f"; {line}" for line in lines)


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
    limits: tuple[float, float] = (math.inf, math.inf)
    snapshot: Snapshot | None = field(default=None, compare=False)
    update: Any = field(default=None, compare=False)
    halts: dict[int, int] = field(default_factory=dict)

    def bad_in_a_row(self, before: int, places: Iterable[int]) -> tuple[int, int]:
        """Return the longest run of refusals up to this window's end, and the one still open there.

        A micro-batch that counted ends a run; in a window refused as a whole, none counted.

        Args:
            before: the length of the run that was open when the window began.
            places: of the micro-batches that counted, on all processes.
        """
        if not self.applied:
            return before + len(self.refused), before + len(self.refused)
        bad = {r.micro_batch for r in self.refused if r.micro_batch is not None}
        longest = run = before
        for index in sorted({*places, *bad}):
            run = run + 1 if index in bad else 0
            longest = max(longest, run)
        return longest, run


@dataclass
class Counts:
    """Windows, steps and refusals of a run so far. in_a_row: refusals since the last survivor."""

    windows: int = 0
    steps: int = 0
    refused: int = 0
    in_a_row: int = 0

    def add(self, outcome: Outcome, processes: ProcessGroup) -> int:
        """Count a window; return the longest run of refusals up to its end."""
        longest = 0
        if outcome.refused:  # the same on all processes, whose numbers of micro-batches may differ
            places = chain(*processes.gather_json(outcome.places))
            longest, self.in_a_row = outcome.bad_in_a_row(self.in_a_row, places)
        elif outcome.applied:
            self.in_a_row = 0
        self.windows, self.steps = self.windows + 1, outcome.steps
        self.refused += len(outcome.refused)
        return longest


@dataclass
class MicroBatchFlags:
    """A micro-batch of an open window.

    Attributes:
        sums: of it.
        flag: scalar bool, loss and gradients are finite.
        norms: [P] of the parameters' gradients, to name the bad one.
        index: in the window.
        sample_ids: of it.
        reached: places of the parameters with a gradient, None for all.
    """

    sums: Sums
    flag: Tensor
    norms: Tensor
    index: int
    sample_ids: tuple[str, ...]
    reached: frozenset[int] | None = None


@dataclass
class ClosedWindow:
    """A window's gradient on its way to the optimizer: tokens, loss and norm over its survivors,
    the scalar bools finite, spike and go, and flags and losses of the micro-batches that ran here.
    """

    tokens: Tensor
    loss: Tensor
    norm: Tensor
    finite: Tensor
    spike: Tensor
    go: Tensor
    flags: Tensor
    losses: Tensor
    across: Tensor


@dataclass
class LaunchedWindow:
    """A window without further micro-batches.

    Attributes:
        halt: this process's code.
        fingerprint: of its data.
        limits, describe_spike: of the spike guard.
        reached: a survivor's backward reached a parameter, as far as that is tracked.
        norms: [P] of the window's gradient, if it was not applied or flags are late.
        record: on the host, in parts of `sizes`, valid once `arrived`; None if nothing ran.
    """

    index: int
    micro_batches: int
    ran: list[MicroBatchFlags]
    refusals: list[Refusal]
    halt: int = 0
    fingerprint: int = 0
    limits: tuple[float, float] = (math.inf, math.inf)
    describe_spike: Callable[[float, float, tuple[float, float]], str] | None = None
    closed: ClosedWindow | None = None
    reached: bool = True
    update: Any = None
    norms: Tensor | None = None
    record: Tensor | None = None
    sizes: Sequence[int] = ()
    arrived: Any = None


def stacked(
    scalars: list[Tensor], home: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return [number of scalars], empty for a process without a micro-batch."""
    return torch.stack(scalars) if scalars else torch.zeros(0, dtype=dtype, device=home)


def sent(numbers: Sequence[int], home: torch.device) -> Tensor:
    """Return numbers of the host in fp32 on the device, without waiting for it."""
    values = torch.tensor(numbers, dtype=torch.float32)
    return values.pin_memory().to(home, non_blocking=True) if home.type == "cuda" else values


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


def send_record(
    window: LaunchedWindow, closed: ClosedWindow, steps: Tensor, rate: Tensor | None
) -> None:
    """Send the record of a window that was stepped: all on the device, without waiting."""
    home, update = closed.flags.device, window.update
    rate = steps.new_tensor(math.nan, dtype=torch.float32) if rate is None else rate
    of_window = (closed.tokens, closed.loss, closed.norm, closed.finite, closed.spike)
    scalars = (*of_window, update.applied, steps, rate)
    norm_of_each = stacked([torch.linalg.vector_norm(m.norms) for m in window.ran], home)
    reports = [m.sums.report.detach().to(home, torch.float64) for m in window.ran]
    parts = [
        torch.stack([scalar.to(torch.float64) for scalar in scalars]),
        closed.flags,
        closed.losses,
        norm_of_each,
        torch.cat(reports) if reports else closed.flags.new_zeros(0),
        closed.across,
        closed.flags.new_zeros(0) if update.fingerprints is None else update.fingerprints,
    ]
    window.sizes = [part.numel() for part in parts]
    record = torch.cat([part.to(torch.float64) for part in parts])
    window.record, window.arrived = to_host(record)


def read_record(
    window: LaunchedWindow,
    names: Sequence[str],
    known_steps: int,
    processes: ProcessGroup,
    history: deque[MicroBatchRecord],
) -> Outcome:
    """Read a window's record, which has arrived.

    Args:
        window: that was committed.
        names: of the parameters.
        known_steps: applied before it.
        processes: that share the window; with refusals all of them must call this.
        history: receives a record of each of its micro-batches.
    """
    outcome = Outcome(window.index, window.micro_batches, False, known_steps)
    if window.halt and processes.size == 1:
        return replace(outcome, micro_batches=0, halts={0: window.halt})
    refusals, outcome.limits = list(window.refusals), window.limits
    outcome.refused = tuple(refusals)
    if window.record is None:
        return outcome
    values, *parts = (part.tolist() for part in window.record.split(list(window.sizes)))
    flags, losses, norms, reports, across, states = parts
    shared = None
    if processes.size > 1:
        shared = AcrossProcesses(across, states, processes)
        if shared.halts:
            return replace(outcome, micro_batches=0, refused=(), halts=shared.halts)
        shared.check(window.index, known_steps)
    for number, micro in enumerate(window.ran):
        loss, index = losses[number], micro.index
        mean = loss / max(1, micro.sums.tokens)
        history.append(MicroBatchRecord(window.index, index, micro.sample_ids, mean, norms[number]))
        if flags[number]:
            outcome.places.append(index)
            length = len(reports) // len(window.ran)
            outcome.reports.append(reports[number * length :][:length])
        else:
            refusals.append(refusal_of(micro, loss, names, processes.index))
    if shared is not None and shared.refused:
        # All processes come here, since the number refused is a sum over them.
        refusals = gathered(refusals, Refusal, processes)
    refusals.sort(key=lambda r: r.micro_batch or 0)
    scalars = dict(zip(SCALARS, values, strict=True))
    outcome.tokens = int(scalars["tokens"])
    outcome.rate = None if math.isnan(scalars["rate"]) else scalars["rate"]
    if outcome.places if shared is None else shared.survivors:
        outcome.loss, outcome.grad_norm = scalars["loss"], scalars["norm"]
        outcome.applied = bool(scalars["applied"])
        # survivors without a token, or without a gradient, are nothing to step on, and no fault
        if not outcome.applied and outcome.tokens and window.reached:
            refusals.append(_window_refusal(window, names, scalars))
    outcome.update, outcome.refused = window.update, tuple(refusals)
    if refusals and window.update is not None:
        outcome.snapshot = window.update.snapshot
    outcome.steps = int(scalars["steps"])
    return outcome


def refusal_of(micro: MicroBatchFlags, loss: float, names: Sequence[str], process: int) -> Refusal:
    """Return why a micro-batch was refused that ran on this process; its summed loss is given."""
    names = names[: len(micro.norms)]  # more may have joined since
    kind, detail, tensor = "loss", f"loss is {loss}", None
    if not math.isfinite(loss):
        bad = int((~micro.norms.isfinite()).sum())
        detail += f", and {bad or 'none'} of {len(names)} gradients are not finite"
    else:
        kind, detail = "gradient", describe_norms(micro.norms, names)
        tensor = worst(micro.norms, names)
    return Refusal(kind, detail, micro.index, micro.sample_ids, process, tensor)


def _window_refusal(
    window: LaunchedWindow, names: Sequence[str], scalars: dict[str, float]
) -> Refusal:
    """Return why a window was refused as a whole."""
    loss, norm = scalars["loss"], scalars["norm"]
    if not scalars["finite_norm"]:
        assert window.norms is not None
        detail = f"gradient norm of the window is {norm}: {describe_norms(window.norms, names)}"
        return Refusal("norm", detail, tensor=worst(window.norms, names))
    if scalars["spike"]:
        assert window.describe_spike is not None and window.norms is not None
        largest = worst(window.norms, names)
        detail = window.describe_spike(loss, norm, window.limits)
        return Refusal("spike", f"{detail}; the largest gradient is {largest}'s", tensor=largest)
    bad = window.update.first_bad()
    detail = f"{bad} was not finite after the step; the state before it was restored"
    parameter = bad.rpartition(" of ")[2]
    sizes = [
        f"{name} up to {size:.3g}"
        for name, size in window.update.before.items()
        if name in (bad, parameter)
    ]
    if window.norms is not None:
        norm = float(window.norms[names.index(parameter)])
        sizes.insert(0, f"its gradient had norm {norm:.3g}")
    return Refusal("update", f"{detail} ({', '.join(sizes)})" if sizes else detail, tensor=bad)


def first_bad(norms: Tensor, names: Sequence[str]) -> str | None:
    """Return the first of a gradient's tensors that is not finite; norms: [P]."""
    return next(
        (name for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)),
        None,
    )


def worst(norms: Tensor, names: Sequence[str]) -> str:
    """Return the first of a gradient's tensors that is not finite, or the largest; norms: [P]."""
    return first_bad(norms, names) or names[int(norms.argmax())]


def describe_norms(norms: Tensor, names: Sequence[str]) -> str:
    """Return which of a gradient's tensors is not finite, in words; norms: [P]."""
    values = norms.tolist()
    bad = [(n, v) for n, v in zip(names, values, strict=True) if not math.isfinite(v)]
    if not bad:
        return (
            f"every tensor's own norm is finite (largest {max(values):.3g}, of"
            f" {worst(norms, names)}), their sum of squares overflows"
        )
    return f"gradient of {bad[0][0]} has norm {bad[0][1]} ({len(bad)} of {len(values)} tensors)"
