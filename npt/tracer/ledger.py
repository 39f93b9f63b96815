"""The ledger of a pass: for each bad tensor the operation that first made it bad.

Passing a NaN along is no fault. A bad output whose inputs were all good has a new origin; one with
a bad input inherits that input's. So a bad loss or gradient leads back to the one operation,
parameter or batch entry that it came from, and a NaN that was masked away on purpose leads nowhere.

-Inf is what masks are made of. It counts as bad only if arithmetic made it from numbers that were
no masks; writing it (`full`, `masked_fill`, `where`) is intended, and so is passing it along. A
softmax over nothing but intended -Inf is then rightly the origin of its NaN.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from npt.tracer.operations import (
    ATTENTION,
    BLANK,
    CONSTANTS,
    REPLACING,
    WRITERS,
    External,
    Origin,
    Sequence,
    TorchCall,
    call_of,
)
from npt.tracer.source_location import Place, read_stack
from npt.tracer.tensors import (
    Badness,
    Memory,
    element,
    first_bad,
    judge,
    looks_like_a_mask,
    numbers,
    storage_key,
)
from npt.tracer.verdict import Phase

_ORIGINS_KEPT = 8
"""Origins kept, the oldest ones, of a tensor that is bad for several reasons."""


@dataclass(frozen=True)
class Location:
    """The place where an operation ran.

    Attributes:
        place: in backward, that of a hook or a custom function, or nothing but a leaf's module.
        node: of the graph, in backward, unless a hook or a custom function ran it.
        sequence: of the forward operation whose backward this is.
    """

    phase: Phase
    place: Place
    node: str
    sequence: Sequence | None


class Ledger(TorchDispatchMode):
    """Numbers the operations of a pass and keeps the origin of every bad tensor.

    Inputs are kept for one origin only: a model with thousands of harmless ones is not held twice.

    Attributes:
        first: the first origin that is no mask's and no NaN, of a number beyond the limit.
        hid: the operation `watched` gave a bad number.

    Args:
        modules: dotted names of the model's modules by identity.
        externals: tensors that exist before the pass.
        limit: a size from which finite numbers count as bad.
        keep: number and output of the operation whose origin keeps copies of all arguments: `kept`.
        asked: number of the operation whose inputs' origins are noted: `read_origins`.
        watch: the forward operation to locate, for a fault in its backward: `watched`.
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
        self.first: Origin | None = None
        self.kept: Origin | None = None
        self.read_origins: dict[str, Origin | None] = {}
        self.watched: Location | None = None
        self.hid = False
        self._modules, self._limit = modules, limit
        self._keep, self._asked, self._watch = keep, asked, watch
        self.count = 0
        self._home = threading.get_ident()
        self._starts = {self._home: torch._C._autograd._get_sequence_nr()}
        self._origins: Memory[tuple[int, Origin]] = Memory()
        self._externals: Memory[External] = Memory()
        for external in externals:
            self._externals.add(external.tensor, external)
        self._blank: dict[int, StorageWeakRef] = {}

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Return where the badness of this tensor came from, if the pass saw it arise.

        Of several origins, those of what was certainly bad (0) precede those of what may have been
        a mask (1), and the older the younger.
        """
        _, origin = min(
            self._origins.of(tensor),
            key=lambda item: (item[1].meant, item[0], item[1].number),
            default=(0, None),
        )
        return origin

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
        call = call_of(self.count, func, args, kwargs or {})
        self.count += 1
        away, now = self._clock()
        watch = self._watch if self.watched is None else None
        self._look_at_inputs(call)
        out = func(*args, **(kwargs or {}))
        results = call.results(out)
        if watch is not None and away == watch[0] and now > watch[1]:
            self.watched = self._location(call.node)
            self.hid = any(judge(t, self._limit) != Badness.FINE for t in results)
        if call.name in BLANK:
            for tensor in results:
                if storage_key(tensor):
                    self._blank[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage())
        elif not call.is_view or call.written or call.name == "lift_fresh":
            self._account_for(call, results[:1] if call.name.startswith(ATTENTION) else results)
        return out

    def _look_at_inputs(self, call: TorchCall) -> None:
        """Judge, and keep if asked, the inputs that the operation will write over."""
        memory = {key for t in call.written if (key := storage_key(t))}
        call.replaced = {
            id(t): judge(t, self._limit)
            for _, t in call.read
            if memory and storage_key(t) in memory
        }
        if self._keep is not None and call.number == self._keep[0]:
            call.kept = [
                (label, t.detach() if self._externals.of(t) else t.detach().clone())
                for label, t in call.read
            ]
        if call.number == self._asked:
            self.read_origins = {label: self.origin_of(t) for label, t in call.read}

    def _account_for(self, call: TorchCall, results: list[Tensor]) -> None:
        for position, result in enumerate(results):
            badness = judge(result, self._limit)
            if badness != Badness.FINE:
                self._account(call, position, result, badness)
            elif call.written:
                self._origins.forget(result)
            if call.written:
                self._blank.pop(storage_key(result), None)

    def _account(self, call: TorchCall, position: int, result: Tensor, badness: Badness) -> None:
        """Give a bad result its origin: that of the input it has it from, else a new one."""
        inherited, mask, masks = self._inherited(call, result, badness)
        constant = result.ndim == 0 and call.name in CONSTANTS
        if call.written:
            self._origins.forget(result)
        if inherited:
            inherited.sort(key=lambda item: (item[0], item[1].number))
            for rank, origin in inherited[:_ORIGINS_KEPT]:
                self._origins.add(result, (rank - inherited[0][0], origin))
            return
        blank = call.written and self._is_blank(result) and call.name not in REPLACING
        if badness == Badness.HARD and blank:
            return  # some of it may still be the content of fresh memory
        masks_on = masks or call.name in WRITERS or call.made_of_masks or self._masks_with(call)
        meant = constant or (badness == Badness.SOFT and masks_on)
        if meant and mask is not None and mask.shape:
            self._origins.add(result, (0, mask))
            return
        index = first_bad(result, self._limit, soft=meant or not masks)
        origin = self._origin(call, result, position, index)
        origin.meant, origin.hard = meant, badness == Badness.HARD
        self._origins.add(result, (0, origin))
        if not meant:
            self._note(origin)

    def _inherited(
        self, call: TorchCall, result: Tensor, badness: Badness
    ) -> tuple[list[tuple[int, Origin]], Origin | None, bool]:
        """Return the origins that a bad result has from its inputs, the first mask among them, and
        whether any input is a mask.
        """
        inherited: list[tuple[int, Origin]] = []
        mask, masks = None, False
        for label, tensor in call.read:
            replaced = call.replaced.get(id(tensor))
            was = judge(tensor, self._limit) if replaced is None else replaced
            if was == Badness.FINE or (self._is_blank(tensor) and call.writes(tensor)):
                continue
            origins, before_pass = self._origins.of(tensor), self._externals.of(tensor)
            trained = any(external.trained for external in before_pass)
            if not origins and was == Badness.SOFT and not trained and looks_like_a_mask(tensor):
                masks = True
                continue
            if not origins and tensor.ndim == 0 and not before_pass:
                continue  # a constant from before the pass, treated as those made in it
            masks |= was == Badness.SOFT
            if not origins:
                origins = [(0, self._from_outside(call, label, was, result, badness))]
            for rank, origin in origins:
                if origin.meant:
                    mask = mask or origin
                # A selection that leaves -Inf alone has dropped the worse of that input.
                elif (
                    badness == Badness.HARD
                    or was == Badness.SOFT
                    or not origin.hard
                    or call.name not in WRITERS
                ):
                    inherited.append((max(rank, int(was < badness)), origin))
        return inherited, mask, masks

    def _origin(
        self, call: TorchCall, result: Tensor, position: int, index: tuple[int, ...]
    ) -> Origin:
        shape = tuple(result.shape)
        origin = Origin(
            number=call.number,
            output=position,
            operation=call.name,
            shape=shape,
            dtype=result.dtype,
            index=index,
            value=element(result, index),
            through=(shape, index),
            pointwise=call.pointwise,
            **vars(self._location(call.node)),
        )
        if self._keep == (call.number, position):
            origin.inputs, origin.constants = call.kept, call.constants
            for label, tensor in call.read:
                external = self._external(tensor, origin.place.module)
                if external is not None:
                    origin.externals[label] = external
            self.kept = origin
        return origin

    def _location(self, node: Any) -> Location:
        stack = read_stack(sys._getframe(), self._modules)
        if node is None or stack.recomputing:
            return Location("forward" if node is None else "recomputation", stack.place, "", None)
        place = stack.place if stack.user_code else Place()
        if not place.module:
            place = Place(self._leaf(node), place.source)
        name = "" if stack.user_code else node.name().rpartition("::")[2]
        return Location("backward", place, name, self._sequence(node, stack.nested))

    def _from_outside(
        self, call: TorchCall, label: str, was: Badness, result: Tensor, badness: Badness
    ) -> Origin:
        """Return the origin of an input that no operation of this pass made bad; its note makes it
        the same for every reader.
        """
        arguments = dict(call.read)
        tensor, ids = arguments[label], arguments.get("indices")
        shown = first_bad(result, self._limit, soft=badness == Badness.SOFT)
        origin = self._origin(call, result, 0, shown)
        external = self._external(tensor, origin.place.module, bad=True)
        whole = tensor if external is None else external.tensor
        if external is None:
            name = f"the argument {label} of {call.name}"
            external = External(name, "outside", tensor.detach())
        origin.external, origin.index = external, first_bad(whole, self._limit)
        if call.name == "embedding" and ids is not None and len(shown) > 1:
            # of a table with several bad rows the one that was read
            origin.index = (int(ids[shown[:-1]]), shown[-1])
        origin.shape, origin.dtype = tuple(whole.shape), whole.dtype
        origin.value = element(whole, origin.index)
        origin.hard = was == Badness.HARD
        self._origins.add(tensor, (0, origin))
        self._note(origin)
        return origin

    def _external(self, tensor: Tensor, module: str, bad: bool = False) -> External | None:
        """Return what a tensor was before the pass, by the name that it has in `module`; `bad`: of
        several that share its memory only a bad one.
        """
        externals = self._externals.of(tensor)
        externals = [e for e in externals if not bad or judge(e.tensor, self._limit)]
        return min(externals, key=lambda external: external.module != module, default=None)

    def _note(self, origin: Origin) -> None:
        if self.first is None and not math.isnan(origin.value):
            self.first = origin

    def _masks_with(self, call: TorchCall) -> bool:
        """Tell if a number of the program itself is beyond the limit: (1 - mask) * -1e9."""
        constants = [*call.constants.values()]
        for _, t in call.read:
            if t.ndim == 0 and numbers(t) is not None and not self._externals.of(t):
                constants.append(element(t, ()))
        return any(number < -self._limit or number == -math.inf for number in constants)

    def _clock(self) -> tuple[bool, int]:
        """Return how many nodes the graph has got in this thread since the pass began. Backward on
        a GPU has threads of its own.
        """
        thread, now = threading.get_ident(), torch._C._autograd._get_sequence_nr()
        return thread != self._home, now - self._starts.setdefault(thread, now)

    def _sequence(self, node: Any, nested: bool) -> Sequence | None:
        """Return the forward operation that a node belongs to; None for one that has none, such as
        the end of a leaf's gradient.
        """
        thread = threading.get_ident()
        away = thread != self._home and nested
        number = node._sequence_nr() - self._starts.get(thread if away else self._home, 0)
        return (away, number) if 0 <= number < 2**62 else None

    def _is_blank(self, tensor: Tensor) -> bool:
        reference = self._blank.get(storage_key(tensor))
        return reference is not None and not reference.expired()

    def _leaf(self, node: Any) -> str:
        """Return the module of the parameter whose gradient is being accumulated, at the engine's
        last node.
        """
        variable = getattr(node, "variable", None)
        external = self._external(variable, "") if isinstance(variable, Tensor) else None
        return "" if external is None else external.module
