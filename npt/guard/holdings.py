"""All that an optimizer holds, copied and put back in place.

Optimizers keep what they count in their groups, in their state by parameter and by other names, in
attributes, in lists, in schedules and optimizers of their own; some draw random numbers. So
everything that can be reached is copied. It is put back into the same tensors and containers, for
whoever else holds them.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from npt.random_state import random_state, set_random_state

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device),
    *(type, FunctionType, MethodType, BuiltinFunctionType, ModuleType),
)
_TORCHS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class Holdings:
    """A copy of the tensors, numbers and containers that objects hold, and of the state of the
    random numbers that they draw, to be put back.

    Followed are containers, torch's optimizers and schedulers, objects of the package that a class
    of the owners is from, and whatever an optimizer keeps in its state. Models are not followed,
    and parameters that require no gradient are not copied: no step changes them.

    Args:
        owners: objects that are followed first, such as an optimizer.
        tensors: to be copied as well, such as its parameters.
        without: objects and tensors that are left out.
    """

    def __init__(
        self, owners: Iterable[Any], tensors: Iterable[Tensor] = (), without: Iterable[Any] = ()
    ):
        owners = list(owners)
        packages = {_package(kind) for owner in owners for kind in type(owner).__mro__}
        self._packages = packages - {"torch", "builtins", "abc", "typing"}
        self._tensors = {id(tensor): tensor for tensor in tensors}
        self._containers: list[tuple[Any, Any]] = []  # each with a shallow copy
        self._generators: list[torch.Generator] = []
        self._follow(owners, {id(each) for each in without})
        self._copies = {key: t.detach().clone() for key, t in self._tensors.items()}
        self._drawn = [generator.get_state() for generator in self._generators]
        numpy = sys.modules.get("numpy")  # not loaded: nobody draws from it
        self._random = random_state(), random.getstate(), numpy and numpy.random.get_state()

    def of(self, value: Any) -> Any:
        """Return the copy of a tensor that was copied, and any other value as it is."""
        return self._copies.get(id(value), value)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, into the same tensors and containers."""
        for container, items in self._containers:
            if isinstance(container, dict):
                for key in [key for key in container if key not in items]:
                    del container[key]
                container.update(items)
            elif isinstance(container, list):
                container[:] = items
            else:
                container.clear()
                (container.update if isinstance(container, set) else container.extend)(items)
        for key, tensor in self._tensors.items():
            copy = self._copies[key]
            if tensor.shape == copy.shape and tensor.dtype == copy.dtype:
                tensor.copy_(copy)
            else:
                tensor.data = copy
        for generator, state in zip(self._generators, self._drawn, strict=True):
            generator.set_state(state)
        of_torch, of_python, of_numpy = self._random
        set_random_state(of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)

    def _follow(self, owners: list[Any], seen: set[int]) -> None:
        # what is to be followed, and whether it is part of a state, of which every object is
        waiting: list[tuple[Any, bool]] = [(vars(owner), False) for owner in owners]
        while waiting:
            holder, in_state = waiting.pop()
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            if not isinstance(holder, tuple):
                self._containers.append((holder, holder.copy()))
            values, state = holder, None
            if isinstance(holder, dict):
                values, state = holder.values(), holder.get("state")
                # hooks are others' to add and remove
                seen.update(id(v) for k, v in holder.items() if _are_hooks(k))
            for value in values:
                inside = in_state or value is state
                if id(value) in seen or isinstance(value, _PLAIN):
                    pass
                elif isinstance(value, Tensor):
                    if _can_change(value):
                        self._tensors.setdefault(id(value), value)
                elif isinstance(value, dict | list | tuple | set | deque):
                    waiting.append((value, inside))
                elif isinstance(value, torch.Generator):
                    self._generators.append(value)
                elif self._is_followed(value, inside):
                    waiting.append((vars(value), inside))

    def _is_followed(self, value: Any, in_state: bool) -> bool:
        if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
            return False
        return in_state or isinstance(value, _TORCHS) or _package(type(value)) in self._packages


def _are_hooks(key: Any) -> bool:
    return isinstance(key, str) and key.endswith("_hooks")


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _can_change(tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
        return False
    strided = tensor.layout == torch.strided
    return not (strided and torch._debug_has_internal_overlap(tensor) == 1)  # expanded
