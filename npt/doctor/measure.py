"""Measure the memory and the time of a run's windows on this device."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import torch
from bitsandbytes.functional import QuantState
from torch import Tensor, nn
from torch._C._profiler import _EventType

from npt.adapters.attach import attach
from npt.batch import batch_from_tensors
from npt.config import TrainConfig
from npt.device import wait_for
from npt.distill.step import free_memory, student_guard, summed
from npt.distill.strategies import drive
from npt.doctor.plan import Workload
from npt.errors import is_out_of_memory
from npt.guard.guard import PlannedGuard
from npt.guard.window import IN_FLIGHT

# At lower levels the profiler prints its start and end. It reads the variable on first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def peak_bytes(call: Callable[[], object], device: torch.device | str) -> int:
    """Run `call` once and return by how many bytes the memory of live tensors rises.

    On a GPU the caching allocator measures this, on the CPU the profiler. On the CPU, memory that
    the call frees but did not allocate is not subtracted, so the figure can be too high, never too
    low.
    """
    device = torch.device(device)
    gc.collect()  # free reference cycles before measuring, not during it
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        baseline = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - baseline
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    totals = []
    waiting = list(profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        tag, details = event.typed
        if tag == _EventType.Allocation and details.device.type == device.type:
            totals.append(
                (event.start_time_ns, event.id, details.total_allocated, details.alloc_size)
            )
    if not totals:
        return 0
    # the profiler counts from an arbitrary total: that before the first allocation
    *_, first, size = min(totals)
    highest = max(total for *_, total, _ in totals)
    return max(0, highest - (first - size))


def measure_window(
    model: Any, config: TrainConfig, samples: int, length: int, teacher: Any = None
) -> tuple[int, float]:
    """Train on windows of random tokens, `samples` rows per micro-batch. Return the peak of live
    bytes, with model and moments, and the seconds of one window.
    """
    device = model.device
    held = storage_bytes(tensors_of(model, teacher))
    guards: list[PlannedGuard] = []
    shape = (config.gradient_accumulation_steps, samples, length)
    ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    batches = [batch_from_tensors(rows, torch.ones_like(rows)) for rows in ids]
    strategy = partial(drive, teacher=teacher)

    def window() -> None:
        for batch in batches:
            with guards[0].micro_batch(batch.tokens, batch.sample_ids, batch) as micro:
                sums = summed(model, strategy, batch, config)
                micro.loss = sums.loss
                micro.tokens = sums.tokens
                micro.report = sums.report
        guards[0].step()

    def first_windows() -> None:
        guards.append(student_guard(model, config, [config.learning_rate]))
        # as in a run, each window in flight keeps the state before it
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


def measured_windows(
    workload: Workload, model: Any, teacher: Any, limit: int | None
) -> Iterator[dict[str, Any]]:
    """Run windows of 1, 2, 4, ... samples per micro-batch, up to the workload's; yield each result.

    The last result has None as peak and seconds if its window does not fit. If the formula exceeds
    `limit` bytes the window is not run, because the operating system would kill the process.
    """
    config = workload.training
    attach(model, replace(workload.adapter, init="random", ranks=tuple(workload.ranks.values())))
    sizes = {2**power for power in range(config.batch_size.bit_length())}
    for samples in sorted({*sizes, config.batch_size}):
        smaller = replace(workload, training=replace(config, batch_size=samples))
        predicted = smaller.plan().of("micro-batch", "step")
        peak = None
        seconds = None
        if limit is None or predicted <= limit:
            try:
                peak, seconds = measure_window(model, config, samples, workload.length, teacher)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            free_memory(workload.device)
        yield {"samples": samples, "predicted": predicted, "peak": peak, "seconds": seconds}
        if peak is None:
            break


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, counting each whole storage once."""
    sizes: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            sizes[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def tensors_of(*owners: Any) -> Iterator[Tensor]:
    """Yield each tensor in modules, optimizers, dataclasses and containers once, with gradients and
    statistics of 4-bit weights.
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
            waiting += owner.keys()
            waiting += owner.values()
        elif isinstance(owner, list | tuple | set | frozenset):
            waiting += owner
        elif isinstance(owner, Tensor | nn.Module | torch.optim.Optimizer | QuantState) or (
            is_dataclass(owner) and not isinstance(owner, type)
        ):
            waiting += vars(owner).values()
