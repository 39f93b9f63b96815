"""Measurements: the peak of live tensor memory in a call, and a run's own windows.

Memory is counted in bytes of live tensors, on every device alike; the size of the process also has
libraries and freed memory that the allocator keeps.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch._C._profiler import _EventType

from npt.base.device import wait_for
from npt.config import TrainConfig
from npt.data.batch import batch_from_tensors
from npt.distill.step import add_batch, student_guard, summed
from npt.distill.strategies import drive
from npt.guard.guard import Guard
from npt.guard.window import IN_FLIGHT

# The profiler announces its start and end on the terminal at any level below; it reads this at its
# first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def peak_bytes(call: Callable[[], object], device: torch.device | str) -> int:
    """Run `call` once and return by how many bytes the live tensor memory of a device rises.

    On a GPU the caching allocator counts. On the CPU every allocation of torch's allocator is
    followed, also inside operations and in backward; scratch memory that a library takes elsewhere
    is left out. Memory that was live before and is freed by the call is seen on a GPU only: on the
    CPU the peak is then too high by so much, and never too low.
    """
    device = torch.device(device)
    gc.collect()  # what only a cycle keeps alive would be freed at any moment
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        baseline = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - baseline
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    return _highest(profiler.kineto_results, device)


def measure_window(
    model: Any, config: TrainConfig, samples: int, length: int, teacher: Any = None
) -> tuple[int, float]:
    """Train windows of random tokens, `samples` of `length` a micro-batch; return the bytes of all
    that is alive at the highest moment, model and moments included, and the seconds of a window.

    Args:
        model: with adapters attached, which are trained.
    """
    device, held = next(model.parameters()).device, storage_bytes(tensors_of(model, teacher))
    shape = (config.gradient_accumulation_steps, samples, length)
    ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batches = [batch_from_tensors(rows, torch.ones_like(rows)) for rows in ids]
    compute = partial(summed, model, partial(drive, teacher=teacher), config=config)
    guards: list[Guard] = []

    def window() -> None:
        for batch in batches:
            add_batch(guards[0], batch, compute, model.config.vocab_size)
        guards[0].step()

    def first_windows() -> None:
        guards.append(student_guard(model, config, [config.learning_rate]))
        # each that is in flight, as in a run, keeps the state before it
        for _ in range(1 + IN_FLIGHT * guards[0].update.late):
            window()

    try:
        peak = held + peak_bytes(first_windows, device)
        wait_for(device)
        started = time.perf_counter()
        window()
        wait_for(device)
        return peak, time.perf_counter() - started
    finally:
        for guard in guards:
            guard.close()
        model.zero_grad()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; each counts once, and whole."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def tensors_of(*owners: Any) -> Iterator[Tensor]:
    """Yield every tensor that the owners hold, once: parameters and buffers of a module, packed
    weights' statistics, gradients, an optimizer's moments, fields of a dataclass, members of a
    container.
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
            waiting += vars(owner).values()
            if owner.is_leaf and owner.grad is not None:
                waiting.append(owner.grad)
        elif isinstance(owner, dict):
            waiting += [*owner.keys(), *owner.values()]
        elif isinstance(owner, list | tuple | set | frozenset):
            waiting += list(owner)
        elif isinstance(owner, nn.Module | torch.optim.Optimizer | QuantState) or (
            is_dataclass(owner) and not isinstance(owner, type)
        ):
            waiting += list(vars(owner).values())


def _highest(results: Any, device: torch.device) -> int:
    """Return the highest sum of what was allocated and not yet freed within a profile. Freeing
    what was there before counts for nothing.
    """
    events, waiting = [], list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        tag, details = event.typed
        if tag == _EventType.Allocation and details.device.type == device.type:
            events.append((event.start_time_ns, event.id, details.ptr, details.alloc_size))
    live: dict[int, int] = {}
    total = highest = 0
    for *_, address, size in sorted(events):
        if size > 0:
            live[address] = size
            total += size
            highest = max(highest, total)
        else:
            total -= live.pop(address, 0)
    return highest
