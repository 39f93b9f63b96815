"""Permanent faults in weights, in the frozen base and in the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from faults.bench import PAD_ID, Student, module_of

Index = tuple[int, ...]


@dataclass(frozen=True)
class PersistentFault:
    """A permanent change of a student. A guard must name `name` and `index`."""

    name: str
    index: Index
    act: Callable[[Student], Any]

    def __call__(self, student: Student) -> None:
        with torch.no_grad():
            self.act(student)


def _element(
    name: str, index: Index, value: float, tensor: Callable[[Student], Tensor]
) -> PersistentFault:
    def act(student: Student) -> None:
        tensor(student)[index] = value

    return PersistentFault(name, index, act)


def weight(name: str, index: Index, value: float) -> PersistentFault:
    """Set an element of an adapter's tensor."""
    return _element(name, index, value, lambda student: student.parameters[name])


def frozen(name: str, index: Index, value: float) -> PersistentFault:
    """Set an element of an unquantised tensor of the base."""
    return _element(name, index, value, lambda student: student.model.get_parameter(name))


def padding_embedding(value: float) -> PersistentFault:
    """Set the whole embedding of the padding token."""
    return frozen("model.embed_tokens.weight", (PAD_ID,), value)


def moment(name: str, index: Index, value: float) -> PersistentFault:
    """Set an element of the optimizer's state, named `exp_avg of tensor`."""
    return _element(name, index, value, lambda student: _state(student, name))


def statistic(name: str, index: Index, value: float) -> PersistentFault:
    """Set an element of a 4-bit weight's statistics, named `module: state2.absmax`."""
    module, path = name.split(": ")

    def tensor(student: Student) -> Tensor:
        state = module_of(student, module).weight.quant_state
        for part in path.split("."):
            state = getattr(state, part)
        return state

    return _element(name, index, value, tensor)


def flipped_bit(name: str, index: Index, bit: int) -> PersistentFault:
    """Flip a bit of an fp32 weight. Bit 30, the highest of the exponent, turns 0.001 into 1e35."""

    def act(student: Student) -> None:
        student.parameters[name].detach().view(torch.int32)[index] ^= 1 << bit

    return PersistentFault(name, index, act)


def one_bad_write(name: str, value: float) -> PersistentFault:
    """Let the optimizer's next step write `value` into the last element of a weight or moment, as a
    broken kernel would.
    """

    def act(student: Student) -> None:
        def spoil(*_: Any) -> None:
            _state(student, name).view(-1)[-1] = value
            handle.remove()

        handle = student.optimizer.register_step_post_hook(spoil)

    return PersistentFault(name, (-1,), act)


def _state(student: Student, name: str) -> Tensor:
    key, _, tensor = name.rpartition(" of ")
    parameter = student.parameters[tensor]
    return student.optimizer.state[parameter][key] if key else parameter.detach()
