"""Measurements: the peak of live tensor memory in a call, and the speed of plain matrix products.

Memory is counted in bytes of live tensors, on every device alike; the size of the process also has
libraries and freed memory that the allocator keeps.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensor

from npt.base.device import wait_for

# The profiler announces its start and end on the terminal at any level below; it reads this at its
# first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

ROOFLINE_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Sides of the square products, by the device's type: large enough that only arithmetic counts."""


@dataclass(frozen=True)
class Peak:
    """Bytes of live tensors on one device: as a call began, and at its highest moment in all."""

    baseline: int
    peak: int

    @property
    def added(self) -> int:
        """Bytes that the call itself needed."""
        return self.peak - self.baseline


def peak_bytes(call: Callable[[], object], device: torch.device | str) -> Peak:
    """Run `call` once and measure how high the live tensor memory of a device rises.

    On a GPU the caching allocator counts. On the CPU every allocation of torch's allocator is
    followed, also inside operations and in backward; scratch memory that a library takes elsewhere
    is in neither figure. Memory that was live before and is freed by the call is seen on a GPU
    only: on the CPU the peak is then too high by so much, and never too low.
    """
    device = torch.device(device)
    gc.collect()  # what only a cycle keeps alive would be freed at any moment
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        baseline = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return Peak(baseline, torch.cuda.max_memory_allocated(device))
    baseline = live_bytes(device)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    return Peak(baseline, baseline + _highest(profiler.kineto_results, device))


def live_bytes(device: torch.device | str) -> int:
    """Return the bytes of all tensors that Python knows of on a device: none that only a graph
    keeps, but gradients, which are no Python objects until they are read.
    """
    kind = torch.device(device).type
    found = (o for o in gc.get_objects() if issubclass(type(o), Tensor))
    return storage_bytes(t for o in found for t in (o, *_gradient(o)) if t.device.type == kind)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages; each counts once, and whole."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if (
            tensor.layout == torch.strided
            and tensor.device.type != "meta"
            and not isinstance(tensor, FakeTensor)
        ):
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
            waiting += [*vars(owner).values(), *_gradient(owner)]
        elif isinstance(owner, dict):
            waiting += [*owner.keys(), *owner.values()]
        elif isinstance(owner, list | tuple | set | frozenset):
            waiting += list(owner)
        elif isinstance(owner, nn.Module | torch.optim.Optimizer | QuantState) or (
            is_dataclass(owner) and not isinstance(owner, type)
        ):
            waiting += list(vars(owner).values())


@dataclass(frozen=True)
class Roofline:
    """The highest speed of a plain matrix product, and the side of the matrices that reached it."""

    flops_per_second: float
    size: int


def matmul_roofline(
    device: torch.device | str, *, sizes: Iterable[int] | None = None, seconds: float = 1.0
) -> Roofline:
    """Measure the speed that this device reaches, as it is set up now (threads, TF32), on square
    fp32 products of `sizes`, each for `seconds` and three times at least. The best is taken: other
    work can only make one slower.
    """
    device = torch.device(device)
    best = Roofline(0.0, 0)
    for size in ROOFLINE_SIZES[device.type] if sizes is None else sizes:
        a, b = (torch.randn(size, size, device=device) for _ in range(2))
        out = torch.empty_like(a)
        spent: list[float] = []
        while len(spent) < 4 or sum(spent) < seconds:
            wait_for(device)
            started = time.perf_counter()
            torch.mm(a, b, out=out)
            wait_for(device)
            spent.append(time.perf_counter() - started)
        speed = 2 * size**3 / min(spent[1:])  # the first one also finds its kernel
        best = max(best, Roofline(speed, size), key=lambda found: found.flops_per_second)
    return best


def _gradient(tensor: Tensor) -> list[Tensor]:
    return [tensor.grad] if tensor.is_leaf and tensor.grad is not None else []


def _highest(results: Any, device: torch.device) -> int:
    """Return the highest sum of what was allocated and not yet freed within a profile. Freeing
    what was there before counts for nothing.
    """
    found, waiting = [], list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        tag, details = event.typed
        if tag == _EventType.Allocation and details.device.type == device.type:
            found.append((event.start_time_ns, event.id, details.ptr, details.alloc_size))
    live: dict[int, int] = {}
    total = highest = 0
    for *_, address, size in sorted(found):
        if size > 0:
            live[address] = size
            total += size
            highest = max(highest, total)
        else:
            total -= live.pop(address, 0)
    return highest
