"""An optimizer step that changes nothing unless its whole result is finite.

Parameters and moments are copied, stepped and verified; if one of them is not finite, all are
restored. On a CPU the flags are read at once. On a GPU that would make the host wait, so a fused
AdamW skips the step by its own `found_inf`, and the flag selects the old state on the device. Both
ways do the same arithmetic in the same order, so their results are equal bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from npt.distributed.processes import ProcessGroup
from npt.guard.lists import (
    FiniteCheck,
    Forms,
    alike,
    bits_of,
    copied,
    has_norm,
    is_plain,
    keep_,
    norms_of,
    same_bits,
)
from npt.guard.parallel import is_sharded, local
from npt.random_state import random_state, set_random_state

Snapshot = dict[str, tuple[Tensor, dict[str, Any]]]
"""By parameter name, a copy of the parameter and of its optimizer state."""

EXACT = 2**24
"""Integers below this are exact in fp32: token counts, data and state fingerprints."""

RATE_SCALE = "rate_scale"
"""Key of an optimizer's group that trains at this share of the guard's rates."""

_TORCHS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_TRAINED = attrgetter("requires_grad")
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


class Holdings:
    """A copy of what the `owners` hold and of torch's random state. `restore` writes it back into
    the same tensors and containers, which other code may hold too.

    It copies tensors, containers, torch's optimizers and schedulers, and an optimizer's state, but
    not models or parameters that need no gradient, which no step changes.

    Args:
        owners: what holds the state.
        without: values that are not followed.
        parts: whether a tensor may be sharded or lie in paged memory.
        earlier: holdings whose memory may be taken over; they can no longer be restored. On a CPU,
            fresh memory takes several times as long as the copy.

    Attributes:
        kept: whether other code holds the copies.
    """

    @torch.no_grad()
    def __init__(
        self,
        owners: Iterable[object],
        without: Iterable[object] = (),
        parts: bool = False,
        earlier: Holdings | None = None,
    ):
        self._containers: list[tuple[Container, Container]] = []  # each with its shallow copy
        self._values = self._follow(owners, {id(each) for each in without})
        self._tensors = [own_part(value) for value in self._values] if parts else self._values
        if earlier is not None and earlier._can_be_overwritten_by(self._tensors):
            self._forms: Forms = earlier._forms
            self._copies: list[Tensor] = earlier._copies
            torch._foreach_copy_(self._copies, self._tensors)
        else:
            self._forms = Forms(self._tensors)
            self._copies = copied(self._tensors)
        self.kept = False
        self._paged = parts and any(getattr(value, "is_paged", False) for value in self._values)
        self._random = random_state()

    @torch.no_grad()
    def restore(self) -> None:
        for container, items in self._containers:
            container.clear()
            if isinstance(container, dict | set):
                container.update(items)
            else:
                container.extend(items)
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)  # in place: others hold it, and paged tensors have attributes
        if self._paged:  # the host may read them next
            torch.cuda.synchronize()
        set_random_state(self._random)

    def marks(self) -> list[tuple[int, int]]:
        """Return what an operation on a tensor changes, and a fault of the machine does not."""
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in self._tensors]

    @torch.no_grad()
    def put_back(self, marks: Sequence[tuple[int, int]]) -> set[int]:
        """Restore the tensors that changed without an operation since; return their `id`."""
        changed: set[int] = set()
        each = zip(self._values, self._tensors, self._copies, marks, self.marks(), strict=True)
        for value, tensor, copy, mark, now in each:
            if mark == now and is_plain(tensor) and not same_bits(tensor, copy):
                tensor.copy_(copy)
                changed.add(id(value))
        return changed

    def before(self) -> tuple[dict[int, Tensor], dict[int, dict[Any, Any]]]:
        """Return the copies of tensors, of sharded ones the own parts, and the entries of dicts, by
        `id`.
        """
        self.kept = True
        copies = zip(map(id, self._values), map(local, self._copies), strict=True)
        entries = {id(c): items for c, items in self._containers if isinstance(items, dict)}
        return dict(copies), entries

    def _can_be_overwritten_by(self, tensors: list[Tensor]) -> bool:
        """Return whether the copies are of these tensors, and nothing else holds them."""
        # a tensor that is made of others need not copy together with others
        free = self._forms.plain and not self.kept
        return free and self._forms.are_those_of(tensors)

    def _follow(self, owners: Iterable[object], seen: set[int]) -> list[Tensor]:
        """Note the containers, and return the tensors. Written without a call for each value: an
        optimizer has three tensors for each parameter.
        """
        tensors: list[Tensor] = []
        excludes = bool(seen)
        waiting = [(owner, False) for owner in owners]  # value, whether it is part of a state
        owned = {id(owner) for owner, _ in waiting}
        while waiting:
            value, in_state = waiting.pop()
            kind = type(value)
            if kind in _ATOMS or id(value) in seen:
                continue
            if isinstance(value, Tensor):
                seen.add(id(value))
                if value.requires_grad or id(value) in owned or not isinstance(value, nn.Parameter):
                    tensors.append(value)
            elif isinstance(value, dict | list | tuple | set | deque):
                seen.add(id(value))
                if not isinstance(value, tuple):
                    self._containers.append((value, value.copy()))
                items = value.values() if isinstance(value, dict) else value
                # most containers hold tensors alone, which then need no turn of their own
                kinds = set(map(type, items))
                if kinds == {Tensor}:  # a parameter's moments
                    tensors.extend(items)
                elif kinds == {nn.Parameter} and not excludes:  # a group's
                    tensors.extend(filter(_TRAINED, items))
                else:
                    waiting.extend(zip(items, repeat(in_state)))
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
                    if not name.endswith("_hooks")  # other code adds and removes them
                ]
        return tensors


@dataclass
class Update:
    """The result of a guarded update.

    Attributes:
        applied: scalar bool on the device, whether the step stays.
        holdings: the state from before the step; None if there was no step, or it was undone.
        by: what made it.
        names: the names of the verified parameters and moments.
        finite: whether each of `names` is finite.
        fingerprints: [processes] of each process's state after the step, 0 if it is not finite.
    """

    applied: Tensor
    by: GuardedUpdate
    holdings: Holdings | None = None
    names: Sequence[str] = ()
    finite: Tensor | None = None
    fingerprints: Tensor | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """The part of `holdings` that belongs to the parameters."""
        return None if self.holdings is None else self.by.snapshot_of(self.holdings)

    def first_bad(self) -> str:
        assert self.finite is not None
        return self.names[self.finite.tolist().index(False)]


class GuardedUpdate:
    """Step an optimizer, verify the result, and restore the old state if it is not finite.

    Args:
        parameters: all parameters that the optimizer trains, by name.
        late: never read a flag on the host; default: True for a fused Adam or AdamW on CUDA.

    Attributes:
        reads: whether the host may read a flag at no cost.

    Raises:
        ValueError: `late` with an optimizer that ignores `found_inf`.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        late: bool | None,
    ):
        self.optimizer = optimizer
        self._check = FiniteCheck()
        self.guard(parameters)
        self.home = self.parameters[0].device
        self._earlier: Holdings | None = None
        self._fused = isinstance(optimizer, torch.optim.AdamW | torch.optim.Adam) and all(
            group["fused"] for group in optimizer.param_groups
        )
        self.late = late if late is not None else self._fused and self.home.type == "cuda"
        if self.late and not self._fused:
            raise ValueError(
                f"late=True does not support {type(optimizer).__name__}, which ignores found_inf:"
                " pass AdamW(fused=True) or late=False"
            )
        self.reads = self.home.type == "cpu" and not self.late
        if self.late:
            self.make_moments()

    def guard(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Verify and restore these parameters from now on."""
        self.names = tuple(parameters)
        self.parameters = tuple(parameters.values())
        self._sharded = is_sharded(self.parameters[0])
        self._parts = self._sharded or getattr(self.optimizer, "is_paged", False)

    @contextmanager
    def step(self, go: Tensor, rate: Tensor | None, processes: ProcessGroup) -> Iterator[Update]:
        """Step if `go`, verify, and restore the old state if the new one is not finite.

        All processes keep the step or none does. An error here or in the context, such as an OOM or
        an interrupt, undoes it. `go` is a scalar bool on the home device. `rate` is a scalar, or
        None to keep the rates of the optimizer's groups.
        """
        update = Update(go, self)
        try:
            if self.late or bool(go):
                update.holdings = self.holdings(self._earlier)
                if self.reads:  # no step but the last is undone
                    self._earlier = update.holdings
                self._step(go, rate)
                self._verify(update, go, processes)
            yield update
        except BaseException:
            self.take_back(update)
            raise

    def take_back(self, update: Update) -> None:
        if update.holdings is not None:
            update.holdings.restore()
        update.holdings = None

    def put_back(self, holdings: Holdings, marks: Sequence[tuple[int, int]]) -> list[str]:
        """Restore what changed without an operation since holdings were made; return its names."""
        changed = holdings.put_back(marks)
        names: list[str] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if id(parameter) in changed:
                names.append(name)
            state = self.optimizer.state.get(parameter, {})
            names += [f"{key} of {name}" for key, value in state.items() if id(value) in changed]
        return names

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups with the names of their parameters."""
        names = {id(p): name for name, p in zip(self.names, self.parameters, strict=True)}
        groups: list[dict[str, Any]] = []
        for group in self.optimizer.param_groups:
            held = [names[id(p)] for p in group["params"] if id(p) in names]
            groups.append({**group, "params": held})
        return groups

    def snapshot(self) -> Snapshot:
        """Copy parameters and optimizer state on their devices; of sharded ones, the own shards."""
        return self.snapshot_of(self.holdings())

    def snapshot_of(self, holdings: Holdings) -> Snapshot:
        """Return the parameters, and each one's part of the optimizer's state, from holdings."""
        copies, entries = holdings.before()
        states = entries[id(self.optimizer.state)]
        snapshot: Snapshot = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            held = entries[id(states[parameter])] if parameter in states else {}
            state = {key: copies.get(id(value), value) for key, value in held.items()}
            snapshot[name] = copies.get(id(parameter), parameter), state
        return snapshot

    def first_bad(self) -> str | None:
        names, largest = self._largest()
        bad = (~largest.isfinite()).nonzero().flatten().tolist()
        return names[bad[0]] if bad else None

    def checksum(self) -> int:
        """Return a checksum over the bits of parameters and moments, equal on equal processes."""
        total = torch.zeros((), dtype=torch.int64, device=self.home)
        for _, tensor in self._tensors():
            total += bits_of([tensor])[0].sum(dtype=torch.int64).to(self.home)
        return int(total)

    def make_moments(self) -> None:
        """Create a fused optimizer's moments with a step that `found_inf` turns into a no-op."""
        if not self._fused or self.optimizer.state:
            return
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.found_inf = torch.ones((), dtype=torch.float32, device=self.home)  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.found_inf = torch.zeros_like(self.optimizer.found_inf)  # type: ignore[attr-defined]
        for parameter in self.parameters:
            parameter.grad = None

    def holdings(self, earlier: Holdings | None = None) -> Holdings:
        frozen = [p for p in self.parameters if not p.requires_grad]  # since they are guarded
        return Holdings([self.optimizer, *frozen], parts=self._parts, earlier=earlier)

    def _step(self, go: Tensor, rate: Tensor | None) -> None:
        if rate is not None:
            shared = rate if self.late else float(rate)
            for group in self.optimizer.param_groups:
                group["lr"] = shared
                if RATE_SCALE in group:
                    group["lr"] = shared * group[RATE_SCALE]
        if self.late:
            skip = torch.empty((), dtype=torch.float32, device=self.home)
            self.optimizer.found_inf = torch.logical_not(go, out=skip)  # type: ignore[attr-defined]
        self.optimizer.step()

    def _verify(self, update: Update, go: Tensor, processes: ProcessGroup) -> None:
        """Restore the old state unless the new one is finite, and equal, on all processes."""
        if not self.late and processes.size == 1 and self._are_finite():
            update.applied = torch.ones((), dtype=torch.bool, device=self.home)
            return
        update.names, largest = self._largest()
        update.finite = largest < math.inf  # False for NaN
        if self._sharded:
            bad_anywhere = processes.sum_((~update.finite).to(torch.float32))
            update.finite = bad_anywhere == 0
        good = update.finite.all()
        if processes.size > 1 and not self._sharded:
            # Sum the bits of each tensor's largest number: exact in any order, and never 0.
            bits = largest.view(torch.int32).to(torch.int64).sum().remainder(EXACT - 1) + 1
            prints = processes.each(torch.where(good, bits, 0))
            update.fingerprints = prints
            good = (prints == prints[0]).all() & (prints[0] > 0)
        update.applied = go & good
        if self.late:
            self._select(good, update.snapshot or {})
        elif not bool(good):
            self.take_back(update)

    def _select(self, good: Tensor, snapshot: Snapshot) -> None:
        """Keep the new state if `good`, else restore the snapshot, without reading the flag."""
        now: list[Tensor] = []
        old: list[Tensor] = []
        for parameter, (value, state) in zip(self.parameters, snapshot.values(), strict=True):
            held = self.optimizer.state[parameter]
            for key, copy in state.items():
                if isinstance(copy, Tensor):
                    now.append(held[key])
                    old.append(copy)
            now.append(parameter.detach())
            old.append(value)
        for tensors, others in alike(now, old):
            keep_(tensors, good, others)

    def _largest(self) -> tuple[list[str], Tensor]:
        named = [(name, tensor) for name, tensor in self._tensors() if has_norm(tensor)]
        # a shard that is empty here may not be so on another process
        parts = [part if part.numel() else part.new_zeros(1) for _, part in named]
        return [name for name, _ in named], norms_of(parts, math.inf, self.home)

    def _are_finite(self) -> bool:
        """Return whether parameters and moments are finite: see `FiniteCheck`."""
        values: list[object] = [*self.parameters]
        for parameter in self.parameters:
            values.extend(self.optimizer.state.get(parameter, {}).values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        return self._check(map(own_part, tensors) if self._parts else tensors)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return tensors by name, moments first: of the bad ones, the first is reported."""
        named: list[tuple[str, Tensor]] = []
        for name, parameter in zip(self.names, self.parameters, strict=True):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    named.append((f"{key} of {name}", own_part(value)))
            named.append((name, own_part(parameter)))
        return named


def own_part(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, on its card, without a graph."""
    return local(on_card(tensor)).detach()


def on_card(tensor: Tensor) -> Tensor:
    """Return a bitsandbytes paged tensor as a tensor on its GPU, and any other tensor as it is.

    Torch treats paged memory as host memory, and would read it page by page.
    """
    if not getattr(tensor, "is_paged", False):
        return tensor
    layout = tensor.numpy().__array_interface__
    return torch.as_tensor(SimpleNamespace(memory=tensor, __cuda_array_interface__=layout))
