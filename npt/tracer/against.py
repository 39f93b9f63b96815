"""`trace(against=)`: the first operation at which two passes of a batch part beyond rounding.

A reference's results are recorded, operation by operation. In the pass in question each result is
compared with its record, then replaced by it, so every operation is given what the reference's was
given: a difference is its own, none is inherited. What rounding explains of it is measured: the
pass runs once more, held in the same way, while what its operations read is moved at random by as
much as rounding moves it. An operation without a partner (a cast, a fused kernel, one of another
version) runs free, and counts towards the next that has one.

TTrace (arXiv 2506.09280) takes tolerances from such perturbations too, of a whole program's inputs.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
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
from npt.tracer.tensors import dtype_name
from npt.tracer.verdict import Phase, Verdict

MARGIN = 12.0
"""What rounding explains, in sizes of the answer to a random perturbation. Of all equal passes that
were tried the gradients of attention, eager against fused and fp16 against fp32, need most: 6 to 8.
"""

_MEANT = 0.1
"""The least share of a pass's results that are of a dtype which it is meant to compute in."""

_ROW = 32
"""The least length of rows that are judged one by one."""

_UNSEEN = BLANK | names("_to_copy copy_ clone detach alias lift_fresh _unsafe_view")
"""Copies and casts, of which another dtype, device or version has others."""

_FORMATS = {2.0**-11: "float16 or TF32", 2.0**-8: "bfloat16"}


class Step(NamedTuple):
    """A result of an operation by what both passes know it by: the `nth` of its kind."""

    module: str
    phase: Phase
    operation: str
    result: int
    shape: tuple[int, ...]
    nth: int


class Difference(NamedTuple):
    """Norms of a difference and of the record, by row; the element that differs most."""

    error: Tensor
    size: Tensor
    at: tuple[int, ...]
    value: float


def _unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a dtype; 0 of integers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


def _compare(record: Tensor, found: Tensor, valid: Tensor | None = None) -> Difference:
    """Compare a result with its record, of valid tokens. Both masked, or NaN in both, is no
    difference; an integer that differs counts 1.
    """
    if record.dtype == found.dtype and torch.equal(record, found):
        return Difference(torch.zeros(1), torch.zeros(1), (), 0.0)
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
    row = gap.shape[-1] if gap.ndim > 1 and gap.shape[-1] >= _ROW else gap.numel()
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)
    error, norms = (norm(t.reshape(-1, row)).cpu() for t in (gap, size))
    return Difference(error, norms, index, float(found[index]))


@dataclass
class PassRecord:
    """The steps of a pass in order, with their lines and, if kept, results on the host.

    Attributes:
        end: the loss, or the mean of the first output.
    """

    dtypes: dict[Step, torch.dtype] = field(default_factory=dict)
    sources: dict[Step, str] = field(default_factory=dict)
    values: dict[Step, Tensor] = field(default_factory=dict)
    end: str = ""

    @property
    def unit(self) -> float:
        """The coarsest rounding that the pass is meant to do."""
        counts = Counter(unit for dtype in self.dtypes.values() if (unit := _unit(dtype)))
        return max((u for u, n in counts.items() if n >= _MEANT * counts.total()), default=0.0)

    def alone(self, step: Step, matched: Collection[Step]) -> str:
        """Name the operations without a partner just before a step."""
        alone: dict[str, None] = {}
        for earlier in self.dtypes:
            if earlier == step:
                break
            line = self.sources.get(earlier, "").split(" in ")[0]
            named = f"{earlier.operation} ({line})" if line else earlier.operation
            alone = {} if earlier in matched else {**alone, named: None}
        return ", ".join(alone)

    def save(self, path: Path) -> None:
        """Write the results as safetensors."""
        tensors = {str(i): value.contiguous() for i, value in enumerate(self.values.values())}
        metadata = {"npt_trace": json.dumps([*self.values]), "end": self.end}
        write_bytes(path, safetensors.torch.save(tensors, metadata))

    @staticmethod
    def load(path: Path) -> PassRecord:
        """Read what `save` wrote."""
        with opened(path, ConfigError) as stored:
            metadata = stored.metadata() or {}
            if "npt_trace" not in metadata:
                raise ConfigError(f"{path} is no trace that against= wrote; name another file")
            record = PassRecord(end=metadata["end"])
            for i, (*kind, shape, nth) in enumerate(json.loads(metadata["npt_trace"])):
                step = Step._make((*kind, tuple(shape), nth))
                record.values[step] = stored.get_tensor(str(i))
                record.dtypes[step] = record.values[step].dtype
        return record


class HeldPass(TorchDispatchMode):
    """A pass whose results are recorded, and held to an earlier record.

    Args:
        held: what results are replaced by.
        compared: what they are compared with.
        units: by operation, the relative size of the perturbations.
        unit: that of others; 0 for no perturbation.
        boundaries: results are what modules return, since a compiled graph shows no operation.
        keep: record the values too.
    """

    def __init__(
        self, model: nn.Module, valid: Tensor | None, boundaries: bool, *, keep: bool = False,
        held: Mapping[Step, Tensor] | None = None, compared: Mapping[Step, Tensor] | None = None,
        units: Any = None, unit: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.supports_higher_order_operators = True
        self.record, self.found = PassRecord(), dict[Step, Difference]()
        self._valid, self._boundaries, self._keep = valid, boundaries, keep
        self._held, self._compared = held or {}, compared or held or {}
        self._units, self._unit = units or {}, unit
        self._names = {id(m): n.replace("_orig_mod.", "") for n, m in model.named_modules()}
        self._places: dict[int, Place] = {}
        self._counts: Counter[Any] = Counter()
        self._draws = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        kwargs, call = kwargs or {}, call_of(0, func, args, kwargs or {})
        name = call.name.rstrip("_")
        # autograd sums gradients in the order in which they come
        summed = call.node is not None and name == "add"
        if call.is_view or call.name in _UNSEEN or "dequantize" in name or summed:
            return func(*args, **kwargs)
        phase, place = self._where(call)
        unit = self._units.get((place.module, phase, name), self._unit)
        if self._unit:
            # A sum over n numbers rounds about sqrt(n) times, in fp32 at least; none is longer
            # than a dimension.
            longest = max((n for _, t in call.read if _unit(t.dtype) for n in t.shape), default=1)
            moved = unit + (0.0 if call.pointwise else _unit(torch.float32) * math.sqrt(longest))
            args, kwargs = tree_map_only(
                Tensor, lambda t: t if call.writes(t) else self._moved(t, moved), (args, kwargs)
            )
        out = func(*args, **kwargs)
        results = [] if self._boundaries else call.results(out)
        for i, result in enumerate(results[:1] if name.startswith(ATTENTION) else results):
            self._take((place.module, phase, name, i), result, place.source, unit)
        return out

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Take what modules return. What is compiled is compiled anew, here and when next used."""

        @torch.compiler.disable
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self._take((self._names[id(module)], "forward", "output", 0), output.data)

        torch.compiler.reset()
        with ExitStack() as hooks:
            hooks.callback(torch.compiler.reset)
            for module in model.modules():
                hooks.callback(module.register_forward_hook(hook).remove)
            yield

    def _where(self, call: TorchCall) -> tuple[Phase, Place]:
        """Return phase and place of an operation, in backward those of its forward."""
        stack, now = read_stack(sys._getframe(), self._names), torch._C._autograd._get_sequence_nr()
        if call.node is None or stack.recomputing:
            self._places.setdefault(now - 1, stack.place)
            return "forward" if call.node is None else "recomputation", stack.place
        return "backward", self._places.get(call.node._sequence_nr(), stack.place)

    def _take(self, operation: Any, result: Tensor, source: str = "", unit: float = 0.0) -> None:
        if result.layout != torch.strided or result.is_complex() or not result.numel():
            return
        kind = *operation, tuple(result.shape)
        self._counts[kind] += 1
        step = Step._make((*kind, self._counts[kind]))
        self.record.dtypes[step], self.record.sources[step] = result.dtype, source
        if self._keep:
            self.record.values[step] = result.to("cpu", copy=True)
        if step in self._held:
            compared = self._compared[step].to(result.device)
            self.found[step] = _compare(compared, result, self._valid)
            held = self._held[step].to(result.device, result.dtype)
            result.copy_(self._moved(held, unit))

    def _moved(self, tensor: Tensor, unit: float) -> Tensor:
        """Return the numbers moved at random, by up to `unit` of each."""
        if not tensor.is_floating_point() or not unit:
            return tensor
        wide = torch.promote_types(tensor.dtype, torch.float32)
        draws = torch.empty(tensor.shape, dtype=wide).uniform_(-unit, unit, generator=self._draws)
        moved = tensor + tensor * draws.to(tensor.device)
        inside = moved.abs() < torch.finfo(tensor.dtype).max / 2  # masks are not moved
        return torch.where(inside, moved.to(tensor.dtype), tensor)


class PassComparison:
    """The passes of one comparison; arguments as for `trace`."""

    def __init__(self, model: nn.Module, batch: Any, run: Any, against: Any):
        self.model, self.batch, self._run, self._against = model, batch, run, against
        self.other = against if isinstance(against, nn.Module) else None
        self._boundaries = _is_compiled(model) or _is_compiled(self.other)
        mask = batch.attention_mask if isinstance(batch, Batch) else None
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else mask
        self.valid = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def verdict(self) -> Verdict | None:
        """Return the first result that rounding does not explain; write a file that is missing."""
        if self.other is None and Path(self._against).exists():
            return self._parting(PassRecord.load(Path(self._against)))
        record = self._pass(self.model if self.other is None else self.other, keep=True).record
        if self.other is not None:
            return self._parting(record)
        record.save(Path(self._against))
        return None

    def _pass(self, model: nn.Module, **how: Any) -> HeldPass:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with torch.inference_mode(False):
            batch = ready(self.batch, device)
        run = default_run(model, batch) if self._run is None else partial(self._run, model)
        held = HeldPass(model, self.valid, self._boundaries, **how)
        with untouched(model, batch), ExitStack() as stack:
            if self._boundaries:
                stack.enter_context(held.hooked(model))
            if not _is_compiled(model):
                stack.enter_context(held)
            end = sinks_of(model, batch, run())[0]
        held.record.end = f"{end.label} {float(end.tensor.double().mean()):.7g}"
        return held

    def _parting(self, record: PassRecord) -> Verdict | None:
        plain = self._pass(self.model).record
        ours, theirs = (Counter(step[:-1] for step in r.dtypes) for r in (plain, record))
        held = {s: v for s, v in record.values.items() if ours[s[:-1]] == theirs[s[:-1]]}
        if 2 * len(held) < len(record.values):
            raise ConfigError(
                f"only {len(held)} of the reference's {len(record.values)} results have a partner"
                " in this pass: compare one model with itself, on one batch"
            )
        run = self._pass(self.model, held=held, keep=True)
        if not any(bool(difference.error.any()) for difference in run.found.values()):
            return None
        coarsest, operations = max(plain.unit, record.unit), dict[Any, float]()
        for step in run.found:  # of an operation that gives integers, the rounding of what it reads
            unit = max(_unit(run.record.dtypes[step]), _unit(record.dtypes[step])) or coarsest
            operations[step[:3]] = max(min(unit, coarsest), operations.get(step[:3], 0.0))
        noisy, compared = self.model, run.record.values
        if _is_compiled(noisy):  # it shows no operation
            noisy, compared = self.other or noisy, record.values
        how: Any = {"held": held, "compared": compared, "units": operations, "unit": coarsest}
        noise = self._pass(noisy, **how).found
        for step, found in run.found.items():
            if step not in noise:
                continue  # a shape that depends on values, such as an expert's share of the tokens
            unit = operations[step[:3]] if record.dtypes[step].is_floating_point else 0.0
            rounding = noise[step].error + noise[step].error.mean()
            explained = MARGIN * (rounding + unit * (found.size + found.size.mean()))
            row = int((found.error / explained.clamp(min=1e-300)).argmax())
            error, size = float(found.error[row]), float(found.size[row]) or 1.0
            if error <= explained[row]:
                continue
            text = f"it differs from the reference's by {error / size:.2g} of its norm, rounding"
            text += f" explains {float(explained[row]) / size:.2g}"
            for size_of, name in _FORMATS.items():
                if 0 < unit < size_of and size_of * size < 8 * error <= 16 * size_of * size:
                    text += f"; rounding to {name} makes as much"
            for whose, other in (("this pass", plain), ("the reference", record)):
                alone = other.alone(step, held)
                text += f"; just before it {whose} alone ran {alone}" if alone else ""
            return self._verdict(step, run, text + self._states(step.module), plain, record)
        return None

    def _states(self, module: str) -> str:
        """Say which weights and buffers of a module differ."""
        text, theirs = "", {} if self.other is None else _state(self.other, module)
        for name, tensor in _state(self.model, module).items() if theirs else ():
            other = theirs.get(name, tensor)
            difference = _compare(other.cpu(), tensor.cpu())
            apart = float(difference.error.norm() / difference.size.norm())
            # of equal dtypes all but the last bit of a statistic that another device rounded
            units = _unit(tensor.dtype), _unit(other.dtype)
            if apart > (1e-6 if units[0] == units[1] else max(units)):
                text += f"; {name} differs by {apart:.2g} of its norm"
        return text

    def _verdict(
        self, step: Step, run: HeldPass, explanation: str, plain: PassRecord, record: PassRecord
    ) -> Verdict:
        found, dtype = run.found[step], dtype_name(run.record.dtypes[step])
        shapes = {tuple(p.shape) for p in self.model.parameters()}
        row, token, sample = Tokens(self.batch, shapes).locate(step.shape, found.at)
        return Verdict(
            cause="beyond rounding",
            phase=step.phase,
            layer=layer_of(step.module),
            module=step.module,
            operation=step.operation,
            source=run.record.sources[step],
            tensor=f"output of {step.operation} {[*step.shape]} {dtype}",
            index=found.at,
            value=found.value,
            reached=f"{plain.end}; the reference {record.end}",
            explanation=explanation,
            row=row,
            token=token,
            sample=sample,
        )


def _state(model: nn.Module, module: str) -> dict[str, Tensor]:
    """Return a module's floating-point parameters and buffers, and its dequantised weight."""
    tensors = chain(model.named_parameters(), model.named_buffers())
    own = ((n.replace("_orig_mod.", ""), t.detach()) for n, t in tensors if t.is_floating_point())
    state = {name: tensor for name, tensor in own if name.startswith(f"{module}.")}
    packed = (linear for name, linear in quantized_linears(model) if name == module)
    return state | {f"{module}.weight": dense_weight(linear) for linear in packed}


def _is_compiled(model: nn.Module | None) -> bool:
    return model is not None and any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
