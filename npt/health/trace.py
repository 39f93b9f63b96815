"""`trace`: from "loss is NaN" to the operation that did it.

The pass is run once as it is, and where loss and gradients are good that is all. Otherwise it is run again, from the same random
state, under a ledger of its operations, which knows for every bad tensor who made it bad; and once more for a close-up: what
went into that operation, and the line of the forward operation whose backward failed. Of numbers that overflowed two further
passes tell where they had begun to grow. Weights, gradients, buffers and random state are as before afterwards.
"""

from __future__ import annotations

import inspect
import math
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from npt.data.batch import IGNORE_INDEX, Batch
from npt.errors import ConfigError
from npt.health import causes
from npt.health.badness import Badness, absmax, count, judge
from npt.health.guards import quantization_statistics, target_fault
from npt.health.masks import mask_fault
from npt.health.operations import External, Ledger, Origin
from npt.health.place import Place, Tokens, layer_of, module_names
from npt.health.verdict import OUTSIDE, Operand, Phase, Verdict

Run = Callable[[], Any]

OPERANDS_SHOWN = 6

_OVERFLOWS = (
    "exploding product",
    "exploding gradient",
    "cast overflow",
    "low-precision overflow",
    "exponential overflow",
    "corrupt absmax",
)


def trace(model: nn.Module, batch: Any = None, *, run: Run | None = None, limit: float = math.inf) -> Verdict | None:
    """The first fault of a forward and backward pass, or None where there is none.

    Args:
        model: any module; quantised, converted, on any device. Its mode (train or eval) is left as it is.
        batch: what to run it on: a mapping of keyword arguments (as tokenizers and data loaders give it), a
            `npt.data.batch.Batch`, a tensor, or a tuple of arguments. A language model without labels gets its input ids as
            labels. Beside `run` it only serves to name samples and tokens.
        run: computes the pass instead. It returns a scalar loss, which is differentiated here if it has a graph, or an object
            or mapping with such a `loss`, or whatever it computes; it may also run backward itself. It is called once, and up
            to five more times where there is a fault; it has to do the same each time, and to leave the weights alone.
        limit: look for the first number larger than this as well: an explosion before it overflows.

    Returns:
        Who first made the number that spoilt loss or gradients. A mask that leaves a valid token without keys is a fault too,
        though all that comes of it may be finite and wrong.

    Raises:
        ConfigError: a limit that is not above 0, or a `run` that takes an optimizer step.
    """
    if not limit > 0:
        raise ConfigError(f"limit is {limit}, but has to be above 0")
    verdict = _data_fault(model, batch)
    if verdict is not None:
        return verdict
    if run is None:
        with torch.inference_mode(False):
            batch = _ready(batch, next((p.device for p in model.parameters()), torch.device("cpu")))
        run = _default_run(model, batch)
    masks = _MaskLook(model, batch)
    versions = _versions(model)
    with _untouched(model, batch):
        with masks:
            sinks = _sinks(model, run())
        bad = [sink.label for sink in sinks if sink.bad]
        unsure = any(sink.unsure for sink in sinks)
        del sinks
    changed = next((name for name, version in _versions(model).items() if versions.get(name) != version), None)
    if changed is not None:
        raise ConfigError(f"run wrote to {changed}: give trace a run that computes loss and gradients, and takes no optimizer step")
    if not bad and not unsure and math.isinf(limit):
        return masks.verdict()
    verdict = _Tracer(model, batch, run, limit).verdict()
    if verdict is None:
        return _not_repeatable(bad[0]) if bad else masks.verdict()
    return verdict


@dataclass(frozen=True)
class _Sink:
    """Something that may not be bad in the end, and what it is called: a loss, a gradient, or an output, which may be masked."""

    label: str
    tensor: Tensor

    @property
    def bad(self) -> bool:
        return judge(self.tensor) >= (Badness.HARD if self._may_be_masked else Badness.SOFT)

    @property
    def unsure(self) -> bool:
        """Whether only a ledger can tell if it is bad."""
        return self._may_be_masked and judge(self.tensor) == Badness.SOFT

    @property
    def _may_be_masked(self) -> bool:
        return self.label.startswith("output")

    def origin(self, ledger: Ledger) -> Origin | None:
        origin = ledger.origin_of(self.tensor) if self.bad or self.unsure else None
        return None if origin is None or (origin.meant and self.unsure) else origin


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
        found = [(origin, sink.label) for sink in sinks if (origin := sink.origin(ledger)) is not None]
        reached = [label for _, label in found]
        if math.isfinite(self.limit) and ledger.first is not None:
            found.append((ledger.first, f"more than {self.limit:g}"))
        if not found:
            bad = [sink for sink in sinks if sink.bad]
            return _outside_of_torch(bad[0]) if bad else None
        origin, label = min(found, key=lambda pair: pair[0].number)
        close = self._close_up(origin, self.limit)
        if close is None:
            return self._written(origin, causes.unrepeated(origin), label)
        finding = causes.explain(close)
        if close.phase == "forward" and close.external is None and reached and all(name.startswith("gradient") for name in reached):
            finding = causes.hidden(finding)
        verdict = self._written(close, finding, label)
        if finding.cause in _OVERFLOWS and close.external is None:
            verdict = self._with_growth(verdict, close)
        return verdict

    def _pass(self, **wanted: Any) -> tuple[Ledger, list[_Sink]]:
        with _untouched(self.model, self.batch):
            with Ledger(self.modules, self.externals, **wanted) as ledger:
                result = self.run()
                sinks = _sinks(self.model, result)
            return ledger, sinks

    def _close_up(self, origin: Origin, limit: float) -> Origin | None:
        """The same origin with what only a second look shows: what went in, and its forward's line; None if it did not recur."""
        if origin.external is not None:
            return origin
        ledger, _ = self._pass(limit=limit, keep=(origin.number, origin.output), watch=origin.sequence)
        close, watched = ledger.kept, ledger.watched
        if close is None or close.operation != origin.operation:
            return None
        close.hid = watched is not None and watched.hid
        while watched is not None and watched.sequence is not None and not watched.place.source:
            # Backward of a backward: the forward operation is one further back.
            watched = self._pass(limit=limit, watch=watched.sequence)[0].watched
        if watched is not None:
            close.place = Place(close.place.module or watched.place.module, close.place.source or watched.place.source)
        return close

    def _with_growth(self, verdict: Verdict, origin: Origin) -> Verdict:
        """Where the numbers that overflowed had become large: half of the way there, in orders of magnitude."""
        sizes = {label: absmax(tensor) for label, tensor in origin.inputs if tensor.is_floating_point()}
        label = max(sizes, key=lambda name: sizes[name], default=None)
        if label is None or sizes[label] <= causes.HUGE:
            return verdict
        limit = math.sqrt(sizes[label])
        ledger, _ = self._pass(limit=limit, asked=origin.number)
        start = ledger.read_origins.get(label)
        start = self._close_up(start, limit) if start is not None and start.sequence is not None else start
        if start is None:
            return verdict
        if start.external is not None:
            grew = f"{start.external.name}{_at(start.index)} was {start.value:g} before anything was computed"
            if start.external.kind == "outside" or abs(start.value) <= causes.HUGE:
                return replace(verdict, grew=grew)
            cause = causes.explain(start).cause
            return replace(verdict, grew=grew, cause=cause, remedy=causes.CAUSES[cause])
        shape, index = start.shown
        where = f"past {limit:g} first in {_operation(start)} in {start.place.module or OUTSIDE}"
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
            # What it came through, or the part of a tensor that was written, may be of a token all the same.
            located = self.tokens.locate(*(origin.shown if external is not None else (origin.shape, origin.index)))
        row, token, sample = located
        return Verdict(
            cause=finding.cause,
            phase=_phase(phase),
            layer=layer_of(module),
            module=module,
            operation=_operation(origin),
            source=origin.place.source,
            tensor=f"{name} {list(shape)} {_short(origin.dtype)}",
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


def _operands(origin: Origin) -> tuple[Operand, ...]:
    tensors = [_operand(origin, label, tensor) for label, tensor in origin.inputs[:OPERANDS_SHOWN]]
    constants = [(name, value) for name, value in origin.constants.items() if name in causes.CONSTANTS]
    return (
        *tensors,
        *(Operand(name, "constant", (), int(value != value), int(abs(value) == math.inf), abs(value), value) for name, value in constants),
    )


def _operand(origin: Origin, label: str, tensor: Tensor) -> Operand:
    nan, inf = count(tensor)
    external = origin.externals.get(label)
    number = tensor.is_floating_point() and origin.pointwise
    return Operand(
        name=label if external is None else external.name,
        dtype=_short(tensor.dtype),
        shape=tuple(tensor.shape),
        nan=nan,
        inf=inf,
        absmax=absmax(tensor),
        value=causes.element_at(tensor, origin.shape, origin.index) if number else None,
    )


class _MaskLook:
    """Within the context every attention mask that a module is given is looked at, once.

    Args:
        model: whose modules take `attention_mask` with a query axis.
        batch: says which tokens are valid. Where it does not, a token is taken for padding if no query may attend to it.
    """

    def __init__(self, model: nn.Module, batch: Any):
        self.model = model
        given = batch.attention_mask if isinstance(batch, Batch) else batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self.valid: Tensor | None = given if isinstance(given, Tensor) and given.ndim == 2 else None
        self.tokens = Tokens(batch)
        if self.valid is None and given is None and self.tokens.shape is not None:
            self.valid = torch.ones(self.tokens.shape)
        self._seen: list[weakref.ref[Tensor]] = []
        self._found: Verdict | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> _MaskLook:
        for name, module in self.model.named_modules():

            def look(_module: nn.Module, _args: Any, kwargs: dict[str, Any], name: str = name) -> None:
                self._look(name, kwargs.get("attention_mask"))

            self._hooks.callback(module.register_forward_pre_hook(look, with_kwargs=True).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._seen.clear()

    def verdict(self) -> Verdict | None:
        return self._found

    def _look(self, name: str, mask: Any) -> None:
        if self._found is not None or not isinstance(mask, Tensor) or mask.ndim != 4 or any(seen() is mask for seen in self._seen):
            return
        self._seen.append(weakref.ref(mask))
        if not (mask.dtype == torch.bool or mask.is_floating_point()) or 0 in mask.shape:
            return
        valid = self._valid(mask.detach())
        if valid is None or _means_the_opposite(mask, valid):
            return
        finding = mask_fault(mask.detach(), valid)
        if finding is None:
            return
        row, token = finding.index[0], finding.index[1]
        samples = self.tokens.samples
        self._found = Verdict(
            cause="fully masked row",
            phase="data",
            layer=layer_of(name),
            module=name,
            operation="attention_mask",
            source="",
            tensor=f"attention_mask {list(mask.shape)} {_short(mask.dtype)}",
            index=finding.index,
            value=finding.value,
            reached="the attention of a valid token, maybe as finite numbers",
            explanation=finding.message,
            remedy=causes.CAUSES["fully masked row"],
            row=row,
            token=token,
            sample=samples[row] if row < len(samples) else None,
        )

    def _valid(self, mask: Tensor) -> Tensor | None:
        """[B, T], which queries are of valid tokens; None where that cannot be told."""
        rows, queries = mask.shape[0], mask.shape[2]
        if self.valid is not None:
            return self.valid.to(mask.device) if tuple(self.valid.shape) == (rows, queries) else None
        if mask.shape[3] != queries:
            return None
        return _allowed(mask).any(dim=1).any(dim=1)


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def _means_the_opposite(mask: Tensor, valid: Tensor) -> bool:
    """Whether a boolean mask says True for what is masked, as some models have it: then every valid token sees itself through it."""
    if mask.dtype != torch.bool or mask.shape[2] != mask.shape[3]:
        return False
    itself = mask.diagonal(dim1=2, dim2=3).any(dim=1)
    return not bool((itself & valid.bool()).any())


def _default_run(model: nn.Module, batch: Any) -> Run:
    """The model on the batch, with labels where it is a language model."""
    if isinstance(batch, Batch):
        batch = {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "position_ids", "labels")}
    if isinstance(batch, Mapping):
        arguments = dict(batch)
        if "labels" not in arguments and isinstance(arguments.get("input_ids"), Tensor) and _is_language_model(model):
            ids, mask = arguments["input_ids"], arguments.get("attention_mask")
            if isinstance(mask, Tensor) and mask.shape == ids.shape:
                ids = ids.masked_fill(~mask.bool(), IGNORE_INDEX)
            arguments["labels"] = ids
        return lambda: model(**arguments)
    given = batch if isinstance(batch, tuple | list) else (batch,)
    return lambda: model(*given)


def _is_language_model(model: nn.Module) -> bool:
    """Whether labels are token ids: transformers' models with a head over their vocabulary."""
    head: Any = getattr(model, "get_output_embeddings", None)
    return head is not None and head() is not None and "labels" in inspect.signature(model.forward).parameters


def _ready(batch: Any, device: torch.device) -> Any:
    """The batch on a device, and fit for backward, which tensors of inference mode are not."""
    if isinstance(batch, Tensor):
        return batch.to(device).clone() if batch.is_inference() else batch.to(device)
    if isinstance(batch, Batch):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _ready(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        items = [_ready(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def _sinks(model: nn.Module, result: Any) -> list[_Sink]:
    """What the pass came to. A scalar loss with a graph is differentiated first, if the pass has not done so."""
    loss = result.get("loss") if isinstance(result, Mapping) else result if isinstance(result, Tensor) else getattr(result, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if loss.requires_grad and all(p.grad is None for p in model.parameters()):
            loss.backward()
        sinks = [_Sink("loss", loss.detach())]
    else:
        sinks = [_Sink(f"output {name}".strip(), tensor.detach()) for name, tensor in _tensors("", result)]
    return sinks + [_Sink(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)


@contextmanager
def _untouched(model: nn.Module, batch: Any) -> Iterator[None]:
    """Within the context gradients start from nothing and no mode of the caller's stands in the way of a backward pass.

    Afterwards gradients, buffers and random state are as before.
    """
    leaves = [*model.parameters(), *(t for _, t in _tensors("", batch) if t.is_leaf and t.requires_grad)]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    buffers = [
        (module._buffers, name, b, b.detach().clone()) for module in model.modules() for name, b in module._buffers.items() if b is not None
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    states = random.getstate(), numpy.random.get_state()
    torch.clear_autocast_cache()  # casts of the weights from before this pass would come out of nowhere in it
    try:
        with (
            torch.random.fork_rng(devices=devices),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
        ):
            for leaf, _ in gradients:
                leaf.grad = None
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        for leaf, gradient in gradients:
            leaf.grad = gradient
        with torch.no_grad():
            for held, name, buffer, before in buffers:
                if held.get(name) is not buffer:
                    held[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter was written to."""
    return {name: p._version for name, p in model.named_parameters() if not p.is_inference()}


def _externals(model: nn.Module, batch: Any) -> Iterator[External]:
    """The tensors that are there before a pass."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield External(name, "state", parameter.detach(), trained=True)
    for name, statistic in quantization_statistics(model):
        yield External(name, "state", statistic.detach(), trained=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield External(name, "state", buffer.detach())
    for name, tensor in _tensors("", batch):
        plain = isinstance(batch, Mapping)
        yield External(name if plain else f"input {name}".strip(), "data", tensor.detach())


def _data_fault(model: nn.Module, batch: Any) -> Verdict | None:
    """Ids that stand for nothing: on a CPU an IndexError, on a GPU the end of the process."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if not isinstance(vocabulary, int):
        return None
    for name in ("input_ids", "labels"):
        ids = getattr(batch, name, None) if isinstance(batch, Batch) else batch.get(name) if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            continue
        ignore = IGNORE_INDEX if name == "labels" else -1 - vocabulary
        finding = target_fault(ids, vocabulary, ignore, name="token" if name == "input_ids" else "label")
        if name == "input_ids" and finding is None and bool((ids < 0).any()):
            finding = target_fault(ids, vocabulary, vocabulary, name="token")
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
    return _without_operation("not repeatable", label, math.nan, f"{label} was not finite once, and finite when everything was run again")


def _outside_of_torch(sink: _Sink) -> Verdict:
    value = float(sink.tensor.detach().to_dense().flatten()[0])
    return _without_operation("outside of torch", sink.label, value, f"{sink.label} is not finite, and no operation made it so")


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
    phases: dict[str, Phase] = {p: p for p in ("forward", "recomputation", "backward", "data", "state")}
    return phases[text]


def _at(index: tuple[int, ...]) -> str:
    return str(list(index)) if index else ""


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
