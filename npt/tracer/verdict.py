"""The verdict of a trace: the operation that first produced a bad number, its place, the cause and
the remedy that fits it.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from npt.errors import printable_lines

Phase = Literal["forward", "recomputation", "backward", "data", "state"]
"""When the number arose: in forward, its recomputation under checkpointing, or backward, or before
that in the batch (data) or among parameters, buffers and quantisation statistics (state).
"""

OUTSIDE = "the model itself or code around it"
"""Printed for a module without a name: the whole model's, or none."""

_TABLE = """
corrupt weight: load a sound checkpoint, or the last adapter that loads, and look for the step
    or the code that wrote the number
corrupt absmax: a statistic of a 4-bit weight is bad: quantise the base again from its checkpoint
    and check the file's checksum
corrupt input: look at how the batch is made: features, tokenising, truncation, padding
token id: check that the data was tokenised with the model's own tokenizer, and that the padding
    id lies in the vocabulary
no valid label: a mean over no label divides by nothing: truncate the prompt, not the completion,
    or leave the sample out
masked label: the logit of a label's class is masked with -Inf: do not mask it, or ignore the label
cast overflow: the number does not fit the smaller dtype: compute in fp32, as --use_quantization
    does (drop --use_fp16), or in bf16
low-precision overflow: the result fits fp32 and not this dtype: compute in fp32 or bf16 (drop
    --use_fp16, autocast); of gradients, lower the loss scale
vanishing norm: a norm or variance is 0: check the epsilon (rms_norm_eps), and add it under the
    root, not after it
division by zero: a count, norm or probability is 0: clamp the divisor, or leave such elements out
    with torch.where before it
fully masked row: a query has no key: let every row of the mask see one, its own position at
    least, and zero padded queries
exponential overflow: the logits are too large: subtract their maximum, as softmax does
invalid argument: the function has no value there: clamp its argument (log of 0, root of -1)
infinite slope: the derivative has no finite value there: keep the argument from the edge (sqrt(x
    + eps), clamp before log)
masked gradient: torch.where hides a bad branch in forward only: make the argument safe before the
    where as well
masked arithmetic: -Inf as a mask was used in arithmetic: mask with torch.where or finfo.min
exploding product: activations have grown too large: look at where they grew; lower the learning
    rate (--learning_rate) or the scale of what is added (--additive_scale), raise
    --regularization_lambda, start with --safe_mode, watch the residual stream with --trace_steps
exploding gradient: gradients have grown too large: lower --learning_rate, raise
    --regularization_lambda, or start with --safe_mode
written constant: code wrote a non-finite constant here: look at the line, a hook or an assignment
beyond the limit: nothing is broken yet: look at what went in, and at what comes of it
not repeatable: the fault did not recur with the same batch, state and random numbers: suspect
    hardware, a race, or a non-deterministic kernel (torch.use_deterministic_algorithms)
outside of torch: no torch operation of the pass made the number: look at tensors made before it
    (targets, a closure, a cache), at numpy code, at torch.empty and at compiled extensions
beyond rounding: two passes that should agree part here, and all that follows was held to the
    reference: compare weights, constants, dtypes and kernels at the line
unknown: no rule knows this one: look at the line and at what went in
"""

_ENTRIES = re.split(r"\n(?=\w)", _TABLE.strip())

CAUSES = {cause: " ".join(remedy.split()) for cause, remedy in (e.split(": ", 1) for e in _ENTRIES)}
"""Every cause, and its remedy."""


@dataclass(frozen=True)
class Operand:
    """One tensor that went into the guilty operation: a parameter, buffer, batch entry or argument.

    Attributes:
        dtype: `constant` for a number of the program.
        absmax: size of the largest finite element.
        value: the element that met the bad one of the output, if the shapes tell which.
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
        size = "" if self.dtype == "bool" else f" up to {self.absmax:g} in size"
        nan = f", {self.nan} NaN" if self.nan else ""
        inf = f", {self.inf} Inf" if self.inf else ""
        at = "" if self.value is None else f", there {self.value:g}"
        return f"{self.name} {list(self.shape)} {self.dtype}{size}{nan}{inf}{at}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first fault of a run: who made the bad number, not who passed it along.

    Attributes:
        cause: a key of `CAUSES`.
        module: dotted name in the model, empty for code outside any module.
        operation: its name in torch, such as `rsqrt`.
        source: file, line and text of the Python line that ran it (in backward: its forward).
        index: of the first bad element in `tensor`.
        reached: where the number was seen in the end.
        grew: of an overflow, where the numbers that went into it first became large.
        row, token, sample: of the batch, if the tensor's shape tells.
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
        """The remedy of the cause."""
        return CAUSES[self.cause]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, with non-finite numbers as text, since JSON has no word for them and
        here they are the message.
        """
        return _spell({**asdict(self), "remedy": self.remedy})

    def __str__(self) -> str:
        at = f" at {list(self.index)}" if self.index else ""
        first_bad = f"{self.tensor}{at}: {self.value:g}{self._owner()}"
        lines = [
            f"{self.cause}: {self.explanation}",
            f"  {self.phase}: {self.operation or 'no operation'} in {self.module or OUTSIDE}",
            f"  first bad: {first_bad}; it reached {self.reached}",
        ]
        lines += [f"  line: {self.source}"] * bool(self.source)
        lines += [f"  went in: {operand}" for operand in self.operands]
        lines += [f"  grew: {self.grew}"] * bool(self.grew)
        return printable_lines([*lines, f"  remedy: {self.remedy}"])

    def _owner(self) -> str:
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
    return [_spell(item) for item in value] if isinstance(value, list | tuple) else value
