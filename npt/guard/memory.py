"""The memory that a guard holds, in bytes, known before the first step too."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from npt.guard.holdings import Reached
from npt.guard.window import GradientWindow


@dataclass(frozen=True)
class Memory:
    """Bytes that a guard holds on top of model, optimizer and activations.

    gradients: of the window and of one micro-batch, always: a plain loop that sets gradients to
    None holds none while activations are largest, and one of the two in its step. undo: copies of
    parameters and of all tensors of the optimizer, during a step. shared: the gradients in fp32
    that several processes sum, before the step.
    """

    gradients: int
    undo: int
    shared: int

    @property
    def peak(self) -> int:
        """The most at any moment."""
        return self.gradients + max(self.undo, self.shared)


def memory_of(window: GradientWindow) -> Memory:
    """Return the bytes that a window and its update need.

    Before the first step the moments are those that the optimizer makes for zeros, one parameter
    of each shape at a time.
    """
    gradients, update = window.gradients, window.update
    undo = shared = 0
    if update.undo:
        reached = Reached([update.optimizer], update.parameters)
        undo = _bytes(reached.tensors.values())
        if not update.optimizer.state:
            holdings = update.holdings()
            undo += _coming(update.optimizer, reached, frozenset(update.parameters))
            holdings.restore()  # what it keeps outside of its state was stepped too
    if window.processes.size > 1:
        for flat in gradients.sums:
            as_it_is = flat.dtype == torch.float32 and flat.device == update.home
            shared += 4 * flat.numel() * (1 if as_it_is else 2)  # converted, then put together
    return Memory(_bytes([*gradients.scratch, *gradients.sums]), undo, shared)


def _coming(
    optimizer: torch.optim.Optimizer, reached: Reached, parameters: frozenset[nn.Parameter]
) -> int:
    """Return the bytes of the tensors that an optimizer's first step will make."""
    total, held = 0, dict(reached.tensors)  # with what it makes for all parameters together
    for group in optimizer.param_groups:
        known: dict[Any, int] = {}
        for parameter in parameters.intersection(group["params"]):
            kind = parameter.shape, parameter.dtype, parameter.device
            if kind not in known:
                known[kind] = _moments_of(optimizer, group, parameter, held)
            total += known[kind]
    return total + _bytes(held.values()) - _bytes(reached.tensors.values())


def _moments_of(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: nn.Parameter,
    held: dict[int, Tensor],
) -> int:
    """Return the bytes that an optimizer keeps for a parameter, by a step over zeros like it; to
    `held` it adds the tensors that the step made for all.
    """
    zeros = nn.Parameter(torch.zeros_like(parameter))
    zeros.grad = torch.zeros_like(zeros)
    # another optimizer of its class and settings; a copy would share a `step` that was replaced
    other = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__)
    other.__dict__.pop("step", None)
    other.state, other.param_groups = defaultdict(dict), [{**group, "params": [zeros]}]
    other._optimizer_step_pre_hooks = OrderedDict()
    other._optimizer_step_post_hooks = OrderedDict()
    other.step()
    moments = other.state.pop(zeros, {})
    other.param_groups = []
    held |= Reached([other]).tensors
    found = Reached([moments]).tensors
    return _bytes(found[key] for key in found.keys() - held.keys())


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
