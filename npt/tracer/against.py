"""`trace(against=)`: the first operation where two passes of a batch differ beyond rounding.

A reference's results are recorded. In the other pass, each result is compared with its record and
then replaced by it, so no difference is inherited. To measure how much rounding explains, the pass
runs again, held in the same way, while its operations' inputs are perturbed at random by as much as
rounding would (TTrace, arXiv 2506.09280, perturbs a program's inputs): by the rounding of the
operation and of what it reads, so of a parameter in bf16 that is read as fp32. An operation without
a partner, such as a cast or a fused kernel, runs freely and counts towards the next matched one.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from npt.errors import ConfigError, ModelError
from npt.packed import quantized_linears, unpacked
from npt.tracer.held_pass import HeldPass, Units, compare
from npt.tracer.pass_record import PassRecord, Step, rounding_in
from npt.tracer.passes import default_run, ready, sinks_of, untouched
from npt.tracer.source_location import Tokens, layer_of, plain_name
from npt.tracer.tensors import described, dtype_name
from npt.tracer.verdict import Verdict

MARGIN = 12.0
"""What rounding may explain, as a multiple of the response to a random perturbation. Among equal
passes, gradients of attention (eager against fused, fp16 against fp32) needed most: 6 to 8.
"""

_FORMATS = {2.0**-11: "float16 or TF32", 2.0**-8: "bfloat16"}


class Parting(NamedTuple):
    """A row of a result that differs by more than rounding explains.

    Attributes:
        explained: the norm of what rounding explains.
        unit: the rounding of the operation, 0 if its results are integers.
    """

    step: Step
    row: int
    explained: float
    unit: float


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
        if isinstance(self._against, nn.Module):
            return self._compared_with(self._pass(self.other, keep=True).record)
        file = Path(self._against)
        if file.exists():
            return self._compared_with(PassRecord.load(file))
        self._pass(self.other, keep=True).record.save(file)
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

    def _compared_with(self, record: PassRecord) -> Verdict | None:
        # what it computes by itself: only results that both passes have can be held
        plain = self._pass(self.model).record
        held = _matched(record, plain)
        run = self._pass(self.model, held=held, keep=True)
        if not any(bool(difference.error.any()) for difference in run.found.values()):
            return None
        coarsest = max(plain.unit, record.unit)
        units = _units(run, record, coarsest)
        shown = run  # a compiled pass shows no operation to perturb
        if _is_compiled(self.model):
            shown = self._pass(self.model, eager=True, held=held, keep=True)
        # the response to rounding, measured around the results of this pass, not of the reference
        noise = self._pass(
            self.model,
            eager=True,
            held=held,
            compared=shown.record.values,
            units=units,
            unit=coarsest,
        )
        parting = _first_parting(run, noise, units, record)
        return parting and self._verdict_on(parting, run, plain, record)

    def _verdict_on(
        self, parting: Parting, run: HeldPass, plain: PassRecord, record: PassRecord
    ) -> Verdict:
        step = parting.step
        found = run.found[step]
        position = torch.unravel_index(found.at[parting.row], step.shape)
        index = tuple(int(i) for i in position)
        value = float(run.record.values[step][index])
        expected = float(record.values[step][index])
        error = float(found.error[parting.row])
        size = float(found.size[parting.row])
        scale = size or 1.0
        text = f"the reference is {expected:.2g} and this pass {value:.2g}"
        if size:
            text = f"the relative difference from the reference is {error / scale:.2g}"
        text += f"; rounding explains at most {parting.explained / scale:.2g}"
        states = self._states(step.module)
        if not states:
            text += _format_of(error, size, parting.unit)
        for whose, other in (("this pass", plain), ("the reference", record)):
            alone = other.alone(step, run.held)
            if alone:
                text += f"; just before, only {whose} ran {alone}"
        result = run.record.results[step]
        return Verdict(
            cause="beyond rounding",
            phase=step.phase,
            layer=layer_of(step.module),
            module=step.module,
            operation=step.operation,
            source=result.source,
            tensor=described(f"output of {step.operation}", step.shape, result.dtype),
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
        theirs = _state(self.other, module)
        buffers = {plain_name(name) for name, _ in self.model.named_buffers()}
        text = ""
        for name, tensor in _state(self.model, module).items():
            other = theirs.get(name, tensor)
            text += _told(name, tensor, other, name in buffers)
        return text


def _told(name: str, tensor: Tensor, other: Tensor, is_buffer: bool) -> str:
    difference = compare(other.cpu(), tensor.cpu(), Tokens())
    apart = float(difference.error.norm() / difference.size.norm())
    fine, coarse = sorted((tensor.dtype, other.dtype), key=rounding_in)
    # equal dtypes may differ in a last bit that another device rounded
    explained = 1e-6 if fine == coarse else rounding_in(coarse)
    if math.isinf(apart) and not bool(other.any()):
        return f"; {name} has only zeros in the reference"
    if apart > explained:
        return f"; {name} has a relative difference of {apart:.2g}"
    was_rounded = is_buffer and fine != coarse and apart > 0
    if not was_rounded:
        return ""
    where = "this pass" if coarse == tensor.dtype else "the reference"
    return (
        f"; the buffer {name} was rounded to {dtype_name(coarse)} in {where}: keep it in"
        f" {dtype_name(fine)}"
    )


def _first_parting(
    run: HeldPass, noise: HeldPass, units: Units, record: PassRecord
) -> Parting | None:
    """Return the first row of a result that differs by more than its noise explains."""
    for step, found in run.found.items():
        if step not in noise.found:
            continue  # the shape depends on values, as for an expert's tokens
        unit = units[step[:3]][0] if record.results[step].dtype.is_floating_point else 0.0
        rounding = noise.found[step].error + unit * found.size
        # a single draw may leave a row nearly unmoved, so each has the mean's share too
        explained = MARGIN * (rounding + rounding.mean())
        row = int((found.error / explained.clamp(min=1e-300)).argmax())
        if found.error[row] > explained[row]:
            return Parting(step, row, float(explained[row]), unit)
    return None


def _format_of(error: float, size: float, unit: float) -> str:
    """Name a format that is coarser than `unit` and whose rounding would explain an error."""
    text = ""
    for coarser, name in _FORMATS.items():
        # an error of many roundings: from an eighth of one to two
        near = coarser * size < 8 * error <= 16 * coarser * size
        if 0 < unit < coarser and near:
            text += f"; rounding to {name} would explain it"
    return text


def _matched(record: PassRecord, plain: PassRecord) -> dict[Step, Tensor]:
    """Return the values of the results that a plain pass makes as often as the record's did."""
    # all but `nth`
    ours = Counter(step[:-1] for step in plain.results)
    theirs = Counter(step[:-1] for step in record.results)
    values = record.values
    held = {step: value for step, value in values.items() if ours[step[:-1]] == theirs[step[:-1]]}
    if 2 * len(held) <= len(values):
        raise ConfigError(
            f"only {len(held)} of the reference's {len(values)} results match one in"
            " this pass: compare the same model on the same batch"
        )
    return held


def _units(run: HeldPass, record: PassRecord, coarsest: float) -> Units:
    """Return by operation the coarser roundings of both passes, at most `coarsest`."""
    operations: dict[Any, tuple[float, float]] = {}
    for step in run.found:
        ours = run.record.results[step]
        theirs = record.results[step]
        # an operation that returns integers rounds as coarsely as any
        unit = max(rounding_in(ours.dtype), rounding_in(theirs.dtype)) or coarsest
        read = max(ours.read, theirs.read)
        other_unit, other_read = operations.get(step[:3], (0.0, 0.0))
        operations[step[:3]] = (
            max(min(unit, coarsest), other_unit),
            max(min(read, coarsest), other_read),
        )
    return operations


def _state(model: nn.Module, module: str) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module; of a whole model, only its own."""
    modules = {plain_name(name): held for name, held in model.named_modules()}
    held = modules.get(module, nn.Module())
    own = {"prefix": module, "recurse": bool(module)}
    named = chain(held.named_parameters(**own), held.named_buffers(**own))
    state = {plain_name(name): t.detach() for name, t in named if t.is_floating_point()}
    for name, linear in quantized_linears(held):
        if not name:
            # the weight of a class with a forward of its own does not tell what it computes
            with suppress(ModelError):
                state[f"{module}.weight"] = unpacked(linear)
    return state


def _is_compiled(model: nn.Module) -> bool:
    marks = "_orig_mod", "_compiled_call_impl"
    return any(getattr(m, mark, None) is not None for m in model.modules() for mark in marks)
