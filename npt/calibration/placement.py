"""The device that a calibration keeps its matrices on: the model's if they fit, else the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from npt.errors import is_out_of_memory

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """Devices that a calibration uses: for the matrices of all layers, and for those of one layer
    while they are factorised.
    """

    sums: torch.device = HOST
    factors: torch.device = HOST

    @property
    def all_on_host(self) -> bool:
        return self == Placement()

    def __str__(self) -> str:
        """As `matrices on the host, factorisations on cuda:0`."""
        sums, factors = ("the host" if d == HOST else str(d) for d in (self.sums, self.factors))
        return f"matrices on {sums}, factorisations on {factors}"


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process could allocate now, its allocator's unused ones included."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def or_on_host(
    act: Callable[[Placement], None], placement: Placement, say: Callable[[str], None]
) -> Placement:
    """Run `act`; if a device has no memory for it, say so in one line and run it on the host.

    Returns:
        The placement that it ran in.
    """
    try:
        act(placement)
        return placement
    except (RuntimeError, MemoryError) as error:
        if placement.all_on_host or not is_out_of_memory(error):
            raise
        lack = (str(error).strip() or type(error).__name__).splitlines()[0]
    # After the handler: until then the error keeps the frames alive, and these the tensors.
    gc.collect()
    release(placement.sums, placement.factors)
    host = Placement()
    say(f"calibration: out of memory ({lack[:160]}); begun again with {host}")
    act(host)
    return host


def release(*devices: torch.device) -> None:
    """Give a GPU's memory that is no longer used back to it."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()
