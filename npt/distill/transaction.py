"""The transaction: a window of micro-batches becomes one optimizer step, of which every bad part is refused whole.

Independent of models and strategies: anything that adds gradients to the parameters' `.grad` and returns sums and a token
count can be a micro-batch. What is promised: a window with a bad micro-batch leaves weights, moments and counts as if that
micro-batch had never been there, bit for bit; a window without survivors, or whose step turns out non-finite, changes
nothing at all.

How: each micro-batch writes into scratch gradients. One flag per micro-batch says whether loss and gradients are finite, and
the scratch is added to the window's gradient through `torch.where` on that flag. Multiplying by the flag would not do,
since 0 * NaN is NaN. The window is divided once, by the tokens of its survivors. The norm is looked at before clipping,
because clipping spreads one NaN over every gradient and turns an overflowing norm silently into zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn


class Sums(Protocol):
    """What a micro-batch returns: the summed loss and the tokens it was summed over."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def tokens(self) -> int: ...


S = TypeVar("S", bound=Sums)


@dataclass(frozen=True)
class Refusal:
    """One refused micro-batch or step: what was wrong, and where.

    kind: `data` (refused before anything was computed), `loss`, `gradient`, `norm` (of the whole window) or `update`
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


@dataclass
class WindowResult(Generic[S]):
    """What became of a window. `survivors` are the sums of the micro-batches that counted, in order."""

    applied: bool
    tokens: int
    grad_norm: float | None
    survivors: list[S] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


@dataclass
class _Pending(Generic[S]):
    sums: S
    flag: Tensor  # scalar bool: loss and gradients are finite
    norms: Tensor  # [P] gradient norm of each parameter, to name the bad one
    index: int
    sample_ids: tuple[str, ...]


class Transaction(Generic[S]):
    """Collects micro-batches and commits them as one step of `optimizer`.

    Args:
        parameters: the trainable tensors by name; `.grad` belongs to the transaction from here on.
        optimizer: over exactly these parameters.
        max_grad_norm: the window's gradient is clipped to this global norm.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, max_grad_norm: float):
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self._scratch, self._scratch_views = _flat_like(self.parameters)
        self._window, self._window_views = _flat_like(self.parameters)
        self._pending: list[_Pending[S]] = []
        self._refusals: list[Refusal] = []
        self._index = 0

    def micro_batch(self, fill: Callable[[], S], sample_ids: tuple[str, ...] = ()) -> None:
        """Run one micro-batch. `fill` does forward and backward of the summed loss into `.grad` and returns the sums.

        Whether it counted is known after `commit`; nothing is read from the device here.
        """
        index, self._index = self._index, self._index + 1
        for flat in self._scratch:
            flat.zero_()
        self._point_gradients_at(self._scratch_views)
        sums = fill()
        norms = _norms(self._scratch_views)
        # The norm of norms is finite only if every norm is, and also catches squares that overflow in their sum alone.
        flag = torch.isfinite(sums.loss) & torch.isfinite(torch.linalg.vector_norm(norms))
        for window, scratch in zip(self._window, self._scratch, strict=True):
            torch.where(flag.to(window.device), window + scratch, window, out=window)
        self._pending.append(_Pending(sums, flag, norms, index, sample_ids))

    def refuse(self, detail: str, sample_ids: tuple[str, ...] = ()) -> None:
        """Count a micro-batch that was found bad before anything was computed on it."""
        self._refusals.append(Refusal("data", detail, self._index, sample_ids))
        self._index += 1

    def commit(self, learning_rate: float) -> WindowResult[S]:
        """Close the window: one optimizer step from its survivors, or none, and nothing kept of what was refused."""
        pending, refusals = self._pending, self._refusals
        survivors: list[S] = []
        for item, good in zip(pending, _read([p.flag for p in pending]), strict=True):
            if good:
                survivors.append(item.sums)
            else:
                refusals.append(self._explain(item))
        refusals.sort(key=lambda r: r.micro_batch or 0)
        tokens = sum(s.tokens for s in survivors)
        result = WindowResult(applied=False, tokens=tokens, grad_norm=None, survivors=survivors, refusals=refusals)
        if tokens:
            self._step(tokens, learning_rate, result)
        self._reset()
        return result

    def _step(self, tokens: int, learning_rate: float, result: WindowResult[S]) -> None:
        for flat in self._window:
            flat.div_(tokens)
        norms = _norms(self._window_views)
        total = torch.linalg.vector_norm(norms)
        result.grad_norm = float(total)
        if not bool(torch.isfinite(total)):
            result.refusals.append(Refusal("norm", f"gradient norm of the window is {float(total)}; {self._first_bad(norms)}"))
            return
        scale = torch.clamp(self.max_grad_norm / (total + 1e-6), max=1.0)
        for flat in self._window:
            flat.mul_(scale.to(flat.device))
        self._point_gradients_at(self._window_views)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        before = self._snapshot()
        self.optimizer.step()
        bad = self._first_bad_state()
        if bad is not None:
            self._restore(before)
            result.refusals.append(Refusal("update", f"{bad} is not finite after the step; the state before it was restored"))
            return
        result.applied = True

    def _reset(self) -> None:
        for flat in self._window:
            flat.zero_()
        for parameter in self.parameters:
            parameter.grad = None
        self._pending, self._refusals, self._index = [], [], 0

    def _explain(self, item: _Pending[S]) -> Refusal:
        loss = float(item.sums.loss)
        if loss - loss != 0.0:  # NaN or infinite
            return Refusal("loss", f"loss is {loss}", item.index, item.sample_ids)
        return Refusal("gradient", self._first_bad(item.norms), item.index, item.sample_ids)

    def _first_bad(self, norms: Tensor) -> str:
        values = norms.tolist()
        bad = [(name, value) for name, value in zip(self.names, values, strict=True) if value - value != 0.0]
        if not bad:
            return "every tensor's own norm is finite, their sum of squares overflows"
        return f"gradient of {bad[0][0]} has norm {bad[0][1]} ({len(bad)} of {len(values)} tensors)"

    def _first_bad_state(self) -> str | None:
        named: list[tuple[str, Tensor]] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            named.append((name, parameter.detach()))
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    named.append((f"{key} of {name}", value))
        finite = torch.isfinite(_norms([tensor for _, tensor in named], order=float("inf")))
        if bool(finite.all()):
            return None
        return named[finite.tolist().index(False)][0]

    def _snapshot(self) -> list[tuple[Tensor, dict[str, object]]]:
        return [
            (
                p.detach().clone(),
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in self.optimizer.state.get(p, {}).items()},
            )
            for p in self.parameters
        ]

    @torch.no_grad()
    def _restore(self, before: list[tuple[Tensor, dict[str, object]]]) -> None:
        for parameter, (value, state) in zip(self.parameters, before, strict=True):
            parameter.copy_(value)
            if state:
                self.optimizer.state[parameter] = state
            else:
                self.optimizer.state.pop(parameter, None)

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


def _read(flags: list[Tensor]) -> list[bool]:
    return torch.stack(flags).tolist() if flags else []
