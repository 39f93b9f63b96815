"""The transaction: a window of micro-batches becomes one optimizer step, of which every bad part is refused whole.

Independent of models and strategies: anything that adds gradients to the parameters' `.grad` and returns sums and a token
count can be a micro-batch. What is promised: a window with a bad micro-batch leaves weights, moments and counts as if that
micro-batch had never been there, bit for bit; a window without survivors, or whose step turns out non-finite, changes
nothing at all.

How: each micro-batch writes into scratch gradients. One flag per micro-batch says whether loss and gradients are finite, and
the scratch is added to the window's gradient through `torch.where` on that flag. Multiplying by the flag would not do,
since 0 * NaN is NaN. The window is divided once, by the tokens of its survivors. The norm is looked at before clipping,
because clipping spreads one NaN over every gradient and turns an overflowing norm silently into zeros. After the step
parameters and moments are verified, and put back where they are not finite.

All of these decisions are device flags. On a CPU they are read at once. On a GPU reading one would make the host wait for the
device, so there, with a fused AdamW (which obeys `found_inf` without a host branch), they are copied to pinned memory and
read one window late; the learning rate follows the device's own count of applied steps. Both ways do the same arithmetic in
the same order, and tests hold their results to bit equality. Only the limits of the spike guard, which are made on the host
from steps whose results are known, are one step older there. And a step's snapshot, which a post-mortem needs if the window
turns out bad, is kept until its result is known: one more copy of weights and moments.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from npt.distill.spikes import SpikeGuard


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


@dataclass(frozen=True)
class Refusal:
    """One refused micro-batch or step: what was wrong, and where.

    kind: `data` (refused before anything was computed), `loss`, `gradient`; of a whole window `norm`, `spike` or `update`
    (parameters or moments after the step). micro_batch: index in its window, None for a whole window.
    """

    kind: str
    detail: str
    micro_batch: int | None = None
    sample_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = "the whole window" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        samples = f" (samples {', '.join(self.sample_ids)})" if self.sample_ids else ""
        return f"{where}{samples}: {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Trace:
    """What is remembered of a micro-batch, refused or not: its mean loss and its gradient's norm, as they came out."""

    window: int
    micro_batch: int
    sample_ids: tuple[str, ...]
    loss: float
    grad_norm: float


@dataclass
class WindowResult(Generic[S]):
    """What became of a window.

    index: windows before it. micro_batches: their number, refused ones included. steps: applied steps, this one included.
    rate: the learning rate it was, or would have been, applied with. loss, grad_norm: mean per surviving token, and before
    clipping; None without survivors. survivors: sums of the micro-batches that counted, in order. limits: of the spike guard,
    as they stood when it decided. before: where something was refused and the state may have moved on since, the state that
    the window started from.
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
    refusals: list[Refusal] = field(default_factory=list)
    limits: tuple[float, float] = (math.inf, math.inf)
    before: Kept | None = None


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
    state: tuple[list[str], Tensor] | None = None  # names of parameters and moments, and which were finite after the step
    before: Kept | None = None  # the step's own snapshot


# Entries of a record behind its micro-batches' flags, losses and norms.
_SCALARS = ("tokens", "loss", "norm", "finite_norm", "spike", "applied", "steps", "rate")


class Transaction(Generic[S]):
    """Collects micro-batches and commits them as one step of `optimizer`.

    Args:
        parameters: the trainable tensors by name; `.grad` belongs to the transaction from here on.
        optimizer: over exactly these parameters.
        max_grad_norm: the window's gradient is clipped to this global norm.
        rates: learning rate of each applied step, from the first; the last one stays.
        late: read the flags one window late (see above); default for a fused AdamW on CUDA, impossible without fused AdamW.
        spikes: refuse windows whose loss or norm leaves the range of the accepted ones; None refuses none.
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
    ):
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.spikes = spikes
        self.history: deque[Trace] = deque(maxlen=HISTORY)
        self.home = self.parameters[0].device
        self._obeys_found_inf = isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam) and all(
            group["fused"] for group in optimizer.param_groups
        )
        self.late = late if late is not None else self._obeys_found_inf and self.home.type == "cuda"
        if self.late and not self._obeys_found_inf:
            raise ValueError(f"{type(optimizer).__name__} does not obey found_inf; pass AdamW(fused=True) or late=False")
        self._rates = torch.tensor(rates, dtype=torch.float32)
        self._device_rates = self._rates.to(self.home)
        self._steps = torch.zeros((), dtype=torch.int64, device=self.home)
        self._scratch, self._scratch_views = _flat_like(self.parameters)
        self._window, self._window_views = _flat_like(self.parameters)
        self._ran: list[_MicroBatch[S]] = []
        self._refusals: list[Refusal] = []
        self._index = self._windows = self._known_steps = 0
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

    def micro_batch(self, fill: Callable[[], S], sample_ids: tuple[str, ...] = ()) -> None:
        """Run one micro-batch. `fill` does forward and backward of the summed loss into `.grad` and returns the sums.

        Nothing is read from the device. If `fill` raises, the micro-batch has not happened.
        """
        for flat in self._scratch:
            flat.zero_()
        self._point_gradients_at(self._scratch_views)
        sums = fill()
        norms = _norms(self._scratch_views)
        # The norm of norms is finite only if every norm is, and also catches squares that overflow in their sum alone.
        flag = torch.isfinite(sums.loss.to(self.home)) & torch.isfinite(torch.linalg.vector_norm(norms))
        for window, scratch in zip(self._window, self._scratch, strict=True):
            torch.where(flag.to(window.device), window + scratch, window, out=window)
        self._ran.append(_MicroBatch(sums, flag, norms, self._index, sample_ids))
        self._index += 1

    def refuse(self, detail: str, sample_ids: tuple[str, ...] = ()) -> None:
        """Count a micro-batch that was found bad before anything was computed on it."""
        self._refusals.append(Refusal("data", detail, self._index, sample_ids))
        self._index += 1

    def commit(self) -> list[WindowResult[S]]:
        """Close the window: one optimizer step from its survivors, or none, and nothing kept of what was refused.

        Returns:
            Results that have become known, oldest first: this window's, or with `late` the one before it, if any.
        """
        self._launched.append(self._launch())
        return self._finish(keep=1 if self.late else 0)

    def flush(self) -> list[WindowResult[S]]:
        """Wait for every committed window; the results not returned before."""
        return self._finish(keep=0)

    def abandon(self) -> None:
        """Forget the open window: its micro-batches have not happened."""
        for flat in self._window:
            flat.zero_()
        for parameter in self.parameters:
            parameter.grad = None
        self._ran, self._refusals, self._index = [], [], 0

    def resume_at(self, steps: int) -> None:
        """Count from here on as if `steps` had been applied already; moments and weights are the caller's to restore."""
        assert not self._launched and not self._ran, "a window is open"
        self._steps.fill_(steps)
        self._known_steps = steps

    def _launch(self) -> _Window[S]:
        window: _Window[S] = _Window(self._windows, self._index, self._ran, self._refusals, None, None, None, self._limits())
        self._windows += 1
        if self._ran:
            window.norms = self._step(window)
        self.abandon()
        return window

    def _limits(self) -> tuple[float, float]:
        return (math.inf, math.inf) if self.spikes is None else self.spikes.limits

    def _step(self, window: _Window[S]) -> Tensor:
        """Everything that happens on the device; fills in the window's record and returns the window's norms [P]."""
        ran = window.ran
        flags = torch.stack([m.flag for m in ran])
        losses = torch.stack([m.sums.loss.detach().to(self.home, torch.float32) for m in ran])
        micro_norms = torch.stack([torch.linalg.vector_norm(m.norms) for m in ran])
        counts = torch.tensor([m.sums.tokens for m in ran], dtype=torch.float32)
        counts = counts.pin_memory().to(self.home, non_blocking=True) if self.home.type == "cuda" else counts
        tokens = torch.where(flags, counts, 0.0).sum()
        for flat in self._window:
            flat.div_(tokens.clamp_min(1.0).to(flat.device))
        norms = _norms(self._window_views)
        norm = torch.linalg.vector_norm(norms)
        loss = torch.where(flags, losses, 0.0).sum() / tokens.clamp_min(1.0)
        finite_norm = torch.isfinite(norm)
        spike = torch.zeros_like(finite_norm) if self.spikes is None else self.spikes.exceeds(loss, norm)
        go = (tokens > 0) & finite_norm & ~spike
        scale = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
        for flat in self._window:
            flat.mul_(scale.to(flat.device))
        self._point_gradients_at(self._window_views)
        last = len(self._rates) - 1
        # Not indexed by the step: indexing with a scalar tensor reads it.
        rate = self._device_rates.index_select(0, self._steps.clamp(max=last).view(1)).squeeze(0)
        applied = self._guarded_update(window, go, rate)
        self._steps += applied
        scalars = (tokens, loss, norm, finite_norm, spike, applied, self._steps, rate)  # in the order of _SCALARS
        parts = (flags, losses, micro_norms, torch.stack([scalar.to(torch.float64) for scalar in scalars]))
        record = torch.cat([part.to(torch.float64) for part in parts])
        window.record, window.arrived = _to_host(record)
        return norms

    def _guarded_update(self, window: _Window[S], go: Tensor, rate: Tensor) -> Tensor:
        """Step where `go` says so, verify, put back what is not finite; returns the flag of a step that stands."""
        if self.late:
            return self._update_unseen(window, go, rate)
        if not bool(go):
            return go
        for group in self.optimizer.param_groups:
            group["lr"] = float(rate)
        before = self.snapshot()
        self.optimizer.step()
        finite = self._verify(window)
        if bool(finite):
            window.before = before
        else:
            self.restore(before)
        return finite

    def _update_unseen(self, window: _Window[S], go: Tensor, rate: Tensor) -> Tensor:
        """The update without a look at any flag: the optimizer skips by `found_inf`, the restore selects by `torch.where`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        window.before = before = self.snapshot()
        self.optimizer.found_inf = (~go).to(torch.float32)  # type: ignore[attr-defined]
        self.optimizer.step()
        finite = self._verify(window)
        for parameter, (value, state) in zip(self.parameters, before.values(), strict=True):
            now = self.optimizer.state[parameter]
            pairs = [(now[key], old) for key, old in state.items() if isinstance(old, Tensor)]
            for tensor, old in [*pairs, (parameter.detach(), value)]:
                torch.where(finite.to(tensor.device), tensor, old, out=tensor)
        return go & finite

    def _finish(self, keep: int) -> list[WindowResult[S]]:
        results = []
        while len(self._launched) > keep:
            results.append(self._result(self._launched.popleft()))
        return results

    def _result(self, window: _Window[S]) -> WindowResult[S]:
        """Read a window's record and say what became of it; whatever has to be looked up further was refused already."""
        result: WindowResult[S] = WindowResult(window.index, window.micro_batches, False, self._known_steps, 0, 0.0, None, None)
        result.refusals, result.limits = list(window.refusals), window.limits
        if window.record is None:
            return result
        if window.arrived is not None:
            window.arrived.synchronize()
        values = window.record.tolist()
        k = len(window.ran)
        flags, losses, norms = values[:k], values[k : 2 * k], values[2 * k : 3 * k]
        scalars = dict(zip(_SCALARS, values[3 * k :], strict=True))
        for micro, good, loss, norm in zip(window.ran, flags, losses, norms, strict=True):
            self.history.append(Trace(window.index, micro.index, micro.sample_ids, loss / max(1, micro.sums.tokens), norm))
            if good:
                result.survivors.append(micro.sums)
            else:
                result.refusals.append(self._explain(micro, loss))
        result.refusals.sort(key=lambda r: r.micro_batch or 0)
        result.tokens, result.rate = int(scalars["tokens"]), scalars["rate"]
        if result.survivors:
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

    def _explain(self, micro: _MicroBatch[S], loss: float) -> Refusal:
        if not math.isfinite(loss):
            return Refusal("loss", f"loss is {loss}", micro.index, micro.sample_ids)
        return Refusal("gradient", self._first_bad(micro.norms), micro.index, micro.sample_ids)

    def _explain_window(self, window: _Window[S], scalars: dict[str, float]) -> Refusal | None:
        if scalars["applied"] or not scalars["tokens"]:  # survivors without a token are nothing to step on, and no fault
            return None
        if not scalars["finite_norm"]:
            assert window.norms is not None
            return Refusal("norm", f"gradient norm of the window is {scalars['norm']}: {self._first_bad(window.norms)}")
        if scalars["spike"]:
            assert self.spikes is not None
            return Refusal("spike", self.spikes.describe(scalars["loss"], scalars["norm"], window.limits))
        assert window.state is not None
        names, finite = window.state
        what = names[finite.tolist().index(False)]
        return Refusal("update", f"{what} was not finite after the step; the state before it was restored")

    def _first_bad(self, norms: Tensor) -> str:
        values = norms.tolist()
        bad = [(name, value) for name, value in zip(self.names, values, strict=True) if not math.isfinite(value)]
        if not bad:
            return f"every tensor's own norm is finite (largest {max(values):.3g}), their sum of squares overflows"
        return f"gradient of {bad[0][0]} has norm {bad[0][1]} ({len(bad)} of {len(values)} tensors)"

    def _state_tensors(self) -> list[tuple[str, Tensor]]:
        """(name, tensor) of every parameter and of every tensor that the optimizer keeps for it."""
        named: list[tuple[str, Tensor]] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            # Moments first: a broken moment breaks its weight in the same step, and the first one found is the one named.
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    named.append((f"{key} of {name}", value))
            named.append((name, parameter.detach()))
        return named

    def _verify(self, window: _Window[S]) -> Tensor:
        """Scalar bool on the home device: every parameter and moment is finite. Which one is not stays with the window."""
        named = [(name, tensor) for name, tensor in self._state_tensors() if tensor.is_floating_point()]
        finite = torch.isfinite(_norms([tensor for _, tensor in named], order=float("inf")))
        window.state = ([name for name, _ in named], finite)
        return finite.all()

    def snapshot(self) -> Kept:
        """Copies of the parameters and of what the optimizer keeps for them, on their devices."""
        return {
            name: (
                p.detach().clone(),
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.optimizer.state.get(p, {}).items()},
            )
            for name, p in zip(self.names, self.parameters, strict=True)
        }

    @torch.no_grad()
    def restore(self, kept: Kept) -> None:
        """Put a snapshot back. The optimizer goes on in the tensors handed over: a snapshot that is to be used again is cloned."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            value, state = kept[name]
            parameter.copy_(value)
            if state:
                self.optimizer.state[parameter] = state
            else:
                self.optimizer.state.pop(parameter, None)

    def _make_state(self) -> None:
        """Let the optimizer make its moments now, by a step that `found_inf` forbids: a first step is then like any other."""
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


def _flat_like(parameters: tuple[nn.Parameter, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """One flat buffer of zeros per device and dtype, and a view of it shaped like each parameter."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(parameters):
        groups.setdefault((p.device, p.dtype), []).append(i)
    flats: list[Tensor] = []
    views: dict[int, Tensor] = {}
    for (device, dtype), members in groups.items():
        flat = torch.zeros(sum(parameters[i].numel() for i in members), device=device, dtype=dtype)
        for i, part in zip(members, flat.split([parameters[i].numel() for i in members]), strict=True):
            views[i] = part.view_as(parameters[i])
        flats.append(flat)
    return flats, [views[i] for i in range(len(parameters))]


def _norms(tensors: list[Tensor], order: float = 2.0) -> Tensor:
    """[P] norms, each reduced in one pass; NaN or Inf in a tensor shows in its norm, and so does overflow of its squares."""
    home = tensors[0].device
    return torch.stack([norm.to(device=home, dtype=torch.float32) for norm in torch._foreach_norm(tensors, order)])


def _to_host(record: Tensor) -> tuple[Tensor, Any]:
    """The record on the host, and the event to wait for before it is read; on a CPU it is there at once."""
    if record.device.type != "cuda":
        return record, None
    pinned = torch.empty(record.shape, dtype=record.dtype, pin_memory=True)
    pinned.copy_(record, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return pinned, arrived
