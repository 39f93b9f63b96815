"""The verdict of a trace: the operation that first produced a bad number, its place, the reason and
the remedy.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from npt.errors import printable_lines

Phase = Literal["forward", "recomputation", "backward", "data", "state"]
"""When the number arose: in forward, in its recomputation under checkpointing, in backward, or
before anything was computed, in the batch (data) or among parameters, buffers and quantisation
statistics (state)."""

OUTSIDE = "the model itself or code around it"
"""Printed for a module without a name: the whole model's, or none."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32`, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Operand:
    """One tensor that went into the guilty operation.

    name: of the parameter, buffer or batch entry if it is one, else of the operation's argument.
    dtype: `constant` for a number of the program. absmax: of the finite elements. value: the
    element that met the bad one of the output, if the shapes tell which.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int
    inf: int
    absmax: float
    value: float | None = None

    def __str__(self) -> str:
        if self.dtype == "constant":
            return f"{self.name} = {self.value:g}"
        size = "" if self.dtype == "bool" else f" up to {self.absmax:g} in size"
        nan = f", {self.nan} NaN" if self.nan else ""
        inf = f", {self.inf} Inf" if self.inf else ""
        at = "" if self.value is None else f", there {self.value:g}"
        return f"{self.name} {list(self.shape)} {self.dtype}{size}{nan}{inf}{at}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first fault of a run: who made the bad number, not who passed it along.

    cause: a key of `npt.diagnostics.tracer.causes.CAUSES`. layer: index of the decoder layer, None
    outside of them. module: dotted name in the model, empty for code outside any module. operation:
    its name in torch, such as `rsqrt`. source: file, line and text of the Python line that ran it
    (in backward: that ran its forward). index: of the first bad element in `tensor`. row, token,
    sample: of the batch, if the tensor's shape tells. reached: where the number was seen in the
    end. grew: of an overflow, where the numbers that went into it first became large.
    """

    cause: str
    phase: Phase
    layer: int | None = None
    module: str = ""
    operation: str = ""
    source: str = ""
    tensor: str
    index: tuple[int, ...] = ()
    value: float
    reached: str
    explanation: str
    remedy: str
    grew: str = ""
    operands: tuple[Operand, ...] = ()
    row: int | None = None
    token: int | None = None
    sample: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, with non-finite numbers as text, since JSON has no word for them and
        here they are the message.
        """
        return _spell(asdict(self))

    def __str__(self) -> str:
        at = f" at {list(self.index)}" if self.index else ""
        found = f"{self.tensor}{at}: {self.value:g}{self._owner()}"
        lines = [
            f"{self.cause}: {self.explanation}",
            f"  {self.phase}: {self.operation or 'no operation'} in {self.module or OUTSIDE}",
            f"  first bad: {found}; it reached {self.reached}",
        ]
        lines += [f"  line: {self.source}"] if self.source else []
        lines += [f"  went in: {operand}" for operand in self.operands]
        lines += [f"  grew: {self.grew}"] if self.grew else []
        return printable_lines([*lines, f"  remedy: {self.remedy}"])

    def _owner(self) -> str:
        """Return row, token and sample, as far as they are known."""
        if self.row is None:
            return ""
        # A weight is of no token: this is the first that it spoilt.
        first = "first in " if self.phase == "state" else ""
        token = "" if self.token is None else f", token {self.token}"
        sample = "" if self.sample is None else f" of sample {self.sample}"
        return f", {first}row {self.row}{token}{sample}"


def _spell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value:g}"
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    return value
