"""Faults that stay: in weights, in the frozen base and in the optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from faults.bench import PAD_ID, Student, module_of

Poison = Callable[[Student], Any]
"""Done to a student, and not undone."""


def weight(name: str, index: tuple[int, ...], value: float) -> Poison:
    """An element of an adapter's tensor."""

    def act(student: Student) -> None:
        with torch.no_grad():
            student.parameters[name][index] = value

    return act


def frozen(name: str, index: tuple[int, ...], value: float) -> Poison:
    """An element of an unquantised tensor of the base."""

    def act(student: Student) -> None:
        with torch.no_grad():
            student.model.get_parameter(name)[index] = value

    return act


def padding_embedding(value: float) -> Poison:
    """The whole embedding of the padding token."""

    def act(student: Student) -> None:
        with torch.no_grad():
            student.model.model.embed_tokens.weight[PAD_ID] = value

    return act


def flipped_bit(name: str, index: tuple[int, ...], bit: int) -> Poison:
    """One bit of an fp32 weight; 30 is the highest of the exponent, and makes 0.001 a number of
    1e35.
    """

    def act(student: Student) -> None:
        student.parameters[name].detach().view(torch.int32)[index] ^= 1 << bit

    return act


def statistic(what: str, index: tuple[int, ...], value: float) -> Poison:
    """An element of a 4-bit weight's statistics, named `module: state2.absmax`."""
    module, path = what.split(": ")

    def act(student: Student) -> None:
        layer: Any = module_of(student, module)
        state = layer.weight.quant_state
        for part in path.split("."):
            state = getattr(state, part)
        state[index] = value

    return act


def moment(what: str, index: tuple[int, ...], value: float) -> Poison:
    """An element of the optimizer's state, named `exp_avg of tensor`."""
    return lambda student: _state(student, what).__setitem__(index, value)


def one_bad_write(what: str, value: float) -> Poison:
    """The optimizer's next step writes `value` into one element of a weight or of a moment, as a
    broken kernel would.
    """

    def act(student: Student) -> None:
        def spoil(*_: Any) -> None:
            _state(student, what).view(-1)[-1] = value
            handle.remove()

        handle = student.optimizer.register_step_post_hook(spoil)

    return act


def _state(student: Student, what: str) -> torch.Tensor:
    key, _, name = what.rpartition(" of ")
    parameter = student.parameters[name]
    return student.optimizer.state[parameter][key] if key else parameter.detach()
