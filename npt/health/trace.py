"""`trace`: from "loss is NaN" to the operation that did it.

The pass is run once as it is, and where loss and gradients are good that is all. Otherwise it is run again, from the same random
state, under a ledger of its operations, which knows for every bad tensor who made it bad; and once more for a close-up: the
line of the forward operation whose backward failed, what an in-place operation wrote over, and where numbers that
overflowed had begun to grow. Weights, gradients, buffers and random state are as before afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from npt.data.batch import IGNORE_INDEX, Batch
from npt.health import causes
from npt.health.guards import quantization_statistics, target_fault
from npt.health.masks import mask_fault
from npt.health.operations import Badness, External, Ledger, Origin, judge, storage_key
from npt.health.place import Place, Tokens, layer_of, module_names
from npt.health.verdict import Operand, Phase, Verdict

Run = Callable[[], Any]
Sink = tuple[str, Tensor]
"""Something that may not be bad in the end, a loss or a gradient, and what it is called."""

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
            `npt.data.batch.Batch`, a tensor, or a tuple of arguments. A causal language model without labels gets its input ids
            as labels. Beside `run` it only serves to name samples and tokens.
        run: computes the pass instead. It returns a scalar loss, which is differentiated here if it has a graph, or an object
            with such a `loss`, or whatever it computes; it may also run backward itself. It is called up to four times and has
            to do the same each time.
        limit: look for the first number larger than this as well: an explosion before it overflows.

    Returns:
        Who first made the number that spoilt loss or gradients. A mask that leaves a valid token without keys is a fault too,
        though all that comes of it may be finite and wrong.
    """
    verdict = _data_fault(model, batch)
    if verdict is not None:
        return verdict
    run = run if run is not None else _default_run(model, batch)
    masks = _MaskLook(model, batch)
    with _untouched(model):
        with masks:
            sinks = _sinks(model, run())
        bad = [label for label, tensor in sinks if judge(tensor) != Badness.FINE]
        del sinks
    if not bad and math.isinf(limit):
        return masks.verdict()
    tracer = _Tracer(model, batch, run)
    verdict = tracer.verdict(limit)
    if verdict is None and not bad:
        return masks.verdict()
    return verdict if verdict is not None else _not_repeatable(bad[0])


class _Tracer:
    """The passes of one trace.

    Args:
        model, batch, run: as for `trace`.
    """

    def __init__(self, model: nn.Module, batch: Any, run: Run):
        self.model, self.run = model, run
        self.tokens = Tokens(batch)
        self.modules = module_names(model)
        self.external = _external(model, batch)

    def verdict(self, limit: float) -> Verdict | None:
        """The first fault; None where this pass was good."""
        ledger, bad = self._pass(limit)
        origins = [(origin, label) for label, tensor in bad if (origin := ledger.origin_of(tensor)) is not None]
        if math.isfinite(limit):
            # What is not finite and reached neither loss nor gradients was hidden on purpose, a constant for a `where`, say.
            origins += [(origin, f"more than {limit:g}") for origin in ledger.origins if math.isfinite(origin.value)]
        if not origins:
            return _outside_of_torch(*bad[0]) if bad else None
        origin, reached = min(origins, key=lambda pair: pair[0].number)
        origin = self._close_up(origin, limit)
        finding = causes.explain(origin)
        if origin.phase == "forward" and origin.external is None and not any(label == "loss" for label, _ in bad):
            finding = causes.hidden(finding)
        verdict = self._written(origin, finding, reached)
        if finding.cause in _OVERFLOWS and origin.external is None:
            verdict = self._with_growth(verdict, origin)
        return verdict

    def _pass(self, limit: float, keep: int | None = None, watch: int | None = None) -> tuple[Ledger, list[Sink]]:
        with _untouched(self.model):
            with Ledger(self.modules, self.external, limit, keep, watch) as ledger:
                result = self.run()
                sinks = _sinks(self.model, result)
            return ledger, [(label, tensor) for label, tensor in sinks if judge(tensor) != Badness.FINE]

    def _close_up(self, origin: Origin, limit: float) -> Origin:
        """The same origin with what only a second look shows: its forward's line, and what it wrote over."""
        if origin.external is not None or not (origin.overwritten or origin.sequence is not None):
            return origin
        ledger, _ = self._pass(limit, keep=origin.number, watch=origin.sequence)
        again = next((o for o in ledger.origins if o.number == origin.number and o.operation == origin.operation), origin)
        forward = ledger.watched if ledger.watched is not None else Place()
        again.place = Place(again.place.module or forward.module, again.place.source or forward.source)
        return again

    def _with_growth(self, verdict: Verdict, origin: Origin) -> Verdict:
        """Where the numbers that overflowed had become large: half of the way there, in orders of magnitude."""
        sizes = {label: _absmax(tensor) for label, tensor in origin.inputs if tensor.is_floating_point()}
        label = max(sizes, key=lambda name: sizes[name], default=None)
        if label is None or sizes[label] <= causes.HUGE:
            return verdict
        limit = math.sqrt(sizes[label])
        ledger, _ = self._pass(limit, keep=origin.number)
        start = ledger.input_origins.get(label)
        if start is None:
            return verdict
        if start.sequence is not None:
            start = self._close_up(start, limit)
        if start.external is not None:
            kind = causes.explain(start).cause
            if start.external.kind != "state":
                return replace(verdict, grew=f"{start.external.name} was {start.value:g} before anything was computed")
            where = f"{start.external.name}{list(start.index)} was {start.value:g} before anything was computed"
            return replace(verdict, grew=where, cause=kind, remedy=causes.CAUSES[kind])
        where = (
            f"past {limit:g} first in {_operation(start)} in {start.place.module or 'no module'} at {list(start.index)}: {start.value:g}"
        )
        return replace(verdict, grew=f"{where}, {start.place.source}" if start.place.source else where)

    def _written(self, origin: Origin, finding: causes.Finding, reached: str) -> Verdict:
        place, phase, external = origin.place, origin.phase, origin.external
        tensor = f"output of {origin.operation} {list(origin.tensor.shape)} {_short(origin.tensor.dtype)}"
        shape, index = tuple(origin.tensor.shape), origin.index
        module = place.module
        if external is not None:
            phase = origin.phase if external.kind == "outside" else external.kind
            tensor = f"{external.name} {list(origin.tensor.shape)} {_short(origin.tensor.dtype)}"
            module = external.name.split(": ")[0].rpartition(".")[0] if external.kind == "state" and ": " not in external.name else module
            module = external.name.split(": ")[0] if ": " in external.name else module
            shape, index = origin.shown if origin.shown is not None else (shape, index)
        row, token, sample = self.tokens.locate(shape, index)
        return Verdict(
            cause=finding.cause,
            phase=_phase(phase),
            layer=layer_of(module),
            module=module,
            operation=_operation(origin),
            source=place.source,
            tensor=tensor,
            index=origin.index,
            value=origin.value,
            reached=reached,
            explanation=finding.explanation,
            remedy=causes.CAUSES[finding.cause],
            operands=tuple(self._operand(origin, label, t) for label, t in origin.inputs[:OPERANDS_SHOWN]) if external is None else (),
            row=row,
            token=token,
            sample=sample,
        )

    def _operand(self, origin: Origin, label: str, tensor: Tensor) -> Operand:
        number = tensor.is_floating_point()
        return Operand(
            name=origin.names.get(label, label),
            dtype=_short(tensor.dtype),
            shape=tuple(tensor.shape),
            nan=int(torch.isnan(tensor).sum()) if number else 0,
            inf=int(torch.isinf(tensor).sum()) if number else 0,
            absmax=_absmax(tensor),
            value=causes.element_at(tensor, tuple(origin.tensor.shape), origin.index) if origin.pointwise and number else None,
        )


class _MaskLook:
    """Within the context the first attention mask of every shape that a module is given is looked at.

    Args:
        model: whose modules take `attention_mask` with a query axis.
        batch: says which tokens are valid; without it all are.
    """

    def __init__(self, model: nn.Module, batch: Any):
        self.model = model
        valid = batch.attention_mask if isinstance(batch, Batch) else batch.get("attention_mask") if isinstance(batch, Mapping) else None
        self.valid = valid if isinstance(valid, Tensor) and valid.ndim == 2 else None
        self.tokens = Tokens(batch)
        self._seen: list[Tensor] = []
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
        if self._found is not None or not isinstance(mask, Tensor) or mask.ndim != 4 or any(mask is seen for seen in self._seen):
            return
        self._seen.append(mask)
        rows, queries = mask.shape[0], mask.shape[2]
        valid = self.valid.to(mask.device) if self.valid is not None else torch.ones(rows, queries, device=mask.device)
        if tuple(valid.shape) != (rows, queries):
            return
        finding = mask_fault(mask, valid)
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


def _default_run(model: nn.Module, batch: Any) -> Run:
    """The model on the batch, with labels where it is a causal language model."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Batch):
        batch = {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "position_ids", "labels")}
    if isinstance(batch, Mapping):
        arguments = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        if "labels" not in arguments and "input_ids" in arguments and hasattr(model, "get_output_embeddings"):
            ids, mask = arguments["input_ids"], arguments.get("attention_mask")
            arguments["labels"] = ids if mask is None else torch.where(mask.bool(), ids, IGNORE_INDEX)
        return lambda: model(**arguments)
    given = batch if isinstance(batch, tuple | list) else (batch,)
    moved = [value.to(device) if isinstance(value, Tensor) else value for value in given]
    return lambda: model(*moved)


def _sinks(model: nn.Module, result: Any) -> list[Sink]:
    """What the pass came to. A scalar loss with a graph is differentiated first."""
    loss = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if loss.requires_grad:
            loss.backward()
        sinks = [("loss", loss.detach())]
    else:
        sinks = [(f"output {name}".strip(), tensor.detach()) for name, tensor in _tensors("", result)]
    return sinks + [(f"gradient of {name}", p.grad) for name, p in model.named_parameters() if p.grad is not None]


def _tensors(name: str, value: Any) -> Iterator[Sink]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Within the context gradients start from nothing; afterwards they, buffers and random state are as before."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _external(model: nn.Module, batch: Any) -> dict[int, External]:
    """The tensors that are there before a pass, by their memory."""
    named = [(name, tensor, "state") for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]]
    named += [(name, tensor, "state") for name, tensor in quantization_statistics(model)]
    if isinstance(batch, Mapping):
        named += [(name, tensor, "data") for name, tensor in batch.items() if isinstance(tensor, Tensor)]
    elif isinstance(batch, Tensor | tuple | list):
        named += [(f"input {name}".strip(), tensor, "data") for name, tensor in _tensors("", batch)]
    found: dict[int, External] = {}
    for name, tensor, kind in named:
        known = found.get(storage_key(tensor))
        found[storage_key(tensor)] = External(
            (name,) if known is None else (*known.names, name), kind, tensor.detach() if known is None else known.tensor
        )
    return found


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


def _outside_of_torch(label: str, tensor: Tensor) -> Verdict:
    return _without_operation("outside of torch", label, float(tensor.flatten()[0]), f"{label} is not finite, and no operation made it so")


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


def _absmax(tensor: Tensor) -> float:
    values = tensor[torch.isfinite(tensor)] if tensor.is_floating_point() else tensor.to(torch.int64)
    return float(values.abs().max()) if values.numel() else 0.0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
