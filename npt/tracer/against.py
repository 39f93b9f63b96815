"""`trace(against=)`: the first operation where two passes of a batch differ beyond rounding.

A reference's results are recorded. In the other pass, each result is compared with its record and
then replaced by it, so no difference is inherited. To measure how much rounding explains, the pass
runs again, held in the same way, while its operations' inputs are perturbed at random by as much as
rounding would (TTrace, arXiv 2506.09280, perturbs a program's inputs): by the rounding of the
operation and of what it reads, so of a parameter in bf16 that is read as fp32. An operation without
a partner, such as a cast or a fused kernel, runs freely and counts towards the next matched one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from npt.errors import ConfigError, printable
from npt.files import write_bytes
from npt.packed import quantized_linears, unpacked
from npt.stored import opened, shown
from npt.tracer.operations import BLANK, Observer, TorchCall, names
from npt.tracer.passes import default_run, ready, sinks_of, untouched
from npt.tracer.source_location import Tokens, layer_of
from npt.tracer.tensors import Memory, described, dtype_name
from npt.tracer.verdict import Phase, Verdict

MARGIN = 12.0
"""What rounding may explain, as a multiple of the response to a random perturbation. Among equal
passes, gradients of attention (eager against fused, fp16 against fp32) needed most: 6 to 8.
"""

# A pass is meant to compute in a dtype that at least this share of its results has.
_MEANT = 0.1
# Rows at least this long are judged one by one.
_ROW = 32
# Copies and casts, which differ between dtypes, devices and versions.
_UNSEEN = BLANK | names("_to_copy copy_ clone detach alias lift_fresh _unsafe_view")
_NONE: Mapping[Any, Any] = MappingProxyType({})
# By operation, the relative rounding of its results, and of what it reads.
_Units = Mapping[Any, tuple[float, float]]
# Results of these can be compared.
_DTYPES = names(
    "float64 float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
)
_FORMATS = {2.0**-11: "float16 or TF32", 2.0**-8: "bfloat16"}


class Step(NamedTuple):
    """The name of a result in both passes; `nth` counts equal ones."""

    module: str
    phase: Phase
    operation: str
    result: int
    shape: tuple[int, ...]
    nth: int


class Difference(NamedTuple):
    """Norms, by row, of a difference and of the record, and where in each row it is largest."""

    error: Tensor
    size: Tensor
    at: Tensor


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0


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


def _compare(record: Tensor, found: Tensor, tokens: Tokens) -> Difference:
    """Compare a result with its record at valid tokens."""
    if record.dtype == found.dtype and torch.equal(record, found):
        none = torch.zeros(1)
        return Difference(none, none, none.long())
    gap, size = _gap(record, found)
    gap = tokens.without_padding(gap)
    size = tokens.without_padding(size)
    row = gap.numel()
    if gap.ndim > 1 and gap.shape[-1] >= _ROW:
        row = gap.shape[-1]
    gap = gap.reshape(-1, row)
    size = size.reshape(-1, row)
    rows = torch.arange(len(gap), device=gap.device)
    at = gap.argmax(dim=-1) + row * rows
    norm = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)
    return Difference(norm(gap).cpu(), norm(size).cpu(), at.cpu())


@dataclass
class PassRecord:
    """The steps of a pass in order.

    Attributes:
        reads: the coarsest rounding of what the operation of each read.
        sources: the line of each.
        values: the result of each on the host, if kept.
        end: the loss, or the mean of the first output.
    """

    dtypes: dict[Step, torch.dtype] = field(default_factory=dict)
    reads: dict[Step, float] = field(default_factory=dict)
    sources: dict[Step, str] = field(default_factory=dict)
    values: dict[Step, Tensor] = field(default_factory=dict)
    end: str = ""

    @property
    def unit(self) -> float:
        """The rounding error of the coarsest dtype that the pass is meant to compute in."""
        counts = Counter(map(_unit, self.dtypes.values()))
        del counts[0.0]  # integers
        least = _MEANT * counts.total()
        return max((unit for unit, n in counts.items() if n >= least), default=0.0)

    def alone(self, step: Step, matched: Collection[Step]) -> str:
        """Name the unmatched operations just before a step."""
        alone: list[str] = []
        for earlier in self.dtypes:
            if earlier == step:
                break
            if earlier in matched:
                alone = []
                continue
            line = self.sources.get(earlier, "").split(" in ")[0]
            alone.append(f"{earlier.operation} ({line})" if line else earlier.operation)
        return ", ".join(dict.fromkeys(alone))

    def save(self, path: Path) -> None:
        reads = [self.reads[step] for step in self.values]
        tensors = {str(i): value.contiguous() for i, value in enumerate(self.values.values())}
        metadata = {
            "npt_trace": json.dumps(list(self.values)),
            "reads": json.dumps(reads),
            "end": self.end,
        }
        write_bytes(path, safetensors.torch.save(tensors, metadata))

    @staticmethod
    def load(path: Path) -> PassRecord:
        """Return the record in a file, which may come from anybody, or raise ConfigError."""
        with opened(path, ConfigError) as stored:
            metadata = stored.metadata() or {}
            if "npt_trace" not in metadata:
                raise ConfigError(f"{path} was not written by against=; pass another file")
            try:
                record = PassRecord(end=printable(metadata["end"], one_line=True))
                # files of earlier versions have none
                reads = json.loads(metadata.get("reads", "[]"))
                for i, entry in enumerate(json.loads(metadata["npt_trace"])):
                    read = reads[i] if reads else 0.0
                    step = _step_of(entry)
                    value = stored.get_tensor(str(i))
                    dtype = dtype_name(value.dtype)
                    if dtype not in _DTYPES or value.shape != step.shape:
                        raise ValueError(
                            f"tensor {i} is {dtype} {[*value.shape]}, but its step {[*step.shape]}"
                        )
                    if not 0 <= read <= 1:
                        raise ValueError(f"{read} is not the rounding of a dtype")
                    record.values[step] = value
                    record.dtypes[step] = value.dtype
                    record.reads[step] = read
            except (LookupError, RecursionError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path} is damaged ({type(error).__name__}: {shown(str(error))}): remove it,"
                    " and write the reference again"
                ) from error
        return record


def _step_of(entry: Any) -> Step:
    """Return a step read from JSON; ValueError or TypeError if it is none."""
    module, phase, operation, result, shape, nth = entry
    words = (module, phase, operation)
    numbers = (result, *shape, nth)
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"{words} are not all text")
    if not all(type(number) is int for number in numbers):
        raise TypeError(f"{numbers} are not all whole numbers")
    return Step(module, phase, operation, result, tuple(shape), nth)


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
        units: _Units = _NONE,
        unit: float = 0.0,
    ):
        modules = {id(module): _plain(name) for name, module in model.named_modules()}
        super().__init__(modules)
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
            for result in call.results(out):
                # what is cast keeps its rounding; exact numbers must not be rounded
                rounding = max(read, _unit(result.dtype)) if read else 0.0
                self._roundings.forget(result)
                self._roundings.add(result, rounding)
            return out
        phase, place = self.where(call)
        operation = (place.module, phase, name)
        unit, least = self._units.get(operation, (self._unit, self._unit))
        if self._unit:
            args, kwargs = self._perturbed(call, args, kwargs, max(unit, least))
        out = func(*args, **kwargs)
        if self._boundaries:
            return out
        for i, result in enumerate(call.judged(call.results(out))):
            self._roundings.forget(result)
            self._take((*operation, i), result, place.source, unit, read)
        return out

    def _perturbed(self, call: TorchCall, args: Any, kwargs: Any, unit: float) -> Any:
        """Return the arguments, perturbed by `unit` and by what the operation's sums round."""
        if not call.pointwise:
            # A sum of n numbers rounds about sqrt(n) times, in fp32 or better; n is at most the
            # longest dimension.
            rounded = [tensor for _, tensor in call.read if _unit(tensor.dtype)]
            longest = max((n for tensor in rounded for n in tensor.shape), default=1)
            unit += _unit(torch.float32) * math.sqrt(longest)

        def moved(tensor: Tensor) -> Tensor:
            return tensor if call.writes(tensor) else self._moved(tensor, unit)

        return tree_map_only(Tensor, moved, (args, kwargs))

    def _rounding(self, tensor: Tensor) -> float:
        """Return how coarsely a tensor was rounded: in its dtype, or before a cast to it."""
        return max(self._roundings.of(tensor), default=_unit(tensor.dtype))

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Observe what modules return. Compiled code is recompiled, here and at its next use."""

        @torch.compiler.disable
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            self._taking = True
            if isinstance(output, Tensor):
                name = self.modules[id(module)]
                operation = (name, "forward", "output", 0)
                self._take(operation, output.data)
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
        if result.layout != torch.strided or not result.numel():
            return
        if dtype_name(result.dtype) not in _DTYPES:
            return
        kind = (*operation, tuple(result.shape))
        self._counts[kind] += 1
        step = Step._make((*kind, self._counts[kind]))
        record = self.record
        record.dtypes[step] = result.dtype
        record.reads[step] = read
        record.sources[step] = source
        if self._keep:
            record.values[step] = result.to("cpu", copy=True)
        if step in self.held:
            compared = self._compared[step].to(result.device)
            self.found[step] = _compare(compared, result, self._tokens)
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


class PassComparison:
    """The passes of one comparison; arguments as for `trace`."""

    def __init__(self, model: nn.Module, batch: Any, run: Any, against: Any):
        self.model = model
        self.batch = batch
        self._run = run
        self._against = against
        self.other = against if isinstance(against, nn.Module) else model
        self._boundaries = _is_compiled(model) or _is_compiled(self.other)
        self.tokens = Tokens(batch, {tuple(p.shape) for p in model.parameters()})

    def verdict(self) -> Verdict | None:
        """Return the first result that rounding does not explain, or write a missing file."""
        file = None if isinstance(self._against, nn.Module) else Path(self._against)
        if file is not None and file.exists():
            return self._parting(PassRecord.load(file))
        record = self._pass(self.other, keep=True).record
        if file is None:
            return self._parting(record)
        record.save(file)
        return None

    def _pass(self, model: nn.Module, *, eager: bool = False, **how: Any) -> HeldPass:
        """Run a pass; if `eager`, observe operations even if only module outputs are compared."""
        batch = ready(model, self.batch)
        run = default_run(model, batch) if self._run is None else partial(self._run, model)
        held = HeldPass(model, self.tokens, self._boundaries, **how)
        with untouched(model, batch), ExitStack() as stack:
            if self._boundaries:
                stack.enter_context(held.hooked(model))
            if eager or not self._boundaries:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(held)
            end = sinks_of(model, batch, run())[0]
        held.record.end = f"{end.label} {float(end.tensor.double().mean()):.7g}"
        return held

    def _parting(self, record: PassRecord) -> Verdict | None:
        model = self.model
        plain = self._pass(model).record
        held = _matched(record, plain)
        run = self._pass(model, held=held, keep=True)
        if not any(bool(difference.error.any()) for difference in run.found.values()):
            return None
        coarsest = max(plain.unit, record.unit)
        units = _units(run, record, coarsest)
        shown = run  # a compiled pass shows no operation to perturb
        if _is_compiled(model):
            shown = self._pass(model, eager=True, held=held, keep=True)
        noise = self._pass(
            model, eager=True, held=held, compared=shown.record.values, units=units, unit=coarsest
        ).found
        for step, found in run.found.items():
            if step not in noise:
                continue  # the shape depends on values, as for an expert's tokens
            unit = units[step[:3]][0] if record.dtypes[step].is_floating_point else 0.0
            rounding = noise[step].error + unit * found.size
            # a single draw may leave a row nearly unmoved, so each has the mean's share too
            explained = MARGIN * (rounding + rounding.mean())
            row = int((found.error / explained.clamp(min=1e-300)).argmax())
            if found.error[row] <= explained[row]:
                continue
            most = float(explained[row])
            return self._verdict_on(step, row, unit, most, run, plain, record)
        return None

    def _verdict_on(
        self,
        step: Step,
        row: int,
        unit: float,
        explained: float,
        run: HeldPass,
        plain: PassRecord,
        record: PassRecord,
    ) -> Verdict:
        """Return the verdict on a row that differs by more than the norm that rounding explains."""
        found = run.found[step]
        position = torch.unravel_index(found.at[row], step.shape)
        index = tuple(int(i) for i in position)
        value = float(run.record.values[step][index])
        expected = float(record.values[step][index])
        error = float(found.error[row])
        size = float(found.size[row])
        scale = size or 1.0
        if size:
            text = f"the relative difference from the reference is {error / scale:.2g}"
        else:
            text = f"the reference is {expected:.2g} and this pass {value:.2g}"
        text += f"; rounding explains at most {explained / scale:.2g}"
        states = self._states(step.module)
        for coarser, name in _FORMATS.items():
            # an error of many roundings: from an eighth of one to two
            near = coarser * size < 8 * error <= 16 * coarser * size
            if 0 < unit < coarser and near and not states:
                text += f"; rounding to {name} would explain it"
        for whose, other in (("this pass", plain), ("the reference", record)):
            alone = other.alone(step, run.held)
            if alone:
                text += f"; just before, only {whose} ran {alone}"
        output = f"output of {step.operation}"
        return Verdict(
            cause="beyond rounding",
            phase=step.phase,
            layer=layer_of(step.module),
            module=step.module,
            operation=step.operation,
            source=run.record.sources[step],
            tensor=described(output, step.shape, run.record.dtypes[step]),
            index=index,
            value=value,
            reached=f"{plain.end}; the reference {record.end}",
            explanation=text + states,
            **self.tokens.locate(step.shape, index)._asdict(),
        )

    def _states(self, module: str) -> str:
        """Describe the parameters and buffers of a module that differ, and buffers that are only
        rounded: rotary frequencies in bf16 turn distant tokens wrongly.
        """
        text = ""
        theirs = _state(self.other, module)
        buffers = {_plain(name) for name, _ in self.model.named_buffers()}
        for name, tensor in _state(self.model, module).items():
            other = theirs.get(name, tensor)
            difference = _compare(other.cpu(), tensor.cpu(), Tokens())
            apart = float(difference.error.norm() / difference.size.norm())
            fine, coarse = sorted((tensor.dtype, other.dtype), key=_unit)
            # equal dtypes may differ in a last bit that another device rounded
            explained = 1e-6 if fine == coarse else _unit(coarse)
            if apart > explained:
                found = f"a relative difference of {apart:.2g}"
                if math.isinf(apart) and not bool(other.any()):
                    found = "only zeros in the reference"
                text += f"; {name} has {found}"
            elif fine != coarse and apart > 0 and name in buffers:
                where = "this pass" if coarse == tensor.dtype else "the reference"
                text += (
                    f"; the buffer {name} was rounded to {dtype_name(coarse)} in {where}: keep it"
                    f" in {dtype_name(fine)}"
                )
        return text


def _matched(record: PassRecord, plain: PassRecord) -> dict[Step, Tensor]:
    """Return the values of the results that a plain pass makes as often as the record's did."""
    ours = Counter(step[:-1] for step in plain.dtypes)
    theirs = Counter(step[:-1] for step in record.dtypes)
    held = {}
    for step, value in record.values.items():
        same = step[:-1]  # all but `nth`
        if ours[same] == theirs[same]:
            held[step] = value
    if 2 * len(held) <= len(record.values):
        raise ConfigError(
            f"only {len(held)} of the reference's {len(record.values)} results match one in"
            " this pass: compare the same model on the same batch"
        )
    return held


def _units(run: HeldPass, record: PassRecord, coarsest: float) -> _Units:
    """Return by operation the coarser roundings of both passes, at most `coarsest`."""
    operations: dict[Any, tuple[float, float]] = {}
    for step in run.found:
        # an operation that returns integers rounds as coarsely as any
        unit = max(_unit(run.record.dtypes[step]), _unit(record.dtypes[step])) or coarsest
        read = max(run.record.reads[step], record.reads[step])
        operation = step[:3]
        other_unit, other_read = operations.get(operation, (0.0, 0.0))
        operations[operation] = (
            max(min(unit, coarsest), other_unit),
            max(min(read, coarsest), other_read),
        )
    return operations


def _state(model: nn.Module, module: str) -> dict[str, Tensor]:
    state = {}
    for full_name, tensor in chain(model.named_parameters(), model.named_buffers()):
        name = _plain(full_name)
        # of a whole model, only what it holds itself
        own = "." not in name
        if module:
            own = name.startswith(f"{module}.")
        if own and tensor.is_floating_point():
            state[name] = tensor.detach()
    for name, linear in quantized_linears(model):
        if name == module:
            state[f"{module}.weight"] = unpacked(linear)
    return state


def _plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _is_compiled(model: nn.Module) -> bool:
    marks = "_orig_mod", "_compiled_call_impl"
    return any(getattr(m, mark, None) is not None for m in model.modules() for mark in marks)
