"""The gradient window: micro-batches in, one guarded optimizer step out.

Each micro-batch gets its own gradients. One flag tells whether its loss and gradients are finite.
If so, they are added to the window's gradient; otherwise zeros are added. The zeros come from
multiplying the bits by 0, since 0 * NaN is NaN. The sum is divided once, by the survivors' tokens.
Its norm is checked before clipping, because clipping spreads one NaN over every gradient and
silently turns an overflowing norm into zeros.

All decisions are device flags. On a CPU they are read at once. On a GPU they are copied to pinned
memory and read one window late, or up to `IN_FLIGHT` windows late if they have not arrived. The
learning rate follows the device's own count of applied steps. With the spike guard or several
processes, results are read exactly one window late, so that nothing depends on timing.

Several processes share a window. One all-reduce sums gradients, losses, token counts and flags, so
all processes decide alike; if one must stop, all void the window. After the step they compare their
states. If one differs or is not finite, all undo the step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from npt.distributed.processes import ProcessGroup
from npt.guard.forensics import StoredMicroBatch
from npt.guard.lists import alike, keep_, norms_of
from npt.guard.outcome import (
    NO_LIMITS,
    Judged,
    Landing,
    MicroBatch,
    Outcome,
    PendingWindow,
    Refusal,
    WindowFigures,
    computed,
    outcome_of,
    refusal_of,
    send_record,
)
from npt.guard.parallel import Sharding, as_gradient, full, is_sharded, local
from npt.guard.parameters import Guarded
from npt.guard.refusal import BEFORE
from npt.guard.spikes import SpikeGuard
from npt.guard.traces import Spoilt
from npt.guard.update import EXACT, GuardedUpdate

IN_FLIGHT = 3
"""The most windows whose results may be pending before the host waits for one."""

FAILED = 1000
"""The code of a process that stops on an error; other codes are signal numbers."""


class Gradients:
    """The summed gradients of a window, and those of its current micro-batch.

    Sums lie in one flat buffer per device and dtype; in the window's step, `.grad` is a view of it.
    During a micro-batch `.grad` starts as None, so that backward need not zero or add. For sharded
    parameters both hold this process's shards.

    Args:
        parameters: parameters by name; this object now owns their `.grad`.
        track: keep `.grad` None where no backward reached, so the optimizer skips the parameter.
        reads: whether the host may read a flag, as it may on a CPU.

    Attributes:
        present: the micro-batch's gradients, by index of the parameter that backward reached.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], track: bool = False, reads: bool = False
    ):
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        self.track = track
        self._reads = reads
        self._sharded = bool(self.parameters) and is_sharded(self.parameters[0])
        self.sums, self.sum_views = _flat_like(self.parameters)
        self._strides = [view.stride() for view in self.sum_views]
        self.present: dict[int, Tensor] = {}
        self._none = [view.new_empty(0) for view in self.sum_views]
        self._stale = False

    def withdraw(self) -> None:
        self.present = {}
        for parameter in self.parameters:
            parameter.grad = None

    def collect(self) -> None:
        """Take the gradients from `.grad` after a backward."""
        self.present = {}
        starts: dict[int, int] = {}  # first byte of each
        for place, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if self._sharded:
                gradient = local(gradient)
            if gradient.requires_grad:
                gradient = gradient.detach()
            if gradient.layout != torch.strided or gradient.is_complex():
                gradient = gradient.to_dense().resolve_conj().resolve_neg()
            view = self.sum_views[place]
            # gradients change in place, so none may share memory with itself
            fits = gradient.stride() == self._strides[place] and gradient.dtype == view.dtype
            if fits:
                starts[place] = gradient.data_ptr()
            else:
                gradient = torch.empty_like(view).copy_(gradient)
            self.present[place] = gradient
        self._separate(starts)

    def _separate(self, starts: dict[int, int]) -> None:
        """Copy gradients that lie in memory of another one: backward may return views."""
        end = 0
        for place in sorted(starts, key=starts.__getitem__):
            if starts[place] < end:
                self.present[place] = self.present[place].clone()
            end = max(end, starts[place] + self.sum_views[place].nbytes)

    def norms(self) -> Tensor:
        """Return the norm of each gradient of the micro-batch [P], 0 where there is none."""
        return norms_of([self.present.get(i, none) for i, none in enumerate(self._none)])

    def scale(self, factor: float) -> None:
        if factor == 1:
            return
        for (gradients,) in alike([*self.present.values()]):
            torch._foreach_mul_(gradients, factor)

    def add(self, flag: Tensor) -> None:
        """Add the gradients to the sums if `flag`, a scalar bool, is set; then drop them."""
        if not self._reads or bool(flag):  # to add zeros would change nothing
            self.renew()  # a copy in place of zeros and a sum would keep -0, which a sum does not
            totals = [self.sum_views[place] for place in self.present]
            for gradients, sums in alike([*self.present.values()], totals):
                if not self._reads:
                    keep_(gradients, flag)
                torch._foreach_add_(sums, gradients)
        self.withdraw()

    def expose(self, unreached: Sequence[int]) -> None:
        """Point `.grad` at the window's sums, except for the parameters in `unreached`."""
        self.renew()
        for parameter, view in zip(self.parameters, self.sum_views, strict=True):
            if not parameter.requires_grad:  # frozen since: not to be stepped
                continue
            gradient = view.detach()  # a callback may replace its `.data`
            if self._sharded:
                gradient = as_gradient(gradient, parameter)
            parameter.grad = gradient
        for place in unreached:
            self.parameters[place].grad = None

    def clear(self) -> None:
        """Discard the window. Nothing here can fail, since its step may have been made."""
        self._stale = True
        self.withdraw()

    def close(self) -> None:
        """Set all `.grad` to None and free the buffers."""
        self.withdraw()
        self.sums = []
        self.sum_views = []

    def renew(self) -> None:
        """Set the sums to 0 if they are those of an earlier window."""
        if self._stale:
            for flat in self.sums:
                flat.zero_()
            self._stale = False


class GradientWindow:
    """Collect micro-batches and commit them as one step.

    Args:
        update: the guarded optimizer; the window now owns the parameters' `.grad`.
        max_grad_norm: the global norm to which the window's gradient is clipped.
        rates: the rate of each applied step; the last one stays. With None the optimizer keeps its
            own rates and skips parameters that no survivor's backward reached, and flags are read
            at once.
        divisor: what the window's gradient is divided by; default: its survivors' tokens.
        sharding: how the parameters are sharded; each backward then sums their gradients.
        guarded: the parameters; default: those of `update`, all of them clipped.

    Attributes:
        open: the micro-batches since the last step.
        place: the index of the next micro-batch in the open window, over all processes.
        committed: the number of windows so far, and the index of the next one.
        known_steps: the number of applied steps in windows whose results were read.
        applied: scalar bool, whether the last window was stepped; None if nothing ran.
        shares: by how many micro-batches the loop has divided each loss; the gradient is then
            divided by the survivors' share of them, in place of `divisor`.
        unscale: called when `.grad` holds the sum over a window's survivors, if there are any.
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
        guarded: Guarded | None = None,
    ):
        assert not (update.late and rates is None), "without rates flags are read on the host"
        self.update = update
        self.max_grad_norm = max_grad_norm
        self.spikes = spikes
        self.processes = ProcessGroup() if processes is None else processes
        self.known_steps = 0
        self.committed = 0
        self.place = 0
        self._halt = 0
        self.applied: Tensor | None = None
        self.shares: int | None = None
        self.unscale: Callable[[], None] | None = None
        self._home = update.home
        self._rates: Tensor | None = None
        if rates is not None:
            self._rates = torch.tensor(rates, dtype=torch.float32).to(self._home)
        self._steps = torch.zeros((), dtype=torch.int64, device=self._home)
        self._zero = torch.zeros((), device=self._home)
        self.gradients = Gradients({})
        if guarded is None:
            stepped = dict(zip(update.names, update.parameters, strict=True))
            guarded = Guarded(held=stepped, stepped=stepped, clipped=update.parameters)
        self.hold(guarded)
        self.divisor = divisor
        self.sharding = Sharding([], self.processes, False) if sharding is None else sharding
        self.open = PendingWindow()
        self._launched: deque[PendingWindow] = deque()
        self._landings: list[Landing] = []  # free ones

    @property
    def in_flight(self) -> int:
        """The number of committed windows whose result is not known yet."""
        return len(self._launched)

    @property
    def applied_steps(self) -> int:
        """The device's own count of applied steps; waits for the device."""
        return int(self._steps)

    def hold(self, guarded: Guarded) -> None:
        """Guard these parameters from now on. Call it only while the window is empty."""
        self.update.guard(guarded.stepped)
        self.gradients.close()
        track = self._rates is None
        self.gradients = Gradients(guarded.held, track, self.update.reads)
        self._clipped = guarded.clipped

    def add(self, micro: MicroBatch, loss: Tensor, spoilt: Spoilt | None = None) -> Tensor:
        """Add the collected gradients if they, the loss and the buffers are finite; return whether
        they are, a scalar bool. The loss is a scalar, times the micro-batch's weight.
        """
        micro.judged = self.judge(loss, spoilt)
        self._append(micro)
        return micro.judged.flag

    def judge(self, loss: Tensor, spoilt: Spoilt | None = None) -> Judged:
        """Add the collected gradients if all is finite; return what came of the micro-batch."""
        norms = self.gradients.norms().to(self._home)
        loss = loss.detach().to(self._home, torch.float32)
        sound = loss  # NaN if anything but the gradients is wrong
        if spoilt is not None:
            sound = torch.where(spoilt.flags.any(), math.nan, loss)
        codes, norms = self.sharding.judge(sound, norms)
        # Finite only if every norm is, and the sum of their squares too.
        norm = torch.linalg.vector_norm(norms)
        flag = norm + 0 * sound < math.inf  # False for NaN, and 0 * inf is NaN
        if codes is not None:
            flag = (codes == 0).all() & (norm < math.inf)
        reached = frozenset(self.gradients.present)
        self.gradients.add(flag)
        return Judged(loss, flag, norm, norms, codes, reached, spoilt)

    def refuse(
        self,
        detail: str,
        sample_ids: tuple[str, ...] = (),
        kind: str = "data",
        stored: StoredMicroBatch | None = None,
    ) -> None:
        """Refuse a micro-batch that has no gradients yet."""
        micro = MicroBatch(None, 0, sample_ids=sample_ids, stored=stored)
        if self.sharding.trained:
            norms = torch.zeros(len(self.gradients.parameters), device=self._home)
            self.sharding.exchange(torch.tensor(float(BEFORE)), norms)
        self._append(micro)
        micro.refusal = Refusal(kind, detail, micro.index, sample_ids, self.processes.index)

    def _append(self, micro: MicroBatch) -> None:
        micro.index = self.place + self.processes.index
        self.place += self.processes.size
        self.open.own.append(micro)

    def halt(self, code: int) -> None:
        """Void this and all later windows on every process; `code` is `FAILED` or a signal."""
        assert 0 < code < EXACT
        self._halt = code

    def clear(self) -> None:
        self.gradients.clear()
        self.open = PendingWindow()
        self.place = 0

    def begin_again(self) -> None:
        """Clear the open window but keep its refused micro-batches, whose flags are known."""
        refused = self.refused()
        for micro, judged in computed(refused):  # no record will hold their figures
            micro.loss = float(judged.loss) / max(1, micro.tokens)
            micro.grad_norm = float(judged.norm)
        earlier = [*self.open.earlier, *refused]
        self.clear()
        self.open.earlier = earlier

    def refused(self) -> list[MicroBatch]:
        """Return this process's refused micro-batches of the open window. Waits for the flags."""
        names = self.gradients.names
        for micro, judged in self.open.ran:
            if micro.refusal is None and not bool(judged.flag):
                loss = float(judged.loss)
                micro.refusal = refusal_of(micro, judged, loss, names, self.processes.index)
        return [micro for micro in self.open.own if micro.refusal is not None]

    def close(self, fingerprint: int = 0) -> Tensor | None:
        """Set `.grad` to the window's gradient, divided, checked and clipped, for `commit`. Return
        its norm before clipping, a scalar, or None if no micro-batch ran.
        """
        window = self.open
        if not window.closed:
            self._close(window, fingerprint)
        return None if window.figures is None else window.figures.norm

    def _close(self, window: PendingWindow, fingerprint: int) -> None:
        window.closed = True
        window.index = self.committed
        window.micro_batches = self.place
        window.halt = self._halt
        window.fingerprint = fingerprint
        if self.spikes is not None:
            window.limits = self.spikes.limits
        if self.processes.size > 1 or (window.ran and not self._halt):
            try:
                self._sum_up(window)
            except BaseException:
                self.clear()
                raise

    def commit(self, fingerprint: int = 0) -> list[Outcome]:
        """Make one optimizer step from the window's survivors, or none. Return the outcomes known
        so far, oldest first.

        Every process must call this equally often, with micro-batches or without, and with the same
        fingerprint of the window's data, below `EXACT`.

        Raises:
            ProcessError: a process is lost or differs; windows without a known result are undone.
        """
        window = self.open
        self.close(fingerprint)
        self.committed += 1
        self.applied = None
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
        """Set the count of applied steps; the caller restores weights and moments."""
        assert not self._launched and not self.open.own, "a window is open"
        self._steps.fill_(steps)
        self.known_steps = steps

    def _sum_up(self, window: PendingWindow) -> None:
        """Sum over survivors and processes, divide, and clip. Decides on the device whether to
        step.
        """
        figures = self._counted(window)
        unreached = self._unreached(window) if self.gradients.track else []
        self.gradients.expose(unreached)
        window.reached = len(unreached) < len(self.gradients.parameters)
        if self.unscale is not None and window.reached:
            self.unscale()
        allowed = self._sum_over_processes(window, figures)
        divisor = self._divide(window, figures)
        figures.loss = figures.loss / divisor
        figures.norm = self._clip(window)
        good = figures.norm < math.inf  # False for NaN
        if self.spikes is not None and window.limits != NO_LIMITS:
            figures.spike = self.spikes.exceeds(figures.loss, figures.norm)
            good = good & ~figures.spike
        window.go = good & allowed if window.reached else torch.zeros_like(good)
        window.figures = figures

    def _counted(self, window: PendingWindow) -> WindowFigures:
        """Return the figures of this process's micro-batches. `loss` is a sum still."""
        home = self._home
        ran = [judged for _, judged in window.ran]
        losses = norms = reports = torch.zeros(0, device=home)
        flags = losses.bool()
        if ran:
            flags = torch.stack([judged.flag for judged in ran])
            both = [judged.loss for judged in ran] + [judged.norm for judged in ran]
            losses, norms = torch.stack(both).split(len(ran))
            reports = torch.cat([micro.report.detach().to(home) for micro, _ in window.ran])
        # rows: tokens, one for each micro-batch, loss; those of survivors are added up
        counts = sent([micro.tokens for micro, _ in window.ran] + [1] * len(ran), home)
        table = torch.cat([counts, losses]).view(3, len(ran))
        tokens, survivors, loss = torch.where(flags, table, self._zero).sum(1).unbind()
        return WindowFigures(
            tokens=tokens,
            loss=loss,
            norm=self._zero,
            spike=self._zero,
            survivors=survivors,
            flags=flags,
            losses=losses,
            norms=norms,
            reports=reports,
        )

    def _sum_over_processes(self, window: PendingWindow, figures: WindowFigures) -> Tensor:
        """Sum gradients and figures over all processes, and exchange each one's halt and
        fingerprint of the data. Return whether a step is allowed, a scalar bool: something is left,
        none halts, and all have the same data.
        """
        processes = self.processes
        if processes.size == 1:
            return figures.tokens > 0
        sums = self.gradients.sums
        if self.sharding.trained:
            sums = []  # backward has summed them
        lost = len(window.earlier) + len(window.own) - figures.survivors
        numbers = torch.stack([figures.tokens, figures.loss, figures.survivors, lost])
        codes = torch.zeros(2, processes.size, device=self._home)
        codes[:, processes.index] = sent([window.halt, window.fingerprint], self._home)
        # all in one flat fp32 tensor, exact for integers below `EXACT`
        parts = [*sums, numbers, codes.flatten()]
        flat = processes.sum_(torch.cat([part.to(self._home, torch.float32) for part in parts]))
        *summed, totals, of_each = flat.split([part.numel() for part in parts])
        for gradient, total in zip(sums, summed, strict=True):
            gradient.copy_(total)
        figures.tokens, figures.loss, figures.survivors, figures.refused = totals.unbind()
        halts, data = of_each.split(processes.size)
        figures.halts = halts
        figures.data = data
        agreed = (halts == 0).all() & (data == data[0]).all()
        return agreed & (figures.tokens > 0)

    def _divide(self, window: PendingWindow, figures: WindowFigures) -> Tensor:
        """Divide the window's gradient, and return by what."""
        divisor = self._divisor(figures)
        window.divided = not (self.update.reads and float(divisor) == 1.0)
        if window.divided:
            for flat in self.gradients.sums:
                flat.div_(divisor.to(flat.device))
        return divisor

    def _divisor(self, figures: WindowFigures) -> Tensor:
        if self.shares is not None:
            return figures.survivors.clamp_min(1.0) / self.shares
        if self.divisor is not None:
            return torch.full_like(figures.tokens, self.divisor)
        return figures.tokens.clamp_min(1.0)

    def _unreached(self, window: PendingWindow) -> list[int]:
        """Return indices of parameters that no survivor's backward reached. All must call it."""
        every = len(self.gradients.parameters)
        found: set[int] = set()
        for _, judged in window.ran:
            # most often the first one reaches all, and no other flag needs to be read
            if not judged.reached <= found and bool(judged.flag):
                found |= judged.reached
        if self.processes.size > 1:
            reached = torch.zeros(every)
            reached[list(found)] = 1
            reached = self.processes.sum_(reached.to(self._home))
            found = set(reached.nonzero().flatten().tolist())
        return [place for place in range(every) if place not in found]

    def _clip(self, window: PendingWindow) -> Tensor:
        """Clip the window's gradient; return its norm before."""
        norm = self._norm_to_clip_by(window)
        whole = full(norm)
        # torch divides by the norm plus 1e-6, and multiplies by 1 where that gives 1 or more
        within = self.update.reads and bool(self.max_grad_norm / (whole + 1e-6) >= 1)
        if not within:
            clip_grads_with_norm_(self._clipped, self.max_grad_norm, norm)
        return whole.to(self._home, torch.float32)

    def _norm_to_clip_by(self, window: PendingWindow) -> Tensor:
        if not self.gradients.track:
            window.norms = self._norms()
            return torch.linalg.vector_norm(window.norms)
        gradients = [p.grad for p in self._clipped if p.grad is not None]
        if self._is_of_one(window, len(gradients)):
            ((_, judged),) = window.ran
            norm = judged.norm
        else:
            # torch's own arithmetic, in the gradients' dtype, as in an unguarded loop
            norm = get_total_norm(gradients)
        if self.spikes is not None or not bool(torch.isfinite(full(norm))):
            window.norms = self._norms()
        return norm

    def _is_of_one(self, window: PendingWindow, clipped: int) -> bool:
        """Return whether the window's gradient is that of its only micro-batch, whose norm then has
        the bits of the norm of the sums.
        """
        reached = [len(judged.reached) for _, judged in window.ran]
        alone = self.processes.size == 1 and not self.sharding.trained
        changed = window.divided or self.unscale is not None
        # of bf16 gradients torch adds the norms in bf16, and `judge` in fp32
        fp32 = [flat.dtype for flat in self.gradients.sums] == [torch.float32]
        every = len(self.gradients.parameters)
        return alone and fp32 and not changed and reached == [every] == [clipped]

    def _norms(self) -> Tensor:
        norms = norms_of(self.gradients.sum_views, home=self._home)
        return self.sharding.norms_of_all(norms)

    def _step(self, window: PendingWindow, go: Tensor) -> None:
        """Step, verify or restore, and send the figures, all on the device."""
        figures = window.figures
        assert figures is not None
        if self._rates is not None:
            # rates[step] would read the step on the host.
            step = self._steps.clamp(max=len(self._rates) - 1).view(1)
            figures.rate = self._rates.index_select(0, step).squeeze(0)
        if self._home.type == "cuda":
            window.landing = self._landing(figures)
        with self.update.step(go, figures.rate, self.processes) as update:
            window.update = update
            figures.applied = update.applied
            figures.steps = self._steps + update.applied
            figures.states = update.fingerprints
            send_record(window)
        self._steps = figures.steps
        self.applied = figures.applied

    def _landing(self, figures: WindowFigures) -> Landing:
        added = 2 + self.processes.size  # the most that the step adds
        size = added + sum(figure.numel() for figure in figures.known().values())
        fitting = [each for each in self._landings if each.memory.numel() >= size]
        self._landings = fitting[1:]
        return fitting[0] if fitting else Landing(size)

    def _unread(self) -> int:
        if not self.update.late:
            return 0
        if self.spikes is not None or self.processes.size > 1:
            return 1
        *earlier, _ = self._launched
        waiting = [*dropwhile(PendingWindow.has_arrived, earlier)]
        return min(IN_FLIGHT, len(waiting) + 1)

    def _read(self, keep: int) -> list[Outcome]:
        results = []
        while len(self._launched) > keep:
            # it stays in line until its outcome is known, so that an error can take it back
            window = self._launched[0]
            if self.processes.broken and window.arrived is not None:
                self._take_back()  # the lost process was reported already
                break
            try:
                result = self._outcome(window)
            except BaseException:
                self._take_back()
                raise
            self._launched.popleft()
            if window.landing is not None:
                self._landings.append(window.landing)
            self.known_steps = result.steps
            results.append(result)
        return results

    def _outcome(self, window: PendingWindow) -> Outcome:
        """Wait for a window's figures, and return its outcome."""
        if window.arrived is not None:
            self.processes.check_unbroken()
            window.arrived.synchronize()
        names = self.gradients.names
        result = outcome_of(window, names, self.known_steps, self.processes)
        if result.applied and self.spikes is not None:
            assert result.loss is not None and result.grad_norm is not None
            self.spikes.accept(result.loss, result.grad_norm)
        return result

    def _take_back(self) -> None:
        for window in reversed(self._launched):
            if window.update is not None:
                self.update.take_back(window.update)
        self._launched.clear()
        self._steps.fill_(self.known_steps)


def sent(numbers: Sequence[int], home: torch.device) -> Tensor:
    values = torch.tensor(numbers, dtype=torch.float32)
    return values.pin_memory().to(home, non_blocking=True) if home.type == "cuda" else values


def _flat_like(parameters: tuple[nn.Parameter, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return flat buffers of zeros, one per device and dtype, and each parameter's view of one."""
    shards = [local(p) for p in parameters]
    flats: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for group, places in alike(shards, range(len(shards))):
        size = sum(shard.numel() for shard in group)
        flat = torch.zeros(size, device=group[0].device, dtype=group[0].dtype)
        flats.append(flat)
        views.update(zip(places, _views(flat, group), strict=True))
    return flats, [views[place] for place in range(len(shards))]


def _views(flat: Tensor, shards: list[Tensor]) -> Iterator[Tensor]:
    """Yield each shard's view of the flat buffer. Views have the shards' strides, as autograd's
    gradients do, so norms add in the same order.
    """
    parts = flat.split([shard.numel() for shard in shards])
    for shard, part in zip(shards, parts, strict=True):
        like = torch.empty_like(shard, device="meta")
        yield part.as_strided(like.shape, like.stride(), part.storage_offset())
