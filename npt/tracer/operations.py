"""One operation of a pass, as torch dispatches it, and the origin of a bad value."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npt.tracer.source_location import Place, read_stack
from npt.tracer.tensors import Badness, tensors_in
from npt.tracer.verdict import Phase


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# These write a constant or select among numbers, so a -Inf from them is intended.
WRITERS = names(
    "full full_like fill fill_ scalar_tensor new_full masked_fill masked_fill_ where copy_ copy"
    " index_put index_put_ _index_put_impl_ lift_fresh constant_pad_nd triu tril cat stack clone"
)
# A single number from these is a constant in the code; the operation that uses it is at fault.
CONSTANTS = names("scalar_tensor lift_fresh full")
# Uninitialised memory holds no result.
BLANK = names(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize_ set_"
)
# These overwrite their whole first argument without reading it.
REPLACING = names(
    "copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_"
)
# These may carry a mask near the dtype's minimum beyond it.
MASKING = names("add add_ sub _to_copy to mul")
# Outputs after the first are bookkeeping, with -Inf for a row without keys.
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")

Sequence = tuple[bool, int]
"""A forward operation: whether a backward thread ran it, and its node's number there."""


@dataclass(frozen=True)
class External:
    """A tensor from before the pass.

    Attributes:
        kind: `state` (parameter, buffer, quantisation statistic), `data`, or `outside` (made by
            code that torch does not see).
        no_mask: whether -Inf in it is a fault and no mask.
    """

    name: str
    kind: Literal["state", "data", "outside"]
    tensor: Tensor
    no_mask: bool = False

    @property
    def module(self) -> str:
        """The module that holds it; statistics are named `module: absmax`."""
        holder, colon, _ = self.name.partition(": ")
        return holder if colon else self.name.rpartition(".")[0]


@dataclass(eq=False)
class Origin:
    """The origin of a bad value: an operation, or a tensor that was bad before the pass.

    Attributes:
        number: the operation's number in the pass.
        output: which of its results is bad.
        operation: its name in torch; for an external tensor, the operation that read it first.
        index: the index of the first bad element in the result or external tensor.
        value: that element.
        through: for an external tensor, shape and index of the first bad result it caused.
        node: the graph node, in backward.
        sequence: its forward operation.
        meant: whether it is a mask's -Inf, or a constant.
        hard: whether it is certainly no mask.
        hid: whether the forward operation gave a bad value too, which was hidden.
        inputs: copies of the arguments, if the ledger was asked to keep them.
        constants: arguments that are numbers in the code.
        externals: arguments from before the pass.
    """

    number: int
    output: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: tuple[int, ...]
    value: float
    through: tuple[tuple[int, ...], tuple[int, ...]]
    phase: Phase
    place: Place
    node: str
    sequence: Sequence | None
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
        read: the tensors that it reads, with argument names.
        written: the tensors that it writes to, by id.
        replaced: by id, how bad a tensor was that it reads and overwrites.
    """

    number: int
    name: str
    node: Any
    is_view: bool = False
    pointwise: bool = False
    read: list[tuple[str, Tensor]] = field(default_factory=list)
    written: dict[int, Tensor] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    replaced: dict[int, Badness] = field(default_factory=dict)

    def writes(self, tensor: Tensor) -> bool:
        return id(tensor) in self.written

    def results(self, out: Any) -> list[Tensor]:
        """Return the tensors that it wrote to, and the others in its output that count."""
        others = [tensor for _, tensor in tensors_in(out) if not self.writes(tensor)]
        if self.name.startswith(_ATTENTION):
            others = others[:1]
        return [*self.written.values(), *others]


def call_of(number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TorchCall:
    node = torch._C._current_autograd_node()
    # a higher-order operator, such as flex_attention
    if not isinstance(func, torch._ops.OpOverload):
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        return TorchCall(number, func.name(), node, read=list(tensors_in(given)))
    name = func._schema.name.split("::")[-1]
    call = TorchCall(number, name, node, func.is_view, torch.Tag.pointwise in func.tags)
    declared = func._schema.arguments
    by_name = [kwargs.get(argument.name) for argument in declared[len(args) :]]
    for argument, value in zip(declared, [*args, *by_name], strict=True):
        if type(value) in (int, float):
            call.constants[argument.name] = value
            continue
        if name == "_ctc_loss" and isinstance(value, list):
            value = torch.tensor(value)  # lengths, which may be given in a tensor too
        tensors = [(argument.name, value)]
        if not isinstance(value, Tensor):
            tensors = list(tensors_in(value, argument.name))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes:
            call.written |= {id(tensor): tensor for _, tensor in tensors}
        # an `out` argument is overwritten unread
        unread = writes and (argument.kwarg_only or name in REPLACING)
        if not unread and name != "lift_fresh":
            call.read += tensors
    return call


class Observer(TorchDispatchMode):
    """Observe operations, and match backward ones to forward ones; `modules` are names by id."""

    def __init__(self, modules: Mapping[int, str]):
        super().__init__()
        self.supports_higher_order_operators = True
        self.modules = modules
        self.count = 0
        self._home = threading.get_ident()
        self._starts = {self._home: torch._C._autograd._get_sequence_nr()}
        self._places: dict[Any, Place] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # a wrapper subclass is unwrapped first, and its parts come back here
            return NotImplemented
        kwargs = kwargs or {}
        call = call_of(self.count, func, args, kwargs)
        self.count += 1
        return self.run(call, func, args, kwargs)

    def run(self, call: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def where(self, call: TorchCall) -> tuple[Phase, Place]:
        """Return an operation's phase and place; in backward, the place of its forward."""
        stack = read_stack(sys._getframe(), self.modules)
        away, now = self.clock()
        if call.node is None or stack.recomputing:
            self._places.setdefault((away, now - 1), stack.place)
            return "forward" if call.node is None else "recomputation", stack.place
        forward = self.sequence(call.node, stack.nested)
        return "backward", self._places.get(forward, stack.place)

    def clock(self) -> Sequence:
        """Return whether this is a backward thread, and its number of graph nodes so far."""
        thread = threading.get_ident()
        now = torch._C._autograd._get_sequence_nr()
        return thread != self._home, now - self._starts.setdefault(thread, now)

    def sequence(self, node: Any, nested: bool) -> Sequence | None:
        """Return the forward operation of a node; None if it has none, as at a leaf."""
        thread = threading.get_ident()
        away = thread != self._home and nested
        number = node._sequence_nr() - self._starts.get(thread if away else self._home, 0)
        return (away, number) if 0 <= number < 2**62 else None
