"""The peak memory of a run, term by term, and the sizes that it is written in.

A run stands at its peak in one of three places: in a micro-batch, whose graph is alive; at an
optimizer step, beside which the state before it is kept until the new one is verified; or in an
evaluation, which sees all layers and the logits. Each term is alive in some of them. Loading a
base, `--init calibrated` and what the process itself takes are in none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npt.adapters.fit import resolve_layers
from npt.config import NPTConfig
from npt.planning.shape import Shape

PHASES = ("micro-batch", "step", "evaluation")
"""Where the peak can be."""

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

FP32 = 4
"""Bytes of a number of an adapter, its gradients and its moments."""


def shown(size: float) -> str:
    """Bytes as `6.20 GiB`."""
    for unit, name in _UNITS:
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"


@dataclass(frozen=True)
class Term:
    """Something that takes memory. phases: those in which it is alive."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class MemoryPlan:
    """What a run is predicted to take.

    samples_at_once, evaluated_at_once: of a micro-batch and of an evaluation, that this is for.
    """

    terms: tuple[Term, ...]
    samples_at_once: int
    evaluated_at_once: int

    def of(self, phase: str) -> int:
        """Bytes at the highest moment of a phase."""
        return sum(term.bytes for term in self.terms if phase in term.phases)

    @property
    def phase(self) -> str:
        """In which the peak is."""
        return max(PHASES, key=self.of)

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.of(self.phase)

    @property
    def largest(self) -> Term:
        """The term that the peak has most of."""
        return max(
            (term for term in self.terms if self.phase in term.phases), key=lambda term: term.bytes
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "samples_at_once": self.samples_at_once,
            "evaluated_at_once": self.evaluated_at_once,
            "peak_bytes": self.peak,
            "phase": self.phase,
            "phases": {phase: self.of(phase) for phase in PHASES},
            "terms": [
                {"name": term.name, "bytes": term.bytes, "phases": list(term.phases)}
                for term in self.terms
            ],
        }


def state_terms(parameters: int, *, in_flight: int = 0) -> list[Term]:
    """What training holds of its adapters, whatever drives them.

    Args:
        parameters: trainable ones.
        in_flight: steps at most whose results are not read yet, as on a GPU: of each the state
            before it is kept until then.
    """
    size = FP32 * parameters
    terms = [
        Term("adapters", size),
        Term("AdamW's two moments", 2 * size),
        Term("gradients of a micro-batch", size),
        Term("gradients of the window", size),
        Term("state before the step", 3 * size, ("step",)),
    ]
    return (
        [*terms, Term("states before steps in flight", in_flight * 3 * size)]
        if in_flight
        else terms
    )


def adapter_numbers(shape: Shape, config: NPTConfig) -> int:
    """Trainable parameters: of every converted layer A [R, D], and for each target a B and an M [O,
    R], as far as the form has them.
    """
    terms = int(config.additive) + int(config.multiplicative)
    width = shape.hidden + terms * sum(shape.width(target) for target in config.targets)
    return width * sum(config.ranks_of(len(resolve_layers(config.layers, shape.layers))))


def available(device: torch.device) -> int | None:
    """Bytes that a run on this device could have now; None where nothing says it.

    On a GPU what is free there and what this process holds; else what the system says is free
    without swapping.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        lines = dict(
            line.split(":", 1)
            for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        )
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
