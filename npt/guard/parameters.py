"""What a guard is given: the parameters of its optimizer by the names of their model, the optimizer
and the scheduler, which must be such that it can guard them, and the processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError

Trainable = nn.Module | Mapping[str, nn.Parameter] | Iterable[Any]
"""A model, parameters by name, pairs of names and parameters, or parameters."""

IN_BACKWARD = frozenset({"Lomo", "AdaLomo", "LayerWiseDummyOptimizer"})
"""Classes of lomo_optim, and of transformers for GaLore and Apollo layer by layer."""


class Guarded:
    """The parameters of a guard: those of the optimizer that require a gradient.

    Args:
        trainable: gives them their names; the optimizer's others are named by their places.
        optimizer: to be guarded.
        whole_norm: the norm is that of all parameters of `trainable` that require a gradient,
            stepped or not, and of no others, as transformers' Trainer has it.

    Attributes:
        stepped: by name.
        held: by name, those whose gradients are the window's.
        clipped: whose norm is taken and clipped, in this order.

    Raises:
        ConfigError: the optimizer or a parameter of it cannot be guarded.
    """

    def __init__(
        self, trainable: Trainable, optimizer: torch.optim.Optimizer, whole_norm: bool = False
    ):
        if not isinstance(trainable, nn.Module | Mapping):
            trainable = list(trainable)  # an iterator can be read once
        self._trainable, self._optimizer, self._whole_norm = trainable, optimizer, whole_norm
        _check_optimizer(optimizer)
        stepped = self._stepped_now()
        if not stepped:
            raise ConfigError("no parameter of the optimizer requires a gradient; nothing to guard")
        # of a Trainer, the optimizer may have the parameters of a loss alone
        if not whole_norm and stepped.isdisjoint(p for _, p in _named(trainable)):
            raise ConfigError(
                "none of the optimizer's parameters is among the guard's; give the guard the model"
                " that the optimizer was made for"
            )
        self.look()

    def joined(self) -> set[nn.Parameter]:
        """Return the parameters that have come to require a gradient, or to be stepped."""
        now = self._stepped_now() | {p for p in self._watched if p.requires_grad}
        return now.difference(self.held.values())

    def look(self) -> None:
        """Take in the parameters as they are now."""
        stepped, named = self._stepped_now(), list(_named(self._trainable))
        names: dict[nn.Parameter, str] = {}  # in the order of clipping; tied weights are one
        for name, p in named:
            if p in stepped or (self._whole_norm and p.requires_grad):
                names.setdefault(p, name)
        clipped = list(names)
        for group, settings in enumerate(self._optimizer.param_groups):
            for place, p in enumerate(settings["params"]):
                if p in stepped:
                    names.setdefault(p, f"parameter {place} of the optimizer's group {group}")
        sharded = next((name for p, name in names.items() if _is_sharded(p)), None)
        if sharded is not None:
            raise ConfigError(
                f"{sharded} is sharded over processes, and a guard needs whole tensors; train with"
                " DDP or in one process"
            )
        self.held = {name: p for p, name in names.items()}
        self.stepped = {name: p for name, p in self.held.items() if p in stepped}
        self.clipped = tuple(clipped if self._whole_norm else names)
        # a large model's modules take longer to walk than a micro-batch's guard
        self._watched = [p for _, p in named] if self._whole_norm else []

    def _stepped_now(self) -> set[nn.Parameter]:
        return {p for g in self._optimizer.param_groups for p in g["params"] if p.requires_grad}


def unwrapped(
    optimizer: Any, divided: bool
) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """Return torch's optimizer and the scaler inside one that `Accelerator.prepare` returned.

    Args:
        optimizer: that, or one of torch's, which has no scaler.
        divided: the loss is divided for the window already.

    Raises:
        ConfigError: accelerate would divide the loss for a window that it counts itself.
    """
    if type(optimizer).__module__.partition(".")[0] != "accelerate":
        return optimizer, None
    steps = optimizer.gradient_state.num_steps
    if steps > 1 and not divided:
        raise ConfigError(
            f"accelerate divides losses by gradient_accumulation_steps {steps}, and a guard divides"
            " once, by what survives; leave it at 1, and call guard.step() after each window"
        )
    return optimizer.optimizer, optimizer.scaler


def stepped_blindly(scheduler: Any) -> Any:
    """Return a scheduler whose step needs nothing to be told, or raise ConfigError."""
    # accelerate's form has torch's in it
    inner = getattr(scheduler, "scheduler", scheduler)
    if isinstance(inner, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a figure at each step, which a guard does not have; leave out"
            " scheduler= and call scheduler.step(loss) in the loop"
        )
    return scheduler


def all_processes(device: torch.device) -> ProcessGroup:
    """Return the processes of torch.distributed, or this one alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ProcessGroup()
    return ProcessGroup(dist.get_rank(), dist.get_world_size(), device)


def plain_name(name: str) -> str:
    """Return a parameter's name without what torch.compile adds to it."""
    return name.replace("_orig_mod.", "")


def whole(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, or the model."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_parallel(model: nn.Module | None) -> bool:
    """Return whether a model, compiled or not, is in DistributedDataParallel."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def unsynchronised(model: nn.Module | None) -> AbstractContextManager[None]:
    """Return a context in which processes compute apart.

    One process's NaN is not spread over all in a backward, and none waits in its forward, where
    buffers would be sent, for one whose micro-batch was refused before that.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    model.require_forward_param_sync = False
    return model.no_sync()


def share_buffers(model: nn.Module | None) -> None:
    """Send process 0's buffers to all, as DistributedDataParallel does in a window's first forward.

    Every process must call it.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel) or not model.broadcast_buffers:
        return
    if model.modules_buffers:
        model._sync_buffers()


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    unfit = {torch.optim.LBFGS: "calls the model itself", torch.optim.SparseAdam: "is sparse"}
    for kind, why in unfit.items():
        if isinstance(optimizer, kind):
            raise ConfigError(
                f"{type(optimizer).__name__} {why}; a guard needs an optimizer whose step takes"
                " dense gradients from .grad, such as AdamW or SGD"
            )
    if not IN_BACKWARD.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        raise ConfigError(
            f"{type(optimizer).__name__} steps inside backward, before a guard can look at the"
            " gradient; use its form that is not layerwise, or AdamW"
        )


def _named(trainable: Trainable) -> Iterable[tuple[str, nn.Parameter]]:
    if isinstance(trainable, nn.Module):
        return ((plain_name(name), p) for name, p in whole(trainable).named_parameters())
    if isinstance(trainable, Mapping):
        return trainable.items()
    entries = list(trainable)
    if all(isinstance(entry, tuple) for entry in entries):
        return entries
    return ((f"parameter {place}", entry) for place, entry in enumerate(entries))


def _is_sharded(parameter: nn.Parameter) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: there is none
    return getattr(parameter, "_is_flat_param", False) or (
        module is not None and isinstance(parameter, module.DTensor)
    )
