"""The memory that a calibration takes next to the model, by formula, and the device of its
matrices: the model's if they fit, else the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from npt.adapters.fit import format_layers
from npt.base.families import head_sizes
from npt.distill.logit_losses import LOGIT_CHUNK
from npt.errors import is_out_of_memory

HOST = torch.device("cpu")

SHARE = 0.9
"""Share of a GPU's free memory that is planned with: what is freed comes back in pieces."""

FACTOR_MATRICES = 12
"""[D, D] fp64 alive in `Cut.of`: two inputs, both roots, eigenvectors, products, and the workspace
of the eigendecomposition, more than two of them."""


@dataclass(frozen=True)
class Placement:
    """Devices that a calibration uses: for the matrices of all layers, and for those of one layer
    while they are factorised.
    """

    sums: torch.device = HOST
    factors: torch.device = HOST

    def __str__(self) -> str:
        """As `matrices on the host, factorisations on cuda:0`."""
        sums, factors = ("the host" if d == HOST else str(d) for d in (self.sums, self.factors))
        return f"matrices on {sums}, factorisations on {factors}"


@dataclass(frozen=True)
class Plan:
    """Bytes next to the model.

    Attributes:
        gram: of one [D, D] matrix in fp32.
        graph: of one batch through the teacher.
        sums: of the matrices of all layers, in which their directions find room later.
        factor: of the matrices of one layer while they are factorised.
    """

    gram: int
    graph: int
    sums: int
    factor: int

    def place(self, device: torch.device, free: int) -> Placement:
        """Return the first that fits into a GPU's `free` bytes: all on it, the factorisations
        alone, which the host is slowest at, or nothing.
        """
        if device.type != "cpu":
            for placement in (Placement(device, device), Placement(HOST, device)):
                if self.peak(device, placement) <= SHARE * free:
                    return placement
        return Placement()

    def peak(self, device: torch.device, placement: Placement) -> int:
        """Return the most bytes on the model's device."""
        kept = self.sums if placement.sums == device else 0
        factor = self.factor if placement.factors == device else self.gram
        return max(self.graph + (kept or self.gram), factor + kept)

    def announcement(
        self, device: torch.device, placement: Placement, free: int, layers: Sequence[int],
        tokens: int,
    ) -> str:  # fmt: skip
        """Return the line printed before the start: work, memory, and on which devices."""
        line = f"calibrating layers {format_layers(tuple(layers))} on {tokens:,} tokens,"
        line += f" {self.peak(device, placement) >> 20:,} MiB besides the base"
        if device == HOST:
            return line
        return f"{line}, of {free >> 20:,} MiB free on {device}; {placement}"


def plan(
    model: PreTrainedConfig, layers: Sequence[int], *, batch: tuple[int, int] = (8, 256)
) -> Plan:
    """Return the memory of a calibration of `layers`; `batch`: rows and length of the largest one.

    Of each layer the graph keeps two norms' inputs, q, k, v, attention's output and three of the
    MLP's, and of a converted one what is measured: a, and the gradient at h + a.
    """
    width, ffn, (rows, length) = model.hidden_size, model.intermediate_size, batch
    tokens, above = rows * length, model.num_hidden_layers - min(layers)
    heads, key_heads, head = head_sizes(model)
    layer = 2 * (width + head * (heads + key_heads)) + 3 * ffn
    logits = 5 * min(tokens * model.vocab_size, LOGIT_CHUNK)
    backward = tokens * (7 * width + 3 * ffn) + 2 * width * ffn
    graph = tokens * (above * layer + 2 * len(layers) * width) + max(logits, backward)
    return Plan(
        gram=4 * width**2,
        graph=4 * graph,
        sums=2 * 8 * width**2 * len(layers),
        factor=FACTOR_MATRICES * 8 * width**2,
    )


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process could allocate now, its allocator's unused ones included."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def or_on_host(
    act: Callable[[Placement], None], placement: Placement, say: Callable[[str], None]
) -> None:
    """Run `act`; if a device has no memory for it, say so in one line and run it on the host."""
    try:
        act(placement)
        return
    except (RuntimeError, MemoryError) as error:
        if placement == Placement() or not is_out_of_memory(error):
            raise
        lack = (str(error).strip() or type(error).__name__).splitlines()[0]
    # After the handler: until then the error keeps the frames alive, and these the tensors.
    gc.collect()
    release(placement.sums, placement.factors)
    host = Placement()
    say(f"calibration: out of memory ({lack[:160]}); begun again with {host}")
    act(host)


def release(*devices: torch.device) -> None:
    """Give a GPU's memory that is no longer used back to it."""
    if any(device.type == "cuda" for device in devices):
        torch.cuda.empty_cache()
