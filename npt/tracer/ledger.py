"""The ledger of a pass: for each bad tensor, the operation that first made it bad.

A bad output whose inputs were all good gets a new origin; one with a bad input inherits that
input's. So a bad loss or gradient leads back to one operation, parameter or batch entry. A NaN that
`where` masks on purpose is not reported.

Masks use -Inf. It counts as bad only if arithmetic made it from numbers that are no mask. Writing
it (`full`, `masked_fill`, `where`) or passing it on is intended.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from npt.tracer.operations import (
    BLANK,
    CONSTANTS,
    MASKING,
    REPLACING,
    WRITERS,
    External,
    Observer,
    Origin,
    Sequence,
    TorchCall,
)
from npt.tracer.source_location import Place, read_stack
from npt.tracer.tensors import (
    Badness,
    Memory,
    element,
    first_bad,
    judge,
    looks_like_a_mask,
    nears_minimum,
    numbers,
    storage_key,
    tensors_in,
)
from npt.tracer.verdict import Phase

# No operation comes after it.
_NEVER = (False, sys.maxsize)
_ORIGINS_KEPT = 8
"""How many origins are kept, oldest first, of a tensor that is bad for several reasons."""


class Location(NamedTuple):
    """The place of an operation, as in `Origin`. In backward, `place` is known only for a hook or a
    custom function, which has no `node`, and otherwise holds at most a leaf's module.
    """

    phase: Phase
    place: Place
    node: str = ""
    sequence: Sequence | None = None


class Ledger(Observer):
    """Keep the origin of every bad tensor of a pass. Inputs are copied for one origin only, to save
    memory.

    Args:
        modules: dotted names of modules by id.
        externals: tensors that exist before the pass.
        limit: the magnitude above which finite numbers count as bad.
        keep: number and output of the operation whose origin, `kept`, keeps its arguments.
        asked: number of the operation whose inputs' origins are kept in `read_origins`.
        watch: the forward operation to locate as `watched`, after a fault in its backward.

    Attributes:
        first: the first origin of a number beyond the limit, neither a mask nor NaN.
        hid: whether the operation `watched` gave a bad value.
    """

    def __init__(
        self,
        modules: Mapping[int, str],
        externals: Iterable[External],
        limit: float = math.inf,
        keep: tuple[int, int] = (-1, -1),
        asked: int = -1,
        watch: Sequence | None = None,
    ):
        super().__init__(modules)
        self.first: Origin | None = None
        self.kept: Origin | None = None
        self.read_origins: dict[str, Origin | None] = {}
        self.watched = Location("forward", Place())
        self.hid = False
        # so that an infinity is beyond it
        self._limit = min(limit, sys.float_info.max)
        self._keep = keep
        self._asked = asked
        self._watch = watch or _NEVER
        self._origins: Memory[tuple[int, Origin]] = Memory()
        self._externals: Memory[External] = Memory()
        for external in externals:
            self._externals.add(external.tensor, external)
        self._blank: dict[int, StorageWeakRef] = {}
        self._inputs: list[tuple[str, Tensor]] = []

    def origin_of(self, tensor: Tensor) -> Origin | None:
        """Return a tensor's origin: certain ones (0) before possible masks (1), then the oldest."""
        found = self._origins.of(tensor)
        if not found:
            return None
        found.sort(key=lambda item: (item[1].meant, item[0], item[1].number))
        return found[0][1]

    def run(self, call: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        away, now = self.clock()
        self._look_at_inputs(call)
        out = func(*args, **kwargs)
        results = call.results(out)
        # the operation whose graph node came after the watched one's
        if away == self._watch[0] and now > self._watch[1]:
            self._watch = _NEVER
            self.watched = self._location(call.node)
            # of attention too, all results: its statistics overflow first
            returned = [tensor for _, tensor in tensors_in(out)]
            self.hid = any(judge(tensor, self._limit) for tensor in (*results, *returned))
        if call.name in BLANK:
            for result in results:
                key = storage_key(result)
                if key:
                    self._blank[key] = StorageWeakRef(result.untyped_storage())
        elif call.written or not call.is_view or call.name == "lift_fresh":
            for position, result in enumerate(results):
                self._judge(call, position, result)
        return out

    def _look_at_inputs(self, call: TorchCall) -> None:
        """Judge the inputs that the operation will overwrite, and keep inputs if asked."""
        overwritten = {*map(storage_key, call.written.values())} - {0}  # 0: no memory
        for _, tensor in call.read if overwritten else ():
            if storage_key(tensor) in overwritten:
                call.replaced[id(tensor)] = judge(tensor, self._limit)
        if call.number == self._keep[0]:
            for label, tensor in call.read:
                kept = tensor.detach()
                if not self._externals.of(tensor):
                    # later operations may overwrite it
                    kept = kept.clone()
                self._inputs.append((label, kept))
        if call.number == self._asked:
            self.read_origins = {label: self.origin_of(tensor) for label, tensor in call.read}

    def _judge(self, call: TorchCall, position: int, result: Tensor) -> None:
        badness = judge(result, self._limit)
        if badness:
            self._account(call, position, result, badness)
        elif call.written:
            self._origins.forget(result)
        if call.written:
            self._blank.pop(storage_key(result), None)

    def _account(self, call: TorchCall, position: int, result: Tensor, badness: Badness) -> None:
        """Give a bad result its origin: the origin of a bad input, or else a new one."""
        inherited, mask, masks = self._inherited(call, result, badness)
        if call.written:
            self._origins.forget(result)
        if inherited:
            self._pass_on(result, inherited)
            return
        blank = call.written and self._is_blank(result) and call.name not in REPLACING
        if badness == Badness.HARD and blank:
            return  # part of it may still be uninitialised
        meant = result.ndim == 0 and call.name in CONSTANTS
        if badness == Badness.SOFT and not meant:
            meant = masks or call.name in WRITERS or self._makes_a_mask(call)
        if meant and mask is not None and mask.shape:
            # a mask that is passed on
            self._origins.add(result, (0, mask))
            return
        index = first_bad(result, self._limit, soft=meant or not masks)
        origin = self._origin(call, result, position, index)
        origin.meant = meant
        origin.hard = badness == Badness.HARD
        self._origins.add(result, (0, origin))
        if not meant:
            self._note(origin, call)

    def _pass_on(self, result: Tensor, inherited: list[tuple[int, Origin]]) -> None:
        """Give a result the origins of its inputs, the most certain ones first."""
        inherited.sort(key=lambda item: (item[0], item[1].number))
        least = inherited[0][0]
        for rank, origin in inherited[:_ORIGINS_KEPT]:
            self._origins.add(result, (rank - least, origin))

    def _inherited(
        self, call: TorchCall, result: Tensor, badness: Badness
    ) -> tuple[list[tuple[int, Origin]], Origin | None, bool]:
        """Return the origins from its inputs, the first mask, and whether there is a mask."""
        inherited: list[tuple[int, Origin]] = []
        mask: Origin | None = None
        masks = False
        selects = call.name in WRITERS
        for label, tensor, was in self._bad_inputs(call):
            masks |= was == Badness.SOFT
            origins = self._origins.of(tensor)
            if not origins and not self._is_given(tensor, was):
                origins = [(0, self._from_outside(call, label, was, result, badness))]
            for rank, origin in origins:
                if origin.meant:
                    mask = mask or origin
                # A selection with only -Inf left has dropped that input's NaN or +Inf.
                elif badness >= was or not (origin.hard and selects):
                    # a -Inf may be a mask, and so is the less certain origin of a NaN
                    rank = max(rank, int(was < badness))
                    inherited.append((rank, origin))
        return inherited, mask, masks

    def _bad_inputs(self, call: TorchCall) -> Iterator[tuple[str, Tensor, Badness]]:
        """Yield the bad inputs, but not uninitialised memory that the operation writes to."""
        for label, tensor in call.read:
            # what has been overwritten was judged before
            was = call.replaced.get(id(tensor))
            if was is None:
                was = judge(tensor, self._limit)
            if was and not (call.writes(tensor) and self._is_blank(tensor)):
                yield label, tensor, was

    def _is_given(self, tensor: Tensor, badness: Badness) -> bool:
        """Tell if a bad tensor without origin is a mask or a constant from before the pass, which
        counts like one made in it.
        """
        if badness == Badness.SOFT and not self._is_no_mask(tensor):
            return looks_like_a_mask(tensor)
        return tensor.ndim == 0 and not self._externals.of(tensor)

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
            **self._location(call.node)._asdict(),
        )
        if self._keep == (call.number, position):
            self._give_inputs(origin, call)
            self.kept = origin
        return origin

    def _give_inputs(self, origin: Origin, call: TorchCall) -> None:
        origin.inputs = self._inputs
        origin.constants = call.constants
        for label, tensor in call.read:
            external = self._external(tensor, origin.place.module)
            if external is not None:
                origin.externals[label] = external

    def _location(self, node: Any) -> Location:
        stack = read_stack(sys._getframe(), self.modules)
        place = stack.place
        if node is None:
            return Location("forward", place)
        if stack.recomputing:
            return Location("recomputation", place)
        name = ""
        if not stack.user_code:
            # a function of torch's own has no place in the user's code
            place = Place()
            name = node.name().rpartition("::")[2]
        if not place.module:
            place = Place(self._leaf(node), place.source)
        sequence = self.sequence(node, stack.nested)
        return Location("backward", place, name, sequence)

    def _from_outside(
        self, call: TorchCall, label: str, was: Badness, result: Tensor, badness: Badness
    ) -> Origin:
        """Return the origin of an input that no operation made bad, and record it."""
        read = dict(call.read)
        tensor = read[label]
        shown = first_bad(result, self._limit, soft=badness == Badness.SOFT)
        origin = self._origin(call, result, 0, shown)
        external = self._external(tensor, origin.place.module, bad=True)
        if external is None:
            external = External(f"the argument {label} of {call.name}", "outside", tensor.detach())
        origin.external = external
        whole = external.tensor
        origin.index = first_bad(whole, self._limit)
        if call.name == "embedding" and "indices" in read and len(shown) > 1:
            # the bad row that was read, if the table has several
            row = int(read["indices"][shown[:-1]])
            origin.index = (row, shown[-1])
        origin.shape = tuple(whole.shape)
        origin.dtype = whole.dtype
        origin.value = element(whole, origin.index)
        origin.hard = was == Badness.HARD
        self._origins.add(tensor, (0, origin))
        self._note(origin, call)
        return origin

    def _external(self, tensor: Tensor, module: str, bad: bool = False) -> External | None:
        """Return an external in a tensor's memory, preferably of `module`; a bad one if `bad`."""
        externals = self._externals.of(tensor)
        if bad:
            externals = [e for e in externals if judge(e.tensor, self._limit)]
        return min(externals, key=lambda external: external.module != module, default=None)

    def _note(self, origin: Origin, _call: TorchCall) -> None:
        if self.first is None and not math.isnan(origin.value):
            self.first = origin

    def _is_no_mask(self, tensor: Tensor) -> bool:
        return any(external.no_mask for external in self._externals.of(tensor))

    def _makes_a_mask(self, call: TorchCall) -> bool:
        """Tell if a -Inf comes from a mask in another dtype, or from a number in the code that is
        beyond the limit, as in (1 - mask) * -1e9.
        """
        maybe = (tensor for _, tensor in call.read if not self._is_no_mask(tensor))
        if call.name in MASKING and any(map(nears_minimum, maybe)):
            return True
        scalars = [t for _, t in call.read if t.ndim == 0 and not self._externals.of(t)]
        given = [element(scalar, ()) for scalar in scalars if numbers(scalar) is not None]
        return any(number < -self._limit for number in (*call.constants.values(), *given))

    def _is_blank(self, tensor: Tensor) -> bool:
        reference = self._blank.get(storage_key(tensor))
        return reference is not None and not reference.expired()

    def _leaf(self, node: Any) -> str:
        """Return the module of the parameter whose gradient a node accumulates."""
        variable = getattr(node, "variable", None)
        if not isinstance(variable, Tensor):
            return ""
        external = self._external(variable, "")
        return "" if external is None else external.module


class OnePass(Ledger):
    """The ledger of code that is not run again. It keeps at once what `trace` collects in further
    passes: the inputs of the first origins, and the line of every forward operation.

    Attributes:
        losses: what backward was called on.
    """

    def __init__(self, modules: Mapping[int, str], externals: Iterable[External], limit: float):
        super().__init__(modules, externals, limit)
        self.losses: list[Tensor] = []
        self._bad: set[Sequence] = set()
        self._noted = 0

    def run(self, call: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        if call.name == "ones_like" and _starts_backward():
            self.losses += [tensor.detach() for _, tensor in call.read]
        self.where(call)
        return super().run(call, func, args, kwargs)

    def _account(self, call: TorchCall, position: int, result: Tensor, badness: Badness) -> None:
        if call.node is None:
            away, now = self.clock()
            self._bad.add((away, now - 1))
        super()._account(call, position, result, badness)

    def _note(self, origin: Origin, call: TorchCall) -> None:
        super()._note(origin, call)
        forward = self._places.get(origin.sequence, Place())
        origin.place = origin.place.completed_by(forward)
        origin.hid = origin.sequence in self._bad
        # what the operation has overwritten is lost
        lost = any(call.writes(tensor) for _, tensor in call.read)
        if self._noted < _ORIGINS_KEPT and not lost:
            self._noted += 1
            # an optimizer may overwrite externals before they are looked at
            self._inputs = [(label, tensor.detach().clone()) for label, tensor in call.read]
            self._give_inputs(origin, call)


def _starts_backward() -> bool:
    """Tell if torch is making the gradient of a loss, to start backward from it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_make_grads":
        frame = frame.f_back
    return frame is not None
