"""`trace`: from "loss is NaN" to the operation that did it.

The pass is run once as it is; good loss and gradients end the matter. Otherwise it is run again,
from the same random state, under a ledger of its operations, and once more for a close-up: the
inputs of the guilty operation, and the line of the forward operation whose backward failed. Of
numbers that overflowed two further passes tell where they had begun to grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from npt.adapters.trained import unfused
from npt.data.batch import IGNORE_INDEX, Batch
from npt.errors import ConfigError
from npt.tracer import rules
from npt.tracer.against import PassComparison
from npt.tracer.ledger import Ledger
from npt.tracer.mask_check import mask_check
from npt.tracer.operations import External, Origin
from npt.tracer.passes import (
    Run,
    Sink,
    default_run,
    named_inputs,
    ready,
    sinks_of,
    untouched,
    versions,
)
from npt.tracer.source_location import Place, Tokens, layer_of
from npt.tracer.tensors import absmax, count, dtype_name, element, first_bad
from npt.tracer.verdict import OUTSIDE, Operand, Phase, Verdict
from npt.tracer.watchdogs import quantization_statistics

OPERANDS_SHOWN = 6

EXPLOSION = 1e18
"""A size whose square leaves fp32: traced if no number was non-finite but a sum of squares."""

_OVERFLOWS = (
    "exploding product",
    "exploding gradient",
    "cast overflow",
    "low-precision overflow",
    "exponential overflow",
    "corrupt absmax",
)


@unfused()  # single operations are looked at
def trace(
    model: nn.Module,
    batch: Any = None,
    *,
    run: Any = None,
    limit: float = math.inf,
    against: nn.Module | str | Path | None = None,
) -> Verdict | None:
    """Return the first fault of a forward and backward pass, or None if there is none.

    Args:
        model: any module; quantised, converted, on any device, in train or eval mode.
        batch: its input: a mapping of keyword arguments (as tokenizers and data loaders give it), a
            `npt.data.batch.Batch`, a tensor, or a tuple of arguments. A language model without
            labels gets its input ids as labels. With `run` it only serves to name samples and
            tokens.
        run: computes the pass instead. It returns a scalar loss, which is differentiated here if it
            has a graph, or an object or mapping with such a `loss`, or outputs; it may also run
            backward itself. It is called once, and up to five more times after a fault; it must do
            the same each time, and leave the weights alone. Only the model's tensors and the
            batch's may get gradients. Gradients of before are put aside meanwhile.
        limit: find the first number larger than this as well: an explosion before it overflows.
        against: a reference, to find the first operation whose result parts from the reference's by
            more than rounding explains, and nothing else: a model with the same names of modules
            (in another dtype, on another device, compiled), or the file of an earlier trace. A file
            that does not exist is written, from this pass. `run` is given the model to run. The
            results of all operations are held in the host's memory.

    Returns:
        The operation that first made the number that spoilt loss or gradients. A mask that leaves a
        valid token without keys is a fault too, though all that comes of it may be finite and
        wrong.

    Raises:
        ConfigError: a limit that is not above 0, or a `run` that takes an optimizer step.
    """
    if not limit > 0:
        raise ConfigError(f"limit is {limit}, but must be above 0")
    verdict = _data_fault(model, batch)
    if verdict is not None:
        return verdict
    if against is not None:
        return PassComparison(model, batch, run, against).verdict()
    unpadded = run is None
    if run is None:
        with torch.inference_mode(False):
            batch = ready(batch, next((p.device for p in model.parameters()), torch.device("cpu")))
        run = default_run(model, batch)
    versions_before = versions(model)
    with untouched(model, batch):
        with mask_check(model, batch, unpadded) as masks:
            sinks = sinks_of(model, batch, run())
        bad = [sink.label for sink in sinks if sink.bad]
        unsure = any(sink.unsure for sink in sinks)
        del sinks
    for name, version in versions(model).items():
        if versions_before.get(name, version) != version:
            raise ConfigError(
                f"run wrote to {name}: give trace a run that computes loss and gradients, and takes"
                " no optimizer step"
            )
    if bad or unsure or math.isfinite(limit):
        verdict = _Tracer(model, batch, run, limit).verdict()
    if verdict is None and bad:
        once = f"{bad[0]} was not finite once, and finite when everything was run again"
        return _without_operation("not repeatable", bad[0], math.nan, once)
    return verdict or next(iter(masks), None)


def first_fault(model: nn.Module, batch: Any, run: Run, *, exploded: bool) -> Verdict | None:
    """Return the operation that made a micro-batch's first bad number.

    If it, or its window, was refused (`exploded`) and every number is finite, the first one too
    large to be squared is traced, since a norm overflows before its elements do.
    """
    verdict = trace(model, batch, run=run)
    if verdict is None and exploded:
        return trace(model, batch, run=run, limit=EXPLOSION)
    return verdict


class _Tracer:
    """The passes of one trace; arguments as for `trace`."""

    def __init__(self, model: nn.Module, batch: Any, run: Run, limit: float):
        self.model, self.batch, self.run, self.limit = model, batch, run, limit
        self.tokens = Tokens(batch, {tuple(p.shape) for p in model.parameters()})
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.externals = list(_externals(model, batch))

    def verdict(self) -> Verdict | None:
        """Return the first fault, or None if this pass was good."""
        ledger, sinks = self._pass(limit=self.limit)
        origins = []
        for sink in sinks:
            origin = ledger.origin_of(sink.tensor) if sink.bad or sink.unsure else None
            # a mask that an output still shows is no fault
            if origin is not None and not (origin.meant and sink.unsure):
                origins.append((origin, sink.label))
        reached = [label for _, label in origins]
        if math.isfinite(self.limit) and ledger.first is not None:
            origins.append((ledger.first, f"more than {self.limit:g}"))
        if not origins:
            for sink in (sink for sink in sinks if sink.bad):
                index = first_bad(sink.tensor)
                made = f"{sink.label} is not finite, and no operation made it so"
                value = element(sink.tensor, index)
                return _without_operation("outside of torch", sink.label, value, made, index)
            return None
        del sinks, ledger  # the gradients of one pass are not held during the next
        origin, label = min(origins, key=lambda pair: pair[0].number)
        close = self._close_up(origin, self.limit)
        if close is None:
            gave = f"{origin.operation} gave {origin.value:g} once"
            once = f"{gave}, and not when everything was run again"
            return self._verdict_on(origin, rules.Reason("not repeatable", once), label)
        reason, computed = rules.explain(close), close.external is None
        in_gradients = bool(reached) and all(name.startswith("gradient") for name in reached)
        if close.phase == "forward" and computed and in_gradients:
            reason = rules.hidden(reason)
        verdict = self._verdict_on(close, reason, label)
        if reason.cause in _OVERFLOWS and computed:
            verdict = self._with_growth(verdict, close)
        return verdict

    def _pass(self, **wanted: Any) -> tuple[Ledger, list[Sink]]:
        # A compiled module has operations of its own, and refuses to run under a ledger if it was
        # compiled as one graph.
        with (
            untouched(self.model, self.batch),
            torch.compiler.set_stance("force_eager"),
            Ledger(self.modules, self.externals, **wanted) as ledger,
        ):
            return ledger, sinks_of(self.model, self.batch, self.run())

    def _close_up(self, origin: Origin, limit: float) -> Origin | None:
        """Return the same origin with its inputs and its forward's line, which take a second look;
        None if it did not recur.
        """
        if origin.external is not None:
            return origin
        keep = origin.number, origin.output
        ledger = self._pass(limit=limit, keep=keep, watch=origin.sequence)[0]
        close, watched = ledger.kept, ledger.watched
        if close is None or close.operation != origin.operation:
            return None
        close.hid = ledger.hid
        while watched is not None and watched.sequence is not None and not watched.place.source:
            # Backward of a backward: the forward operation is one further back.
            watched = self._pass(limit=limit, watch=watched.sequence)[0].watched
        if watched is not None:
            close.place = Place(
                close.place.module or watched.place.module,
                close.place.source or watched.place.source,
            )
        return close

    def _with_growth(self, verdict: Verdict, origin: Origin) -> Verdict:
        """Add where the numbers that overflowed had become large: half of the way there, in orders
        of magnitude.
        """
        sizes = {label: absmax(t) for label, t in origin.inputs if t.is_floating_point()}
        label = max(sizes, key=lambda name: sizes[name], default=None)
        if label is None or sizes[label] <= rules.HUGE:
            return verdict
        limit = math.sqrt(sizes[label])
        start = self._pass(limit=limit, asked=origin.number)[0].read_origins.get(label)
        if start is not None and start.sequence is not None:
            start = self._close_up(start, limit)
        if start is None:
            return verdict
        at = f"{list(start.index)}" if start.index else ""
        if start.external is not None:
            was = f"{start.external.name}{at} was {start.value:g} before anything was computed"
            if start.external.kind == "outside" or abs(start.value) <= rules.HUGE:
                return replace(verdict, grew=was)
            return replace(verdict, grew=was, cause=rules.explain(start).cause)
        where = f"first past {limit:g} in {start} in {start.place.module or OUTSIDE}"
        at = f" at {at} of {list(start.shape)}" if start.shape else ""
        source = f", {start.place.source}" if start.place.source else ""
        return replace(verdict, grew=f"{where}{at}: {start.value:g}{source}")

    def _verdict_on(self, origin: Origin, reason: rules.Reason, reached: str) -> Verdict:
        external = origin.external
        module, name = origin.place.module, f"output of {origin.operation}"
        phase: Phase = origin.phase
        if external is not None:
            name = external.name
            phase = phase if external.kind == "outside" else external.kind
            module = external.module if external.kind == "state" else module
        located = self.tokens.locate(origin.shape, origin.index)
        if located[0] is None:
            located = self.tokens.locate(*origin.through)
        row, token, sample = located
        return Verdict(
            cause=reason.cause,
            phase=phase,
            layer=layer_of(module),
            module=module,
            operation=str(origin),
            source=origin.place.source,
            tensor=f"{name} {list(origin.shape)} {dtype_name(origin.dtype)}",
            index=origin.index,
            value=origin.value,
            reached=reached,
            explanation=reason.explanation,
            operands=_operands(origin),
            row=row,
            token=token,
            sample=sample,
        )


def _operands(origin: Origin) -> tuple[Operand, ...]:
    operands = []
    for label, tensor in origin.inputs[:OPERANDS_SHOWN]:
        external, (nan, inf) = origin.externals.get(label), count(tensor)
        number = tensor.is_floating_point() and origin.pointwise
        operands.append(
            Operand(
                name=label if external is None else external.name,
                dtype=dtype_name(tensor.dtype),
                shape=tuple(tensor.shape),
                nan=nan,
                inf=inf,
                absmax=absmax(tensor),
                value=rules.element_at(tensor, origin.shape, origin.index) if number else None,
            )
        )
    constants = ((name, x) for name, x in origin.constants.items() if name in rules.CONSTANTS)
    operands += [Operand(name, "constant", (), absmax=abs(x), value=x) for name, x in constants]
    return tuple(operands)


def _externals(model: nn.Module, batch: Any) -> Iterator[External]:
    """Yield the tensors that exist before a pass."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield External(name, "state", parameter.detach(), trained=True)
    for name, statistic in quantization_statistics(model):
        yield External(name, "state", statistic.detach(), trained=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield External(name, "state", buffer.detach())
    for name, tensor in named_inputs(batch):
        yield External(name, "data", tensor.detach())


def _data_fault(model: nn.Module, batch: Any) -> Verdict | None:
    """Find unknown token ids: on a CPU an IndexError, on a GPU the end of the process."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    entries = vars(batch) if isinstance(batch, Batch) else batch
    if not isinstance(vocabulary, int) or not isinstance(entries, Mapping):
        return None
    if "pixel_values" in entries or "input_features" in entries:
        return None  # placeholders beyond the vocabulary are replaced before they are looked up
    looked_up = {"input_ids": "embedding"}
    # Labels are tokens, and -100 is ignored, in language models of transformers. Losses of other
    # models ignore what they like.
    find: Any = getattr(model, "get_base_model", None)
    inner = model if find is None else find()
    if type(inner).__module__.startswith(("transformers.", "npt.")) and hasattr(inner, "lm_head"):
        looked_up["labels"] = "cross_entropy"
    for name, operation in looked_up.items():
        ids = entries.get(name)
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            continue
        bad = (ids < 0) | (ids >= vocabulary)
        bad = bad & (ids != IGNORE_INDEX) if name == "labels" else bad
        if not bool(bad.any()):
            continue
        index = tuple(bad.nonzero()[0].tolist())
        row, token, sample = Tokens(batch).locate(tuple(ids.shape), index)
        return Verdict(
            cause="token id",
            phase="data",
            operation=operation,
            tensor=f"{name} {list(ids.shape)}",
            index=index,
            value=float(ids[index]),
            reached="nothing yet: it is refused before it is looked up",
            explanation=f"the id {int(ids[index])} is outside [0, {vocabulary}), one of"
            f" {int(bad.sum())} such",
            row=row,
            token=token,
            sample=sample,
        )
    return None


def _without_operation(
    cause: str, label: str, value: float, explanation: str, index: tuple[int, ...] = ()
) -> Verdict:
    return Verdict(
        cause=cause,
        phase="backward" if label.startswith("gradient") else "forward",
        tensor=label,
        index=index,
        value=value,
        reached=label,
        explanation=explanation,
    )
