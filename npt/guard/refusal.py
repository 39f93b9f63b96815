"""What was refused and why, in words, on one process or across all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

UNGUARDED = "train unguarded with callbacks=[npt.guard.Report()], which logs faults"

IN_LOSS = 1
IN_GRADIENT = 2
BEFORE = 4
"""Codes for what is wrong with a micro-batch on one process, if backward sums gradients."""


@dataclass(frozen=True)
class Refusal:
    """A refused micro-batch or window.

    Attributes:
        kind: `data` (refused before any computation), `error`, `loss`, `gradient` or `buffer`; for
            a whole window `norm`, `spike`, `update` (parameters or moments after the step) or
            `card`.
        detail: the reason in words.
        micro_batch: its index in the window over all processes; None for a whole window.
        sample_ids: the ids of its samples.
        process: the process that computed it.
        tensor: the name of the first non-finite tensor, or, if all are finite, of the largest
            gradient.
    """

    kind: str
    detail: str
    micro_batch: int | None = None
    sample_ids: tuple[str, ...] = ()
    process: int = 0
    tensor: str | None = None

    @property
    def overflowed(self) -> bool:
        """Whether gradients were not finite and the loss was, as under too high a loss scale."""
        return self.kind == "gradient"

    def as_dict(self) -> dict[str, object]:
        """Return it for events and post-mortems. They store the process as `rank`, and name the
        tensor only in `detail`.
        """
        values = asdict(self)
        process = values.pop("process")
        del values["tensor"]
        return {**values, "rank": process}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Refusal:
        """Return the refusal that `as_dict` stored, in this or an earlier version."""
        names = tuple(map(str, values["sample_ids"]))
        kind, detail, index = (values[key] for key in ("kind", "detail", "micro_batch"))
        return cls(kind, detail, index, names, values["rank"])

    def __str__(self) -> str:
        where = (
            "the whole window" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        )
        where += f" on process {self.process}" if self.process else ""
        samples = f" (samples {', '.join(self.sample_ids)})" if self.sample_ids else ""
        return f"{where}{samples}: {self.detail}"


def describe_norms(norms: Tensor, names: Sequence[str]) -> tuple[str, str]:
    """Name and describe the first gradient whose norm in [P] is not finite, or the largest."""
    values = norms.tolist()
    bad = [value for value in values if not math.isfinite(value)]
    value = bad[0] if bad else max(values)
    name = next(n for n, v in zip(names, values, strict=True) if v is value)
    if bad:
        return name, f"gradient of {name} has norm {value} ({len(bad)} of {len(values)} tensors)"
    return name, (
        f"every tensor's norm is finite (largest {value:.3g}, of {name}), but their sum of squares"
        " overflows"
    )
