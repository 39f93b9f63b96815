"""DistributedDataParallel under a guard, which sums gradients itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
    """Send process 0's buffers, such as batch norm's statistics, to all processes.

    DistributedDataParallel does it in the first forward of a window, which `unsynchronised` leaves
    out. Every process must call it.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel) or not model.broadcast_buffers:
        return
    if model.modules_buffers:
        model._sync_buffers()
