"""The peak memory of a run, term by term.

The peak is at one of three moments: in a micro-batch, whose graph is alive; at an optimizer step,
while the state before it is kept until the new one is verified; or in an evaluation, which sees all
layers and the logits. Loading a base, `--init calibrated` and the process itself are left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PHASES = ("micro-batch", "step", "evaluation")
"""Moments of the peak."""

FP32 = 4
"""Bytes of a number of an adapter, its gradients and its moments."""


def shown(size: float) -> str:
    """Return bytes as `6.20 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"


@dataclass(frozen=True)
class Term:
    """Something that takes memory in some phases."""

    name: str
    bytes: int
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted memory of a run with so many samples at once in a micro-batch and an evaluation."""

    terms: tuple[Term, ...]
    samples_at_once: int
    evaluated_at_once: int

    def of(self, phase: str) -> int:
        """Return the bytes at the highest moment of a phase."""
        return sum(term.bytes for term in self.terms if phase in term.phases)

    @property
    def phase(self) -> str:
        """The phase with the peak."""
        return max(PHASES, key=self.of)

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.of(self.phase)

    @property
    def largest(self) -> Term:
        """The largest term of the peak."""
        return max((t for t in self.terms if self.phase in t.phases), key=lambda term: term.bytes)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "samples_at_once": self.samples_at_once,
            "evaluated_at_once": self.evaluated_at_once,
            "peak_bytes": self.peak,
            "phase": self.phase,
            "phases": {phase: self.of(phase) for phase in PHASES},
            "terms": [asdict(term) | {"phases": list(term.phases)} for term in self.terms],
        }


def state_terms(parameters: int, *, in_flight: int = 0) -> list[Term]:
    """Return what training holds of its trainable `parameters`, whatever the strategy. in_flight:
    steps at most whose results are not read yet, as on a GPU; the state before each is kept.
    """
    size = FP32 * parameters
    terms = [
        Term("adapters", size),
        Term("AdamW's two moments", 2 * size),
        Term("gradients of a micro-batch", size),
        Term("gradients of the window", size),
        Term("state before the step", 3 * size, ("step",)),
    ]
    if in_flight:
        terms.append(Term("states before steps in flight", in_flight * 3 * size))
    return terms


def available(device: torch.device) -> int | None:
    """Return the bytes that a run on this device could have now, None if nothing says it: free ones
    and on a GPU those of this process.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return int(found["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
