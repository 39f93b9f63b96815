"""One operation of a pass, as torch dispatches it, and the origin of a bad number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from npt.tracer.source_location import Place
from npt.tracer.tensors import Badness, extent, numbers, tensors_in
from npt.tracer.verdict import Phase


def names(text: str) -> frozenset[str]:
    """Return the names in a text, divided by spaces."""
    return frozenset(text.split())


# Writing a constant, or selecting among existing numbers: a -Inf that comes out of these was meant.
WRITERS = names(
    "full full_like fill fill_ scalar_tensor new_full masked_fill masked_fill_ where copy_ copy"
    " index_put index_put_ _index_put_impl_ lift_fresh constant_pad_nd triu tril cat stack clone"
)
# One number that these make is a constant of the program: the fault is of whoever uses it.
CONSTANTS = names("scalar_tensor lift_fresh full")
# The content of fresh memory is nobody's number.
BLANK = names(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ set_"
)
# These write over all of their first argument and read nothing of it.
REPLACING = names(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_"
)
# Outputs after the first are bookkeeping, -Inf for a row without a key.
ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")

Sequence = tuple[bool, int]
"""The forward operation that a node of the graph belongs to: whether a thread of backward ran it,
and its number there.
"""


@dataclass(frozen=True)
class External:
    """A tensor from before the pass.

    Attributes:
        kind: `state` (parameter, buffer, quantisation statistic), `data`, or `outside` if code that
            torch does not see made it.
        trained: a parameter or statistic, in which -Inf is no mask.
    """

    name: str
    kind: Literal["state", "data", "outside"]
    tensor: Tensor
    trained: bool = False

    @property
    def module(self) -> str:
        """The module that holds it: statistics are named `module: absmax`."""
        return self.name.split(": ")[0] if ": " in self.name else self.name.rpartition(".")[0]


@dataclass(eq=False)
class Origin:
    """The begin of badness: an operation, or a tensor that was bad before anything was computed.

    Attributes:
        number, output: of the operation in the pass, and which of its results.
        operation: its name in torch; of an external tensor, the operation that read it first.
        node: of the graph, in backward.
        sequence: of the forward operation whose backward this is.
        shape, dtype, index, value: of the bad result (or external tensor) and its first bad
            element.
        through: of an external tensor, shape and index at which it came through.
        meant: a mask's -Inf, or a constant.
        hard: more than what may be a mask.
        hid: the forward operation gave a bad number too, and something hid it.
        inputs, constants, externals: arguments as they went in, and those that are from before the
            pass, if the ledger was told to keep them.
    """

    number: int
    output: int
    operation: str
    node: str
    sequence: Sequence | None
    phase: Phase
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: tuple[int, ...]
    value: float
    through: tuple[tuple[int, ...], tuple[int, ...]]
    external: External | None = None
    pointwise: bool = False
    meant: bool = False
    hard: bool = True
    hid: bool = False
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    constants: dict[str, float] = field(default_factory=dict)
    externals: dict[str, External] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.operation} in {self.node}" if self.node else self.operation


@dataclass
class TorchCall:
    """One dispatched operation.

    Attributes:
        read: the tensors that it reads, by the names of its arguments.
        written: the tensors that it writes to, which it may read too.
        replaced: how bad those were that it reads and writes over.
        kept: copies of `read`.
    """

    number: int
    name: str
    node: Any
    is_view: bool = False
    pointwise: bool = False
    read: list[tuple[str, Tensor]] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    constants: dict[str, float] = field(default_factory=dict)
    replaced: dict[int, Badness] = field(default_factory=dict)
    kept: list[tuple[str, Tensor]] = field(default_factory=list)

    def writes(self, tensor: Tensor) -> bool:
        return any(tensor is written for written in self.written)

    def results(self, out: Any) -> list[Tensor]:
        """Return what it wrote to, and the other tensors of its output."""
        return [*self.written, *(t for _, t in tensors_in(out) if not self.writes(t))]

    @property
    def made_of_masks(self) -> bool:
        """Tell if its -Inf is of numbers at the dtype's end: a mask that was added to a mask, or
        cast to a smaller dtype.
        """
        if self.name not in ("add", "add_", "sub", "_to_copy", "to", "mul"):
            return False
        candidates = (
            (t, values)
            for _, t in self.read
            if (values := numbers(t)) is not None and t.dtype.itemsize > 1 and not t.is_complex()
        )
        return any(extent(values)[0] <= 0.5 * torch.finfo(t.dtype).min for t, values in candidates)


def call_of(number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
    """Return the call of an operation that torch is about to run."""
    node = torch._C._current_autograd_node()
    # an operator of functions, such as flex_attention
    if not isinstance(func, torch._ops.OpOverload):
        return TorchCall(
            number, func.name(), node, read=[*tensors_in({**dict(enumerate(args)), **kwargs})]
        )
    name = func._schema.name.split("::")[-1]
    call = TorchCall(number, name, node, func.is_view, torch.Tag.pointwise in func.tags)
    declared = func._schema.arguments
    named = [(declared[i], value) for i, value in enumerate(args)]
    named += [(argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs]
    for argument, value in named:
        if isinstance(value, int | float) and not isinstance(value, bool):
            call.constants[argument.name] = value
        writes = argument.alias_info is not None and argument.alias_info.is_write
        only = name == "lift_fresh" or (writes and (argument.kwarg_only or name in REPLACING))
        tensors = [*tensors_in(value, argument.name)]
        call.read += [] if only else tensors
        call.written += [t for _, t in tensors] if writes else []
    return call
