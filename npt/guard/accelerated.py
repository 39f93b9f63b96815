"""Optimizers that accelerate has prepared, without importing it."""

from __future__ import annotations

from typing import Any

import torch

from npt.errors import ConfigError


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
