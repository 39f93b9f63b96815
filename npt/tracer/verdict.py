"""The verdict of a trace: the operation that made the NaN or Inf, its place, cause and remedy."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from npt.errors import printable_lines

Phase = Literal["forward", "recomputation", "backward", "data", "state"]
"""Where the value arose: in forward, its recomputation under checkpointing, or backward; or before
the pass in the batch (data) or in parameters, buffers and quantisation statistics (state).
"""

OUTSIDE = "the model itself or code around it"
"""Printed for the module if it is the whole model, or none."""

_TABLE = """
corrupt weight: load an earlier checkpoint or adapter that is finite, and find the step or the code
    that wrote this value
corrupt absmax: a statistic of a 4-bit weight is damaged: quantise the base again from its
    checkpoint, and verify the file's checksum
corrupt input: check how the batch is made: features, tokenisation, truncation, padding; for
    advantages, what the reward function returns
token id: tokenise the data with the model's own tokenizer, and check that the padding id is in the
    vocabulary
no valid label: the mean over no labels divides by 0: truncate the prompt instead of the
    completion, or leave the sample out
masked label: the logit of a label's class is masked with -Inf: unmask it, or ignore the label
too few frames: CTC finds no path: leave out such samples, shorten the encoder's stride, or pass
    zero_infinity=True
cast overflow: the value does not fit the smaller dtype: compute in fp32 (npt with a 4-bit base:
    remove --use_fp16) or in bf16
low-precision overflow: the result fits fp32 but not this dtype: compute in fp32 or bf16 (remove
    fp16=True, autocast or npt's --use_fp16); for gradients, lower the loss scale
vanishing norm: a norm or variance is 0: check the epsilon (rms_norm_eps), and add it inside the
    square root
division by zero: a count, norm or probability is 0: clamp the divisor, or exclude such elements
    with torch.where before dividing
fully masked row: a query has no key to attend to: let every query attend at least to itself, and
    zero the outputs of padded queries
exponential overflow: the argument is too large: subtract the maximum first, as softmax does
invalid argument: the function is undefined here: clamp its argument (log of 0, square root of -1)
infinite slope: the derivative is infinite here: keep the argument away from the edge (sqrt(x +
    eps), clamp before log)
masked gradient: torch.where hides a bad branch in forward, but not in backward: make the argument
    safe before the where too
masked arithmetic: a -Inf mask was used in arithmetic: mask with torch.where or finfo.min instead
exploding product: activations have grown too large: find where they grew and lower the learning
    rate; with npt also lower --additive_scale, raise --regularization_lambda, start with
    --safe_mode, or watch the residual stream with --trace_steps
exploding gradient: gradients have grown too large: check the loss for large factors and lower the
    learning rate; with npt also raise --regularization_lambda, or start with --safe_mode
written constant: code wrote a non-finite constant: check this line, hooks and assignments
beyond the limit: the value is finite but above the limit: check this operation's inputs, and what
    uses its result
not repeatable: the fault did not recur with the same batch, state and random numbers: suspect the
    hardware, a race, or a non-deterministic kernel (torch.use_deterministic_algorithms)
outside of torch: no torch operation of this pass made the value: check tensors made before it
    (targets, a closure, a cache), NumPy code, torch.empty and compiled extensions
beyond rounding: the two passes first diverge here: compare weights, constants, dtypes and kernels
    at this line
unknown: no rule covers this case: check the line and the operation's inputs
"""

_ENTRIES = [entry.split(": ", 1) for entry in re.split(r"\n(?=\w)", _TABLE.strip())]

CAUSES = {cause: " ".join(remedy.split()) for cause, remedy in _ENTRIES}
"""The remedy of every cause."""


@dataclass(frozen=True)
class Operand:
    """An input of the operation: a parameter, buffer, batch entry or argument.

    Attributes:
        name: the name of the tensor, or of the operation's argument.
        dtype: the dtype, or `constant` for a number in the code.
        shape: the shape.
        nan: the number of NaN elements.
        inf: the number of infinite elements.
        absmax: the largest finite magnitude.
        value: the element that the bad output element was computed from, if the shapes tell.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    inf: int = 0
    absmax: float = 0.0
    value: float | None = None

    def __str__(self) -> str:
        if self.dtype == "constant":
            return f"{self.name} = {self.value:g}"
        text = f"{self.name} {list(self.shape)} {self.dtype}"
        if self.dtype != "bool":
            text += f", max abs {self.absmax:g}"
        if self.nan:
            text += f", {self.nan} NaN"
        if self.inf:
            text += f", {self.inf} Inf"
        if self.value is not None:
            text += f", {self.value:g} at the bad element"
        return text


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first fault of a pass: the operation that made the bad value, not one that passed it on.

    Attributes:
        cause: a key of `CAUSES`.
        phase: where the value arose.
        layer: the index of the decoder layer; None outside of one.
        module: the module's dotted name; empty outside of any module.
        operation: the operation's name in torch, such as `rsqrt`.
        source: the Python line that ran it (in backward, the forward operation): file and text.
        tensor: the bad tensor's name, shape and dtype.
        index: the index of its first bad element.
        value: that element.
        reached: the loss, gradient or output that it reached.
        explanation: the cause in words, with the values involved.
        grew: for an overflow, where the inputs first became large.
        operands: the operation's inputs.
        row: the batch row of the element, if the shape tells; none in a list of samples.
        token: its position in the row.
        sample: its sample's id.
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
    grew: str = ""
    operands: tuple[Operand, ...] = ()
    row: int | None = None
    token: int | None = None
    sample: str | None = None

    @property
    def remedy(self) -> str:
        """The remedy for the cause."""
        return CAUSES[self.cause]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, with non-finite numbers as text."""
        return _spell({**asdict(self), "remedy": self.remedy})

    def __str__(self) -> str:
        at = f" at {list(self.index)}" if self.index else ""
        lines = [
            f"{self.cause}: {self.explanation}",
            f"  {self.phase}: {self.operation or 'no operation'} in {self.module or OUTSIDE}",
            f"  first bad: {self.tensor}{at}: {self.value:g}{self._owner()}; it reached"
            f" {self.reached}",
        ]
        if self.source:
            lines.append(f"  line: {self.source}")
        lines += [f"  input: {operand}" for operand in self.operands]
        if self.grew:
            lines.append(f"  grew: {self.grew}")
        lines.append(f"  remedy: {self.remedy}")
        return printable_lines(lines)

    def _owner(self) -> str:
        if self.row is None:
            return "" if self.sample is None else f", in sample {self.sample}"
        # A weight belongs to no token, so this is the first token that it spoilt.
        first = "first in " if self.phase == "state" else ""
        text = f", {first}row {self.row}"
        if self.token is not None:
            text += f", token {self.token}"
        if self.sample is not None:
            text += f" of sample {self.sample}"
        return text


def _spell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value:g}"
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    return value
