"""What a trace comes to: the operation that first produced a bad number, where it stands, why, and
what to do about it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Phase = Literal["forward", "recomputation", "backward", "data", "state"]
"""When the number arose: in the forward pass, in its recomputation under checkpointing, in
backward; or it was there before anything was computed, in the batch (data) or among parameters,
buffers and quantisation statistics (state)."""


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


OUTSIDE = "the model itself or code around it"
"""What is said for a module without a name: the whole model's, or none."""


@dataclass(frozen=True)
class Operand:
    """One tensor that went into the guilty operation.

    name: of the parameter, buffer or batch entry where it is one, else of the operation's argument.
    dtype: `constant` for a number of the program. absmax: of the finite elements. value: the
    element that met the bad one of the output, where the shapes say which that is.
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
        at = "" if self.value is None else f", there {self.value:g}"
        bad = "".join(
            f", {count} {what}" for count, what in ((self.nan, "NaN"), (self.inf, "Inf")) if count
        )
        size = "" if self.dtype == "bool" else f" up to {self.absmax:g} in size"
        return f"{self.name} {list(self.shape)} {self.dtype}{size}{bad}{at}"


@dataclass(frozen=True)
class Verdict:
    """The first fault of a run: who made the bad number, not who passed it on.

    cause: a key of `npt.diagnostics.tracer.causes.CAUSES`. layer: index of the decoder layer, None
    outside of them. module: dotted name in the model, empty for code outside any module. operation:
    its name in torch, such as `rsqrt`. source: file, line and text of the Python line that ran it
    (in backward: that ran its forward). index: of the first bad element in `tensor`. row, token,
    sample: of the batch, where the tensor's shape tells. reached: where the number was seen in the
    end. grew: of an overflow, where the numbers that went into it first became large.
    """

    cause: str
    phase: Phase
    layer: int | None
    module: str
    operation: str
    source: str
    tensor: str
    index: tuple[int, ...]
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
        """For JSON; non-finite numbers as text, since JSON has no word for them and here they are
        the message.
        """
        return _spell(asdict(self))

    def __str__(self) -> str:
        where = self.module or OUTSIDE
        at = f" at {list(self.index)}" if self.index else ""
        lines = [
            f"{self.cause}: {self.explanation}",
            f"  {self.phase}: {self.operation or 'no operation'} in {where}",
            (
                f"  first bad: {self.tensor}{at}: {self.value:g}{self._whose()}; it reached"
                f" {self.reached}"
            ),
        ]
        if self.source:
            lines.append(f"  line: {self.source}")
        lines += [f"  went in: {operand}" for operand in self.operands]
        if self.grew:
            lines.append(f"  grew: {self.grew}")
        lines.append(f"  remedy: {self.remedy}")
        return "\n".join(lines)

    def _whose(self) -> str:
        """Row, token and sample, as far as they are known."""
        row = (
            ""
            if self.row is None
            else f"row {self.row}"
            if self.token is None
            else f"row {self.row}, token {self.token}"
        )
        sample = "" if self.sample is None else f" of sample {self.sample}"
        # A weight is of no token: this is the first that it spoilt.
        return f", {'first in ' if self.phase == 'state' else ''}{row}{sample}" if row else ""


def _spell(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0.0:
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    return value
