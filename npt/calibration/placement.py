"""The device that a calibration keeps its matrices and rows on: the model's if they fit, else the
host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from npt.errors import is_out_of_memory

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """Devices that a calibration uses: for the Gram matrices of all layers, for the matrices of one
    layer while they are factorised, and for the states of all tokens, which the host has in a
    temporary file.
    """

    sums: torch.device = HOST
    factors: torch.device = HOST
    rows: torch.device = HOST

    @classmethod
    def of(cls, device: torch.device, names: tuple[str, ...]) -> Placement:
        """Put the named ones on `device` and the others on the host."""
        return cls(**dict.fromkeys(names, device))

    @property
    def all_on_host(self) -> bool:
        return self == Placement()

    def __str__(self) -> str:
        """As `Gram matrices and factorisations on cuda:0, rows on disk`."""
        parts = {"Gram matrices": self.sums, "factorisations": self.factors, "rows": self.rows}
        found: dict[str, list[str]] = {}
        for name, device in parts.items():
            host = "disk" if name == "rows" else "the host"
            found.setdefault(host if device == HOST else str(device), []).append(name)
        return ", ".join(
            f"{' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))} on {place}"
            for place, names in found.items()
        )


PREFERENCES = (("sums", "factors", "rows"), ("sums", "factors"), ("factors", "rows"), ("factors",))
"""Choices of what is put on the model's device; the first that fits is taken. Rows on the host are
copied while the device computes; sums on the host cost the host's own time, factorisations there
most of all."""


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
    release(*{placement.sums, placement.factors, placement.rows})
    host = Placement()
    say(f"calibration: out of memory ({lack[:160]}); begun again with {host}")
    act(host)
    return host


def release(*devices: torch.device) -> None:
    """Give a GPU's memory that is no longer used back to it."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()
