"""An optimizer step that changes nothing unless its whole result is finite.

Parameters and moments are copied, stepped, verified, and put back if one of them is not finite. On
a CPU the flags are read at once. On a GPU reading a flag would make the host wait, so there a fused
AdamW skips by its own `found_inf` and the old state is selected by the flag. Both ways do the
same arithmetic in the same order: their results are equal bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from npt.distributed.processes import ProcessGroup
from npt.guard.lists import alike, bits_of, keep_, norms_of
from npt.guard.outcome import Snapshot
from npt.guard.sharding import is_sharded, local
from npt.random_state import random_state, set_random_state

EXACT = 2**24
"""Whole numbers below it are exact in fp32: token counts, data and state fingerprints."""

_TORCHS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class Holdings:
    """A copy of what objects hold and of torch's random state, put back into the same tensors and
    containers, for whoever else holds them.

    Followed are tensors, containers, torch's optimizers and schedulers, and whatever an optimizer
    keeps in its state. Models are not, and parameters without a gradient are not copied: no step
    changes them.
    """

    def __init__(self, owners: Iterable[Any], without: Iterable[Any] = ()):
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # by id, each with its copy
        self._containers: list[tuple[Any, Any]] = []  # each with a shallow copy
        self._paged = False
        self._follow(owners, {id(each) for each in without})
        plain = [pair for pair in self._tensors.values() if _is_plain(pair[0])]
        for sources, targets in alike([t for t, _ in plain], [copy for _, copy in plain]):
            torch._foreach_copy_(targets, sources)
        self._random = random_state()

    def of(self, value: Any) -> Any:
        """Return the copy of a tensor that was copied, and any other value as it is."""
        return self._tensors[id(value)][1] if id(value) in self._tensors else value

    @torch.no_grad()
    def restore(self) -> None:
        for container, items in self._containers:
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(items)
        for tensor, copy in self._tensors.values():
            tensor.copy_(copy)  # never replaced: others hold it, and a paged one has attributes
        if self._paged:  # the host may read it next
            torch.cuda.synchronize()
        set_random_state(self._random)

    def _follow(self, owners: Iterable[Any], seen: set[int]) -> None:
        waiting = [(owner, False) for owner in owners]  # and whether it is part of a state
        owned = {id(owner) for owner, _ in waiting}
        while waiting:
            value, in_state = waiting.pop()
            if id(value) in seen:
                continue
            if isinstance(value, Tensor):
                seen.add(id(value))
                if value.requires_grad or not isinstance(value, nn.Parameter):
                    held = local(on_card(value)).detach()
                    self._paged |= held.device != value.device
                    copy = torch.empty_like(held) if _is_plain(held) else held.clone()
                    self._tensors[id(value)] = held, copy
            elif isinstance(value, dict | list | tuple | set | deque):
                seen.add(id(value))
                if not isinstance(value, tuple):
                    self._containers.append((value, value.copy()))
                items = value.values() if isinstance(value, dict) else value
                waiting += [(item, in_state) for item in items]
            elif (
                id(value) in owned
                or isinstance(value, _TORCHS)
                or (in_state and hasattr(value, "__dict__") and not callable(value))
            ):
                seen.add(id(value))
                attributes = vars(value)
                self._containers.append((attributes, attributes.copy()))
                waiting += [
                    (item, in_state or name == "state")
                    for name, item in attributes.items()
                    if not name.endswith("_hooks")  # others' to add and remove
                ]


@dataclass
class Update:
    """The outcome of a guarded update.

    Attributes:
        applied: scalar bool on the device.
        holdings: all that was held before, None if it is held now; `snapshot` is of its parameters.
        finite: flags of the parameters and moments of these `names`.
        fingerprints: [processes] of the state that the step left on each, 0 if it is not finite.
    """

    applied: Tensor
    holdings: Holdings | None = None
    snapshot: Snapshot | None = None
    names: Sequence[str] = ()
    finite: Tensor | None = None
    fingerprints: Tensor | None = None

    def first_bad(self) -> str:
        assert self.finite is not None
        return self.names[self.finite.tolist().index(False)]


class GuardedUpdate:
    """Steps an optimizer, verifies, and restores.

    Args:
        parameters: by name, all that the optimizer trains.
        late: never read a flag on the host; by default for a fused Adam or AdamW on CUDA.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        late: bool | None = None,
    ):
        self.guard(parameters)
        self.optimizer = optimizer
        self.home = self.parameters[0].device
        self._fused = isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam) and all(
            group["fused"] for group in optimizer.param_groups
        )
        self.late = late if late is not None else self._fused and self.home.type == "cuda"
        if self.late and not self._fused:
            raise ValueError(
                f"{type(optimizer).__name__} does not obey found_inf; pass AdamW(fused=True) or"
                " late=False"
            )
        if self.late:
            self.make_moments()

    def guard(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Verify and restore these parameters from now on."""
        self.names, self.parameters = tuple(parameters), tuple(parameters.values())

    @contextmanager
    def step(self, go: Tensor, rate: Tensor | None, processes: ProcessGroup) -> Iterator[Update]:
        """Step if `go`, verify, and restore the old state if the new one is bad.

        An error within, or within the context, takes the step back: running out of memory, or an
        interrupt. All processes keep it or none does. `go` is a scalar bool on the home device, the
        learning rate a scalar, or None if the optimizer's groups have it.
        """
        update = Update(go)
        try:
            if self.late or bool(go):
                update.holdings = Holdings([self.optimizer])
                update.snapshot = self._snapshot(update.holdings)
                self._step(go, rate)
                self._verify(update, go, processes)
            yield update
        except BaseException:
            self.take_back(update)
            raise

    def take_back(self, update: Update) -> None:
        """Put back the parameters, and all that the optimizer held, from before an update."""
        if update.holdings is not None:
            update.holdings.restore()
        update.holdings = update.snapshot = None

    def groups(self) -> list[dict[str, Any]]:
        names = {id(p): name for name, p in zip(self.names, self.parameters, strict=True)}
        return [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in self.optimizer.param_groups
        ]

    def snapshot(self) -> Snapshot:
        """Return copies of parameters and optimizer state, on their devices; of what is sharded,
        this process's shards."""
        return self._snapshot(Holdings([self.optimizer]))

    def first_bad(self) -> str | None:
        names, largest = self._largest()
        bad = (~largest.isfinite()).nonzero().flatten().tolist()
        return names[bad[0]] if bad else None

    def checksum(self) -> int:
        """Return the sum of every bit of parameters and moments, equal on equal processes."""
        total = torch.zeros((), dtype=torch.int64, device=self.home)
        for _, tensor in self._tensors():
            total += bits_of([tensor])[0].sum(dtype=torch.int64).to(self.home)
        return int(total)

    def make_moments(self) -> None:
        """Let a fused optimizer without any make its moments by a step that `found_inf` forbids."""
        if not self._fused or self.optimizer.state:
            return
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.found_inf = torch.ones((), dtype=torch.float32, device=self.home)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.found_inf = torch.zeros_like(self.optimizer.found_inf)  # type: ignore[attr-defined]
        for parameter in self.parameters:
            parameter.grad = None

    def _snapshot(self, copies: Holdings) -> Snapshot:
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]
        return {
            name: (local(copies.of(p)), {k: local(copies.of(value)) for k, value in state.items()})
            for name, p, state in zip(self.names, self.parameters, states, strict=True)
        }

    def _step(self, go: Tensor, rate: Tensor | None) -> None:
        if rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate if self.late else float(rate)
        if self.late:
            skip = torch.empty((), dtype=torch.float32, device=self.home)
            self.optimizer.found_inf = torch.logical_not(go, out=skip)  # type: ignore[attr-defined]
        self.optimizer.step()

    def _verify(self, update: Update, go: Tensor, processes: ProcessGroup) -> None:
        """Restore the old state unless the new one is finite on every process, and one on all."""
        update.names, largest = self._largest()
        update.finite = largest < math.inf  # NaN is not
        good = update.finite.all()
        if processes.size > 1 and is_sharded(self.parameters[0]):
            update.finite = processes.sum_((~update.finite).to(torch.float32)) == 0
            good = update.finite.all()
        elif processes.size > 1:
            # The largest number of each tensor, bit for bit: equal in any order of summation, never
            # 0.
            bits = largest.view(torch.int32).to(torch.int64).sum().remainder(EXACT - 1) + 1
            prints = update.fingerprints = processes.each(torch.where(good, bits, 0))
            good = (prints == prints[0]).all() & (prints[0] > 0)
        update.applied = go & good if self.late else good
        if self.late:
            self._select(good, update.snapshot or {})
        elif not bool(good):
            self.take_back(update)

    def _select(self, good: Tensor, snapshot: Snapshot) -> None:
        """Keep the new state if `good`, else the snapshot, without reading the flag."""
        now: list[Tensor] = []
        old: list[Tensor] = []
        for parameter, (value, state) in zip(self.parameters, snapshot.values(), strict=True):
            held = self.optimizer.state[parameter]
            keys = [key for key, copy in state.items() if isinstance(copy, Tensor)]
            now += [*(held[key] for key in keys), parameter.detach()]
            old += [*(state[key] for key in keys), value]
        for tensors, others in alike(now, old):
            keep_(tensors, good, others)

    def _largest(self) -> tuple[list[str], Tensor]:
        sharded = is_sharded(self.parameters[0])  # then of other processes it may be something
        named = [
            (n, t) for n, t in self._tensors() if t.is_floating_point() and (t.numel() or sharded)
        ]
        tensors = [t if t.numel() else t.new_zeros(1) for _, t in named]
        return [name for name, _ in named], norms_of(tensors, float("inf"), self.home)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return parameters and their optimizer tensors, by name: moments first, since a broken one
        breaks its weight in the same step, and the first tensor found is reported.
        """
        named: list[tuple[str, Tensor]] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    named.append((f"{key} of {name}", local(on_card(value))))
            named.append((name, local(parameter).detach()))
        return named


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not hasattr(tensor, "__tensor_flatten__")


def on_card(tensor: Tensor) -> Tensor:
    """Return the memory of bitsandbytes' paged tensors, which torch takes for the host's, as a
    tensor of its card, lest it is read page by page through the host; other tensors as they are.
    """
    if not getattr(tensor, "is_paged", False):
        return tensor
    layout = tensor.numpy().__array_interface__
    return torch.as_tensor(SimpleNamespace(memory=tensor, __cuda_array_interface__=layout))
