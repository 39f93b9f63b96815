"""A pass whose results are held: each is recorded, compared with a reference and replaced by it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from npt.tracer.operations import BLANK, Observer, TorchCall, names
from npt.tracer.pass_record import DTYPES, PassRecord, Result, Step, rounding_in
from npt.tracer.passes import names_of_modules
from npt.tracer.source_location import Tokens
from npt.tracer.tensors import Memory, dtype_name

Units = Mapping[Any, tuple[float, float]]
"""By operation, the relative rounding of its results, and of what it reads."""

# Rows at least this long are judged one by one.
_ROW = 32
# Copies and casts, which differ between dtypes, devices and versions.
_UNSEEN = BLANK | names("_to_copy copy_ clone detach alias lift_fresh _unsafe_view")
_NONE: Mapping[Any, Any] = MappingProxyType({})


class Difference(NamedTuple):
    """Norms, by row, of a difference and of the record, and where in each row it is largest."""

    error: Tensor
    size: Tensor
    at: Tensor


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    # torch does not promote 8-bit floats
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _gap(record: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Return each element's difference, and the magnitude that it is relative to.

    Elements that are masked in both, or NaN in both, are equal; a differing integer counts 1.
    """
    if not (record.is_floating_point() and found.is_floating_point()):
        gap = (record != found).to(torch.float32)
        return gap, torch.ones_like(gap)
    wide = _wide(record.dtype, found.dtype)
    expected = record.to(wide)
    given = found.to(wide)
    # a mask is written as the minimum of each pass's own dtype
    masked = expected <= torch.finfo(record.dtype).min / 2
    both_masked = masked & (given <= torch.finfo(found.dtype).min / 2)
    both_nan = expected.isnan() & given.isnan()
    equal = (expected == given) | both_nan | both_masked
    # Inf - Inf is NaN: only where both are the same is it no gap
    gap = (given - expected).abs().nan_to_num(math.inf)
    gap = gap.masked_fill(equal, 0.0)
    # a norm with a mask or an Inf in it would explain any difference
    size = expected.masked_fill(masked | ~expected.isfinite(), 0.0)
    return gap, size


def compare(record: Tensor, found: Tensor, tokens: Tokens) -> Difference:
    """Compare a result with its record at valid tokens."""
    if record.dtype == found.dtype and torch.equal(record, found):
        none = torch.zeros(1)
        return Difference(none, none, none.long())
    gap, size = map(tokens.without_padding, _gap(record, found))
    row = gap.numel()
    if gap.ndim > 1 and gap.shape[-1] >= _ROW:
        row = gap.shape[-1]
    gap = gap.reshape(-1, row)
    size = size.reshape(-1, row)
    rows = torch.arange(len(gap), device=gap.device)
    at = gap.argmax(dim=-1) + row * rows
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)
    return Difference(norm(gap).cpu(), norm(size).cpu(), at.cpu())


class HeldPass(Observer):
    """A pass whose results are recorded, compared and then replaced by held ones.

    Args:
        boundaries: observe only what modules return, since a compiled graph hides operations.
        keep: record values too.
        held: the results to replace by.
        compared: the results to compare with; default `held`.
        units: by operation, the relative size of the perturbation of its held result, and the
            least of its inputs.
        unit: both sizes for other operations; 0 turns perturbations off.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        boundaries: bool,
        *,
        keep: bool = False,
        held: Mapping[Step, Tensor] = _NONE,
        compared: Mapping[Step, Tensor] = _NONE,
        units: Units = _NONE,
        unit: float = 0.0,
    ):
        super().__init__(names_of_modules(model))
        self.record = PassRecord()
        self.found: dict[Step, Difference] = {}
        self.held = held
        self._tokens = tokens
        self._boundaries = boundaries
        self._keep = keep
        self._compared = compared or held
        self._units = units
        self._unit = unit
        self._roundings: Memory[float] = Memory()
        for buffer in model.buffers():
            # a constant such as rotary frequencies, which must not be rounded
            self._roundings.add(buffer, 0.0)
        self._counts: Counter[Any] = Counter()
        self._draws = torch.Generator().manual_seed(0)
        self._taking = False

    def run(self, call: TorchCall, func: Any, args: Any, kwargs: Any) -> Any:
        if call.is_view or self._taking:
            return func(*args, **kwargs)
        name = call.name.rstrip("_")
        read = max((self._rounding(tensor) for _, tensor in call.read), default=0.0)
        # autograd adds gradients in order of arrival
        summed = call.node is not None and name == "add"
        if summed or call.name in _UNSEEN or "dequantize" in name:
            out = func(*args, **kwargs)
            self._note_roundings(call.results(out), read)
            return out
        phase, place = self.where(call)
        operation = (place.module, phase, name)
        unit, least = self._units.get(operation, (self._unit, self._unit))
        if self._unit:
            args, kwargs = self._perturbed(call, args, kwargs, max(unit, least))
        out = func(*args, **kwargs)
        if not self._boundaries:
            for i, result in enumerate(call.results(out)):
                self._roundings.forget(result)
                self._take((*operation, i), result, place.source, unit, read)
        return out

    def _note_roundings(self, results: list[Tensor], read: float) -> None:
        """What is cast keeps the rounding that was read; exact numbers must not be rounded."""
        for result in results:
            self._roundings.forget(result)
            self._roundings.add(result, max(read, rounding_in(result.dtype)) if read else 0.0)

    def _perturbed(self, call: TorchCall, args: Any, kwargs: Any, unit: float) -> Any:
        """Return the arguments, perturbed by `unit` and by what the operation's sums round."""
        if not call.pointwise:
            # A sum of n numbers rounds about sqrt(n) times, in fp32 or better; n is at most the
            # longest dimension.
            sizes = [max(t.shape, default=1) for _, t in call.read if rounding_in(t.dtype)]
            unit += rounding_in(torch.float32) * math.sqrt(max(sizes, default=1))

        def moved(tensor: Tensor) -> Tensor:
            return tensor if call.writes(tensor) else self._moved(tensor, unit)

        return tree_map_only(Tensor, moved, (args, kwargs))

    def _rounding(self, tensor: Tensor) -> float:
        """Return how coarsely a tensor was rounded: in its dtype, or before a cast to it."""
        return max(self._roundings.of(tensor), default=rounding_in(tensor.dtype))

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Observe what modules return. Compiled code is recompiled, here and at its next use."""

        @torch.compiler.disable
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            self._taking = True
            if isinstance(output, Tensor):
                name = self.modules[id(module)]
                self._take((name, "forward", "output", 0), output.data)
            self._taking = False

        torch.compiler.reset()
        with ExitStack() as hooks:
            hooks.callback(torch.compiler.reset)
            for module in model.modules():
                handle = module.register_forward_hook(hook)
                hooks.callback(handle.remove)
            yield

    def _take(
        self, operation: Any, result: Tensor, source: str = "", unit: float = 0.0, read: float = 0.0
    ) -> None:
        comparable = result.layout == torch.strided and dtype_name(result.dtype) in DTYPES
        if not comparable or not result.numel():
            return
        kind = (*operation, tuple(result.shape))
        self._counts[kind] += 1
        step = Step._make((*kind, self._counts[kind]))
        value = result.to("cpu", copy=True) if self._keep else None
        self.record.results[step] = Result(result.dtype, read, source, value)
        if step in self.held:
            compared = self._compared[step].to(result.device)
            self.found[step] = compare(compared, result, self._tokens)
            held = self.held[step].to(result.device, result.dtype)
            result.copy_(self._moved(held, unit))

    def _moved(self, tensor: Tensor, unit: float) -> Tensor:
        """Return the tensor with each number perturbed at random by up to `unit` of it."""
        if not (unit and tensor.is_floating_point() and tensor.layout == torch.strided):
            return tensor
        numbers = tensor.to(_wide(tensor.dtype))
        draws = torch.empty(tensor.shape, dtype=numbers.dtype)
        draws.uniform_(-unit, unit, generator=self._draws)
        # 1 + draws would round the draws
        moved = torch.addcmul(numbers, numbers, draws.to(tensor.device))
        inside = moved.abs() < torch.finfo(tensor.dtype).max / 2  # masks stay
        return torch.where(inside, moved.to(tensor.dtype), tensor)
