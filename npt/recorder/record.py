"""The health of a model's tensors in one pass, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["forward", "gradient"]


@dataclass(frozen=True)
class Row:
    """One tensor at one point of the pass.

    Statistics cover the finite elements and are None if there are none.

    Attributes:
        module: dotted name of its module, empty for the model itself.
        layer: index of its decoder layer, None outside the layers.
        stage: its role in the module, such as `out`, `in`, `m_gate`, `weight`.
        direction: the forward value, or its gradient.
        count: number of elements.
        finite_share: in [0, 1].
        saturation: share of multipliers within a hundredth of their bounds.
        update_ratio: RMS of the addition to the residual stream over the RMS of the stream.
        source: index of the row that this tensor was made from, if their sizes are comparable.
    """

    module: str
    layer: int | None
    stage: str
    direction: Direction
    shape: tuple[int, ...]
    dtype: str
    count: int
    finite_share: float
    nan: int
    pos_inf: int
    neg_inf: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    rms: float | None
    absmax: float | None
    saturation: float | None = None
    update_ratio: float | None = None
    source: int | None = None

    @property
    def name(self) -> str:
        """The module and the stage in it: `model.layers.3.mlp.gate_proj out`."""
        return f"{self.module} {self.stage}".strip()

    @property
    def title(self) -> str:
        """The name, also of a gradient."""
        return f"gradient of {self.name}" if self.direction == "gradient" else self.name

    @property
    def faults(self) -> str:
        """How many elements are not finite."""
        return f"{self.nan} NaN, {self.pos_inf} +Inf, {self.neg_inf} -Inf of {self.count}"

    def __str__(self) -> str:
        """The name, shape and dtype, and what the numbers are, in one line."""
        said = f"{self.title}: {self.dtype} {list(self.shape)}"
        if not self.finite:
            said += f", {self.faults}"
        if self.rms is None:
            return said if self.count else f"{said}, no elements"
        finite = ", otherwise" if not self.finite else ","
        spread = f"mean {self.mean:.3g}, deviation {self.std:.3g}, RMS {self.rms:.3g}"
        return f"{said}{finite} {self.min:.3g} to {self.max:.3g}, {spread}"

    @property
    def cell(self) -> tuple[str, str]:
        """Row and column on a map by layers: `model.layers.3` and `mlp.gate_proj out`. The loss, an
        output of the whole model, has a row of its own.
        """
        if not self.module and self.stage == "out.loss":
            return "loss", "out"
        parts = self.module.split(".")
        if self.layer is None or str(self.layer) not in parts:
            return self.module, self.stage
        depth = parts.index(str(self.layer)) + 1
        return ".".join(parts[:depth]), f"{'.'.join(parts[depth:])} {self.stage}".strip()

    @property
    def finite(self) -> bool:
        """True if no element is NaN or Inf."""
        return self.nan == self.pos_inf == self.neg_inf == 0

    @property
    def norm(self) -> float | None:
        """Euclidean norm of the finite elements."""
        finite = self.count - self.nan - self.pos_inf - self.neg_inf
        return None if self.rms is None else self.rms * finite**0.5


@dataclass(frozen=True)
class Record:
    """All rows of one recorded step, in the order of the pass.

    Attributes:
        micro_batch: index in the step's window.
    """

    step: int
    rows: tuple[Row, ...]
    micro_batch: int = 0

    @property
    def bad(self) -> list[Row]:
        """The rows with NaN or Inf; the first is closest to the cause."""
        return [row for row in self.rows if not row.finite]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON and `from_dict`."""
        return {**vars(self), "rows": [dict(vars(row)) for row in self.rows]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Return the record from the result of `as_dict`."""
        rows = (Row(**{**row, "shape": tuple(row["shape"])}) for row in values["rows"])
        return cls(values["step"], tuple(rows), values["micro_batch"])


def short_names(lines: Iterable[str]) -> dict[str, str]:
    """Return the last part of each name, or all of it if several end alike. A part of the model
    may be called `model`, so the model is the whole one.
    """
    names = {line: line.rpartition(".")[2] for line in lines}
    times = Counter(names.values())
    for line, tail in names.items():
        name = tail if times[tail] == 1 else line
        names[line] = name or "whole model"
    return names
