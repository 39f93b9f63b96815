"""The gradient window: micro-batches in, one guarded optimizer step out.

The promise: a window with a bad micro-batch leaves weights, moments and counts as if that
micro-batch had never existed, bit for bit. A window without survivors, or whose step is not finite,
changes nothing at all.

Each micro-batch writes into scratch gradients. One flag says whether its loss and gradients are
finite, and the scratch is added to the window's gradient through `torch.where` on that flag, never
by multiplying, since 0 * NaN is NaN. The window is divided once, by the tokens of its survivors.
Its norm is checked before clipping, because clipping spreads one NaN over every gradient and turns
an overflowing norm silently into zeros.

All decisions are device flags. On a CPU they are read at once. On a GPU they are copied to pinned
memory and read one window late, or up to `IN_FLIGHT` windows late while they have not arrived; the
learning rate follows the device's own count of applied steps. The limits of the spike guard come
from steps whose results are known, so with it, and with several processes, results are read exactly
one window late: nothing may depend on the clock.

Several processes share a window (`shared_window.py`); after the step they compare the state it
left, and a step that differs or is not finite on one of them is taken back on all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import torch
from torch import Tensor, nn

from npt.distributed.processes import ProcessGroup
from npt.errors import ProcessError
from npt.step.guarded_update import EXACT, GuardedUpdate, Update, norms_of
from npt.step.shared_window import AcrossProcesses, gathered, sum_over_processes
from npt.step.spikes import SpikeGuard
from npt.step.window_result import MicroBatchRecord, Refusal, S, WindowResult, first_bad_norm

HISTORY = 256
"""Micro-batches whose loss and gradient norm are remembered, with their sample ids."""

IN_FLIGHT = 3
"""Windows whose results may be on their way before the host waits for one."""

FAILED = 1000
"""The code of a process that stops because of an error; other codes are signal numbers."""

SCALARS = ("tokens", "loss", "norm", "finite_norm", "spike", "applied", "steps", "rate")
"""Figures of a window in its record."""


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
    """A committed window. halt: this process's code. fingerprint: of its data. norms: [P] of its
    gradient. record: on the host, in parts of `sizes`, valid once `arrived`; None if nothing ran.
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
    sizes: Sequence[int] = ()
    arrived: Any = None


class GradientWindow(Generic[S]):
    """Collects micro-batches and commits them as one step.

    Args:
        update: the guarded optimizer; the parameters' `.grad` belongs to the window from now on.
        max_grad_norm: global norm to which the window's gradient is clipped.
        rates: learning rate of each applied step; the last one stays.
        spikes: refuses windows whose loss or norm leaves the range of the accepted ones.
        processes: share the windows; default this one alone.
    """

    def __init__(
        self,
        update: GuardedUpdate,
        max_grad_norm: float,
        rates: Sequence[float],
        *,
        spikes: SpikeGuard | None = None,
        processes: ProcessGroup | None = None,
    ):
        self.update, self.max_grad_norm, self.spikes = update, max_grad_norm, spikes
        self.processes = processes if processes is not None else ProcessGroup()
        self.history: deque[MicroBatchRecord] = deque(maxlen=HISTORY)
        self.known_steps = 0  # applied steps, of the windows whose results were read
        self.committed = 0  # windows so far: the index of the next one
        self._home = update.home
        self._rates = torch.tensor(rates, dtype=torch.float32).to(self._home)
        self._steps = torch.zeros((), dtype=torch.int64, device=self._home)
        self._scratch, self._scratch_views = _flat_like(update.parameters)
        self._sum, self._sum_views = _flat_like(update.parameters)
        self._ran: list[MicroBatchFlags[S]] = []
        self._refusals: list[Refusal] = []
        self._index = self._halt = 0
        self._launched: deque[LaunchedWindow[S]] = deque()

    @property
    def in_flight(self) -> int:
        """Committed windows whose result is not known yet."""
        return len(self._launched)

    @property
    def applied_steps(self) -> int:
        """Applied steps by the device's own count, for which this waits."""
        return int(self._steps)

    def begin(self) -> None:
        """Point the parameters' `.grad` at empty scratch, for one forward and backward."""
        for flat in self._scratch:
            flat.zero_()
        self._point_gradients_at(self._scratch_views)

    def add(self, sums: S, sample_ids: tuple[str, ...] = ()) -> None:
        """Count the micro-batch whose gradients are in `.grad`, if it is finite.

        Nothing is read from the device.
        """
        norms = norms_of(self._scratch_views)
        # Finite only if every norm is; also catches squares that overflow only in their sum.
        norm = torch.linalg.vector_norm(norms)
        flag = torch.isfinite(sums.loss.to(self._home)) & torch.isfinite(norm)
        for total, scratch in zip(self._sum, self._scratch, strict=True):
            torch.where(flag.to(total.device), total + scratch, total, out=total)
        self._ran.append(MicroBatchFlags(sums, flag, norms, self._index, sample_ids))
        self._index += 1

    def refuse(self, detail: str, sample_ids: tuple[str, ...] = ()) -> None:
        """Count a micro-batch that was found bad before any computation."""
        process = self.processes.index
        self._refusals.append(Refusal("data", detail, self._index, sample_ids, process))
        self._index += 1

    def skip(self) -> None:
        """Count a micro-batch that another process computes."""
        self._index += 1

    def halt(self, code: int) -> None:
        """Make the open window and all later ones void, on every process.

        The code is `FAILED`, or the number of a signal.
        """
        assert 0 < code < EXACT
        self._halt = code

    def clear(self) -> None:
        """Forget the open window: its micro-batches have not happened."""
        for flat in self._sum:
            flat.zero_()
        for parameter in self.update.parameters:
            parameter.grad = None
        self._ran, self._refusals, self._index = [], [], 0

    def commit(self, fingerprint: int = 0) -> list[WindowResult[S]]:
        """Close the window: one optimizer step from its survivors, or none.

        Every process must call this equally often, with micro-batches or without, and with the same
        fingerprint of the window's data, below `EXACT`.

        Returns:
            Results that have become known, oldest first: this window's, or with `late` flags those
            of earlier windows, if any.

        Raises:
            ProcessError: a process is lost or differs; this window is not applied, nor earlier ones
                whose result was not known yet.
        """
        self._launched.append(self._launch(fingerprint))
        return self._read(keep=self._unread())

    def flush(self) -> list[WindowResult[S]]:
        """Wait for every committed window; return the results not returned before."""
        return self._read(keep=0)

    def resume_at(self, steps: int) -> None:
        """Count as if `steps` had been applied; moments and weights are the caller's to restore."""
        assert not self._launched and not self._ran, "a window is open"
        self._steps.fill_(steps)
        self.known_steps = steps

    def _launch(self, fingerprint: int) -> LaunchedWindow[S]:
        window: LaunchedWindow[S] = LaunchedWindow(
            self.committed, self._index, self._ran, self._refusals, self._halt, fingerprint
        )
        if self.spikes is not None:
            window.limits = self.spikes.limits
        self.committed += 1
        if self.processes.size > 1 or (self._ran and not self._halt):
            self._step(window)
        self.clear()
        return window

    def _step(self, window: LaunchedWindow[S]) -> None:
        """Divide, check, clip, step, verify, restore, and send the record: all on the device."""
        home, ran = self._home, window.ran
        flags = _stacked([m.flag for m in ran], home, torch.bool)
        losses = _stacked([m.sums.loss.detach().to(home, torch.float32) for m in ran], home)
        counts = _sent([m.sums.tokens for m in ran], home)
        tokens = torch.where(flags, counts, 0.0).sum()
        loss_sum = torch.where(flags, losses, 0.0).sum()
        across, allowed = flags.new_zeros(0), None
        if self.processes.size > 1:
            survivors = flags.sum()
            refused = len(ran) - survivors + len(window.refusals)
            own = [count.to(torch.float32) for count in (tokens, loss_sum, survivors, refused)]
            codes = _sent([window.halt, window.fingerprint], home)
            (tokens, loss_sum), across, allowed = sum_over_processes(
                self._sum, torch.stack(own), codes, self.processes
            )
        for flat in self._sum:
            flat.div_(tokens.clamp_min(1.0).to(flat.device))
        norms = window.norms = norms_of(self._sum_views)
        norm = torch.linalg.vector_norm(norms)
        loss = loss_sum / tokens.clamp_min(1.0)
        finite = torch.isfinite(norm)
        spike = torch.zeros_like(finite)
        if self.spikes is not None:
            spike = self.spikes.exceeds(loss, norm)
        go = (tokens > 0) & finite & ~spike
        go = go if allowed is None else go & allowed
        scale = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        for flat in self._sum:
            flat.mul_(scale.to(flat.device))
        self._point_gradients_at(self._sum_views)
        # Not indexed by the step: indexing with a scalar tensor reads it.
        step = self._steps.clamp(max=len(self._rates) - 1).view(1)
        rate = self._rates.index_select(0, step).squeeze(0)
        update = window.update = self.update(go, rate, self.processes)
        self._steps += update.applied
        scalars = (tokens, loss, norm, finite, spike, update.applied, self._steps, rate)
        norm_of_each = _stacked([torch.linalg.vector_norm(m.norms) for m in ran], home)
        reports = [m.sums.report.detach().to(home, torch.float64) for m in ran]
        parts = [
            torch.stack([scalar.to(torch.float64) for scalar in scalars]),
            flags,
            losses,
            norm_of_each,
            torch.cat(reports) if reports else flags.new_zeros(0),
            across,
            flags.new_zeros(0) if update.fingerprints is None else update.fingerprints,
        ]
        window.sizes = [part.numel() for part in parts]
        record = torch.cat([part.to(torch.float64) for part in parts])
        window.record, window.arrived = _to_host(record)

    def _unread(self) -> int:
        """Return how many of the newest results to leave unread."""
        if not self.update.late:
            return 0
        if self.spikes is not None or self.processes.size > 1:
            return 1
        arrived = 0
        for window in list(self._launched)[:-1]:
            if window.arrived is not None and not window.arrived.query():
                break
            arrived += 1
        return min(IN_FLIGHT, len(self._launched) - arrived)

    def _read(self, keep: int) -> list[WindowResult[S]]:
        """Return the results of all but the newest `keep` windows."""
        results = []
        while len(self._launched) > keep:
            window, known = self._launched[0], self.processes.broken
            try:
                if window.arrived is not None:
                    self.processes.wait_for(window.arrived)
            except ProcessError:
                self._take_back(window)
                if known:
                    break
                raise
            self._launched.popleft()
            result = self._result_of(window)
            self.known_steps = result.steps
            if result.applied and self.spikes is not None:
                assert result.loss is not None and result.grad_norm is not None
                self.spikes.accept(result.loss, result.grad_norm)
            results.append(result)
        return results

    def _result_of(self, window: LaunchedWindow[S]) -> WindowResult[S]:
        """Read a window's record, which has arrived."""
        processes = self.processes
        result: WindowResult[S] = WindowResult(
            window.index, window.micro_batches, False, self.known_steps, 0, 0.0, None, None
        )
        if window.halt and processes.size == 1:
            return replace(result, micro_batches=0, halts={0: window.halt})
        result.refusals, result.limits = list(window.refusals), window.limits
        if window.record is None:
            return result
        values, *parts = (part.tolist() for part in window.record.split(list(window.sizes)))
        flags, losses, norms, reports, across, states = parts
        shared = None
        if processes.size > 1:
            shared = AcrossProcesses(across, states, processes)
            if shared.halts:
                return replace(result, micro_batches=0, refusals=[], halts=shared.halts)
            shared.check(window.index, self.known_steps)
        for number, micro in enumerate(window.ran):
            loss, index, ids = losses[number], micro.index, micro.sample_ids
            mean = loss / max(1, micro.sums.tokens)
            record = MicroBatchRecord(window.index, index, ids, mean, norms[number])
            self.history.append(record)
            if flags[number]:
                result.survivors.append(micro.sums)
                length = len(reports) // len(window.ran)
                result.reports.append(reports[number * length :][:length])
            else:
                kind, detail = "loss", f"loss is {loss}"
                if math.isfinite(loss):
                    kind, detail = "gradient", first_bad_norm(micro.norms, self.update.names)
                result.refusals.append(Refusal(kind, detail, index, ids, processes.index))
        if shared is not None and shared.refused:
            # All processes come here, since the number refused is a sum over them.
            result.refusals = gathered(result.refusals, Refusal, processes)
        result.refusals.sort(key=lambda r: r.micro_batch or 0)
        scalars = dict(zip(SCALARS, values, strict=True))
        result.tokens, result.rate = int(scalars["tokens"]), scalars["rate"]
        if result.survivors if shared is None else shared.survivors:
            result.loss, result.grad_norm = scalars["loss"], scalars["norm"]
            result.applied = bool(scalars["applied"])
            # survivors without a token are nothing to step on, and no fault
            if not result.applied and result.tokens:
                result.refusals.append(self._window_refusal(window, scalars))
        if result.refusals and window.update is not None:
            result.snapshot = window.update.snapshot
        result.steps = int(scalars["steps"])
        return result

    def _window_refusal(self, window: LaunchedWindow[S], scalars: dict[str, float]) -> Refusal:
        """Return why a window was refused as a whole."""
        loss, norm = scalars["loss"], scalars["norm"]
        assert window.norms is not None and window.update is not None
        if not scalars["finite_norm"]:
            names = first_bad_norm(window.norms, self.update.names)
            return Refusal("norm", f"gradient norm of the window is {norm}: {names}")
        if scalars["spike"]:
            assert self.spikes is not None
            return Refusal("spike", self.spikes.describe(loss, norm, window.limits))
        bad = window.update.first_bad()
        said = f"{bad} was not finite after the step; the state before it was restored"
        return Refusal("update", said)

    def _take_back(self, window: LaunchedWindow[S]) -> None:
        """Restore the state before a window that was launched with a process now lost."""
        self._launched.clear()
        if window.update is not None and window.update.snapshot is not None:
            self.update.restore(window.update.snapshot)
        self._steps.fill_(self.known_steps)

    def _point_gradients_at(self, views: Sequence[Tensor]) -> None:
        for parameter, view in zip(self.update.parameters, views, strict=True):
            parameter.grad = view


def _flat_like(parameters: tuple[nn.Parameter, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return a flat buffer of zeros per device and dtype, and each parameter's view of one."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(parameters):
        groups.setdefault((p.device, p.dtype), []).append(i)
    flats: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for (device, dtype), members in groups.items():
        sizes = [parameters[i].numel() for i in members]
        flats.append(torch.zeros(sum(sizes), device=device, dtype=dtype))
        for i, part in zip(members, flats[-1].split(sizes), strict=True):
            views[i] = part.view_as(parameters[i])
    return flats, [views[i] for i in range(len(parameters))]


def _stacked(
    scalars: list[Tensor], home: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return [number of scalars], empty for a process without a micro-batch."""
    return torch.stack(scalars) if scalars else torch.zeros(0, dtype=dtype, device=home)


def _sent(numbers: Sequence[int], home: torch.device) -> Tensor:
    """Return numbers of the host in fp32 on the device, without waiting for it."""
    values = torch.tensor(numbers, dtype=torch.float32)
    return values.pin_memory().to(home, non_blocking=True) if home.type == "cuda" else values


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
