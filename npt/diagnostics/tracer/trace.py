"""`trace`: from "loss is NaN" to the operation that did it.

The pass is run once as it is, and where loss and gradients are good that is all. Otherwise it is
run again, from the same random state, under a ledger of its operations, which knows for every bad
tensor who made it bad; and once more for a close-up: what went into that operation, and the line of
the forward operation whose backward failed. Of numbers that overflowed two further passes tell
where they had begun to grow. Weights, gradients, buffers and random state are as before afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from npt.adapters.fused import unfused
from npt.data.batch import IGNORE_INDEX, Batch
from npt.diagnostics.guards import quantization_statistics, target_fault
from npt.diagnostics.tracer import causes
from npt.diagnostics.tracer.layer_passes import (
    Run,
    Sink,
    default_run,
    named_inputs,
    ready,
    sinks_of,
    untouched,
    versions,
)
from npt.diagnostics.tracer.mask_check import MaskLook
from npt.diagnostics.tracer.nonfinite import absmax, count, element, first_bad
from npt.diagnostics.tracer.operations import External, Ledger, Origin
from npt.diagnostics.tracer.source_location import Place, Tokens, layer_of, module_names
from npt.diagnostics.tracer.verdict import OUTSIDE, Operand, Phase, Verdict, dtype_name
from npt.errors import ConfigError

OPERANDS_SHOWN = 6

_OVERFLOWS = (
    "exploding product",
    "exploding gradient",
    "cast overflow",
    "low-precision overflow",
    "exponential overflow",
    "corrupt absmax",
)


@unfused()  # what is looked at is single operations
def trace(
    model: nn.Module, batch: Any = None, *, run: Run | None = None, limit: float = math.inf
) -> Verdict | None:
    """The first fault of a forward and backward pass, or None where there is none.

    Args:
        model: any module; quantised, converted, on any device. Its mode (train or eval) is left as
            it is.
        batch: what to run it on: a mapping of keyword arguments (as tokenizers and data loaders
            give it), a `npt.data.batch.Batch`, a tensor, or a tuple of arguments. A language model
            without labels gets its input ids as labels. Beside `run` it only serves to name samples
            and tokens.
        run: computes the pass instead. It returns a scalar loss, which is differentiated here if it
            has a graph, or an object or mapping with such a `loss`, or whatever it computes; it may
            also run backward itself. It is called once, and up to five more times where there is a
            fault; it has to do the same each time, and to leave the weights alone. What gets
            gradients has to be part of the model. Gradients of before it are put aside meanwhile.
        limit: look for the first number larger than this as well: an explosion before it overflows.

    Returns:
        Who first made the number that spoilt loss or gradients. A mask that leaves a valid token
        without keys is a fault too,
        though all that comes of it may be finite and wrong.

    Raises:
        ConfigError: a limit that is not above 0, or a `run` that takes an optimizer step.
    """
    if not limit > 0:
        raise ConfigError(f"limit is {limit}, but has to be above 0")
    verdict = _data_fault(model, batch)
    if verdict is not None:
        return verdict
    masks = MaskLook(model, batch, unpadded=run is None)
    if run is None:
        with torch.inference_mode(False):
            batch = ready(batch, next((p.device for p in model.parameters()), torch.device("cpu")))
        run = default_run(model, batch)
    before = versions(model)
    with untouched(model, batch):
        with masks:
            sinks = sinks_of(model, batch, run())
        bad = [sink.label for sink in sinks if sink.bad]
        unsure = any(sink.unsure for sink in sinks)
        del sinks
    changed = next(
        (name for name, version in versions(model).items() if before.get(name, version) != version),
        None,
    )
    if changed is not None:
        raise ConfigError(
            f"run wrote to {changed}: give trace a run that computes loss and gradients, and takes"
            " no optimizer step"
        )
    if not bad and not unsure and math.isinf(limit):
        return masks.verdict()
    verdict = _Tracer(model, batch, run, limit).verdict()
    if verdict is None:
        return _not_repeatable(bad[0]) if bad else masks.verdict()
    return verdict


class _Tracer:
    """The passes of one trace.

    Args:
        model, batch, run, limit: as for `trace`.
    """

    def __init__(self, model: nn.Module, batch: Any, run: Run, limit: float):
        self.model, self.batch, self.run, self.limit = model, batch, run, limit
        self.tokens = Tokens(batch, {tuple(p.shape) for p in model.parameters()})
        self.modules = module_names(model)
        self.externals = list(_externals(model, batch))

    def verdict(self) -> Verdict | None:
        """The first fault; None where this pass was good."""
        ledger, sinks = self._pass(limit=self.limit)
        found = [
            (origin, sink.label)
            for sink in sinks
            if (origin := _origin_of(sink, ledger)) is not None
        ]
        reached = [label for _, label in found]
        if math.isfinite(self.limit) and ledger.first is not None:
            found.append((ledger.first, f"more than {self.limit:g}"))
        if not found:
            return next((_outside_of_torch(sink) for sink in sinks if sink.bad), None)
        del sinks, ledger  # the gradients of one pass are not held beside those of the next
        origin, label = min(found, key=lambda pair: pair[0].number)
        close = self._close_up(origin, self.limit)
        if close is None:
            return self._written(origin, causes.unrepeated(origin), label)
        finding = causes.explain(close)
        if (
            close.phase == "forward"
            and close.external is None
            and reached
            and all(name.startswith("gradient") for name in reached)
        ):
            finding = causes.hidden(finding)
        verdict = self._written(close, finding, label)
        if finding.cause in _OVERFLOWS and close.external is None:
            verdict = self._with_growth(verdict, close)
        return verdict

    def _pass(self, **wanted: Any) -> tuple[Ledger, list[Sink]]:
        with untouched(self.model, self.batch):
            # A compiled module has operations of its own, and refuses to run under a ledger if it
            # was compiled as one graph.
            with (
                torch.compiler.set_stance("force_eager"),
                Ledger(self.modules, self.externals, **wanted) as ledger,
            ):
                result = self.run()
                sinks = sinks_of(self.model, self.batch, result)
            return ledger, sinks

    def _close_up(self, origin: Origin, limit: float) -> Origin | None:
        """The same origin with what only a second look shows: what went in, and its forward's line;
        None if it did not recur.
        """
        if origin.external is not None:
            return origin
        ledger = self._pass(
            limit=limit, keep=(origin.number, origin.output), watch=origin.sequence
        )[0]
        close, watched = ledger.kept, ledger.watched
        if close is None or close.operation != origin.operation:
            return None
        close.hid = watched is not None and watched.hid
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
        """Where the numbers that overflowed had become large: half of the way there, in orders of
        magnitude.
        """
        sizes = {
            label: absmax(tensor) for label, tensor in origin.inputs if tensor.is_floating_point()
        }
        label = max(sizes, key=lambda name: sizes[name], default=None)
        if label is None or sizes[label] <= causes.HUGE:
            return verdict
        limit = math.sqrt(sizes[label])
        ledger = self._pass(limit=limit, asked=origin.number)[0]
        start = ledger.read_origins.get(label)
        start = (
            self._close_up(start, limit)
            if start is not None and start.sequence is not None
            else start
        )
        if start is None:
            return verdict
        if start.external is not None:
            grew = (
                f"{start.external.name}{_at(start.index)} was {start.value:g} before anything was"
                " computed"
            )
            if start.external.kind == "outside" or abs(start.value) <= causes.HUGE:
                return replace(verdict, grew=grew)
            cause = causes.explain(start).cause
            return replace(verdict, grew=grew, cause=cause, remedy=causes.CAUSES[cause])
        shape, index = start.shown
        where = f"first past {limit:g} in {_operation(start)} in {start.place.module or OUTSIDE}"
        at = f" at {list(index)} of {list(shape)}" if shape else ""
        source = f", {start.place.source}" if start.place.source else ""
        return replace(verdict, grew=f"{where}{at}: {start.value:g}{source}")

    def _written(self, origin: Origin, finding: causes.Finding, reached: str) -> Verdict:
        external = origin.external
        shape, index = (origin.shape, origin.index) if external is not None else origin.shown
        module, phase, name = origin.place.module, origin.phase, f"output of {origin.operation}"
        if external is not None:
            name = external.name
            phase = phase if external.kind == "outside" else external.kind
            module = external.module if external.kind == "state" else module
        located = self.tokens.locate(shape, index)
        if located[0] is None and located[1] is None:
            # What it came through, or the part of a tensor that was written, may be of a token all
            # the same.
            located = self.tokens.locate(
                *(origin.shown if external is not None else (origin.shape, origin.index))
            )
        row, token, sample = located
        return Verdict(
            cause=finding.cause,
            phase=_phase(phase),
            layer=layer_of(module),
            module=module,
            operation=_operation(origin),
            source=origin.place.source,
            tensor=f"{name} {list(shape)} {dtype_name(origin.dtype)}",
            index=index,
            value=origin.value,
            reached=reached,
            explanation=finding.explanation,
            remedy=causes.CAUSES[finding.cause],
            operands=_operands(origin),
            row=row,
            token=token,
            sample=sample,
        )


def _origin_of(sink: Sink, ledger: Ledger) -> Origin | None:
    """Where what is bad in the end began. A mask that an output still shows is no fault."""
    origin = ledger.origin_of(sink.tensor) if sink.bad or sink.unsure else None
    return None if origin is None or (origin.meant and sink.unsure) else origin


def _operands(origin: Origin) -> tuple[Operand, ...]:
    tensors = [_operand(origin, label, tensor) for label, tensor in origin.inputs[:OPERANDS_SHOWN]]
    constants = [
        (name, value) for name, value in origin.constants.items() if name in causes.CONSTANTS
    ]
    return (
        *tensors,
        *(
            Operand(
                name,
                "constant",
                (),
                int(value != value),
                int(abs(value) == math.inf),
                abs(value),
                value,
            )
            for name, value in constants
        ),
    )


def _operand(origin: Origin, label: str, tensor: Tensor) -> Operand:
    nan, inf = count(tensor)
    external = origin.externals.get(label)
    number = tensor.is_floating_point() and origin.pointwise
    return Operand(
        name=label if external is None else external.name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        nan=nan,
        inf=inf,
        absmax=absmax(tensor),
        value=causes.element_at(tensor, origin.shape, origin.index) if number else None,
    )


def _externals(model: nn.Module, batch: Any) -> Iterator[External]:
    """The tensors that are there before a pass."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield External(name, "state", parameter.detach(), trained=True)
    for name, statistic in quantization_statistics(model):
        yield External(name, "state", statistic.detach(), trained=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield External(name, "state", buffer.detach())
    for name, tensor in named_inputs(batch):
        yield External(name, "data", tensor.detach())


def _data_fault(model: nn.Module, batch: Any) -> Verdict | None:
    """Ids that stand for nothing: on a CPU an IndexError, on a GPU the end of the process."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        return None
    for name in ("input_ids", "labels"):
        ids = (
            getattr(batch, name, None)
            if isinstance(batch, Batch)
            else batch.get(name)
            if isinstance(batch, Mapping)
            else None
        )
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            continue
        finding = target_fault(
            ids,
            vocabulary,
            IGNORE_INDEX if name == "labels" else None,
            name="label" if name == "labels" else "token",
        )
        if finding is not None:
            row, token, sample = Tokens(batch).locate(tuple(ids.shape), finding.index)
            return Verdict(
                cause="token id",
                phase="data",
                layer=None,
                module="",
                operation="embedding" if name == "input_ids" else "cross_entropy",
                source="",
                tensor=f"{name} {list(ids.shape)}",
                index=finding.index,
                value=finding.value,
                reached="nothing yet: it is refused before it is looked up",
                explanation=finding.message,
                remedy=causes.CAUSES["token id"],
                row=row,
                token=token,
                sample=sample,
            )
    return None


def _not_repeatable(label: str) -> Verdict:
    return _without_operation(
        "not repeatable",
        label,
        math.nan,
        f"{label} was not finite once, and finite when everything was run again",
    )


def _outside_of_torch(sink: Sink) -> Verdict:
    index = first_bad(sink.tensor)
    explanation = f"{sink.label} is not finite, and no operation made it so"
    return replace(
        _without_operation(
            "outside of torch", sink.label, element(sink.tensor, index), explanation
        ),
        index=index,
    )


def _without_operation(cause: str, label: str, value: float, explanation: str) -> Verdict:
    return Verdict(
        cause=cause,
        phase="backward" if label.startswith("gradient") else "forward",
        layer=None,
        module="",
        operation="",
        source="",
        tensor=label,
        index=(),
        value=value,
        reached=label,
        explanation=explanation,
        remedy=causes.CAUSES[cause],
    )


def _operation(origin: Origin) -> str:
    return f"{origin.operation} in {origin.node}" if origin.node else origin.operation


def _phase(text: str) -> Phase:
    phases: dict[str, Phase] = {
        p: p for p in ("forward", "recomputation", "backward", "data", "state")
    }
    return phases[text]


def _at(index: tuple[int, ...]) -> str:
    return str(list(index)) if index else ""
