"""The transaction: a window of micro-batches becomes one optimizer step, of which every bad part is
refused whole.

Independent of models and strategies: anything that adds gradients to the parameters' `.grad` and
returns sums and a token count can be a micro-batch. What is promised: a window with a bad
micro-batch leaves weights, moments and counts as if that micro-batch had never been there, bit for
bit; a window without survivors, or whose step turns out non-finite, changes nothing at all.

How: each micro-batch writes into scratch gradients. One flag per micro-batch says whether loss and
gradients are finite, and the scratch is added to the window's gradient through `torch.where` on
that flag. Multiplying by the flag would not do, since 0 * NaN is NaN. The window is divided once,
by the tokens of its survivors. The norm is looked at before clipping, because clipping spreads one
NaN over every gradient and turns an overflowing norm silently into zeros. After the step parameters
and moments are verified, and put back where they are not finite.

All of these decisions are device flags. On a CPU they are read at once. On a GPU reading one would
make the host wait for the device, so there, with a fused AdamW (which obeys `found_inf` without a
host branch), they are copied to pinned memory and read one window late or, as long as they have not
arrived, up to `IN_FLIGHT` windows late; the learning rate follows the device's own count of applied
steps. Both ways do the same arithmetic in the same order, and tests hold their results to bit
equality. Only the limits of the spike guard, which are made on the host from steps whose results
are known, are one step older there: exactly one, so that they depend on no clock. For the same
reason several ranks, which have to meet where results are read, read one window late. What is wrong
with a window is known one to `IN_FLIGHT` windows late: where that ends a run, the clock says how
many windows behind it are stepped on first. And a step's snapshot, which a post-mortem needs if the
window turns out bad, is kept until its result is known: a copy of weights and moments for every
window in flight.

Several ranks share a window: each computes some of its micro-batches, and one all-reduce sums
gradients, losses, token counts and flags in one flat tensor. Whatever is decided behind it is
decided on these sums, so every rank decides the same. A rank that cannot go on, because a signal
came or something failed, raises its hand in that sum: the window is then void on every rank, as if
it had never been begun. A second sum, of one number per rank, follows the step: a fingerprint of
what the step left behind. A step that is not finite on one rank, or not the same on all, is taken
back on all. The host waits for neither sum. Counts and flags travel in fp32, which holds whole
numbers exactly below `EXACT`.

A base that draws random numbers (dropout, noise) must not draw other ones because something was
refused before. To put the state back behind a refusal would do only where flags are read at once:
where they come late the next micro-batches have drawn by then. So no micro-batch draws from where
the one before it stopped. Each has numbers of its own (`draws_of`), named by the run's seed, by the
place of its samples in the data and by their ids, and leaves the process's random state as it found
it. They are the same whatever was refused, on whichever rank it is computed, after a resume, and
when a refused one is looked into. It costs some 10 microseconds a micro-batch, less than 0.1% of
one of two rows of 64 tokens of the embedded model, and no wait: CUDA's generators have their state
on the host. Only torch's own generators are meant; a base that draws elsewhere (Python's random,
numpy, a generator of its own) goes on drawing from where it was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from npt.distributed.processes import Ranks
from npt.errors import DataError, RankError
from npt.random_state import named_draws, random_state, set_random_state
from npt.step.spikes import SpikeGuard


class Sums(Protocol):
    """What a micro-batch returns: the summed loss and the tokens it was summed over."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def tokens(self) -> int: ...


S = TypeVar("S", bound=Sums)

Kept = dict[str, tuple[Tensor, dict[str, Any]]]
"""By the name of each parameter a copy of it, and of everything that the optimizer keeps for it."""

HISTORY = 256
"""Micro-batches whose loss and gradient norm are remembered, with the samples they came from."""

EXACT = 2**24
"""Whole numbers below it are exact in fp32: the tokens of a window over all ranks, its mark, a
fingerprint.
"""

IN_FLIGHT = 3
"""Windows whose results may be on their way before the host waits for one."""

FAILED = 1000
"""What a rank raises its hand with that met an error; any other number is that of a signal."""


@dataclass(frozen=True)
class Refusal:
    """One refused micro-batch or step: what was wrong, and where.

    kind: `data` (refused before anything was computed), `loss`, `gradient`; of a whole window
    `norm`, `spike` or `update` (parameters or moments after the step). micro_batch: index in its
    window, over all ranks; None for a whole window. rank: that computed it.
    """

    kind: str
    detail: str
    micro_batch: int | None = None
    sample_ids: tuple[str, ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        where = (
            "the whole window" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        )
        where += f" on rank {self.rank}" if self.rank else ""
        samples = f" (samples {', '.join(self.sample_ids)})" if self.sample_ids else ""
        return f"{where}{samples}: {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Trace:
    """What is remembered of a micro-batch, refused or not: its mean loss and its gradient's norm,
    as they came out.
    """

    window: int
    micro_batch: int
    sample_ids: tuple[str, ...]
    loss: float
    grad_norm: float


@dataclass
class WindowResult(Generic[S]):
    """What became of a window.

    index: windows before it. micro_batches: their number, refused ones included. steps: applied
    steps, this one included. rate: the learning rate it was, or would have been, applied with.
    loss, grad_norm: mean per surviving token, and before clipping; None without survivors.
    survivors: sums of the micro-batches that counted, in order. reports: of each of them the
    numbers that the transaction was asked to report; to read them waits for nothing, as to read the
    survivors may. limits: of the spike guard, as they stood when it decided. before: where
    something was refused and the state may have moved on since, the state that the window started
    from. halts: ranks that raised their hand, and with what; the window is void then, and all else
    empty.

    Of several ranks everything is over all of them, but for `survivors` and `reports`, which are
    this rank's.
    """

    index: int
    micro_batches: int
    applied: bool
    steps: int
    tokens: int
    rate: float
    loss: float | None
    grad_norm: float | None
    survivors: list[S] = field(default_factory=list)
    reports: list[list[float]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    limits: tuple[float, float] = (math.inf, math.inf)
    before: Kept | None = None
    halts: dict[int, int] = field(default_factory=dict)


@dataclass
class _MicroBatch(Generic[S]):
    sums: S
    flag: Tensor  # scalar bool: loss and gradients are finite
    norms: Tensor  # [P] gradient norm of each parameter, to name the bad one
    index: int
    sample_ids: tuple[str, ...]


@dataclass
class _Window(Generic[S]):
    """A launched window whose record is on its way to the host."""

    index: int
    micro_batches: int
    ran: list[_MicroBatch[S]]
    refusals: list[Refusal]
    record: Tensor | None  # on the host, valid once `arrived`; None where nothing ran
    arrived: Any
    norms: Tensor | None  # [P], of the window, for an explanation
    limits: tuple[float, float]  # of the spike guard when the decision was made
    reported: int = 0  # numbers that each micro-batch reports
    # names of parameters and moments, and which were finite after the step
    state: tuple[list[str], Tensor] | None = None
    before: Kept | None = None  # the step's own snapshot
    halt: int = 0  # this rank's hand
    mark: int = 0  # which micro-batches these are
    # [W] fingerprints of what the step left behind, by rank; None without a step
    prints: Tensor | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the record can be read without waiting."""
        return self.arrived is None or self.arrived.query()


# Entries of a record behind its micro-batches' flags, losses, norms and reports. Those of several
# ranks come behind these.
_SCALARS = ("tokens", "loss", "norm", "finite_norm", "spike", "applied", "steps", "rate")


@dataclass
class _Across:
    """What a window's sums say of the ranks. survivors, refused: micro-batches. halts, marks,
    prints: by rank.
    """

    survivors: int
    refused: int
    halts: list[int]
    marks: list[int]
    prints: list[int]


class Transaction(Generic[S]):
    """Collects micro-batches and commits them as one step of `optimizer`.

    Args:
        parameters: the trainable tensors by name; `.grad` belongs to the transaction from here on.
        optimizer: over exactly these parameters.
        max_grad_norm: the window's gradient is clipped to this global norm.
        rates: learning rate of each applied step, from the first; the last one stays.
        late: read the flags a window late or more (see above); default for a fused AdamW on CUDA,
            impossible without fused AdamW.
        spikes: refuse windows whose loss or norm leaves the range of the accepted ones; None
            refuses none.
        ranks: the processes that share the windows; default this one alone.
        report: of a micro-batch's sums, numbers [n] that are to be known with its window's result;
            they travel with the record.
        seed: of the random numbers that micro-batches draw.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        rates: Sequence[float],
        *,
        late: bool | None = None,
        spikes: SpikeGuard | None = None,
        ranks: Ranks | None = None,
        report: Callable[[S], Tensor] | None = None,
        seed: int = 0,
    ):
        self.seed = seed
        self.ranks = ranks if ranks is not None else Ranks()
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.spikes = spikes
        self._report = report
        self.history: deque[Trace] = deque(maxlen=HISTORY)
        self.home = self.parameters[0].device
        self._obeys_found_inf = isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam) and all(
            group["fused"] for group in optimizer.param_groups
        )
        self.late = late if late is not None else self._obeys_found_inf and self.home.type == "cuda"
        if self.late and not self._obeys_found_inf:
            raise ValueError(
                f"{type(optimizer).__name__} does not obey found_inf; pass AdamW(fused=True) or"
                " late=False"
            )
        self._rates = torch.tensor(rates, dtype=torch.float32)
        self._device_rates = self._rates.to(self.home)
        self._steps = torch.zeros((), dtype=torch.int64, device=self.home)
        self._scratch, self._scratch_views = _flat_like(self.parameters)
        self._window, self._window_views = _flat_like(self.parameters)
        self._ran: list[_MicroBatch[S]] = []
        self._refusals: list[Refusal] = []
        self._index = self._windows = self._known_steps = self._halt = 0
        self._launched: deque[_Window[S]] = deque()
        if self._obeys_found_inf and not optimizer.state:
            self._make_state()

    @property
    def committed(self) -> int:
        """Windows committed so far: the index of the next one."""
        return self._windows

    @property
    def in_flight(self) -> int:
        """Committed windows whose result is not known yet."""
        return len(self._launched)

    @property
    def applied_steps(self) -> int:
        """Steps applied so far by the device's own count, for which this waits; results that nobody
        has asked for are included.
        """
        return int(self._steps)

    def micro_batch(
        self, fill: Callable[[], S], sample_ids: tuple[str, ...] = (), offset: int = 0
    ) -> None:
        """Run one micro-batch. `fill` does forward and backward of the summed loss into `.grad` and
        returns the sums.

        Nothing is read from the device. If `fill` raises, the micro-batch has not happened.

        Args:
            fill: computes it.
            sample_ids: of what.
            offset: where in the run's data these samples stand. With their ids it names the random
                numbers that `fill` draws: equal ones are drawn at equal names. Without ids they are
                the process's own, of which a refused micro-batch gives back what it drew only where
                flags are read at once.
        """
        for flat in self._scratch:
            flat.zero_()
        self._point_gradients_at(self._scratch_views)
        before = None if sample_ids else random_state()
        try:
            with draws_of(self.seed, sample_ids, offset) if sample_ids else nullcontext():
                sums = fill()
        except BaseException:
            set_random_state(before or {})
            raise
        norms = _norms(self._scratch_views)
        # The norm of norms is finite only if every norm is, and also catches squares that overflow
        # in their sum alone.
        flag = torch.isfinite(sums.loss.to(self.home)) & torch.isfinite(
            torch.linalg.vector_norm(norms)
        )
        for window, scratch in zip(self._window, self._scratch, strict=True):
            torch.where(flag.to(window.device), window + scratch, window, out=window)
        if before is not None and not self.late and not bool(flag):
            set_random_state(before)
        self._ran.append(_MicroBatch(sums, flag, norms, self._index, sample_ids))
        self._index += 1

    def refuse(self, detail: str, sample_ids: tuple[str, ...] = ()) -> None:
        """Count a micro-batch that was found bad before anything was computed on it."""
        self._refusals.append(Refusal("data", detail, self._index, sample_ids, self.ranks.rank))
        self._index += 1

    def pass_over(self) -> None:
        """Count a micro-batch that another rank computes."""
        self._index += 1

    def halt(self, code: int) -> None:
        """Raise this rank's hand: the open window and every one behind it are void, on all ranks.

        Args:
            code: `FAILED`, or the number of a signal.
        """
        assert 0 < code < EXACT
        self._halt = code

    def commit(self, mark: int = 0) -> list[WindowResult[S]]:
        """Close the window: one optimizer step from its survivors, or none, and nothing kept of
        what was refused.

        Every rank has to come here as often as the others, with micro-batches or without.

        Args:
            mark: a number below `EXACT` that says which micro-batches the window is of; ranks at
                different ones find out by it.

        Returns:
            Results that have become known, oldest first: this window's, or with `late` those of
                windows before it, if any.

        Raises:
            RankError: a rank is lost, or no longer like the others; nothing of this window is
                applied then, nor of those before it whose result was not known yet.
        """
        self._launched.append(self._launch(mark))
        return self._finish(keep=self._unread())

    def flush(self) -> list[WindowResult[S]]:
        """Wait for every committed window; the results not returned before.

        Raises:
            RankError: a rank is lost; windows whose result was not known yet have not happened.
                Once that has been raised there are no more results.
        """
        return self._finish(keep=0)

    def abandon(self) -> None:
        """Forget the open window: its micro-batches have not happened."""
        for flat in self._window:
            flat.zero_()
        for parameter in self.parameters:
            parameter.grad = None
        self._ran, self._refusals, self._index = [], [], 0

    def resume_at(self, steps: int) -> None:
        """Count from here on as if `steps` had been applied already; moments and weights are the
        caller's to restore.
        """
        assert not self._launched and not self._ran, "a window is open"
        self._steps.fill_(steps)
        self._known_steps = steps

    def _launch(self, mark: int) -> _Window[S]:
        window: _Window[S] = _Window(
            self._windows, self._index, self._ran, self._refusals, None, None, None, self._limits()
        )
        window.halt, window.mark = self._halt, mark
        self._windows += 1
        if self.ranks.size > 1 or (self._ran and not self._halt):
            try:
                window.norms = self._step(window)
            except RankError:
                # the step was made, and what it left behind could not be compared
                if window.before is not None:
                    self.restore(window.before)
                raise
        self.abandon()
        return window

    def _limits(self) -> tuple[float, float]:
        return (math.inf, math.inf) if self.spikes is None else self.spikes.limits

    def _step(self, window: _Window[S]) -> Tensor:
        """Everything that happens on the device; fills in the window's record and returns the
        window's norms [P].
        """
        ran = window.ran
        flags = self._stacked([m.flag for m in ran], torch.bool)
        losses = self._stacked([m.sums.loss.detach().to(self.home, torch.float32) for m in ran])
        micro_norms = self._stacked([torch.linalg.vector_norm(m.norms) for m in ran])
        counts = self._sent([m.sums.tokens for m in ran])
        tokens = torch.where(flags, counts, 0.0).sum()
        loss_sum = torch.where(flags, losses, 0.0).sum()
        tokens, loss_sum, across, sound = self._over_all_ranks(window, flags, tokens, loss_sum)
        for flat in self._window:
            flat.div_(tokens.clamp_min(1.0).to(flat.device))
        norms = _norms(self._window_views)
        norm = torch.linalg.vector_norm(norms)
        loss = loss_sum / tokens.clamp_min(1.0)
        finite_norm = torch.isfinite(norm)
        spike = (
            torch.zeros_like(finite_norm)
            if self.spikes is None
            else self.spikes.exceeds(loss, norm)
        )
        go = (tokens > 0) & finite_norm & ~spike
        go = go if sound is None else go & sound
        scale = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        for flat in self._window:
            flat.mul_(scale.to(flat.device))
        self._point_gradients_at(self._window_views)
        last = len(self._rates) - 1
        # Not indexed by the step: indexing with a scalar tensor reads it.
        rate = self._device_rates.index_select(0, self._steps.clamp(max=last).view(1)).squeeze(0)
        applied = self._guarded_update(window, go, rate)
        self._steps += applied
        # in the order of _SCALARS
        scalars = (tokens, loss, norm, finite_norm, spike, applied, self._steps, rate)
        reports = (
            []
            if self._report is None
            else [self._report(m.sums).detach().to(self.home, torch.float64) for m in ran]
        )
        window.reported = reports[0].numel() if reports else 0
        parts = [
            flags,
            losses,
            micro_norms,
            *reports,
            torch.stack([scalar.to(torch.float64) for scalar in scalars]),
            across,
        ]
        if window.prints is not None:
            parts.append(window.prints)
        record = torch.cat([part.to(torch.float64) for part in parts])
        window.record, window.arrived = _to_host(record)
        return norms

    def _over_all_ranks(
        self, window: _Window[S], flags: Tensor, tokens: Tensor, loss_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The one all-reduce: of the window's gradients, in place, and of everything else that is
        decided on.

        Returns:
            Tokens and loss of all ranks; what the record tells of the ranks; and whether these let
            the window be applied, None where
            there is one rank.
        """
        size, rank = self.ranks.size, self.ranks.rank
        if size == 1:
            return tokens, loss_sum, flags.new_zeros(0), None
        survivors = flags.sum()
        counts = [tokens, loss_sum, survivors, flags.numel() - survivors + len(window.refusals)]
        own = [0] * 2 * size
        own[rank], own[size + rank] = window.halt, window.mark
        parts = [
            *self._window,
            torch.stack([count.to(torch.float32) for count in counts]),
            self._sent(own),
        ]
        flat = self.ranks.sum_(torch.cat([part.to(self.home, torch.float32) for part in parts]))
        *gradients, sums, of_ranks = flat.split([part.numel() for part in parts])
        for window_flat, summed in zip(self._window, gradients, strict=True):
            window_flat.copy_(summed)
        halts, marks = of_ranks.split(size)
        return (
            sums[0],
            sums[1],
            torch.cat([sums[2:], of_ranks]),
            (halts == 0).all() & (marks == marks[0]).all(),
        )

    def _stacked(self, scalars: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """[number of scalars]; there are none where this rank had no micro-batch."""
        return torch.stack(scalars) if scalars else torch.zeros(0, dtype=dtype, device=self.home)

    def _sent(self, numbers: Sequence[int]) -> Tensor:
        """Numbers of the host in fp32 on the device, without waiting for it."""
        values = torch.tensor(numbers, dtype=torch.float32)
        return (
            values.pin_memory().to(self.home, non_blocking=True)
            if self.home.type == "cuda"
            else values
        )

    def _guarded_update(self, window: _Window[S], go: Tensor, rate: Tensor) -> Tensor:
        """Step where `go` says so, verify, put back what does not stand; returns the flag of a step
        that stands.
        """
        if self.late:
            return self._update_unseen(window, go, rate)
        if not bool(go):
            return go
        for group in self.optimizer.param_groups:
            group["lr"] = float(rate)
        window.before = before = self.snapshot()
        self.optimizer.step()
        stands = self._stands(window)
        if not bool(stands):
            self.restore(before)
            window.before = None
        return stands

    def _update_unseen(self, window: _Window[S], go: Tensor, rate: Tensor) -> Tensor:
        """The update without a look at any flag: the optimizer skips by `found_inf`, the restore
        selects by `torch.where`.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        window.before = before = self.snapshot()
        self.optimizer.found_inf = (~go).to(torch.float32)  # type: ignore[attr-defined]
        self.optimizer.step()
        stands = self._stands(window)
        for parameter, (value, state) in zip(self.parameters, before.values(), strict=True):
            now = self.optimizer.state[parameter]
            pairs = [(now[key], old) for key, old in state.items() if isinstance(old, Tensor)]
            for tensor, old in [*pairs, (parameter.detach(), value)]:
                torch.where(stands.to(tensor.device), tensor, old, out=tensor)
        return go & stands

    def _stands(self, window: _Window[S]) -> Tensor:
        """Scalar bool on the home device: what the step left behind is finite, on every rank, and
        the same on all.
        """
        finite, largest = self._verify(window)
        if self.ranks.size == 1:
            return finite
        # The largest number of each parameter and moment, bit for bit: the same in any order of
        # summation, and never 0.
        fingerprint = largest.view(torch.int32).to(torch.int64).sum().remainder(EXACT - 1) + 1
        window.prints = self.ranks.each(torch.where(finite, fingerprint, 0))
        return (window.prints == window.prints[0]).all() & (window.prints[0] > 0)

    def _unread(self) -> int:
        """How many results to leave unread: with `late` the newest, and those that would have to be
        waited for while few are in flight.
        """
        if not self.late:
            return 0
        if self.spikes is not None or self.ranks.size > 1:
            return 1
        older = list(self._launched)[:-1]
        arrived = next((i for i, window in enumerate(older) if not window.has_arrived), len(older))
        return min(IN_FLIGHT, len(self._launched) - arrived)

    def _finish(self, keep: int) -> list[WindowResult[S]]:
        results = []
        while len(self._launched) > keep:
            window, known = self._launched[0], self.ranks.broken
            try:
                if window.arrived is not None:
                    self.ranks.wait_for(window.arrived)
            except RankError:
                self._take_back(window)
                if known:
                    break
                raise
            self._launched.popleft()
            results.append(self._result(window))
        return results

    def _take_back(self, window: _Window[S]) -> None:
        """Put back the state before a window that was launched with a rank that is lost, and before
        all after it.
        """
        self._launched.clear()
        if window.before is not None:
            self.restore(window.before)
        self._steps.fill_(self._known_steps)

    def _result(self, window: _Window[S]) -> WindowResult[S]:
        """Read a window's record and say what became of it; whatever has to be looked up further
        was refused already.
        """
        result: WindowResult[S] = WindowResult(
            window.index, window.micro_batches, False, self._known_steps, 0, 0.0, None, None
        )
        if window.halt and self.ranks.size == 1:
            return replace(result, micro_batches=0, halts={0: window.halt})
        result.refusals, result.limits = list(window.refusals), window.limits
        if window.record is None:
            return result
        values = window.record.tolist()
        k = len(window.ran)
        flags, losses, norms = values[:k], values[k : 2 * k], values[2 * k : 3 * k]
        reports = [
            values[start : start + window.reported]
            for start in range(3 * k, (3 + window.reported) * k, max(1, window.reported))
        ]
        behind = (3 + window.reported) * k + len(_SCALARS)
        scalars = dict(zip(_SCALARS, values[behind - len(_SCALARS) : behind], strict=True))
        across = self._across(values[behind:])
        if across is not None:
            halts = {rank: code for rank, code in enumerate(across.halts) if code}
            if halts:
                return replace(result, micro_batches=0, refusals=[], halts=halts)
            self._check_marks(window, across)
            self._check_prints(across)
        for number, (micro, good, loss, norm) in enumerate(
            zip(window.ran, flags, losses, norms, strict=True)
        ):
            self.history.append(
                Trace(
                    window.index,
                    micro.index,
                    micro.sample_ids,
                    loss / max(1, micro.sums.tokens),
                    norm,
                )
            )
            if good:
                result.survivors.append(micro.sums)
                result.reports += reports[number : number + 1]
            else:
                result.refusals.append(self._explain(micro, loss))
        if across is not None and across.refused:
            result.refusals = self._gathered(result.refusals)
        result.refusals.sort(key=lambda r: r.micro_batch or 0)
        result.tokens, result.rate = int(scalars["tokens"]), scalars["rate"]
        if result.survivors if across is None else across.survivors:
            result.loss, result.grad_norm = scalars["loss"], scalars["norm"]
            result.applied = bool(scalars["applied"])
            refusal = self._explain_window(window, scalars)
            if refusal is not None:
                result.refusals.append(refusal)
        result.before = window.before if result.refusals else None
        result.steps = self._known_steps = int(scalars["steps"])
        if result.applied and self.spikes is not None:
            self.spikes.accept(scalars["loss"], scalars["norm"])
        return result

    def _across(self, values: list[float]) -> _Across | None:
        """The last part of a record, which several ranks have."""
        size = self.ranks.size
        if size == 1:
            return None
        numbers = [int(value) for value in values]
        halts, marks, prints = (numbers[2 + i * size : 2 + (i + 1) * size] for i in range(3))
        return _Across(numbers[0], numbers[1], halts, marks, prints)

    def _gathered(self, refusals: list[Refusal]) -> list[Refusal]:
        """Those of every rank. All ranks come here together, since the number of refused
        micro-batches is a sum over them.
        """
        everyone = self.ranks.gather_json([asdict(refusal) for refusal in refusals])
        return [
            Refusal(**{**entry, "sample_ids": tuple(entry["sample_ids"])})
            for entries in everyone
            for entry in entries
        ]

    def _check_marks(self, window: _Window[S], across: _Across) -> None:
        """Ranks that are at different data would train on some of it twice, and on some never."""
        other = next(
            (rank for rank, mark in enumerate(across.marks) if mark != across.marks[0]), None
        )
        if other is not None:
            raise self.ranks.everywhere(
                RankError(
                    f"rank {other} reads other data than rank 0 in window {window.index + 1}"
                    f" (fingerprints {across.marks[other]} and {across.marks[0]}); give every"
                    " process the same data in the same order",
                    DataError.exit_status,
                )
            )

    def _check_prints(self, across: _Across) -> None:
        """A step that came out different on a rank was taken back on all; which of them computes
        wrong nobody here can say.
        """
        bad = [rank for rank, found in enumerate(across.prints) if not found]
        other = bad or [
            rank for rank, found in enumerate(across.prints) if found != across.prints[0]
        ]
        if other and len(bad) < len(across.prints):
            left = (
                f"what it left on rank {', '.join(map(str, other))}"
                f" {'is not finite' if bad else 'differs'}"
            )
            raise self.ranks.everywhere(
                RankError(
                    f"every rank took step {self._known_steps + 1} alike, but {left}; it was taken"
                    " back: look at the hardware of these processes, then go on with --resume auto"
                )
            )

    def _explain(self, micro: _MicroBatch[S], loss: float) -> Refusal:
        if not math.isfinite(loss):
            return Refusal(
                "loss", f"loss is {loss}", micro.index, micro.sample_ids, self.ranks.rank
            )
        return Refusal(
            "gradient", self._first_bad(micro.norms), micro.index, micro.sample_ids, self.ranks.rank
        )

    def _explain_window(self, window: _Window[S], scalars: dict[str, float]) -> Refusal | None:
        # survivors without a token are nothing to step on, and no fault
        if scalars["applied"] or not scalars["tokens"]:
            return None
        if not scalars["finite_norm"]:
            assert window.norms is not None
            return Refusal(
                "norm",
                f"gradient norm of the window is {scalars['norm']}:"
                f" {self._first_bad(window.norms)}",
            )
        if scalars["spike"]:
            assert self.spikes is not None
            return Refusal(
                "spike", self.spikes.describe(scalars["loss"], scalars["norm"], window.limits)
            )
        assert window.state is not None
        names, finite = window.state
        what = names[finite.tolist().index(False)]
        return Refusal(
            "update", f"{what} was not finite after the step; the state before it was restored"
        )

    def _first_bad(self, norms: Tensor) -> str:
        values = norms.tolist()
        bad = [
            (name, value)
            for name, value in zip(self.names, values, strict=True)
            if not math.isfinite(value)
        ]
        if not bad:
            return (
                f"every tensor's own norm is finite (largest {max(values):.3g}), their sum of"
                " squares overflows"
            )
        return f"gradient of {bad[0][0]} has norm {bad[0][1]} ({len(bad)} of {len(values)} tensors)"

    def _state_tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of every parameter and of every tensor that the optimizer keeps for it."""
        named: list[tuple[str, Tensor]] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            # Moments first: a broken moment breaks its weight in the same step, and the first one
            # found is the one named.
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    named.append((f"{key} of {name}", value))
            named.append((name, parameter.detach()))
        return named

    def _verify(self, window: _Window[S]) -> tuple[Tensor, Tensor]:
        """On the home device: whether every parameter and moment is finite, and the largest size in
        each. Which one is not finite stays with the window."""
        named = [
            (name, tensor) for name, tensor in self._state_tensors() if tensor.is_floating_point()
        ]
        largest = _norms([tensor for _, tensor in named], order=float("inf"))
        finite = torch.isfinite(largest)
        window.state = ([name for name, _ in named], finite)
        return finite.all(), largest

    def snapshot(self) -> Kept:
        """Copies of the parameters and of what the optimizer keeps for them, on their devices."""
        return {
            name: (
                p.detach().clone(),
                {
                    k: v.clone() if isinstance(v, Tensor) else v
                    for k, v in self.optimizer.state.get(p, {}).items()
                },
            )
            for name, p in zip(self.names, self.parameters, strict=True)
        }

    def checksum(self) -> int:
        """Every bit of parameters and moments, summed up: what ranks that hold the same have alike."""
        total = torch.zeros((), dtype=torch.int64, device=self.home)
        for _, tensor in self._state_tensors():
            total += tensor.reshape(-1).view(torch.int32).sum(dtype=torch.int64).to(self.home)
        return int(total)

    @torch.no_grad()
    def restore(self, kept: Kept) -> None:
        """Put a snapshot back. The optimizer goes on in the tensors handed over: a snapshot that is
        to be used again is cloned.
        """
        for name, parameter in zip(self.names, self.parameters, strict=True):
            value, state = kept[name]
            parameter.copy_(value)
            if state:
                self.optimizer.state[parameter] = state
            else:
                self.optimizer.state.pop(parameter, None)

    def _make_state(self) -> None:
        """Let the optimizer make its moments now, by a step that `found_inf` forbids: a first step
        is then like any other.
        """
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.found_inf = torch.ones((), dtype=torch.float32, device=self.home)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.found_inf = torch.zeros_like(self.optimizer.found_inf)  # type: ignore[attr-defined]
        for parameter in self.parameters:
            parameter.grad = None

    def _point_gradients_at(self, views: Iterable[Tensor]) -> None:
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.grad = view


def draws_of(seed: int, sample_ids: tuple[str, ...], offset: int) -> AbstractContextManager[None]:
    """A context in which the random numbers are those that training draws for a micro-batch; see
    `Transaction.micro_batch`.
    """
    return named_draws("micro-batch", seed, offset, *sample_ids)


def _flat_like(parameters: tuple[nn.Parameter, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """One flat buffer of zeros per device and dtype, and a view of it shaped like each parameter."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(parameters):
        groups.setdefault((p.device, p.dtype), []).append(i)
    flats: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for (device, dtype), members in groups.items():
        flat = torch.zeros(sum(parameters[i].numel() for i in members), device=device, dtype=dtype)
        for i, part in zip(
            members, flat.split([parameters[i].numel() for i in members]), strict=True
        ):
            views[i] = part.view_as(parameters[i])
        flats.append(flat)
    return flats, [views[i] for i in range(len(parameters))]


def _norms(tensors: list[Tensor], order: float = 2.0) -> Tensor:
    """[P] norms, each reduced in one pass; NaN or Inf in a tensor shows in its norm, and so does
    overflow of its squares.
    """
    home = tensors[0].device
    return torch.stack(
        [norm.to(device=home, dtype=torch.float32) for norm in torch._foreach_norm(tensors, order)]
    )


def _to_host(record: Tensor) -> tuple[Tensor, Any]:
    """The record on the host, and the event to wait for before it is read; on a CPU it is there at
    once.
    """
    if record.device.type != "cuda":
        return record, None
    pinned = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
    pinned.copy_(record, non_blocking=True)
    arrived = torch.cuda.Event()
    # the current device may be another one
    arrived.record(torch.cuda.current_stream(record.device))
    return pinned, arrived
