"""`trace(against=)`: the first operation at which two passes of a batch part beyond rounding.

The results of a reference's operations are recorded. In the pass in question each result is
compared with its record and then replaced by it, so an operation is given what the reference's was
given: a difference is its own, and none is inherited. What rounding explains of it is measured: the
reference runs once more, held to its record in the same way, with all that its operations read
moved at random by as much as rounding moves it. An operation without a partner (a fused kernel, a
cast, one of another version) runs free in both, and what it makes of rounding shows in the next
result that has one.

TTrace (arXiv 2506.09280) has tolerances from perturbations of the size of rounding as well, of what
goes into a whole training program.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from npt.base.linear import dense_weight, quantized_linears
from npt.data.batch import Batch
from npt.errors import ConfigError
from npt.files import write_bytes
from npt.stored import opened
from npt.tracer.operations import ATTENTION, BLANK, TorchCall, call_of, names
from npt.tracer.passes import default_run, ready, sinks_of, untouched
from npt.tracer.source_location import Place, Tokens, layer_of, read_stack
from npt.tracer.tensors import Memory, dtype_name
from npt.tracer.verdict import Phase, Verdict

MARGIN = 8.0
"""What rounding explains, in sizes of the answer to a random perturbation. The largest that equal
passes needed was 2 (gradients of attention, fp32 against fp64); a planted parting exceeds it."""

_DECLARED = 0.1
"""The share of a pass's results from which their dtype is one that the pass is meant to have."""

_ROW = 32
"""Numbers in the last dimension from which every row is judged by itself."""

_UNSEEN = BLANK | names("_to_copy copy_ clone detach alias lift_fresh _unsafe_view")
"""Copies and casts, of which another dtype, device or version has others."""

_FORMATS = {2.0**-11: "float16 or TF32", 2.0**-8: "bfloat16"}


class Step(NamedTuple):
    """A result of an operation, as it is called in both passes: the `nth` of its kind."""

    module: str
    phase: Phase
    operation: str
    result: int
    shape: tuple[int, ...]
    nth: int


@dataclass(frozen=True)
class Difference:
    """How a result differs from its record.

    Attributes:
        error, size: norms of difference and record, by row.
        index, value: of the element that differs most.
        free: something that was not held to a record went in.
    """

    error: Tensor
    size: Tensor
    index: tuple[int, ...]
    value: float
    free: bool = False

    def worst(self, noise: Tensor, unit: float) -> tuple[float, float, float]:
        """Return error, size and what rounding explains, of the row that exceeds that most."""
        rounding = noise + noise.mean() + unit * (self.size + self.size.mean())
        explained = (MARGIN * rounding).clamp(min=1e-300)
        row = int((self.error / explained).argmax())
        return float(self.error[row]), float(self.size[row]), float(explained[row])


def _unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a dtype; 0 of integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def _compare(record: Tensor, found: Tensor, valid: Tensor | None = None) -> Difference:
    """Compare a result with its record, of valid tokens. Both masked, or NaN in both, is no
    difference; of integers each that differs counts 1.
    """
    if record.dtype == found.dtype and torch.equal(record, found):
        none = torch.zeros(1, dtype=torch.float64)
        return Difference(none, none, (), 0.0)
    if record.is_complex():
        record, found = torch.view_as_real(record), torch.view_as_real(found)
    if record.is_floating_point() and found.is_floating_point():
        low = [t <= torch.finfo(t.dtype).min / 2 for t in (record, found)]
        same = (record == found) | (record.isnan() & found.isnan()) | (low[0] & low[1])
        wide = torch.promote_types(torch.promote_types(record.dtype, found.dtype), torch.float32)
        gap = (found.to(wide) - record.to(wide)).abs().nan_to_num(math.inf).masked_fill(same, 0.0)
        size = record.to(wide).masked_fill(low[0] | ~record.isfinite(), 0.0)
    else:
        gap = (record != found).to(torch.float32)
        size = torch.ones_like(gap)
    if valid is not None and gap.shape[:2] == valid.shape:
        gap[~valid.to(gap.device)] = 0.0
    index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    return Difference(_rows(gap), _rows(size), index, float(found[index]))


def _rows(tensor: Tensor) -> Tensor:
    """Return the norms of the rows, or of all if these are short, on the host."""
    long = tensor.ndim > 1 and tensor.shape[-1] >= _ROW
    rows = tensor.reshape(-1, tensor.shape[-1] if long else tensor.numel())
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).cpu()


@dataclass
class Record:
    """The steps of a pass, in order.

    Attributes:
        values: results, on the host.
        noise: of a saved reference, what its own rounding does to each.
        end: the loss, or the mean of the first output.
    """

    dtypes: dict[Step, torch.dtype] = field(default_factory=dict)
    sources: dict[Step, str] = field(default_factory=dict)
    values: dict[Step, Tensor] = field(default_factory=dict)
    noise: dict[Step, Tensor] = field(default_factory=dict)
    end: str = ""

    @property
    def unit(self) -> float:
        """The coarsest rounding that the pass is meant to have."""
        counts = Counter(unit for dtype in self.dtypes.values() if (unit := _unit(dtype)))
        return max((u for u, n in counts.items() if n >= _DECLARED * counts.total()), default=0.0)

    def kinds(self) -> Counter[Any]:
        """Count the steps of each kind."""
        return Counter(step[:-1] for step in self.dtypes)

    def alone(self, step: Step, matched: Collection[Step]) -> list[str]:
        """Name the operations without a partner just before a step, each with its line."""
        alone: dict[str, None] = {}
        for earlier in self.dtypes:
            if earlier == step:
                break
            line = self.sources.get(earlier, "")
            named = f"{earlier.operation} ({line})" if line else earlier.operation
            alone = {} if earlier in matched else {**alone, named: None}
        return [*alone]

    def save(self, path: Path) -> None:
        """Write it as safetensors."""
        tensors = {f"value {i}": value.contiguous() for i, value in enumerate(self.values.values())}
        tensors |= {f"noise {i}": self.noise[step] for i, step in enumerate(self.values)}
        metadata = {"npt_trace": json.dumps([*self.values]), "end": self.end}
        write_bytes(path, safetensors.torch.save(tensors, metadata))

    @staticmethod
    def load(path: Path) -> Record:
        """Read a saved one."""
        record = Record()
        with opened(path, ConfigError) as stored:
            metadata = stored.metadata() or {}
            if "npt_trace" not in metadata:
                raise ConfigError(f"{path} is no trace that --against has written; name another")
            record.end = metadata["end"]
            for i, (*key, shape, nth) in enumerate(json.loads(metadata["npt_trace"])):
                step = Step(*key, tuple(shape), nth)
                record.values[step] = stored.get_tensor(f"value {i}")
                record.noise[step] = stored.get_tensor(f"noise {i}")
                record.dtypes[step] = record.values[step].dtype
        return record


class HeldPass(TorchDispatchMode):
    """A pass whose results are recorded, or held to a record.

    Args:
        held: what the results of steps are compared with and replaced by.
        units: by module, phase and operation, the relative size of the perturbations.
        unit: that of all other operations; 0 for no perturbation.
        keep: record the results.
        boundaries: results are what modules return, since a compiled graph has no operations.
    """

    def __init__(
        self,
        model: nn.Module,
        valid: Tensor | None,
        *,
        held: Mapping[Step, Tensor] | None = None,
        units: Mapping[Any, float] | None = None,
        unit: float = 0.0,
        keep: bool = False,
        boundaries: bool = False,
    ):
        super().__init__()
        self.supports_higher_order_operators = True
        self.record = Record()
        self.found: dict[Step, Difference] = {}
        self._valid, self._held, self._units = valid, held or {}, units or {}
        self._unit, self._keep = unit, keep
        self._names = {id(m): n.replace("_orig_mod.", "") for n, m in model.named_modules()}
        self._boundaries = boundaries
        self._places: dict[int, Place] = {}
        self._counts: Counter[Any] = Counter()
        self._free: Memory[bool] = Memory()
        self._draws = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        call = call_of(0, func, args, kwargs)
        name, free = call.name.rstrip("_"), any(self._free.of(t) for _, t in call.read)
        # autograd sums gradients in the order in which they come
        summed = call.node is not None and name == "add"
        if call.is_view or call.name in _UNSEEN or "dequantize" in name or summed:
            out = func(*args, **kwargs)
            for result in call.results(out) if free and not call.is_view else ():
                self._free.add(result, True)
            return out
        phase, place = self._where(call)
        unit = self._units.get((place.module, phase, name), self._unit)
        if self._unit:
            # A sum over n numbers rounds about sqrt(n) times, in fp32 at least; none is longer
            # than a dimension.
            longest = max((n for _, t in call.read if _unit(t.dtype) for n in t.shape), default=1)
            within = 0.0 if call.pointwise else _unit(torch.float32) * math.sqrt(longest)
            args, kwargs = tree_map_only(
                Tensor,
                lambda t: t if call.writes(t) else self._moved(t, unit + within),
                (args, kwargs),
            )
        out = func(*args, **kwargs)
        if not self._boundaries:
            results = call.results(out)
            for i, result in enumerate(results[:1] if name.startswith(ATTENTION) else results):
                self._take((place.module, phase, name, i), result, place.source, unit, free)
        return out

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Take what the modules return; what was compiled is compiled anew, and once more after."""

        @torch.compiler.disable
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                kind: Any = self._names[id(module)], "forward", "output", 0
                self._take(kind, output.data, "", self._unit)

        torch.compiler.reset()
        handles = [module.register_forward_hook(hook) for module in model.modules()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            torch.compiler.reset()

    def _where(self, call: TorchCall) -> tuple[Phase, Place]:
        """Return phase and place of an operation, in backward those of its forward."""
        stack, now = read_stack(sys._getframe(), self._names), torch._C._autograd._get_sequence_nr()
        if call.node is None or stack.recomputing:
            self._places.setdefault(now - 1, stack.place)
            return "forward" if call.node is None else "recomputation", stack.place
        return "backward", self._places.get(call.node._sequence_nr(), stack.place)

    def _take(
        self, operation: Any, result: Tensor, source: str, unit: float, free: bool = False
    ) -> None:
        """Note a result, and hold it to its record."""
        if result.layout != torch.strided or not result.numel():
            return
        kind = *operation, tuple(result.shape)
        self._counts[kind] += 1
        step = Step(*kind, self._counts[kind])
        self.record.dtypes[step], self.record.sources[step] = result.dtype, source
        if self._keep:
            self.record.values[step] = result.to("cpu", copy=True)
        self._free.forget(result)
        if step not in self._held:
            self._free.add(result, True)
        else:
            record = self._held[step].to(result.device)
            self.found[step] = replace(_compare(record, result, self._valid), free=free)
            result.copy_(self._moved(record.to(result.dtype), unit))

    def _moved(self, tensor: Tensor, unit: float) -> Tensor:
        """Return the numbers moved at random, by up to `unit` of each."""
        if not tensor.is_floating_point() or not unit:
            return tensor
        wide = torch.promote_types(tensor.dtype, torch.float32)
        draws = torch.empty(tensor.shape, dtype=wide).uniform_(-unit, unit, generator=self._draws)
        moved = tensor + tensor * draws.to(tensor.device)
        inside = moved.abs() < torch.finfo(tensor.dtype).max / 2  # masks are not moved
        return torch.where(inside, moved.to(tensor.dtype), tensor)


def parting(
    model: nn.Module, batch: Any, run: Any, against: nn.Module | str | Path
) -> Verdict | None:
    """Return the first result of a pass that rounding does not explain; see `trace`."""
    other = against if isinstance(against, nn.Module) else None
    comparison = _Comparison(model, other, batch, run)
    if isinstance(against, nn.Module):
        return comparison.verdict(comparison.run(against, keep=True).record)
    path = Path(against)
    if path.exists():
        return comparison.verdict(Record.load(path))
    record = comparison.run(model, keep=True).record
    record.noise = comparison.noise(model, record, {s: _unit(d) for s, d in record.dtypes.items()})
    record.save(path)
    return None


class _Comparison:
    """The passes of one comparison; arguments as for `trace`."""

    def __init__(self, model: nn.Module, other: nn.Module | None, batch: Any, run: Any):
        self.model, self.other, self.batch, self._run = model, other, batch, run
        self.compiled = _is_compiled(model) or (other is not None and _is_compiled(other))
        mask = batch.attention_mask if isinstance(batch, Batch) else None
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else mask
        self.valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def run(self, model: nn.Module, **how: Any) -> HeldPass:
        """Run one pass of a model."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with torch.inference_mode(False):
            batch = ready(self.batch, device)
        run = default_run(model, batch) if self._run is None else partial(self._run, model)
        held = HeldPass(model, self.valid, boundaries=self.compiled, **how)
        with ExitStack() as stack:
            stack.enter_context(untouched(model, batch))
            if self.compiled:
                stack.enter_context(held.hooked(model))
            if not _is_compiled(model):
                stack.enter_context(held)
            end = sinks_of(model, batch, run())[0]
        held.record.end = f"{end.label} {float(end.tensor.double().mean()):.7g}"
        return held

    def noise(
        self, model: nn.Module, record: Record, units: Mapping[Step, float]
    ) -> dict[Step, Tensor]:
        """Return what rounding does to each of these steps, by row."""
        unit = max([record.unit, *units.values()])
        of_operations: dict[Any, float] = {}
        for step, size in units.items():  # of an operation that gives integers, of what it reads
            of_operations[step[:3]] = max(size or unit, of_operations.get(step[:3], 0.0))
        held = {step: record.values[step] for step in units}
        found = self.run(model, held=held, units=of_operations, unit=unit).found
        return {step: difference.error for step, difference in found.items()}

    def verdict(self, record: Record) -> Verdict | None:
        """Compare the pass with a record, of the other model or from a file."""
        plain = self.run(self.model).record
        ours, theirs = plain.kinds(), record.kinds()
        held = {s: v for s, v in record.values.items() if ours[s[:-1]] == theirs[s[:-1]]}
        if 2 * len(held) < len(record.values):
            raise ConfigError(
                f"only {len(held)} of the reference's {len(record.values)} results have a partner"
                " in this pass: compare one model with itself, on one batch"
            )
        found = self.run(self.model, held=held)
        if not any(bool(difference.error.any()) for difference in found.found.values()):
            return None
        dtypes, coarsest = found.record.dtypes, max(plain.unit, record.unit)
        exact = {s: max(_unit(dtypes[s]), _unit(record.dtypes[s])) for s in found.found}
        units = {step: min(coarsest, unit) for step, unit in exact.items()}
        if self.other is None:
            scale = max(1.0, plain.unit / (record.unit or 1.0))
            noise = {step: record.noise[step] * scale for step in units}
        else:  # a compiled model shows none of its operations
            eager = self.model if _is_compiled(self.other) else self.other
            noise = self.noise(eager, record, units)
        for step, difference in found.found.items():
            if difference.free and self.other is None:
                continue  # a file cannot tell what rounding makes of other operations than its own
            error, size, explained = difference.worst(noise[step], units[step])
            if error > explained:
                alone = [r.alone(step, held) for r in (plain, record)]
                what = self._explanation(step, error, size, explained, units[step], alone)
                ends = f"{plain.end}; the reference {record.end}"
                dtype = dtype_name(dtypes[step])
                return self._verdict(step, difference, found.record, what, dtype, ends)
        return None

    def _explanation(
        self, step: Step, error: float, size: float, explained: float, unit: float, alone: Any
    ) -> str:
        by = f"{error / size:.2g} of its norm" if size else f"{error:.2g} from 0"
        text = f"it differs from the reference's by {by}"
        text += f", rounding explains {explained / (size or 1):.2g}"
        if unit:
            fits = [name for u, name in _FORMATS.items() if unit < u and error <= 2 * u * size]
            text += f"; no more than rounding to {fits[0]} makes" if fits else ""
        for who, operations in zip(("this pass", "the reference"), alone, strict=True):
            if operations:
                text += f"; just before it {who} alone ran {', '.join(operations)}"
        return text + "".join(f"; {state}" for state in self._states(step.module))

    def _states(self, module: str) -> Iterator[str]:
        """Say which weights, buffers and statistics of a module differ."""
        if self.other is None:
            return
        theirs = dict(_state(self.other, module))
        for name, tensor in _state(self.model, module):
            other = theirs.get(name)
            if other is not None and other.shape == tensor.shape and tensor.numel():
                difference = _compare(other.cpu(), tensor.cpu())
                apart = difference.error.norm() / difference.size.norm()
                units = _unit(tensor.dtype), _unit(other.dtype)
                if apart > (1e-6 if units[0] == units[1] else max(units)):
                    yield f"{name} differs by {float(apart):.2g} of its norm"

    def _verdict(
        self, step: Step, difference: Difference, record: Record, what: str, dtype: str, ends: str
    ) -> Verdict:
        shapes = {tuple(p.shape) for p in self.model.parameters()}
        row, token, sample = Tokens(self.batch, shapes).locate(step.shape, difference.index)
        return Verdict(
            cause="beyond rounding",
            phase=step.phase,
            layer=layer_of(step.module),
            module=step.module,
            operation=step.operation,
            source=record.sources[step],
            tensor=f"output of {step.operation} {[*step.shape]} {dtype}",
            index=difference.index,
            value=difference.value,
            reached=ends,
            explanation=what,
            row=row,
            token=token,
            sample=sample,
        )


def _state(model: nn.Module, module: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point parameters, buffers and dequantised weight of a module."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.replace("_orig_mod.", "").startswith(f"{module}.") and tensor.is_floating_point():
            yield name.replace("_orig_mod.", ""), tensor.detach()
    for name, linear in quantized_linears(model):
        if name == module:
            yield f"{name}: dequantised weight", dense_weight(linear)


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
