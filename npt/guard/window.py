"""The gradient window: micro-batches in, one guarded optimizer step out.

Each micro-batch makes gradients of its own. One flag says whether its loss and gradients are
finite; they are added to the window's gradient if it is set, and else zeros are: their bits times
0, since of numbers 0 * NaN is NaN. The window is divided once, by the tokens of its survivors. Its
norm is checked before clipping, because clipping spreads one NaN over every gradient and turns an
overflowing norm silently into zeros.

All decisions are device flags. On a CPU they are read at once. On a GPU they are copied to pinned
memory and read one window late, or up to `IN_FLIGHT` windows late while they have not arrived; the
learning rate follows the device's own count of applied steps. The limits of the spike guard come
from steps whose results are known, so with it, and with several processes, results are read exactly
one window late: nothing may depend on the clock.

Several processes share a window: one all-reduce sums gradients, losses, token counts and flags, so
all decide the same, and void the window if one of them must stop. After the step they compare the
state it left, and a step that differs or is not finite on one of them is taken back on all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from npt.distributed.processes import ProcessGroup
from npt.guard.lists import alike, keep_, norms_of
from npt.guard.outcome import (
    NO_LIMITS,
    Landing,
    MicroBatch,
    Outcome,
    PendingWindow,
    Refusal,
    read_record,
    refusal_of,
    send_record,
)
from npt.guard.refusal import BEFORE
from npt.guard.sharding import Sharding, as_gradient, full, is_sharded, local
from npt.guard.spikes import SpikeGuard
from npt.guard.update import EXACT, GuardedUpdate

if TYPE_CHECKING:
    from npt.guard.forensics import StoredMicroBatch

IN_FLIGHT = 3
"""Windows whose results may be on their way before the host waits for one."""

FAILED = 1000
"""The code of a process that stops because of an error; other codes are signal numbers."""


class Gradients:
    """The gradients of a window, summed, and those of its present micro-batch.

    Sums are flat, one buffer per device and dtype, of which `.grad` is a view in the window's step.
    In a micro-batch `.grad` is what its backward makes of None, so that nothing is zeroed or added
    for it. Of sharded parameters both are this process's shards.

    Args:
        parameters: by name; their `.grad` belongs to this object from now on.
        track: leave parameters that no backward reached the `.grad` None that makes an optimizer
            leave them alone.

    Attributes:
        present: of each parameter that the micro-batch's backward reached, by place.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], track: bool = False):
        self.names, self.parameters = tuple(parameters), tuple(parameters.values())
        self.sums, self.sum_views = _flat_like(self.parameters)
        self.track = track
        self.present: dict[int, Tensor] = {}
        self._none = [view.new_empty(0) for view in self.sum_views]
        self._stale = False

    def withdraw(self) -> None:
        """Leave the parameters without gradients; the window keeps its sums."""
        self.present = {}
        for parameter in self.parameters:
            parameter.grad = None

    def collect(self) -> None:
        """Take the gradients of a backward, or what replaced them."""
        self.present = {}
        taken: set[int] = set()
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            gradient, view = local(parameter.grad).detach(), self.sum_views[place]
            gradient = gradient.to_dense().resolve_conj().resolve_neg()  # as a rule it is itself
            # what changes in place must not be two parameters' at once, or one's many times
            same = gradient.stride() == view.stride() and gradient.dtype == view.dtype
            memory = gradient.untyped_storage().data_ptr()  # backward may make views of one
            if not same or memory in taken:
                gradient = torch.empty_like(view).copy_(gradient)
            taken.add(memory)
            self.present[place] = gradient

    def norms(self) -> Tensor:
        """Return the norms [P] of the micro-batch's gradients, 0 where there is none."""
        return norms_of([self.present.get(i, none) for i, none in enumerate(self._none)])

    def scale(self, factor: float) -> None:
        for (gradients,) in alike([*self.present.values()]):
            torch._foreach_mul_(gradients, factor)

    def add(self, flag: Tensor) -> None:
        """Add the micro-batch's gradients to the sums if the scalar bool `flag` is set, without
        reading it; their memory is lost.
        """
        self._renew()
        totals = [self.sum_views[place] for place in self.present]
        for gradients, sums in alike([*self.present.values()], totals):
            keep_(gradients, flag)
            torch._foreach_add_(sums, gradients)
        self.withdraw()

    def expose(self, unreached: Sequence[int] = ()) -> None:
        """Point `.grad` at the window's sums, but leave those parameters without one."""
        self._renew()
        for parameter, view in zip(self.parameters, self.sum_views, strict=True):
            gradient = view.detach()  # fresh: somebody may move it by `p.grad.data = ...`
            sharded = is_sharded(parameter)
            parameter.grad = as_gradient(gradient, parameter) if sharded else gradient
        for place in unreached:
            self.parameters[place].grad = None

    def clear(self) -> None:
        """Forget the window, by nothing that could fail: its step may be made already."""
        self._stale = True
        self.withdraw()

    def close(self) -> None:
        """Leave the parameters as they were found, without a gradient, and free the buffers."""
        self.withdraw()
        self.sums, self.sum_views = [], []

    def _renew(self) -> None:
        if self._stale:
            for flat in self.sums:
                flat.zero_()
            self._stale = False


class GradientWindow:
    """Collects micro-batches and commits them as one step.

    Args:
        update: the guarded optimizer; the parameters' `.grad` belongs to the window from now on.
        max_grad_norm: global norm to which the window's gradient is clipped.
        rates: of each applied step; the last one stays. None leaves rates to the optimizer, and
            parameters alone that no survivor's backward reached: it reads flags at once.
        divisor: of the window's gradient; default the tokens of its survivors.
        sharding: of the parameters, if they are sharded; each backward sums their gradients.

    Attributes:
        place: in the open window, of the next micro-batches of all processes.
        committed: windows so far, which is the index of the next one.
        known_steps: applied steps, of the windows whose results were read.
        applied: the last window's step, a scalar bool; None if there was none.
        unscale: called once `.grad` is the sum of a window's survivors, if there are some.
    """

    def __init__(
        self,
        update: GuardedUpdate,
        max_grad_norm: float,
        rates: Sequence[float] | None = None,
        *,
        spikes: SpikeGuard | None = None,
        processes: ProcessGroup | None = None,
        divisor: float | None = None,
        sharding: Sharding | None = None,
    ):
        assert not (update.late and rates is None), "it needs flags on the host"
        self.update, self.max_grad_norm, self.spikes = update, max_grad_norm, spikes
        self.processes = processes if processes is not None else ProcessGroup()
        self.known_steps = self.committed = self.place = self._halt = 0
        self.applied: Tensor | None = None
        self.unscale: Callable[[], None] | None = None
        self._home = update.home
        self._rates: Tensor | None = None
        if rates is not None:
            self._rates = torch.tensor(rates, dtype=torch.float32).to(self._home)
        self._steps = torch.zeros((), dtype=torch.int64, device=self._home)
        self._zero = torch.zeros((), device=self._home)
        self.gradients = Gradients({})
        self.hold(dict(zip(update.names, update.parameters, strict=True)))
        self._divisor, self.sharding = divisor, sharding
        self._open = PendingWindow()
        self._launched: deque[PendingWindow] = deque()
        self._landings: list[Landing] = []  # that no window uses

    @property
    def in_flight(self) -> int:
        """Committed windows whose result is not known yet."""
        return len(self._launched)

    @property
    def applied_steps(self) -> int:
        """Applied steps by the device's own count, for which this waits."""
        return int(self._steps)

    def hold(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Step these parameters from now on, and hold their gradients; no micro-batch has run."""
        self.update.guard(parameters)
        self.gradients.close()
        self.gradients = Gradients(parameters, track=self._rates is None)

    def add(self, micro: MicroBatch) -> Tensor:
        """Count the micro-batch whose gradients were collected, if it is finite; return whether it
        is, a scalar bool, without reading it.
        """
        norms = self.gradients.norms()
        loss = micro.loss.to(self._home)
        if self.sharding is not None:
            micro.codes, norms = self.sharding.judge(loss, norms)
        # Finite only if every norm is; also catches squares that overflow only in their sum.
        norm = torch.linalg.vector_norm(norms)
        flag = norm + 0 * loss < math.inf  # NaN is not, nor 0 * inf
        if micro.codes is not None:
            flag = (micro.codes == 0).all() & (norm < math.inf)
        if self.gradients.track:
            micro.reached = frozenset(self.gradients.present)
        self.gradients.add(flag)
        micro.flag, micro.norm, micro.norms = flag, norm, norms
        self._append(micro)
        return flag

    def refuse(
        self,
        detail: str,
        sample_ids: tuple[str, ...] = (),
        kind: str = "data",
        stored: StoredMicroBatch | None = None,
    ) -> None:
        """Count a micro-batch that was found bad before its gradients were made."""
        micro = MicroBatch(None, 0, sample_ids=sample_ids, stored=stored)
        if self.sharding is not None:
            norms = torch.zeros(len(self.gradients.parameters), device=self._home)
            self.sharding.exchange(torch.tensor(float(BEFORE)), norms)
        self._append(micro)
        micro.refusal = Refusal(kind, detail, micro.index, sample_ids, self.processes.index)

    def _append(self, micro: MicroBatch) -> None:
        """Add to the open window; micro-batches of the other processes lie around it."""
        micro.index = self.place + self.processes.index
        self.place += self.processes.size
        self._open.own.append(micro)

    def halt(self, code: int) -> None:
        """Make this and all later windows void, on every process, for `FAILED` or a signal."""
        assert 0 < code < EXACT
        self._halt = code

    def clear(self) -> None:
        self.gradients.clear()
        self._open, self.place = PendingWindow(), 0

    def begin_again(self) -> None:
        """Forget the open window but for what was refused in it, whose flags are known."""
        refused = self.refused()
        for micro in refused:
            if micro.flag is not None:  # it ran, and no record will tell its figures
                micro.loss = float(micro.loss) / max(1, micro.tokens)
                micro.grad_norm = float(micro.norm)
        earlier = [*self._open.earlier, *refused]
        self.clear()
        self._open.earlier = earlier

    def refused(self) -> list[MicroBatch]:
        """Return this process's refused micro-batches of the open window; waits for their flags."""
        for micro in self._open.ran:
            if micro.refusal is None and not bool(micro.flag):
                names, process = self.gradients.names, self.processes.index
                micro.refusal = refusal_of(micro, float(micro.loss), names, process)
        return [micro for micro in self._open.own if micro.refusal is not None]

    def close(self, fingerprint: int = 0) -> Tensor | None:
        """Let `.grad` be the window's gradient, divided, checked and clipped, for `commit`; return
        the norm before clipping, a scalar, None if no micro-batch ran.
        """
        window = self._open
        if window.closed:
            return window.figures.get("norm")
        window.closed, window.index, window.micro_batches = True, self.committed, self.place
        window.halt, window.fingerprint = self._halt, fingerprint
        if self.spikes is not None:
            window.limits = self.spikes.limits
        if self.processes.size > 1 or (window.ran and not self._halt):
            try:
                self._sum_up(window)
            except BaseException:
                self.clear()
                raise
        return window.figures.get("norm")

    def commit(self, fingerprint: int = 0) -> list[Outcome]:
        """Close the window, unless it is closed: one optimizer step from its survivors, or none.
        Return the results that have become known, oldest first.

        Every process must call this equally often, with micro-batches or without, and with the same
        fingerprint of the window's data, below `EXACT`. ProcessError if one is lost or differs:
        this window is not applied, nor earlier ones whose result was not known yet.
        """
        window = self._open
        self.close(fingerprint)
        self.committed, self.applied = self.committed + 1, None
        try:
            if window.go is not None:
                self._step(window, window.go)
        finally:
            self.clear()
        self._launched.append(window)
        return self._read(keep=self._unread())

    def flush(self) -> list[Outcome]:
        return self._read(keep=0)

    def resume_at(self, steps: int) -> None:
        """Count as if `steps` had been applied; moments and weights are the caller's to restore."""
        assert not self._launched and not self._open.own, "a window is open"
        self._steps.fill_(steps)
        self.known_steps = steps

    def _sum_up(self, window: PendingWindow) -> None:
        home, ran, gradients = self._home, window.ran, self.gradients
        losses = norms = reports = torch.zeros(0, device=home)
        flags = losses.bool()
        if ran:
            flags = torch.stack([m.flag for m in ran])
            each = [m.loss.detach().to(home, torch.float32) for m in ran]
            losses, norms = torch.stack([*each, *(m.norm for m in ran)]).split(len(ran))
            reports = torch.cat([m.report.detach().to(home) for m in ran])
        counts = sent([*(m.tokens for m in ran), *(1 for _ in ran)], home)
        table = torch.cat([counts, losses]).view(3, len(ran))
        tokens, survivors, loss = torch.where(flags, table, self._zero).sum(1).unbind()
        unreached = self._unreached(ran) if gradients.track else []
        gradients.expose(unreached)
        window.reached = len(unreached) < len(gradients.parameters)
        if self.unscale is not None and window.reached:
            self.unscale()
        allowed = tokens > 0
        if self.processes.size > 1:
            refused = len(window.earlier) + len(window.own) - survivors
            numbers = [tokens, loss, survivors, refused]
            tokens, loss, survivors, refused = self._sum_over_processes(window, numbers)
            halts, data = window.figures["halts"], window.figures["data"]
            allowed = (tokens > 0) & (halts == 0).all() & (data == data[0]).all()
            window.figures["refused"] = refused
        divisor = tokens.clamp_min(1.0)
        if self._divisor is not None:
            divisor = torch.full_like(tokens, self._divisor)
        for flat in gradients.sums:
            flat.div_(divisor.to(flat.device))
        norm = self._clip(window)
        loss, good, spike = loss / divisor, norm < math.inf, self._zero
        if self.spikes is not None and window.limits != NO_LIMITS:
            spike = self.spikes.exceeds(loss, norm)
            good = good & ~spike
        window.go = good & allowed if window.reached else torch.zeros_like(good)
        scalars = {"tokens": tokens, "loss": loss, "norm": norm, "spike": spike}
        each_of = {"flags": flags, "losses": losses, "norms": norms, "reports": reports}
        window.figures |= {**scalars, "survivors": survivors, **each_of}

    def _sum_over_processes(self, window: PendingWindow, numbers: list[Tensor]) -> Sequence[Tensor]:
        """Sum gradients, in place, and scalars over all processes; exchange halts and fingerprints:
        in one flat fp32 tensor, which holds whole numbers below `EXACT` as they are.
        """
        processes, sums = self.processes, self.gradients.sums
        if self.sharding is not None:
            sums = []  # each backward has summed them
        codes = torch.zeros(2, processes.size, device=self._home)
        codes[:, processes.index] = sent([window.halt, window.fingerprint], self._home)
        parts = [*sums, torch.stack(numbers), codes.flatten()]
        flat = processes.sum_(torch.cat([part.to(self._home, torch.float32) for part in parts]))
        *summed, totals, of_each = flat.split([part.numel() for part in parts])
        for gradient, total in zip(sums, summed, strict=True):
            gradient.copy_(total)
        window.figures["halts"], window.figures["data"] = of_each.split(processes.size)
        return totals.unbind()

    def _unreached(self, ran: Sequence[MicroBatch]) -> list[int]:
        """Return the places of parameters that no survivor's backward reached, on any process,
        every one of which calls this; reads flags.
        """
        reached = torch.zeros(len(self.gradients.parameters))
        for micro in ran:
            if micro.reached and bool(micro.flag):
                reached[list(micro.reached)] = 1
        if self.processes.size > 1:
            reached = self.processes.sum_(reached.to(self._home))
        return (reached == 0).nonzero().flatten().tolist()

    def _clip(self, window: PendingWindow) -> Tensor:
        """Clip the window's gradient; return its norm before, a scalar in fp32."""
        gradients = self.gradients
        if not gradients.track:
            window.norms = self._norms()
            norm = torch.linalg.vector_norm(window.norms)
        else:
            # torch's own arithmetic, in the gradients' dtype: that of the loop which is guarded
            norm = get_total_norm([p.grad for p in gradients.parameters if p.grad is not None])
            if self.spikes is not None or not bool(torch.isfinite(full(norm))):
                window.norms = self._norms()
        clip_grads_with_norm_(gradients.parameters, self.max_grad_norm, norm)
        return full(norm).to(self._home, torch.float32)

    def _norms(self) -> Tensor:
        norms = norms_of(self.gradients.sum_views)
        return norms if self.sharding is None else self.sharding.norms_of_all(norms)

    def _step(self, window: PendingWindow, go: Tensor) -> None:
        """Step, verify, restore, and send the record: all on the device."""
        rate = None
        if self._rates is not None:
            # Not indexed by the step: indexing with a scalar tensor reads it.
            step = self._steps.clamp(max=len(self._rates) - 1).view(1)
            rate = window.figures["rate"] = self._rates.index_select(0, step).squeeze(0)
        if self._home.type == "cuda":
            added = 2 + self.processes.size  # below, at most
            size = added + sum(figure.numel() for figure in window.figures.values())
            fitting = [each for each in self._landings if each.memory.numel() >= size]
            window.landing = fitting[0] if fitting else Landing(size)
            self._landings = fitting[1:]
        with self.update.step(go, rate, self.processes) as update:
            window.update = update
            steps = self._steps + update.applied
            window.figures |= {"applied": update.applied, "steps": steps}
            if update.fingerprints is not None:
                window.figures["states"] = update.fingerprints
            send_record(window)
        self._steps, self.applied = steps, update.applied

    def _unread(self) -> int:
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

    def _read(self, keep: int) -> list[Outcome]:
        results = []
        while len(self._launched) > keep:
            window = self._launched[0]
            if self.processes.broken and window.arrived is not None:
                self._take_back()  # its loss was raised where it was noticed
                break
            try:
                if window.arrived is not None:
                    self.processes.check_unbroken()
                    window.arrived.synchronize()
                result = read_record(window, self.gradients.names, self.known_steps, self.processes)
            except BaseException:
                self._take_back()
                raise
            self._launched.popleft()
            if window.landing is not None:
                self._landings.append(window.landing)
            self.known_steps = result.steps
            if result.applied and self.spikes is not None:
                assert result.loss is not None and result.grad_norm is not None
                self.spikes.accept(result.loss, result.grad_norm)
            results.append(result)
        return results

    def _take_back(self) -> None:
        """Restore the state before the oldest window whose result is not known."""
        for window in reversed(self._launched):
            if window.update is not None:
                self.update.take_back(window.update)
        self._launched.clear()
        self._steps.fill_(self.known_steps)


def sent(numbers: Sequence[int], home: torch.device) -> Tensor:
    """Return numbers of the host in fp32 on the device, without waiting for it."""
    values = torch.tensor(numbers, dtype=torch.float32)
    return values.pin_memory().to(home, non_blocking=True) if home.type == "cuda" else values


def _flat_like(parameters: tuple[nn.Parameter, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return a flat buffer of zeros per device and dtype, and each parameter's view of one.

    A view has its parameter's strides, as a gradient of autograd's has: a norm adds in that order.
    """
    shards = [local(p) for p in parameters]
    flats: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for group, places in alike(shards, range(len(shards))):
        sizes = [shard.numel() for shard in group]
        flats.append(torch.zeros(sum(sizes), device=group[0].device, dtype=group[0].dtype))
        for place, part in zip(places, flats[-1].split(sizes), strict=True):
            like = torch.empty_like(shards[place], device="meta")
            views[place] = part.as_strided(like.shape, like.stride(), part.storage_offset())
    return flats, [views[place] for place in range(len(shards))]
