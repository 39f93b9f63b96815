"""The notable tensors of a record: not finite, exploded, largest gradients. Pure functions of it.

An explosion is seen before anything overflows: a tensor whose RMS is a thousand times that of the
tensor it was made from. In a Llama the first layers write the "massive activations" of its first
token (up to 2,600 in one channel, Sun et al. 2024, arXiv:2402.17762), which multiplies the RMS of a
stream that began near 0.02 by up to a few hundred over a short text; in the embedded model by 80.
Every other module of a trained model stays far below. fp16 ends at 65,504, so from values around 1
a thousandfold growth leaves room for one more warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from npt.recorder.record import Record, Row

FACTOR = 1000.0
"""Growth of the RMS from which on a tensor has exploded."""

_SMALL = 1.0
"""A tensor whose RMS stays below is no explosion, however little it grew from: a bias alone can do
that to a near-zero input.
"""


@dataclass(frozen=True)
class Explosion:
    """A tensor and the one it was made from: a module's output and input, the residual stream after
    and before a layer.
    """

    before: Row
    after: Row
    growth: float

    def __str__(self) -> str:
        return (
            f"{self.after.name} has RMS {self.after.rms:.3g}, {self.growth:.3g} times that of"
            f" {self.before.name}"
        )


def growths(record: Record) -> list[Explosion]:
    """Return how much every tensor grew from the one it was made from, largest first."""
    pairs = ((record.rows[row.source], row) for row in record.rows if row.source is not None)
    grown = [
        Explosion(before, after, after.rms / before.rms)
        for before, after in pairs
        if before.rms and after.rms is not None
    ]
    return sorted(grown, key=lambda growth: -growth.growth)


def explosions(record: Record, factor: float = FACTOR) -> list[Explosion]:
    """Return the tensors of a record whose RMS grew beyond `factor` (above 1), largest first.

    Compared are a module's output with its input, except in normalisations and embeddings, whose
    output says nothing of its size, and the residual stream from layer to layer. A module is left
    out if one inside it is in the list: it repeats that one.
    """
    grown = [g for g in growths(record) if g.growth > factor and (g.after.rms or 0.0) >= _SMALL]
    names = {growth.after.module for growth in grown}
    return [g for g in grown if not any(_contains(g.after.module, name) for name in names)]


def gradients(record: Record) -> list[Row]:
    """Return the gradients, largest norm first; before them those that are not finite, in the order
    of the backward pass.
    """
    rows = [row for row in record.rows if row.direction == "gradient"]
    return sorted(rows, key=lambda row: (row.finite, -(row.norm or 0.0) if row.finite else 0.0))


def worst(record: Record) -> str:
    """Return the worst of a record as a clause: a tensor that is not finite, else an explosion,
    else the largest gradient.
    """
    if record.bad:
        first = record.bad[0]
        name = f"gradient of {first.name}" if first.direction == "gradient" else first.name
        counts = f"{first.nan} NaN, {first.pos_inf} +Inf, {first.neg_inf} -Inf of {first.count}"
        return (
            f"{len(record.bad)} of {len(record.rows)} tensors are not finite, the first: {name}"
            f" ({counts})"
        )
    exploded = explosions(record)
    if exploded:
        more = f" ({len(exploded)} such)" if len(exploded) > 1 else ""
        return f"explosion: {exploded[0]}{more}"
    if not record.rows:
        return "nothing was computed"
    message = f"all {len(record.rows)} tensors finite, none exploded"
    for row in gradients(record)[:1]:
        message += f", largest gradient norm {row.norm or 0.0:.3g} of {row.name}"
    return message


def _contains(outer: str, inner: str) -> bool:
    return inner != outer and (outer == "" or inner.startswith(f"{outer}."))
