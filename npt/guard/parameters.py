"""The parameters of a guard, by name, and the optimizer that steps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from npt.errors import ConfigError
from npt.guard.parallel import refuse_unfit, reshard, sharded_modules, whole
from npt.guard.refusal import UNGUARDED

IN_BACKWARD = frozenset({"Lomo", "AdaLomo", "LayerWiseDummyOptimizer"})
"""Classes of lomo_optim, and of transformers for layerwise GaLore and Apollo."""


@dataclass(frozen=True)
class Guarded:
    """The parameters of a guard.

    Attributes:
        held: by name, those whose gradients the guard checks and sums.
        stepped: by name, those of `held` that the optimizer steps.
        clipped: those of `held` whose norm is the window's, in the order in which it is summed.
    """

    held: dict[str, nn.Parameter]
    stepped: dict[str, nn.Parameter]
    clipped: tuple[nn.Parameter, ...]


def guarded_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, whole_norm: bool
) -> Guarded:
    """Return the parameters to guard: the optimizer's that require a gradient now.

    Names are those in the model; parameters outside it come last, named by their place in the
    optimizer. Tied weights count once.

    Args:
        whole_norm: the window's norm is that of all parameters of the model that require a
            gradient, stepped or not, and of no others.

    Raises:
        ConfigError: the optimizer, or one of its parameters, cannot be guarded.
    """
    if not IN_BACKWARD.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        raise ConfigError(
            f"{type(optimizer).__name__} steps inside backward, before a guard can check the"
            f" gradient; use a variant that is not layerwise, or AdamW, or {UNGUARDED}"
        )
    stepped = stepped_parameters(optimizer)
    if not stepped:
        raise ConfigError("no parameter of the optimizer requires a gradient: nothing to guard")
    reshard(sharded_modules(model))
    names: dict[nn.Parameter, str] = {}
    for name, p in whole(model).named_parameters():
        if id(p) in stepped or (whole_norm and p.requires_grad):
            names[p] = plain_name(name)
    # a Trainer's optimizer may have the parameters of its loss alone
    if not names and not whole_norm:
        raise ConfigError(
            "none of the optimizer's parameters is in the guard's model; pass the guard the model"
            " that the optimizer was made for"
        )
    in_model = tuple(names)
    for group, settings in enumerate(optimizer.param_groups):
        for index, p in enumerate(settings["params"]):
            if id(p) in stepped:
                names.setdefault(p, f"parameter {index} of the optimizer's group {group}")
    held = {name: p for p, name in names.items()}
    refuse_unfit(model, held)
    return Guarded(
        held=held,
        stepped={name: p for name, p in held.items() if id(p) in stepped},
        clipped=in_model if whole_norm else tuple(names),
    )


def stepped_parameters(optimizer: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """Return by `id` what an optimizer steps: torch hashes a tensor in Python, each time."""
    found: dict[int, nn.Parameter] = {}
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.requires_grad]
        found.update(zip(map(id, trained), trained, strict=True))
    return found


def unwrapped(
    optimizer: Any, divided: bool
) -> tuple[torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """Return torch's own optimizer, and the scaler, of one from `Accelerator.prepare`, or the only
    optimizer in a container of them, as torchtitan's.

    Raises:
        ConfigError: there are several optimizers, or accelerate divides losses by the window's
            size, but `divided` is False.
    """
    held = optimizer if isinstance(optimizer, list) else getattr(optimizer, "optimizers", None)
    if held is not None:
        if len(held) != 1:
            raise ConfigError(
                f"{type(optimizer).__name__} holds {len(held)} optimizers, and a guard steps one:"
                " make one with a parameter group in place of each"
            )
        (optimizer,) = held
    if type(optimizer).__module__.partition(".")[0] != "accelerate":
        return optimizer, None
    steps = optimizer.gradient_state.num_steps
    if steps > 1 and not divided:
        raise ConfigError(
            f"accelerate divides losses by gradient_accumulation_steps={steps}, but the guard"
            " divides by the survivors: leave it at 1, and call guard.step() after each window"
        )
    return optimizer.optimizer, optimizer.scaler


def plain_name(name: str) -> str:
    """Return the name in a model that was not compiled, and not wrapped by Fabric."""
    return name.replace("_orig_mod.", "").replace("_forward_module.", "")
