"""Measured memory, in bytes of live tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn

from npt.config import TrainConfig
from npt.doctor.measure import window_cost


def measure_window(model: Any, config: TrainConfig, samples: int, length: int) -> int:
    """Train the model's adapters on windows of random tokens; return the bytes alive at the highest
    moment, model and moments included.
    """
    held = storage_bytes(tensors_of(model))
    return held + window_cost(model, config, samples, length)[0]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; each counts once, and whole."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def tensors_of(*owners: Any) -> Iterator[Tensor]:
    """Yield once every tensor of modules, optimizers, dataclasses and containers, with the
    gradients and the statistics of packed weights.
    """
    seen: set[int] = set()
    waiting = list(owners)
    while waiting:
        owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, Tensor):
            yield owner
            if owner.is_leaf and owner.grad is not None:
                waiting.append(owner.grad)
        if isinstance(owner, dict):
            waiting += [*owner.keys(), *owner.values()]
        elif isinstance(owner, list | tuple | set | frozenset):
            waiting += list(owner)
        elif isinstance(owner, Tensor | nn.Module | torch.optim.Optimizer | QuantState) or (
            is_dataclass(owner) and not isinstance(owner, type)
        ):
            waiting += list(vars(owner).values())
