"""The parameters that a guard steps: those of the optimizer, by the names of their model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import nn

from npt.errors import ConfigError
from npt.guard.parallel import whole

Trainable = nn.Module | Mapping[str, nn.Parameter] | Iterable[Any]
"""A model, parameters by name, pairs of names and parameters, or parameters."""

IN_BACKWARD = frozenset({"Lomo", "AdaLomo", "LayerWiseDummyOptimizer"})
"""Classes of lomo_optim, and of transformers for GaLore and Apollo layer by layer."""


def stepped_parameters(
    trainable: Trainable, optimizer: torch.optim.Optimizer
) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters that require a gradient, by name.

    Raises:
        ConfigError: the optimizer or a parameter of it cannot be guarded.
    """
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
    stepped = _stepped(optimizer)
    names: dict[nn.Parameter, str] = {}  # in the order of clipping; tied weights are one
    for name, parameter in _named(trainable):
        if parameter in stepped:
            names.setdefault(parameter, name)
    found = {name: parameter for parameter, name in names.items()}
    missing = next(iter(stepped.difference(found.values())), None)
    if missing is not None:
        raise ConfigError(
            f"the optimizer has a parameter of shape {tuple(missing.shape)} that is not among the"
            " guard's; give the guard the model that the optimizer was made for"
        )
    sharded = next((name for name, parameter in found.items() if _is_sharded(parameter)), None)
    if sharded is not None:
        raise ConfigError(
            f"{sharded} is sharded over processes, and a guard needs whole tensors; train with DDP"
            " or in one process"
        )
    if not found:
        raise ConfigError("no parameter of the optimizer requires a gradient; nothing to guard")
    return found


def refuse_unguarded(optimizer: torch.optim.Optimizer, guarded: Set[nn.Parameter]) -> None:
    """Raise ConfigError if the optimizer has come to step a parameter that is not guarded."""
    new = next(iter(_stepped(optimizer) - guarded), None)
    if new is not None:
        raise ConfigError(
            f"the optimizer now steps a parameter of shape {tuple(new.shape)} that was added or"
            " unfrozen after the guard was made; make a new guard"
        )


def _stepped(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    return {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}


def _named(trainable: Trainable) -> Iterable[tuple[str, nn.Parameter]]:
    if isinstance(trainable, nn.Module):
        return whole(trainable).named_parameters()
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
