"""The ledger of a pass: every operation that torch dispatches, and for each bad tensor the
operation that first made it bad.

Passing a NaN on is no fault. A bad output whose inputs were all good has a new origin; one with a
bad input inherits that input's. So whatever is bad in the end, a loss or a gradient, leads back to
the one operation, or to the one parameter or batch entry, that it came from, and a NaN that was
masked away on purpose leads nowhere.

-Inf is what masks are made of. It counts as bad only where arithmetic made it from numbers that
were no masks; writing it (`full`, `masked_fill`, `where`) is intended, and so is passing it on. A
softmax over nothing but intended -Inf is then rightly the origin of its NaN.

An origin says who and where. What went in is kept for the one origin whose number is asked for, so
that a model with thousands of harmless ones is not held in memory twice.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from npt.diagnostics.tracer.memory import Memory, stretch_of
from npt.diagnostics.tracer.nonfinite import (
    Badness,
    element,
    extent,
    first_bad,
    judge,
    looks_like_a_mask,
    numbers,
)
from npt.diagnostics.tracer.source_location import Place, Stack, read_stack

# Writing a constant, or selecting among what is there: a -Inf that comes out of these was meant.
_WRITERS = {
    "full",
    "full_like",
    "fill",
    "fill_",
    "scalar_tensor",
    "new_full",
    "masked_fill",
    "masked_fill_",
    "where",
    "copy_",
    "copy",
}
_WRITERS |= {
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "lift_fresh",
    "constant_pad_nd",
    "triu",
    "tril",
    "cat",
    "stack",
    "clone",
}
# One number that these make is a constant of the program: who uses it is asked for, not the
# constant.
_CONSTANTS = {"scalar_tensor", "lift_fresh", "full"}
# What stands in fresh memory is nobody's number.
_BLANK = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "set_",
}
# These write over all of their first argument and read nothing of it.
_REPLACING = {
    "copy_",
    "fill_",
    "zero_",
    "normal_",
    "uniform_",
    "random_",
    "bernoulli_",
    "exponential_",
    "log_normal_",
    "cauchy_",
}
# Outputs behind the first are bookkeeping, -Inf where a row has no key.
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")

_ORIGINS_KEPT = 8
"""Of a tensor that is bad for several reasons so many are kept, the oldest."""

Sequence = tuple[bool, int]
"""Which forward operation a node of the graph belongs to: whether one that a thread of backward
ran, and its number there.
"""


@dataclass(frozen=True)
class External:
    """A tensor that is there before the pass. kind: `state` (parameter, buffer, quantisation
    statistic), `data`, or `outside` for one that code made which torch does not see. trained: a
    parameter or statistic, in which -Inf is no mask.
    """

    name: str
    kind: str
    tensor: Tensor
    trained: bool = False

    @property
    def module(self) -> str:
        """Of the module that holds it: statistics are named `module: absmax`."""
        return self.name.split(": ")[0] if ": " in self.name else self.name.rpartition(".")[0]


@dataclass(eq=False)
class Origin:
    """Where badness began: an operation, or a tensor that was bad before anything was computed.

    number, output: of the operation in the pass, and which of its results. operation: its name in
    torch; of a tensor from outside, the operation that read it first. node: of the graph, in
    backward. sequence: of the forward operation whose backward this is. shape, dtype, index, value:
    of the bad result and its first bad element; of a tensor from outside that tensor's own. shown:
    shape and index in the whole tensor of whose part this is, or of a tensor from outside those at
    which it came through. meant: a mask's -Inf, or a constant. hard: more than what may be a mask.
    hid: the forward operation whose backward this is gave a bad number too, and something hid it.
    inputs, constants: arguments as they went in, where the ledger was told to keep them. externals:
    those inputs that were there before the pass.
    """

    number: int
    output: int
    operation: str
    node: str
    sequence: Sequence | None
    phase: str
    place: Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    index: tuple[int, ...]
    value: float
    shown: tuple[tuple[int, ...], tuple[int, ...]]
    external: External | None = None
    pointwise: bool = False
    meant: bool = False
    hard: bool = True
    hid: bool = False
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    constants: dict[str, float] = field(default_factory=dict)
    externals: dict[str, External] = field(default_factory=dict)


@dataclass
class _Call:
    """One dispatched operation: its arguments by name. read: what it reads; written: what it writes
    to, which it may read too.
    """

    number: int
    name: str
    node: Any
    is_view: bool = False
    pointwise: bool = False
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    read: list[tuple[str, Tensor]] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)
    constants: dict[str, float] = field(default_factory=dict)
    before: dict[int, Badness] = field(default_factory=dict)
    kept: list[tuple[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class Watched:
    """The operation that was waited for. hid: it gave a bad number. sequence: where it is backward
    itself, that of its forward.
    """

    place: Place
    hid: bool
    sequence: Sequence | None


class Ledger(TorchDispatchMode):
    """Numbers the operations of a pass and keeps the origin of every bad tensor.

    Args:
        modules: `place.module_names` of the model.
        externals: tensors that exist before the pass.
        limit: a size from which finite numbers count as bad.
        keep: number and output of the operation of whose origin all arguments are kept, as copies:
            `kept`.
        asked: an operation's number; of what it reads the origins are noted: `read_origins`.
        watch: a forward operation whose place is wanted, for a fault in its backward: `watched`.
    """

    def __init__(
        self,
        modules: Mapping[int, str],
        externals: Iterable[External],
        limit: float = math.inf,
        keep: tuple[int, int] | None = None,
        asked: int | None = None,
        watch: Sequence | None = None,
    ):
        super().__init__()
        self.supports_higher_order_operators = True
        self.modules, self.limit = modules, limit
        self.count = 0
        self.first: Origin | None = None
        """The first origin that is no mask's and no NaN: of a number beyond the limit."""
        self.kept: Origin | None = None
        self.read_origins: dict[str, Origin | None] = {}
        self.watched: Watched | None = None
        self._keep, self._asked, self._watch = keep, asked, watch
        self._home = threading.get_ident()
        self._starts = {self._home: torch._C._autograd._get_sequence_nr()}
        self._origins: Memory[tuple[int, Origin]] = Memory()
        self._externals: Memory[External] = Memory()
        for external in externals:
            self._externals.add(external.tensor, external)
        self._blank: dict[int, StorageWeakRef] = {}
        self._scalars: dict[str, Origin] = {}

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Where the badness of this tensor came from, if the pass saw it arise.

        It may stem from several: those that came in what was certainly bad (rank 0) go before those
        that came in what may have been a mask (rank 1), the older before the younger.
        """
        ranked = min(
            self._origins.of(tensor),
            key=lambda item: (item[1].meant, item[0], item[1].number),
            default=None,
        )
        return None if ranked is None else ranked[1]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # a tensor made of tensors is taken apart first, and comes back as those
            return NotImplemented
        call = _call_of(self.count, func, args, kwargs or {})
        self.count += 1
        away, now = self._clock()
        waited_for = (
            self._watch is not None
            and self.watched is None
            and away == self._watch[0]
            and now > self._watch[1]
        )
        # What an operation writes over is judged, and where asked kept, while it is still there.
        memory = {here.key for t in call.written if (here := stretch_of(t)) is not None}
        call.before = {
            id(t): judge(t, self.limit) for _, t in call.read if memory and _key(t) in memory
        }
        if self._keep is not None and call.number == self._keep[0]:
            call.kept = [
                (label, t.detach() if self._externals.of(t) else t.detach().clone())
                for label, t in call.read
            ]
        if call.number == self._asked:
            self.read_origins = {label: self.origin_of(t) for label, t in call.read}
        out = func(*args, **(kwargs or {}))
        results = [*call.written, *(t for t in _flat(out) if not any(t is w for w in call.written))]
        if waited_for:
            stack = read_stack(sys._getframe(), self.modules)
            hid = any(judge(t, self.limit) != Badness.FINE for t in results)
            place = stack.place if call.node is None or stack.own or stack.recomputing else Place()
            self.watched = Watched(place, hid, self._sequence(call.node, stack))
        if (
            call.name == "_local_scalar_dense"
            and judge(call.read[0][1], self.limit) != Badness.FINE
        ):
            read = self.origin_of(call.read[0][1])
            if read is not None:
                self._scalars[repr(out)] = read
        if call.is_view and not call.written and call.name != "lift_fresh":
            return out
        if call.name in _BLANK:
            for tensor in results:
                if _key(tensor):
                    self._blank[_key(tensor)] = StorageWeakRef(tensor.untyped_storage())
            return out
        if call.name.startswith(_ATTENTION):
            results = results[:1]
        for position, result in enumerate(results):
            badness = judge(result, self.limit)
            if badness != Badness.FINE:
                self._account(call, position, result, badness)
            elif call.written:
                self._origins.forget(result)
            if call.written:
                self._blank.pop(_key(result), None)
        return out

    def _account(self, call: _Call, position: int, result: Tensor, badness: Badness) -> None:
        """Give a bad result its origin: that of the input it has it from, else a new one."""
        masks = False
        mask: Origin | None = None
        inherited: list[tuple[int, Origin]] = []
        for label, tensor in call.read:
            was = call.before.get(id(tensor))
            was = judge(tensor, self.limit) if was is None else was
            if was == Badness.FINE or (
                self._is_blank(tensor) and any(tensor is w for w in call.written)
            ):
                continue
            known = self._origins.of(tensor)
            if not known and self._is_mask(tensor, was):
                masks = True
                continue
            if not known and tensor.ndim == 0 and not self._externals.of(tensor):
                continue  # a constant from before the pass, treated as those made in it
            masks |= was == Badness.SOFT
            for rank, origin in known or [
                (0, self._from_outside(call, label, tensor, was, result, badness))
            ]:
                if origin.meant:
                    mask = mask or origin
                # A selection that leaves -Inf alone has left the worse of that input behind.
                elif (
                    badness == Badness.HARD
                    or was == Badness.SOFT
                    or not origin.hard
                    or call.name not in _WRITERS
                ):
                    inherited.append((max(rank, int(was < badness)), origin))
        constant = result.ndim == 0 and call.name in _CONSTANTS
        inherited += [
            (0, origin) for origin in self._scalars_in(call, result if constant else None)
        ]
        if call.written:
            self._origins.forget(result)
        if inherited:
            best = min(rank for rank, _ in inherited)
            for rank, origin in sorted(inherited, key=lambda item: (item[0], item[1].number))[
                :_ORIGINS_KEPT
            ]:
                self._origins.add(result, (rank - best, origin))
            return
        if (
            badness == Badness.HARD
            and call.written
            and self._is_blank(result)
            and call.name not in _REPLACING
        ):
            return  # some of it may still be what stood in fresh memory
        mask_on = masks or call.name in _WRITERS or _made_of_masks(call) or self._masks_with(call)
        meant = constant or (badness == Badness.SOFT and mask_on)
        if meant and mask is not None and mask.shape:
            self._origins.add(result, (0, mask))
            return
        origin = self._origin(
            call, result, position, first_bad(result, self.limit, soft=meant or not masks)
        )
        origin.meant, origin.hard = meant, badness == Badness.HARD
        self._origins.add(result, (0, origin))
        if not meant:
            self._note(origin)

    def _origin(self, call: _Call, result: Tensor, position: int, index: tuple[int, ...]) -> Origin:
        stack = read_stack(sys._getframe(), self.modules)
        backward = call.node is not None and not stack.recomputing
        place = stack.place if stack.own or not backward else Place()
        if backward and not place.module:
            place = Place(self._leaf(call.node), place.source)
        kept = self._keep == (call.number, position)
        origin = Origin(
            number=call.number,
            output=position,
            operation=call.name,
            node=call.node.name().rpartition("::")[2] if backward and not stack.own else "",
            sequence=self._sequence(call.node, stack) if backward else None,
            phase="backward" if backward else "forward" if call.node is None else "recomputation",
            place=place,
            shape=tuple(result.shape),
            dtype=result.dtype,
            index=index,
            value=element(result, index),
            shown=(
                _in_base(result, index)
                if any(result is w for w in call.written)
                else (tuple(result.shape), index)
            ),
            pointwise=call.pointwise,
        )
        if kept:
            origin.inputs, origin.constants = call.kept, call.constants
            known = {label: self._external(t, place.module, Badness.FINE) for label, t in call.read}
            origin.externals = {
                label: external for label, external in known.items() if external is not None
            }
            self.kept = origin
        return origin

    def _from_outside(
        self,
        call: _Call,
        label: str,
        tensor: Tensor,
        was: Badness,
        result: Tensor,
        badness: Badness,
    ) -> Origin:
        """The origin of a tensor that no operation of this pass made bad; the note makes it the
        same for every reader.
        """
        shown = first_bad(result, self.limit, soft=badness == Badness.SOFT)
        origin = self._origin(call, result, 0, shown)
        external = self._external(tensor, origin.place.module, Badness.SOFT)
        whole = tensor if external is None else external.tensor
        origin.external = (
            external
            if external is not None
            else External(f"the argument {label} of {call.name}", "outside", tensor.detach())
        )
        origin.index = first_bad(whole, self.limit)
        ids = next((t for other, t in call.inputs if other == "indices"), None)
        if call.name == "embedding" and ids is not None and len(shown) > 1:
            # of a table with several bad rows the one that was read
            origin.index = (int(ids[shown[:-1]]), shown[-1])
        origin.shape, origin.dtype, origin.value = (
            tuple(whole.shape),
            whole.dtype,
            element(whole, origin.index),
        )
        origin.hard = was == Badness.HARD
        self._origins.add(tensor, (0, origin))
        self._note(origin)
        return origin

    def _note(self, origin: Origin) -> None:
        if self.first is None and not math.isnan(origin.value):
            self.first = origin

    def _external(self, tensor: Tensor, module: str, at_least: Badness) -> External | None:
        """What a tensor was before the pass; where several share its memory the bad one, and by the
        name that it has in `module`.
        """
        known = [
            e
            for e in self._externals.of(tensor)
            if at_least == Badness.FINE or judge(e.tensor, self.limit) != Badness.FINE
        ]
        return min(known, key=lambda external: external.module != module, default=None)

    def _is_mask(self, tensor: Tensor, was: Badness) -> bool:
        """Whether negative numbers that were there before the pass are a mask. In what is trained
        they never are.
        """
        trained = any(external.trained for external in self._externals.of(tensor))
        return was == Badness.SOFT and not trained and looks_like_a_mask(tensor)

    def _masks_with(self, call: _Call) -> bool:
        """Whether a number of the program itself is beyond the limit: (1 - mask) * -1e9."""
        scalars = [
            element(t, ())
            for _, t in call.read
            if t.ndim == 0 and numbers(t) is not None and not self._externals.of(t)
        ]
        return any(
            number < -self.limit or number == -math.inf
            for number in (*call.constants.values(), *scalars)
        )

    def _scalars_in(self, call: _Call, constant: Tensor | None) -> Iterator[Origin]:
        """Origins of Python numbers that were read from bad tensors (`item`) and that this
        operation is given.
        """
        given = (
            [*call.constants.values(), *([] if constant is None else [element(constant, ())])]
            if self._scalars
            else []
        )
        yield from (self._scalars[repr(value)] for value in given if repr(value) in self._scalars)

    def _clock(self) -> tuple[bool, int]:
        """How many nodes the graph has got in this thread since the pass began. Backward on a GPU
        has threads of its own.
        """
        thread, now = threading.get_ident(), torch._C._autograd._get_sequence_nr()
        return thread != self._home, now - self._starts.setdefault(thread, now)

    def _sequence(self, node: Any, stack: Stack) -> Sequence | None:
        """Of the forward operation that a node belongs to; None for one that has none, as the end
        of a leaf's gradient.
        """
        if node is None:
            return None
        thread = threading.get_ident()
        away = thread != self._home and stack.nested
        number = node._sequence_nr() - self._starts.get(thread if away else self._home, 0)
        return (away, number) if 0 <= number < 2**62 else None

    def _is_blank(self, tensor: Tensor) -> bool:
        reference = self._blank.get(_key(tensor))
        return reference is not None and not reference.expired()

    def _leaf(self, node: Any) -> str:
        """The module of the parameter whose gradient is being accumulated, at the engine's last
        node.
        """
        variable = getattr(node, "variable", None)
        known = self._external(variable, "", Badness.FINE) if isinstance(variable, Tensor) else None
        return known.module if known is not None else ""


def _key(tensor: Tensor) -> int:
    here = stretch_of(tensor)
    return 0 if here is None else here.key


def _call_of(number: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    node = torch._C._current_autograd_node()
    # an operator of functions, such as flex_attention
    if not isinstance(func, torch._ops.OpOverload):
        inputs = [*_labelled("args", list(args)), *_labelled("kwargs", list(kwargs.values()))]
        return _Call(number, func.name(), node, inputs=inputs, read=inputs)
    name = func._schema.name.split("::")[-1]
    call = _Call(number, name, node, func.is_view, torch.Tag.pointwise in func.tags)
    declared = func._schema.arguments
    named = [(declared[i], value) for i, value in enumerate(args)]
    named += [(argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs]
    for argument, value in named:
        if isinstance(value, int | float) and not isinstance(value, bool):
            call.constants[argument.name] = value
        writes = argument.alias_info is not None and argument.alias_info.is_write
        only = name == "lift_fresh" or (writes and (argument.kwarg_only or name in _REPLACING))
        for label, tensor in _labelled(argument.name, value):
            call.inputs.append((label, tensor))
            if not only:
                call.read.append((label, tensor))
            if writes:
                call.written.append(tensor)
    return call


def _made_of_masks(call: _Call) -> bool:
    """-Inf out of numbers at the dtype's end: a mask that was added to a mask, or cast to a smaller
    dtype.
    """
    if call.name not in ("add", "add_", "sub", "_to_copy", "to", "mul"):
        return False
    found = [
        (t, values)
        for _, t in call.read
        if (values := numbers(t)) is not None and t.dtype.itemsize > 1 and not t.is_complex()
    ]
    return any(extent(values)[0] <= 0.5 * torch.finfo(t.dtype).min for t, values in found)


def _in_base(view: Tensor, index: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and index of an element of a view in the whole tensor: an index into a part says
    nothing.
    """
    base = view._base
    if (
        base is None
        or base.dtype != view.dtype
        or base.layout != torch.strided
        or not base.is_contiguous()
    ):
        return tuple(view.shape), index
    offset = (
        view.storage_offset()
        - base.storage_offset()
        + sum(i * s for i, s in zip(index, view.stride(), strict=True))
    )
    if not 0 <= offset < base.numel():
        return tuple(view.shape), index
    return tuple(base.shape), tuple(
        int(i) for i in torch.unravel_index(torch.tensor(offset), base.shape)
    )


def _labelled(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _labelled(f"{name}[{i}]", item)


def _flat(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
