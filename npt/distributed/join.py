"""Join the processes that a launcher started: `accelerate launch`, `torchrun`, MPI or srun."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from npt.base.device import default_device
from npt.distributed.processes import ProcessGroup
from npt.errors import ConfigError, ProcessError

TIMEOUT = 600.0
"""Seconds that a process waits for the others before it gives up."""

# Launchers' names for one number: torchrun's first (accelerate uses them too), then MPI's and
# srun's. SLURM_NTASKS is left out: a shell that salloc opened and a batch script have it too.
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")

_REMEDY = "start the processes with accelerate launch or torchrun"


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
    size = _number(environment, _SIZE, 1)
    if size < 2:
        _warn_of_one(environment)
        return ProcessGroup()
    index = _number(environment, _RANK, None)
    if not 0 <= index < size:
        raise ConfigError(f"{_RANK[0]} is {index} of {_SIZE[0]} {size}; {_REMEDY}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            counted = next(n for n in _SIZE if n in environment)
            remedy = _REMEDY
            if counted.startswith("SLURM"):
                remedy = (
                    "export MASTER_ADDR (a node of the job) and MASTER_PORT (a free port) before"
                    f" srun, or {_REMEDY}; for unrelated processes, export WORLD_SIZE=1"
                )
            raise ConfigError(f"{counted} is {size}, but {name} is not set; {remedy}")
    device = _own_device(environment, _number(environment, _LOCAL_RANK, index))
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
    if started and not any(name in environment for name in _SIZE):
        warnings.warn(
            "accelerate launch started one process, though it was set up for several: without GPUs"
            " it takes `accelerate launch --multi_gpu --num_processes N`, or torchrun"
            " --nproc_per_node N",
            stacklevel=3,
        )


def _number(environment: Mapping[str, str], names: tuple[str, ...], default: int | None) -> int:
    """Return the whole number in the first of these variables that is set."""
    found = next((name for name in names if name in environment), None)
    if found is None:
        if default is None:
            raise ConfigError(f"{_SIZE[0]} is set, but {names[0]} is not; {_REMEDY}")
        return default
    try:
        return int(environment[found])
    except ValueError as error:
        raise ConfigError(
            f"{found} is {environment[found]!r}, expected a whole number; the launcher sets it"
        ) from error


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
    found: dict[str, int] = {}
    first = ""
    for other in range(size):
        host, uuid = json.loads(store.get(f"npt/device/{other}"))
        first = uuid if other == 0 else first
        if bool(uuid) != bool(first):
            with_gpu, without = (0, other) if first else (other, 0)
            raise ConfigError(
                f"process {with_gpu} computes on a GPU and process {without} finds none that it can"
                " use; give every process a GPU, or set NPT_DEVICE=cpu for all of them"
            )
        if uuid and uuid in found:
            raise ConfigError(
                f"process {found[uuid]} and process {other} would share the GPU {uuid} of {host};"
                " start one process for each GPU, or show each process its own with"
                " CUDA_VISIBLE_DEVICES"
            )
        found[uuid] = other
