"""Find the notable tensors of a record: non-finite ones, explosions, the largest gradients.

An explosion shows before anything overflows: the RMS of a tensor is 1,000 times that of the tensor
it was made from. In a Llama, the first layers write the "massive activations" of the first token
(up to 2,600 in one channel, Sun et al. 2024, arXiv:2402.17762). Over a short text they multiply an
RMS near 0.02 by up to a few hundred; in the embedded model by 80. Every other module of a trained
model stays far below. fp16 overflows at 65,504, so a tensor near 1 is reported in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from npt.recorder.record import Record, Row

FACTOR = 1000.0
"""A tensor whose RMS grew by more than this has exploded."""

_SMALL = 1.0
"""A tensor with a smaller RMS has not exploded: a bias alone can make a near-zero input grow."""


@dataclass(frozen=True)
class Explosion:
    """A tensor and the one it was made from, such as a module's output and input."""

    before: Row
    after: Row
    growth: float

    def __str__(self) -> str:
        return (
            f"{self.after.name} has RMS {self.after.rms:.3g}, {self.growth:.3g} times that of"
            f" {self.before.name}"
        )


def growths(record: Record) -> list[Explosion]:
    """Return the growth of every tensor from the one it was made from, largest first."""
    pairs = ((record.rows[row.source], row) for row in record.rows if row.source is not None)
    grown = [
        Explosion(before, after, after.rms / before.rms)
        for before, after in pairs
        if before.rms and after.rms is not None
    ]
    return sorted(grown, key=lambda growth: -growth.growth)


def explosions(record: Record, factor: float = FACTOR) -> list[Explosion]:
    """Return the tensors of a record whose RMS grew by more than `factor` (above 1), largest growth
    first.

    Compares each module's output with its input, and the residual stream from layer to layer. Skips
    normalisations and embeddings, whose output does not scale with their input, and modules that
    contain another module in the list.
    """
    grown = [g for g in growths(record) if g.growth > factor and (g.after.rms or 0.0) >= _SMALL]
    names = {growth.after.module for growth in grown}
    return [growth for growth in grown if not _contains(growth.after.module, names)]


def gradients(record: Record) -> list[Row]:
    """Return the gradients: the non-finite ones in the order of the backward pass, then the others,
    largest norm first.
    """
    rows = [row for row in record.rows if row.direction == "gradient"]
    finite = [row for row in rows if row.finite]
    finite.sort(key=lambda row: -(row.norm or 0.0))
    return [row for row in rows if not row.finite] + finite


def worst_rows(record: Record, most: int = 10) -> list[Row]:
    """Return the worst tensors of a record, at most `most`: the non-finite ones in the order of the
    pass, then explosions, then the values and gradients nearest to the overflow of their dtype. A
    tensor counts once, under its first name: an input is the output of another module.
    """
    made = [row for row in record.rows if "float" in row.dtype and not row.stage.startswith("in")]
    made.sort(key=lambda row: -(row.absmax or 0.0) / torch.finfo(getattr(torch, row.dtype)).max)
    exploded = [explosion.after for explosion in explosions(record)]
    found: dict[tuple[object, ...], Row] = {}
    for row in (*record.bad, *exploded, *made):
        found.setdefault((row.direction, row.nan, row.min, row.max), row)
    return [*found.values()][:most]


def worst(record: Record) -> str:
    """Describe the worst tensor of a record: the first non-finite one, else the largest explosion,
    else the largest gradient.
    """
    if record.bad:
        first = record.bad[0]
        share = f"{len(record.bad)} of {len(record.rows)}"
        return f"{share} tensors are not finite; the first is {first.title} ({first.faults})"
    exploded = explosions(record)
    if exploded:
        more = f" ({len(exploded)} in all)" if len(exploded) > 1 else ""
        return f"explosion: {exploded[0]}{more}"
    if not record.rows:
        return "no tensor was recorded"
    message = f"all {len(record.rows)} tensors finite, none exploded"
    for row in gradients(record)[:1]:
        message += f", largest gradient norm {row.norm or 0.0:.3g} of {row.name}"
    return message


def _contains(module: str, others: Iterable[str]) -> bool:
    """Return whether the module contains another of these; "" is the model itself."""
    inside = f"{module}." if module else ""
    return any(other != module and other.startswith(inside) for other in others)
