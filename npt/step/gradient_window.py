"""The gradient window: micro-batches in, one guarded optimizer step out.

What is promised: a window with a bad micro-batch leaves weights, moments and counts as if that
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

Several processes share a window: one all-reduce sums gradients, losses, token counts and flags in
one flat fp32 tensor, so all of them decide the same. A process that must stop says so in that sum,
and the window is void on all of them. After the step the processes compare what it left behind; a
step that differs or is not finite on one of them is taken back on all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic

import torch
from torch import Tensor, nn

from npt.distributed.processes import ProcessGroup
from npt.errors import ProcessError
from npt.step.guarded_update import EXACT, GuardedUpdate, norms_of
from npt.step.launched_window import LaunchedWindow, MicroBatchFlags, reading_of
from npt.step.spikes import SpikeGuard
from npt.step.window_result import MicroBatchRecord, Refusal, S, WindowResult

HISTORY = 256
"""Micro-batches whose loss and gradient norm are remembered, with their sample ids."""

IN_FLIGHT = 3
"""Windows whose results may be on their way before the host waits for one."""

FAILED = 1000
"""The code of a process that stops because of an error; other codes are signal numbers."""


class GradientWindow(Generic[S]):
    """Collects micro-batches and commits them as one step.

    Args:
        update: the guarded optimizer; the parameters' `.grad` belongs to the window from now on.
        max_grad_norm: the window's gradient is clipped to this global norm.
        rates: learning rate of each applied step; the last one stays.
        spikes: refuses windows whose loss or norm leaves the range of the accepted ones.
        processes: the processes that share the windows; default this one alone.
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

        Args:
            sums: loss, of which the gradients are, and tokens.
            sample_ids: of its rows, for refusals and history.
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
        self._refusals.append(
            Refusal("data", detail, self._index, sample_ids, self.processes.index)
        )
        self._index += 1

    def skip(self) -> None:
        """Count a micro-batch that another process computes."""
        self._index += 1

    def halt(self, code: int) -> None:
        """Make the open window and all later ones void, on every process.

        Args:
            code: `FAILED`, or the number of a signal.
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

        Every process must call this equally often, with micro-batches or without.

        Args:
            fingerprint: below `EXACT`, of the window's data; processes must agree on it.

        Returns:
            Results that have become known, oldest first: this window's, or with `late` flags those
            of earlier windows, if any.

        Raises:
            ProcessError: a process is lost or differs; nothing of this window is applied, nor of
                earlier ones whose result was not known yet.
        """
        self._launched.append(self._launch(fingerprint))
        return self._read(keep=self._unread())

    def flush(self) -> list[WindowResult[S]]:
        """Wait for every committed window; return the results not returned before.

        Raises:
            ProcessError: a process is lost; windows whose result was not known have not happened.
        """
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
        """Divide, check, clip, step, verify, restore: all on the device."""
        window.gather(self._home)
        across, allowed = self._sum_over_processes(window)
        tokens, loss_sum = window.tokens, window.loss_sum
        for flat in self._sum:
            flat.div_(tokens.clamp_min(1.0).to(flat.device))
        norms = window.norms = norms_of(self._sum_views)
        norm = torch.linalg.vector_norm(norms)
        loss = loss_sum / tokens.clamp_min(1.0)
        finite = torch.isfinite(norm)
        spike = (
            self.spikes.exceeds(loss, norm) if self.spikes is not None else torch.zeros_like(finite)
        )
        go = (tokens > 0) & finite & ~spike
        go = go if allowed is None else go & allowed
        scale = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        for flat in self._sum:
            flat.mul_(scale.to(flat.device))
        self._point_gradients_at(self._sum_views)
        # Not indexed by the step: indexing with a scalar tensor reads it.
        step = self._steps.clamp(max=len(self._rates) - 1).view(1)
        rate = self._rates.index_select(0, step).squeeze(0)
        window.update = self.update(go, rate, self.processes)
        self._steps += window.update.applied
        window.send(
            (tokens, loss, norm, finite, spike, window.update.applied, self._steps, rate), across
        )

    def _sum_over_processes(self, window: LaunchedWindow[S]) -> tuple[Tensor, Tensor | None]:
        """Sum gradients, in place, and all that is decided on, in one all-reduce.

        Returns:
            What the record says of the processes, and whether they allow a step; nothing and None
            for one process.
        """
        size, process = self.processes.size, self.processes.index
        if size == 1:
            return window.flags.new_zeros(0), None
        survivors = window.flags.sum()
        refused = window.flags.numel() - survivors + len(window.refusals)
        counts = [window.tokens, window.loss_sum, survivors, refused]
        own = [0] * 2 * size
        own[process], own[size + process] = window.halt, window.fingerprint
        parts = [
            *self._sum,
            torch.stack([count.to(torch.float32) for count in counts]),
            window.sent(own, self._home),
        ]
        flat = self.processes.sum_(
            torch.cat([part.to(self._home, torch.float32) for part in parts])
        )
        *gradients, sums, of_processes = flat.split([part.numel() for part in parts])
        for own_sum, summed in zip(self._sum, gradients, strict=True):
            own_sum.copy_(summed)
        window.tokens, window.loss_sum = sums[0], sums[1]
        halts, fingerprints = of_processes.split(size)
        allowed = (halts == 0).all() & (fingerprints == fingerprints[0]).all()
        return torch.cat([sums[2:], of_processes]), allowed

    def _unread(self) -> int:
        """Return how many of the newest results to leave unread."""
        if not self.update.late:
            return 0
        if self.spikes is not None or self.processes.size > 1:
            return 1
        older = list(self._launched)[:-1]
        arrived = next((i for i, window in enumerate(older) if not window.has_arrived), len(older))
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
            result = reading_of(window, self)
            self.known_steps = result.steps
            if result.applied and self.spikes is not None:
                assert result.loss is not None and result.grad_norm is not None
                self.spikes.accept(result.loss, result.grad_norm)
            results.append(result)
        return results

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
