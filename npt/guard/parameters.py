"""What a guard is given: the parameters of its optimizer by the names of their model, the optimizer
and the scheduler, which must be such that it can guard them, and the processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError
from npt.guard.parallel import plain_name, whole
from npt.guard.window import GradientWindow

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
        self._look(frozenset())

    def follow(self, window: GradientWindow) -> None:
        """Guard parameters too that have come to require a gradient, or to be stepped."""
        held = frozenset(window.gradients.parameters)
        joined = self._stepped_now().difference(window.update.parameters)
        if not joined and held.issuperset(p for p in self._watched if p.requires_grad):
            return
        named = self._look(held)
        window.update.extend({name: p for name, p in self.stepped.items() if p in joined})
        window.gradients.extend({name: p for name, p in named.items() if p not in held})
        window.gradients.clipped = tuple(self.clipped)

    def _look(self, held: Set[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Take in the parameters as they are now; return all whose gradients are held, by name.

        Those that were held stay, though they may be frozen at the moment.
        """
        stepped, named = self._stepped_now(), list(_named(self._trainable))
        names: dict[nn.Parameter, str] = {}  # in the order of clipping; tied weights are one
        for name, p in named:
            if p in stepped or p in held or (self._whole_norm and p.requires_grad):
                names.setdefault(p, name)
        clipped = list(names)
        for group, settings in enumerate(self._optimizer.param_groups):
            for place, p in enumerate(settings["params"]):
                if p in stepped or p in held:
                    names.setdefault(p, f"parameter {place} of the optimizer's group {group}")
        sharded = next((name for p, name in names.items() if _is_sharded(p)), None)
        if sharded is not None:
            raise ConfigError(
                f"{sharded} is sharded over processes, and a guard needs whole tensors; train with"
                " DDP or in one process"
            )
        self.stepped = {name: p for p, name in names.items() if p in stepped}
        self.clipped = clipped if self._whole_norm else list(names)
        # a large model's modules take longer to walk than a micro-batch's guard
        self._watched = [p for _, p in named] if self._whole_norm else []
        return {name: p for p, name in names.items()}

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
