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
"""Integers below this are exact in fp32: token counts, data and state fingerprints."""

RATE_SCALE = "rate_scale"
"""Key of an optimizer's group that trains at this share of the guard's rates."""

_TORCHS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class Holdings:
    """A copy of what the `owners` hold and of torch's random state. `restore` writes it back into
    the same tensors and containers, which other code may hold too.

    It copies tensors, containers, torch's optimizers and schedulers, and an optimizer's state, but
    not models or parameters that need no gradient, which no step changes.
    """

    def __init__(self, owners: Iterable[Any], without: Iterable[Any] = ()):
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # id: tensor, copy
        self._containers: list[tuple[Any, Any]] = []  # container, shallow copy
        self._paged = False
        self._follow(owners, {id(each) for each in without})
        plain = [pair for pair in self._tensors.values() if _is_plain(pair[0])]
        for sources, targets in alike([t for t, _ in plain], [copy for _, copy in plain]):
            torch._foreach_copy_(targets, sources)
        self._random = random_state()

    def of(self, value: Any) -> Any:
        return self._tensors[id(value)][1] if id(value) in self._tensors else value

    @torch.no_grad()
    def restore(self) -> None:
        for container, items in self._containers:
            container.clear()
            (container.update if isinstance(container, dict | set) else container.extend)(items)
        for tensor, copy in self._tensors.values():
            tensor.copy_(copy)  # in place: others hold it, and paged tensors have attributes
        if self._paged:  # the host may read them next
            torch.cuda.synchronize()
        set_random_state(self._random)

    def _follow(self, owners: Iterable[Any], seen: set[int]) -> None:
        waiting = [(owner, False) for owner in owners]  # value, whether it is part of a state
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
                    if not name.endswith("_hooks")  # other code adds and removes them
                ]


@dataclass
class Update:
    """The result of a guarded update.

    Attributes:
        applied: scalar bool on the device, whether the step stays.
        holdings: the state from before the step; None if there was no step, or it was undone.
        snapshot: the part of `holdings` that belongs to the parameters.
        names: the names of the verified parameters and moments.
        finite: whether each of `names` is finite.
        fingerprints: [processes] of each process's state after the step, 0 if it is not finite.
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
    """Step an optimizer, verify the result, and restore the old state if it is not finite.

    Args:
        parameters: all parameters that the optimizer trains, by name.
        late: never read a flag on the host; default: True for a fused Adam or AdamW on CUDA.

    Raises:
        ValueError: `late` with an optimizer that ignores `found_inf`.
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
                f"late=True does not support {type(optimizer).__name__}, which ignores found_inf:"
                " pass AdamW(fused=True) or late=False"
            )
        if self.late:
            self.make_moments()

    def guard(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Verify and restore these parameters from now on."""
        self.names, self.parameters = tuple(parameters), tuple(parameters.values())

    @contextmanager
    def step(self, go: Tensor, rate: Tensor | None, processes: ProcessGroup) -> Iterator[Update]:
        """Step if `go`, verify, and restore the old state if the new one is not finite.

        All processes keep the step or none does. An error here or in the context, such as an OOM or
        an interrupt, undoes it. `go` is a scalar bool on the home device. `rate` is a scalar, or
        None to keep the rates of the optimizer's groups.
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
        """Copy parameters and optimizer state on their devices; of sharded ones, the own shards."""
        return self._snapshot(Holdings([self.optimizer]))

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

    def _snapshot(self, copies: Holdings) -> Snapshot:
        states = [self.optimizer.state.get(p, {}) for p in self.parameters]
        return {
            name: (local(copies.of(p)), {k: local(copies.of(value)) for k, value in state.items()})
            for name, p, state in zip(self.names, self.parameters, states, strict=True)
        }

    def _step(self, go: Tensor, rate: Tensor | None) -> None:
        if rate is not None:
            shared = rate if self.late else float(rate)
            for group in self.optimizer.param_groups:
                group["lr"] = shared * group[RATE_SCALE] if RATE_SCALE in group else shared
        if self.late:
            skip = torch.empty((), dtype=torch.float32, device=self.home)
            self.optimizer.found_inf = torch.logical_not(go, out=skip)  # type: ignore[attr-defined]
        self.optimizer.step()

    def _verify(self, update: Update, go: Tensor, processes: ProcessGroup) -> None:
        """Restore the old state unless the new one is finite, and equal, on all processes."""
        update.names, largest = self._largest()
        update.finite = largest < math.inf  # False for NaN
        good = update.finite.all()
        if processes.size > 1 and is_sharded(self.parameters[0]):
            update.finite = processes.sum_((~update.finite).to(torch.float32)) == 0
            good = update.finite.all()
        elif processes.size > 1:
            # Sum the bits of each tensor's largest number: exact in any order, and never 0.
            bits = largest.view(torch.int32).to(torch.int64).sum().remainder(EXACT - 1) + 1
            prints = update.fingerprints = processes.each(torch.where(good, bits, 0))
            good = (prints == prints[0]).all() & (prints[0] > 0)
        update.applied = go & good if self.late else good
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
            keys = [key for key, copy in state.items() if isinstance(copy, Tensor)]
            now += [*(held[key] for key in keys), parameter.detach()]
            old += [*(state[key] for key in keys), value]
        for tensors, others in alike(now, old):
            keep_(tensors, good, others)

    def _largest(self) -> tuple[list[str], Tensor]:
        sharded = is_sharded(self.parameters[0])  # an empty shard may not be empty elsewhere
        named = [
            (n, t) for n, t in self._tensors() if t.is_floating_point() and (t.numel() or sharded)
        ]
        tensors = [t if t.numel() else t.new_zeros(1) for _, t in named]
        return [name for name, _ in named], norms_of(tensors, float("inf"), self.home)

    def _tensors(self) -> list[tuple[str, Tensor]]:
        """Return tensors by name, moments first: of the bad ones, the first is reported."""
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
    """Return a bitsandbytes paged tensor as a tensor on its GPU, and any other tensor as it is.

    Torch treats paged memory as host memory, and would read it page by page.
    """
    if not getattr(tensor, "is_paged", False):
        return tensor
    layout = tensor.numpy().__array_interface__
    return torch.as_tensor(SimpleNamespace(memory=tensor, __cuda_array_interface__=layout))
