"""The ledger of a pass: every operation that torch dispatches, and for each bad tensor the operation that first made it bad.

Passing a NaN on is no fault. A bad output whose inputs were all good has a new origin; one with a bad input inherits that
input's. So whatever is bad in the end, a loss or a gradient, leads back to the one operation, or to the one parameter or batch
entry, that it came from, and a NaN that was masked away on purpose leads nowhere.

-Inf is what masks are made of. It counts as bad only where arithmetic made it from numbers that were no masks; writing it
(`full`, `masked_fill`, `where`) is intended, and so is passing it on. A softmax over nothing but intended -Inf is then
rightly the origin of its NaN.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from npt.health.place import Place, backward_frame, place_of


class Badness(IntEnum):
    """FINE; SOFT: -Inf beside good numbers, which may be a mask; HARD: NaN, +Inf or beyond the limit."""

    FINE = 0
    SOFT = 1
    HARD = 2


# Writing a constant, or selecting among what is there: a -Inf that comes out of these was meant.
_WRITERS = {"full", "full_like", "fill", "fill_", "scalar_tensor", "new_full", "masked_fill", "masked_fill_", "where", "copy_", "copy"}
_WRITERS |= {"index_put", "index_put_", "_index_put_impl_", "lift_fresh", "constant_pad_nd", "triu", "tril", "cat", "stack", "clone"}
# What stands in fresh memory is nobody's number.
_BLANK = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_", "set_"}


def judge(tensor: Tensor, limit: float = math.inf) -> Badness:
    """How bad a tensor is, in one pass over it; integers are always fine.

    Args:
        tensor: of any dtype.
        limit: a size beyond which a finite number is bad as well. The lowest number of the dtype counts as -Inf: masks again.
    """
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout != torch.strided:
        return Badness.FINE
    values = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if values.dtype.itemsize == 1:  # 8-bit floats have no reductions
        values = values.to(torch.float32)
    low, high = (float(end) for end in torch.aminmax(values))
    if math.isnan(low) or high > limit or high == math.inf:
        return Badness.HARD
    if low >= -limit and low != -math.inf:
        return Badness.FINE
    return Badness.SOFT if low <= torch.finfo(values.dtype).min else Badness.HARD


def bad_elements(tensor: Tensor, limit: float = math.inf, soft: bool = False) -> Tensor:
    """Boolean, like `tensor`: NaN, +Inf, beyond the limit; with `soft` -Inf too."""
    values = tensor.detach()
    if values.is_complex():
        parts = torch.view_as_real(values)
        return bad_elements(parts, limit, soft).any(dim=-1)
    values = values.to(torch.float32) if values.dtype.itemsize == 1 else values
    bad = torch.isnan(values) | (values == math.inf) | (values > limit)
    masked = values <= torch.finfo(values.dtype).min
    return bad | (masked if soft else (values < -limit) & ~masked)


@dataclass(frozen=True)
class External:
    """A tensor that is there before the pass. kind: `state` (parameter, buffer, quantisation statistic), `data`, or `outside` for
    one that code made which torch does not see. names: the first one, and where tensors are tied the others.
    """

    names: tuple[str, ...]
    kind: str
    tensor: Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    def as_read_by(self, module: str) -> External:
        """The same tensor, by the name that it has in `module` if it has one there."""
        own = tuple(name for name in self.names if name.rpartition(".")[0] == module)
        return External(own + tuple(name for name in self.names if name not in own), self.kind, self.tensor)


@dataclass
class Origin:
    """Where badness began: an operation, or a tensor that was bad before anything was computed.

    number: of the operation in the pass. operation: its name in torch; of a tensor from outside, the operation that read it
    first. external: that tensor's name. sequence: of the forward operation whose backward this is, counted from the start of
    the pass. inputs: (argument, tensor) as they went in. tensor, index, value: the bad output, and its first bad element; of a
    tensor from outside that tensor itself. shown: shape and index at which that one came through in the operation's output.
    overwritten: the operation wrote over an input, which is kept only by a ledger that knows its number (`keep`). names: of those
    inputs that were there before the pass, by argument.
    """

    number: int
    operation: str
    node: str
    sequence: int | None
    phase: str
    place: Place
    tensor: Tensor
    index: tuple[int, ...]
    value: float
    inputs: list[tuple[str, Tensor]]
    external: External | None = None
    pointwise: bool = False
    overwritten: bool = False
    shown: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    names: dict[str, str] = field(default_factory=dict)


@dataclass
class _Tag:
    storage: StorageWeakRef
    origin: Origin


@dataclass
class _Call:
    """One dispatched operation: its tensor arguments by name, and which of them it writes to."""

    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    written: list[Tensor] = field(default_factory=list)


class Ledger(TorchDispatchMode):
    """Numbers the operations of a pass and keeps the origin of every bad tensor.

    Args:
        modules: `place.module_names` of the model.
        external: names of tensors that exist before the pass, by `storage_key`.
        limit: a size from which finite numbers count as bad.
        keep: an operation's number; copies of what it writes over are kept, and the origins of what it reads.
        watch: sequence of a forward operation whose place is wanted, for a fault in its backward.
    """

    def __init__(
        self,
        modules: Mapping[int, str],
        external: Mapping[int, External],
        limit: float = math.inf,
        keep: int | None = None,
        watch: int | None = None,
    ):
        super().__init__()
        self.modules, self.external, self.limit = modules, external, limit
        self.count = 0
        self.origins: list[Origin] = []
        self.watched: Place | None = None
        self.input_origins: dict[str, Origin | None] = {}
        self._keep, self._watch = keep, watch
        self._start = torch._C._autograd._get_sequence_nr()
        self._tags: dict[int, _Tag] = {}
        self._blank: dict[int, StorageWeakRef] = {}

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Where the badness of this tensor came from, if the pass saw it arise."""
        tag = self._tags.get(storage_key(tensor))
        return tag.origin if tag is not None and not tag.storage.expired() else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        number, self.count = self.count, self.count + 1
        node = torch._C._current_autograd_node()
        name = func._schema.name.split("::")[-1]
        if self._watch is not None and self.watched is None and node is None and self._sequence() > self._watch:
            self.watched = place_of(sys._getframe(1), self.modules)
        call = _tensors_of(func, args, kwargs)
        # What an operation writes over is judged, and where asked kept, while it is still there.
        before = {id(t): judge(t, self.limit) for t in call.written}
        kept = None
        if number == self._keep:
            self.input_origins = {label: self.origin_of(t) for label, t in call.inputs}
            kept = [(label, t.clone() if _holds(call.written, t) else t) for label, t in call.inputs]
        out = func(*args, **kwargs)
        if func.is_view and not call.written:
            return out
        if name in _BLANK:
            for tensor in _flat(out):
                self._blank[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())
            return out
        results = call.written or list(_flat(out))
        if name.startswith("_scaled_dot_product"):
            results = results[:1]  # the others are its own bookkeeping, -Inf where a row has no key
        for result in results:
            badness = judge(result, self.limit)
            if badness != Badness.FINE:
                self._account(number, func, name, node, call, kept, before, result, badness)
        for tensor in call.written:
            self._blank.pop(storage_key(tensor), None)
        return out

    def _account(
        self,
        number: int,
        func: Any,
        name: str,
        node: Any,
        call: _Call,
        kept: list[tuple[str, Tensor]] | None,
        before: dict[int, Badness],
        result: Tensor,
        badness: Badness,
    ) -> None:
        """Give a bad result its origin: that of the input it has it from, else a new one."""
        masked = False
        inherited: list[Origin] = []
        for label, tensor in call.inputs:
            if not (tensor.is_floating_point() or tensor.is_complex()) or self._is_blank(tensor):
                continue
            was = before.get(id(tensor))
            was = judge(tensor, self.limit) if was is None else was
            known = self.origin_of(tensor)
            masked |= was == Badness.SOFT
            if was == Badness.FINE or (was == Badness.SOFT and known is None and not self._is_parameter(tensor)):
                continue
            if known is None and tensor.ndim == 0 and storage_key(tensor) not in self.external:
                continue  # a constant of the program: who used it is asked for, not the constant
            if known is None:
                known = self._from_outside(number, name, node, label, tensor, was, call, result, badness)
            inherited.append(known)
        if inherited:
            # An input that is bad through and through comes before one that may be a mask, the older before the younger.
            self._tag(result, min(inherited, key=lambda origin: origin.number))
            return
        if badness == Badness.SOFT and (masked or name in _WRITERS or self._made_of_masks(call, name)):
            return
        # Of a write into a part of a tensor the whole is shown: an index into a part says nothing.
        base = result._base if call.written else None
        whole = base if base is not None and base.ndim > result.ndim and judge(base, self.limit) == badness else result
        origin = self._origin(number, name, node, whole, badness, kept if kept is not None else call.inputs)
        origin.pointwise = torch.Tag.pointwise in func.tags
        origin.overwritten = bool(call.written) and kept is None
        self.origins.append(origin)
        self._tag(result, origin)

    def _origin(self, number: int, name: str, node: Any, tensor: Tensor, badness: Badness, inputs: list[tuple[str, Tensor]]) -> Origin:
        index = _first_bad(tensor, self.limit, badness)
        frame = sys._getframe()
        own, recomputing = backward_frame(frame)
        backward = node is not None and not recomputing
        place = place_of(frame, self.modules) if own or not backward else Place()
        if backward and not place.module:
            place = Place(self._leaf(node), place.source)
        sequence = None
        if backward:
            own_number = node._sequence_nr() - self._start
            sequence = own_number if 0 <= own_number < 2**62 else None
        return Origin(
            number=number,
            operation=name,
            node=node.name().rpartition("::")[2] if backward and not own else "",
            sequence=sequence,
            phase="backward" if backward else "recomputation" if recomputing else "forward",
            place=place,
            tensor=tensor.detach().clone(),
            index=index,
            value=_element(tensor, index),
            inputs=[(label, t.detach()) for label, t in inputs],
            names={label: known.name for label, t in inputs if (known := self.external.get(storage_key(t))) is not None},
        )

    def _from_outside(
        self, number: int, name: str, node: Any, label: str, tensor: Tensor, was: Badness, call: _Call, result: Tensor, badness: Badness
    ) -> Origin:
        """The origin of a tensor that no operation of this pass made bad; the tag makes it the same for every reader."""
        external = self.external.get(storage_key(tensor), External((f"the argument {label} of {name}",), "outside", tensor))
        # The named tensor, not the view of it that was read, unless it is only a part of what shares its memory.
        whole = external.tensor if judge(external.tensor, self.limit) != Badness.FINE else tensor
        origin = self._origin(number, name, node, whole, was, [(label, tensor)])
        origin.external = external.as_read_by(origin.place.module)
        shown = _first_bad(result, self.limit, badness)
        origin.shown = (tuple(result.shape), shown)
        ids = next((t for other, t in call.inputs if other == "indices"), None)
        if name == "embedding" and ids is not None and len(shown) > 1:
            # Of a table with several bad rows the one that was read.
            origin.index = (int(ids[shown[:-1]]), shown[-1])
            origin.value = _element(whole, origin.index)
        self.origins.append(origin)
        self._tag(tensor, origin)
        return origin

    def _tag(self, tensor: Tensor, origin: Origin) -> None:
        key = storage_key(tensor)
        old = self._tags.get(key)
        if old is None or old.storage.expired() or origin.number < old.origin.number:
            self._tags[key] = _Tag(StorageWeakRef(tensor.untyped_storage()), origin)

    def _sequence(self) -> int:
        return torch._C._autograd._get_sequence_nr() - self._start

    def _is_blank(self, tensor: Tensor) -> bool:
        reference = self._blank.get(storage_key(tensor))
        return reference is not None and not reference.expired()

    def _is_parameter(self, tensor: Tensor) -> bool:
        known = self.external.get(storage_key(tensor))
        return known is not None and known.kind == "state"

    def _made_of_masks(self, call: _Call, name: str) -> bool:
        """-Inf out of numbers at the dtype's end: a mask that was added to a mask, or cast to a smaller dtype."""
        if name not in ("add", "add_", "sub", "_to_copy", "to"):
            return False
        tensors = [t for _, t in call.inputs if t.is_floating_point() and t.numel()]
        return any(float(t.min()) <= 0.5 * torch.finfo(t.dtype).min for t in tensors if t.dtype.itemsize > 1)

    def _leaf(self, node: Any) -> str:
        """The module of the parameter whose gradient is being accumulated, at the engine's last node."""
        variable = getattr(node, "variable", None)
        known = self.external.get(storage_key(variable)) if isinstance(variable, Tensor) else None
        return known.name.rpartition(".")[0] if known is not None else ""


def storage_key(tensor: Tensor) -> int:
    """What views of one memory have in common; 0 for a tensor without memory of its own."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def _tensors_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    call = _Call()
    declared = func._schema.arguments
    named = [(declared[i], value) for i, value in enumerate(args)]
    named += [(argument, kwargs[argument.name]) for argument in declared if argument.name in kwargs]
    for argument, value in named:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for label, tensor in _labelled(argument.name, value):
            call.inputs.append((label, tensor))
            if writes:
                call.written.append(tensor)
    return call


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


def _first_bad(tensor: Tensor, limit: float, badness: Badness) -> tuple[int, ...]:
    found = bad_elements(tensor, limit, soft=badness == Badness.SOFT).nonzero()
    return tuple(int(i) for i in found[0]) if len(found) else ()


def _element(tensor: Tensor, index: tuple[int, ...]) -> float:
    value = tensor[index]
    return float(torch.view_as_real(value).abs().max()) if value.is_complex() else float(value)


def _holds(tensors: list[Tensor], tensor: Tensor) -> bool:
    return any(tensor is t for t in tensors)
