"""Join the processes that torchrun, `accelerate launch` or another launcher started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from npt.device import default_device
from npt.distributed.processes import ProcessGroup, is_joined
from npt.errors import ConfigError, ProcessError

TIMEOUT = 600.0
"""Seconds that a process waits for the others before it stops."""


def join_processes(timeout: float = TIMEOUT) -> ProcessGroup:
    """Return the processes that the launcher started, or those of torch's existing process group.

    Args:
        timeout: seconds to wait for another process, now and at every exchange.

    Raises:
        ConfigError: two processes share a GPU, or only some have one.
        ProcessError: not all processes joined in time.
    """
    if is_joined():
        device = default_device()
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return ProcessGroup.of_torch(device)
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return ProcessGroup()
    device = _own_device()
    # gloo even on GPUs, for what the hosts exchange
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise ProcessError(
            f"process {os.environ.get('RANK')} did not join the {os.environ['WORLD_SIZE']}"
            f" processes of the run within {timeout:g} s: {str(error).splitlines()[0][:200]}; start"
            " them with torchrun or accelerate launch"
        ) from error
    processes = ProcessGroup.of_torch(device, owned=True)
    # by uuid, since a process may be shown its GPU alone, as number 0
    own = None
    if device.type == "cuda":
        own = str(torch.cuda.get_device_properties(device).uuid)
    gpus = processes.gather(own)
    distinct = {gpu for gpu in gpus if gpu is not None}
    if distinct and len(distinct) < processes.size:
        processes.close()
        raise ConfigError(
            f"the processes use the GPUs {', '.join(map(str, gpus))}; start one process per GPU,"
            " give each its own with CUDA_VISIBLE_DEVICES, or set NPT_DEVICE=cpu for all"
        )
    return processes


def _own_device() -> torch.device:
    """Return this process's own GPU, or the CPU if there is none or accelerate asks for it.

    A launcher may show each process only its own GPU.
    """
    forced = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    if forced or default_device().type == "cpu":
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    count = torch.cuda.device_count()
    index = int(rank) if count > 1 else 0
    if index >= count:
        raise ConfigError(
            f"process {rank} of this machine has no GPU of its own, since there are {count}; start"
            f" at most {count} here"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
