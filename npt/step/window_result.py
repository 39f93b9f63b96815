"""The result of a window of micro-batches: refusals, figures, and a record of each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

Snapshot = dict[str, tuple[Tensor, dict[str, Any]]]
"""By parameter name, a copy of the parameter and of all that the optimizer keeps for it."""


class Sums(Protocol):
    """Sums over the tokens of one micro-batch. report: [n] figures wanted with the result."""

    @property
    def loss(self) -> Tensor: ...

    @property
    def tokens(self) -> int: ...

    @property
    def report(self) -> Tensor: ...


S = TypeVar("S", bound=Sums)

SHOWN_ROWS = 4
"""Rows of a refused micro-batch that its message describes."""


@dataclass(frozen=True)
class Refusal:
    """One refused micro-batch or step: its fault and its place.

    kind: `data` (refused before any computation), `loss` or `gradient`; for a whole window `norm`,
    `spike` or `update` (parameters or moments after the step). micro_batch: index in the window
    over all processes, None for a whole window. process: the process that computed it. tensor: the
    first that was not finite, by name, or of finite gradients that are too large the largest. rows:
    a line about each of its rows, if they are known.
    """

    kind: str
    detail: str
    micro_batch: int | None = None
    sample_ids: tuple[str, ...] = ()
    process: int = 0
    tensor: str | None = None
    rows: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as events and post-mortems store it: the process as `rank`, the tensor in
        `detail` alone.
        """
        values = asdict(self)
        process = values.pop("process")
        del values["tensor"]
        if not self.rows:
            del values["rows"]
        return {**values, "rank": process}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Refusal:
        """Return what `as_dict` gave."""
        names = {**values, "sample_ids": tuple(map(str, values["sample_ids"]))}
        names["rows"] = tuple(map(str, values.get("rows", ())))
        process = names.pop("rank")
        return cls(**names, process=process)

    def __str__(self) -> str:
        where = (
            "the whole window" if self.micro_batch is None else f"micro-batch {self.micro_batch}"
        )
        where += f" on process {self.process}" if self.process else ""
        samples = f" (samples {', '.join(self.sample_ids)})" if self.sample_ids else ""
        return f"{where}{samples}: {self.kind}: {self.detail}{self._shown_rows()}"

    def _shown_rows(self) -> str:
        """Return the lines about the first rows, each with its name."""
        names: Sequence[str] = [f"row {i}" for i in range(len(self.rows))]
        if len(self.sample_ids) == len(self.rows):
            names = [f"sample {name}" for name in self.sample_ids]
        pairs = list(zip(names, self.rows, strict=True))
        said = [f"{name}: {line}" for name, line in pairs[:SHOWN_ROWS] if line]
        said += [f"{len(pairs) - SHOWN_ROWS} rows more"] if len(pairs) > SHOWN_ROWS else []
        return "".join(f"; {line}" for line in said)


@dataclass(frozen=True)
class MicroBatchRecord:
    """The mean loss and gradient norm of a micro-batch, refused or not, for a post-mortem."""

    window: int
    micro_batch: int
    sample_ids: tuple[str, ...]
    loss: float
    grad_norm: float


@dataclass
class WindowResult(Generic[S]):
    """The outcome of a window.

    index: of the window. micro_batches: their number, including refused ones. steps: applied steps
    so far, including this one. rate: learning rate of the step. loss, grad_norm: mean per surviving
    token, and before clipping; None without survivors. survivors: sums of the micro-batches that
    counted, in order. places: their indices in the window. reports: the `report` of each survivor,
    already on the host. limits: of the spike guard when it decided. snapshot: the state before the
    window, if something was refused and the state may have changed since. update: of the optimizer,
    to take it back as long as no later one was made; it holds copies. halts: by process, the
    code with which it stopped the window; the window is then void.

    With several processes all figures are over all of them, except `survivors`, `places` and
    `reports`.
    """

    index: int
    micro_batches: int
    applied: bool
    steps: int
    tokens: int
    rate: float
    loss: float | None
    grad_norm: float | None
    survivors: list[S] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    reports: list[list[float]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    limits: tuple[float, float] = (math.inf, math.inf)
    snapshot: Snapshot | None = None
    update: Any = None
    halts: dict[int, int] = field(default_factory=dict)

    def bad_in_a_row(self, before: int, places: Iterable[int] | None = None) -> tuple[int, int]:
        """Return the longest run of refusals up to this window's end, and the one still open there.

        A micro-batch that counted ends a run; in a window refused as a whole, none counted.

        Args:
            before: the length of the run that was open when the window began.
            places: of the micro-batches that counted, on all processes; default all that were not
                refused. Processes whose numbers of micro-batches differ need it.
        """
        if not self.applied:
            return before + len(self.refusals), before + len(self.refusals)
        bad = {r.micro_batch for r in self.refusals if r.micro_batch is not None}
        longest = run = before
        for index in range(self.micro_batches) if places is None else sorted({*places, *bad}):
            run = run + 1 if index in bad else 0
            longest = max(longest, run)
        return longest, run


def first_bad(norms: Tensor, names: Sequence[str]) -> str | None:
    """Return the first of a gradient's tensors that is not finite; norms: [P]."""
    return next(
        (name for name, norm in zip(names, norms.tolist(), strict=True) if not math.isfinite(norm)),
        None,
    )


def worst(norms: Tensor, names: Sequence[str]) -> str:
    """Return the first of a gradient's tensors that is not finite, or the largest; norms: [P]."""
    return first_bad(norms, names) or names[int(norms.argmax())]


def describe_norms(norms: Tensor, names: Sequence[str]) -> str:
    """Return which of a gradient's tensors is not finite, in words; norms: [P]."""
    values = norms.tolist()
    bad = [(n, v) for n, v in zip(names, values, strict=True) if not math.isfinite(v)]
    if not bad:
        return (
            f"every tensor's own norm is finite (largest {max(values):.3g}, of"
            f" {worst(norms, names)}), their sum of squares overflows"
        )
    return f"gradient of {bad[0][0]} has norm {bad[0][1]} ({len(bad)} of {len(values)} tensors)"
