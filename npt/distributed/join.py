"""Join the processes that a launcher started: torchrun, `accelerate launch` or any that sets
torch's variables.
"""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from npt.adapters.converted import viewed
from npt.base.device import default_device
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ProcessError

TIMEOUT = 600.0
"""Seconds that a process waits for the others before it gives up."""

_VARIABLES = ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")


SHARDED_OVER = "_npt_processes"
"""Attribute of a model whose base is sharded: the processes that share it."""


def processes_of(model: nn.Module) -> ProcessGroup | None:
    """Return the processes that a base is sharded over, or None."""
    return getattr(viewed(model), SHARDED_OVER, None)


def join_processes(
    timeout: float = TIMEOUT, environment: Mapping[str, str] | None = None
) -> ProcessGroup:
    """Return the processes that the launcher started; a process group of torch's is taken as it is.

    timeout: seconds to wait for another process, now and at every sum. ConfigError if the
    launcher's variables do not fit together or two processes would share a GPU, ProcessError if
    not all processes came.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return ProcessGroup()
        on_gpu = default_device().type == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
        return ProcessGroup(dist.get_rank(), dist.get_world_size(), torch.device(device))
    environment = os.environ if environment is None else environment
    if environment.get("WORLD_SIZE", "1") == "1":
        _warn_of_one(environment)
        return ProcessGroup()
    missing = [name for name in _VARIABLES if name not in environment]
    try:
        size, index = int(environment["WORLD_SIZE"]), int(environment.get("RANK", "-1"))
        local_rank = int(environment.get("LOCAL_RANK", index))
    except ValueError as error:
        raise ConfigError(f"WORLD_SIZE, RANK and LOCAL_RANK are whole numbers: {error}") from error
    if missing or not 0 <= index < size:
        lacks = f"{missing[0]} is not set" if missing else f"RANK is {index}"
        raise ConfigError(
            f"WORLD_SIZE is {size}, but {lacks}; start the processes with torchrun or accelerate"
            " launch"
        )
    device = _own_device(environment, local_rank)
    limit = timedelta(seconds=timeout)
    try:
        store, index, size = next(dist.rendezvous("env://", index, size, timeout=limit))
        store = dist.PrefixStore("npt", store)
        _check_devices(store, index, size, device)
        backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        dist.init_process_group(backend, store=store, rank=index, world_size=size, timeout=limit)
    except ConfigError:
        raise
    except (RuntimeError, ValueError) as error:
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        raise ProcessError(
            f"process {index} did not meet the {size - 1} other processes at {where} within"
            f" {timeout:g} s: {str(error).splitlines()[0][:200]}"
        ) from error
    return ProcessGroup(index, size, device, owned=True)


def _warn_of_one(environment: Mapping[str, str]) -> None:
    started = {"MASTER_ADDR", "ACCELERATE_MIXED_PRECISION"} <= set(environment)
    if started and "WORLD_SIZE" not in environment:
        warnings.warn(
            "accelerate launch started one process, though it was set up for several: without GPUs"
            " it takes `accelerate launch --multi_gpu --num_processes N`, or torchrun"
            " --nproc_per_node N",
            stacklevel=3,
        )


def _own_device(environment: Mapping[str, str], local_rank: int) -> torch.device:
    """Return this process's GPU on its machine, or the CPU if it has none or accelerate asks.

    A launcher may show each process one GPU, its own; `_check_devices` tells that from several
    processes on the only GPU.
    """
    forced = environment.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if forced or default_device().type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU of its own, there are {count}; start"
            f" at most {count} here"
        )
    index = local_rank if count > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _check_devices(store: dist.Store, process: int, size: int, device: torch.device) -> None:
    """Refuse processes that share a GPU or mix GPUs with CPUs, alike on every process."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    store.set(f"npt/device/{process}", json.dumps([socket.gethostname(), uuid]))
    users: dict[str, int] = {}
    for other in range(size):
        host, uuid = json.loads(store.get(f"npt/device/{other}"))
        if users and bool(uuid) == ("" in users):
            with_gpu, without = (other, 0) if uuid else (0, other)
            raise ConfigError(
                f"process {with_gpu} computes on a GPU and process {without} finds none that it can"
                " use; give every process a GPU, or set NPT_DEVICE=cpu for all of them"
            )
        if uuid and uuid in users:
            raise ConfigError(
                f"process {users[uuid]} and process {other} would share the GPU {uuid} of {host};"
                " start one process for each GPU, or show each process its own with"
                " CUDA_VISIBLE_DEVICES"
            )
        users[uuid] = other
