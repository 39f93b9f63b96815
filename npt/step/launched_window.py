"""A window on its way: what the device says of it, and how the host reads that."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from npt.distributed.processes import ProcessGroup
from npt.errors import DataError, ProcessError
from npt.step.guarded_update import Update
from npt.step.window_result import MicroBatchRecord, Refusal, S, WindowResult

if TYPE_CHECKING:
    from npt.step.gradient_window import GradientWindow

R = TypeVar("R", Refusal, MicroBatchRecord)

SCALARS = ("tokens", "loss", "norm", "finite_norm", "spike", "applied", "steps", "rate")
"""Of a record, after its micro-batches' flags, losses, norms and reports."""


@dataclass
class MicroBatchFlags(Generic[S]):
    """A micro-batch of an open window. flag: scalar bool, loss and gradients are finite. norms:
    [P] of the parameters' gradients, to name the bad one.
    """

    sums: S
    flag: Tensor
    norms: Tensor
    index: int
    sample_ids: tuple[str, ...]


@dataclass
class LaunchedWindow(Generic[S]):
    """A committed window. halt: this process's code. fingerprint: of its data. record: on the host,
    valid once `arrived`; None if nothing ran. reported: figures in the report of a micro-batch.
    """

    index: int
    micro_batches: int
    ran: list[MicroBatchFlags[S]]
    refusals: list[Refusal]
    halt: int = 0
    fingerprint: int = 0
    limits: tuple[float, float] = (math.inf, math.inf)
    update: Update | None = None
    norms: Tensor | None = None
    record: Tensor | None = None
    arrived: Any = None
    reported: int = 0
    flags: Tensor = field(init=False)
    losses: Tensor = field(init=False)
    tokens: Tensor = field(init=False)
    loss_sum: Tensor = field(init=False)

    @property
    def has_arrived(self) -> bool:
        """Whether the record can be read without waiting."""
        return self.arrived is None or self.arrived.query()

    def gather(self, home: torch.device) -> None:
        """Sum loss and tokens of the micro-batches that count, on the device."""
        self.flags = _stacked([m.flag for m in self.ran], home, torch.bool)
        losses = [m.sums.loss.detach().to(home, torch.float32) for m in self.ran]
        self.losses = _stacked(losses, home)
        counts = self.sent([m.sums.tokens for m in self.ran], home)
        self.tokens = torch.where(self.flags, counts, 0.0).sum()
        self.loss_sum = torch.where(self.flags, self.losses, 0.0).sum()

    def sent(self, numbers: Sequence[int], home: torch.device) -> Tensor:
        """Return numbers of the host in fp32 on the device, without waiting for it."""
        values = torch.tensor(numbers, dtype=torch.float32)
        return values.pin_memory().to(home, non_blocking=True) if home.type == "cuda" else values

    def send(self, scalars: tuple[Tensor, ...], across: Tensor) -> None:
        """Start the record's way to the host.

        Args:
            scalars: in the order of `SCALARS`.
            across: what it says of several processes.
        """
        home = self.flags.device
        norms = _stacked([torch.linalg.vector_norm(m.norms) for m in self.ran], home)
        reports = [m.sums.report.detach().to(home, torch.float64) for m in self.ran]
        parts = [
            self.flags,
            self.losses,
            norms,
            *reports,
            torch.stack([scalar.to(torch.float64) for scalar in scalars]),
            across,
        ]
        if self.update is not None and self.update.fingerprints is not None:
            parts.append(self.update.fingerprints)
        self.reported = reports[0].numel() if reports else 0
        record = torch.cat([part.to(torch.float64) for part in parts])
        self.record, self.arrived = _to_host(record)


def reading_of(window: LaunchedWindow[S], owner: GradientWindow[S]) -> WindowResult[S]:
    """Read a window's record and say what became of it.

    Args:
        window: whose record has arrived.
        owner: whose history grows, and whose processes gather their refusals.

    Raises:
        ProcessError: the processes had different data, or the step differed between them.
    """
    processes, steps = owner.processes, owner.known_steps
    result: WindowResult[S] = WindowResult(
        window.index, window.micro_batches, False, steps, 0, 0.0, None, None
    )
    if window.halt and processes.size == 1:
        return replace(result, micro_batches=0, halts={0: window.halt})
    result.refusals, result.limits = list(window.refusals), window.limits
    if window.record is None:
        return result
    values = window.record.tolist()
    count = len(window.ran)
    reported = window.reported
    end = (3 + reported) * count + len(SCALARS)
    scalars = dict(zip(SCALARS, values[end - len(SCALARS) : end], strict=True))
    survivors, refused = None, 0
    if processes.size > 1:
        survivors, refused, *of_processes = (int(value) for value in values[end:])
        halts, data, states = (
            of_processes[i * processes.size :][: processes.size] for i in range(3)
        )
        if any(halts):
            found = {process: code for process, code in enumerate(halts) if code}
            return replace(result, micro_batches=0, refusals=[], halts=found)
        _check_same_data(data, owner, window.index)
        _check_same_state(states, owner)
    for number, micro in enumerate(window.ran):
        good, loss, norm = (values[part * count + number] for part in range(3))
        mean = loss / max(1, micro.sums.tokens)
        owner.history.append(
            MicroBatchRecord(window.index, micro.index, micro.sample_ids, mean, norm)
        )
        if good:
            result.survivors.append(micro.sums)
            result.reports.append(values[3 * count + number * reported :][:reported])
        else:
            result.refusals.append(_explain(micro, loss, owner))
    if refused:
        # All processes come here, since the number refused is a sum over them.
        result.refusals = gathered(result.refusals, Refusal, processes)
    result.refusals.sort(key=lambda r: r.micro_batch or 0)
    result.tokens, result.rate = int(scalars["tokens"]), scalars["rate"]
    if result.survivors if survivors is None else survivors:
        result.loss, result.grad_norm = scalars["loss"], scalars["norm"]
        result.applied = bool(scalars["applied"])
        refusal = _explain_window(window, scalars, owner)
        if refusal is not None:
            result.refusals.append(refusal)
    if result.refusals and window.update is not None:
        result.snapshot = window.update.snapshot
    result.steps = int(scalars["steps"])
    return result


def gathered(own: Iterable[R], kind: type[R], processes: ProcessGroup) -> list[R]:
    """Return the records of all processes, those of each in their order; every process calls this.

    Args:
        own: of this process.
        kind: their class.
        processes: the processes.
    """
    everyone = processes.gather_json([asdict(record) for record in own])
    return [
        kind(**{**entry, "sample_ids": tuple(entry["sample_ids"])})
        for entries in everyone
        for entry in entries
    ]


def _check_same_data(found: list[int], owner: GradientWindow[Any], index: int) -> None:
    """Refuse processes at different data: they would train on some twice, on some never."""
    other = next((process for process, data in enumerate(found) if data != found[0]), None)
    if other is not None:
        raise owner.processes.everywhere(
            ProcessError(
                f"process {other} reads other data than process 0 in window {index + 1}"
                f" (fingerprints {found[other]} and {found[0]}); give every process the same data"
                " in the same order",
                DataError.exit_status,
            )
        )


def _check_same_state(found: list[int], owner: GradientWindow[Any]) -> None:
    """Report a step that differed on a process and was taken back on all."""
    bad = [process for process, state in enumerate(found) if not state]
    other = bad or [process for process, state in enumerate(found) if state != found[0]]
    if other and len(bad) < len(found):
        left = (
            f"what it left on process {', '.join(map(str, other))}"
            f" {'is not finite' if bad else 'differs'}"
        )
        raise owner.processes.everywhere(
            ProcessError(
                f"every process took step {owner.known_steps + 1} alike, but {left}; it was taken"
                " back: look at the hardware of these processes, then go on with --resume auto"
            )
        )


def _explain(micro: MicroBatchFlags[Any], loss: float, owner: GradientWindow[Any]) -> Refusal:
    kind, detail = "loss", f"loss is {loss}"
    if math.isfinite(loss):
        kind, detail = "gradient", _first_bad(micro.norms, owner.update.names)
    return Refusal(kind, detail, micro.index, micro.sample_ids, owner.processes.index)


def _explain_window(
    window: LaunchedWindow[Any], scalars: dict[str, float], owner: GradientWindow[Any]
) -> Refusal | None:
    # survivors without a token are nothing to step on, and no fault
    if scalars["applied"] or not scalars["tokens"]:
        return None
    loss, norm = scalars["loss"], scalars["norm"]
    if not scalars["finite_norm"]:
        assert window.norms is not None
        names = _first_bad(window.norms, owner.update.names)
        return Refusal("norm", f"gradient norm of the window is {norm}: {names}")
    if scalars["spike"]:
        assert owner.spikes is not None
        return Refusal("spike", owner.spikes.describe(loss, norm, window.limits))
    assert window.update is not None
    bad = window.update.first_bad()
    return Refusal(
        "update", f"{bad} was not finite after the step; the state before it was restored"
    )


def _first_bad(norms: Tensor, names: Sequence[str]) -> str:
    values = norms.tolist()
    bad = [(n, v) for n, v in zip(names, values, strict=True) if not math.isfinite(v)]
    if not bad:
        return (
            f"every tensor's own norm is finite (largest {max(values):.3g}), their sum of squares"
            " overflows"
        )
    return f"gradient of {bad[0][0]} has norm {bad[0][1]} ({len(bad)} of {len(values)} tensors)"


def _stacked(
    scalars: list[Tensor], home: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return [number of scalars], empty for a process without a micro-batch."""
    return torch.stack(scalars) if scalars else torch.zeros(0, dtype=dtype, device=home)


def _to_host(record: Tensor) -> tuple[Tensor, Any]:
    """Return the record on the host, and the event to wait for before it is read."""
    if record.device.type != "cuda":
        return record, None
    pinned = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
    pinned.copy_(record, non_blocking=True)
    arrived = torch.cuda.Event()
    # the current device may be another one
    arrived.record(torch.cuda.current_stream(record.device))
    return pinned, arrived
