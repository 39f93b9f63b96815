"""A forecast of what a calibration takes, printed before it starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from npt.adapters.fit import format_layers
from npt.base.device import wait_for
from npt.calibration.placement import HOST, Placement
from npt.distill.logit_losses import LOGIT_CHUNK

OVERHEAD = 2.0
"""Time over that of the matrix products alone, as measured: activations and norms."""

SHARE = 0.9
"""Share of a GPU's free memory that is planned with: what is freed comes back in pieces."""

FACTOR_MATRICES = 12
"""[D, D] fp64 alive in `Cut.of`: two inputs, both roots, eigenvectors, products, and the workspace
of the eigendecomposition, more than two of them."""

_PROBE_ROWS, _PROBE_COLUMNS = 1024, 4096
_PROBE_SIDE = 512


@dataclass(frozen=True)
class Seconds:
    """A forecast: products on the model's device, factorisations on the device that makes them."""

    products: float
    factorisations: float

    @property
    def total(self) -> float:
        return self.products + self.factorisations


@dataclass(frozen=True)
class Plan:
    """A forecast of what a calibration takes in addition to the model.

    Bytes: `graph` of one batch through the teacher; `sums` of the matrices of all layers, in which
    their directions find room later; `factor` of the matrices of one layer while they are
    factorised.

    width: D. products: multiply-adds in all. factorisations: eigendecompositions of [D, D] fp64.
    """

    width: int
    products: float
    factorisations: int
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
        gram = 4 * self.width**2
        sums = self.sums if placement.sums == device else gram
        factor = self.factor if placement.factors == device else gram
        return max(self.graph + sums, factor + (self.sums if placement.sums == device else 0))

    def ram(self, device: torch.device, placement: Placement) -> int:
        """Return bytes on the host, those of the model's work included on a CPU."""
        if device.type == "cpu":
            return self.peak(device, placement)
        sums = self.sums if placement.sums == HOST else 0
        return sums + (self.factor if placement.factors == HOST else 0)

    def seconds(self, device: torch.device, placement: Placement) -> Seconds:
        """Time one product and one small eigendecomposition, and forecast the whole from them.

        An eigendecomposition is scaled with the cube of
        its side, which is too much on a GPU: a small one waits for launches.
        """
        width, columns = self.width, min(4 * self.width, _PROBE_COLUMNS)
        x = torch.ones(_PROBE_ROWS, width, device=device)
        w = torch.ones(width, columns, device=device)
        product = _fastest(lambda: x @ w, device, 10) / (_PROBE_ROWS * width * columns)
        side = min(width, _PROBE_SIDE)
        draw = torch.Generator().manual_seed(0)
        root = torch.randn(side, side, dtype=torch.float64, generator=draw).to(placement.factors)
        gram = root @ root.T
        eigh = _fastest(lambda: torch.linalg.eigh(gram), placement.factors, 2) * (width / side) ** 3
        return Seconds(OVERHEAD * self.products * product, self.factorisations * eigh)

    def announcement(
        self,
        device: torch.device,
        placement: Placement,
        free: int,
        layers: Sequence[int],
        tokens: int,
    ) -> str:
        """Return the line printed before the start: work, time, memory, and on which devices."""
        seconds = self.seconds(device, placement)
        parts = [
            f"calibrating layers {format_layers(tuple(layers))} on {tokens:,} tokens: about"
            f" {_duration(seconds.total)}"
        ]
        if seconds.factorisations >= 0.1 * seconds.total:
            parts.append(f"{_duration(seconds.factorisations)} of it eigendecompositions")
        if device != HOST:
            parts.append(
                f"{self.peak(device, placement) >> 20:,} of {free >> 20:,} MiB free on {device}"
            )
        parts.append(f"{self.ram(device, placement) >> 20:,} MiB of memory besides the base")
        return ", ".join(parts) + ("" if device == HOST else f"; {placement}")


def plan(
    model: PreTrainedConfig,
    layers: Sequence[int],
    tokens: int,
    *,
    batch: tuple[int, int] = (8, 256),
) -> Plan:
    """Forecast a calibration of `layers` on `tokens` tokens. batch: rows and length of the largest
    batch.
    """
    width, ffn, first = model.hidden_size, model.intermediate_size, min(layers)
    layer = 4 * width * width + 3 * width * ffn
    head = width * model.vocab_size
    # forward, and back through what lies above the first converted layer
    total = (2 * model.num_hidden_layers - first) * layer + 2 * head
    total += 2 * width**2 * len(layers)
    return Plan(
        width=width,
        products=float(total * tokens),
        factorisations=2 * len(layers),
        graph=_graph(model, model.num_hidden_layers - first, *batch),
        sums=2 * 8 * width**2 * len(layers),
        factor=FACTOR_MATRICES * 8 * width**2,
    )


def _graph(model: PreTrainedConfig, layers: int, rows: int, length: int) -> int:
    """Return bytes of a batch's graph through the last `layers` layers, with gradients and logits.

    The factors are counts of fp32 states that were measured on small models. Attention weights are
    included, which only the kernel for shared heads in fp32 keeps.
    """
    width, ffn, tokens = model.hidden_size, model.intermediate_size, rows * length
    layer = 5 * width + 3 * ffn + 2 * model.num_attention_heads * length
    logits = 5 * min(tokens * model.vocab_size, LOGIT_CHUNK)
    return 4 * (tokens * (layers * layer + 7 * width + 3 * ffn) + logits + 2 * width * ffn)


def _fastest(act: Callable[[], object], device: torch.device, times: int) -> float:
    best = float("inf")
    for _ in range(times):
        wait_for(device)
        started = time.perf_counter()
        act()
        wait_for(device)
        best = min(best, time.perf_counter() - started)
    return best


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
