"""`trace`: find the operation that made a NaN.

If loss and gradients of a plain pass are finite, there is nothing to find. Otherwise the pass runs
again, from the same random state, under a ledger of its operations. Another pass then collects the
inputs of the operation that made the NaN and, if that was in backward, the line of its forward. For
an overflow, two further passes find where the values began to grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import update_wrapper
from itertools import chain
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from npt.batch import IGNORE_INDEX, Batch
from npt.errors import ConfigError
from npt.hooks import unfused
from npt.tracer import rules
from npt.tracer.ledger import Ledger, OnePass
from npt.tracer.mask_check import mask_check
from npt.tracer.operations import External, Origin
from npt.tracer.passes import (
    Run,
    Sink,
    default_run,
    gradients_of,
    named_inputs,
    names_of_modules,
    ready,
    sinks_of,
    untouched,
)
from npt.tracer.source_location import Tokens, layer_of, plain_name
from npt.tracer.tensors import (
    absmax,
    count,
    described,
    dtype_name,
    element,
    first_bad,
    parts_of,
    tensors_in,
)
from npt.tracer.token_ids import LOOKED_UP, reads_labels
from npt.tracer.verdict import OUTSIDE, Operand, Verdict
from npt.tracer.watchdogs import quantization_statistics

P = ParamSpec("P")
R = TypeVar("R")

OPERANDS_SHOWN = 6

EXPLOSION = 1e18
"""A magnitude whose square nearly overflows fp32, traced if only a sum of squares overflowed."""

# A bad number of which only the name is left.
_LOST = torch.tensor(math.nan)
_MEDIA = ("pixel_values", "input_features")
_OVERFLOWS = {
    "exploding product",
    "exploding gradient",
    "cast overflow",
    "corrupt absmax",
    "low-precision overflow",
    "exponential overflow",
}


@dataclass
class Watched:
    """What `watch` found.

    Attributes:
        loss: assign it, or any results, if backward does not run within the context.
        verdict: on the first operation that made a NaN or Inf; None if there is no fault.
    """

    loss: Any = None
    verdict: Verdict | None = None


@contextmanager
def watch(model: nn.Module, batch: Any = None, *, limit: float = math.inf) -> Iterator[Watched]:
    """Run any code, such as your own training step, under the tracer, once and with all it changes.

    Losses that backward is called on, gradients and weights are checked. `trace` repeats the pass
    and can say more: where values began to grow, and what an operation in place has overwritten.

    Args:
        model: its modules and weights are named.
        batch: names inputs, samples and tokens, as in `trace`.
        limit: also find the first magnitude above this.

    Raises:
        ConfigError: no backward ran, and no `loss` was assigned.
    """
    watched = Watched()
    tracer = _Tracer(model, batch, lambda: None, limit)
    torch.clear_autocast_cache()  # cached casts of weights would have no origin
    ledger = OnePass(tracer.modules, tracer.externals, limit)
    try:
        with (
            unfused(),
            mask_check(model, batch) as masks,
            torch.compiler.set_stance("force_eager"),
            ledger,
        ):
            yield watched
    finally:  # code may raise because of the NaN
        sinks = [Sink("loss", loss) for loss in ledger.losses]
        sinks += [Sink(*result) for result in tensors_in(watched.loss, "loss")]
        sinks += gradients_of(model.named_parameters())
        checked = bool(sinks)
        for name, weight in model.named_parameters():
            sinks.append(Sink(f"weight {plain_name(name)}", weight))
        verdict = tracer.verdict_of(ledger, sinks)
        watched.verdict = verdict or next(iter(masks), None)
    if not checked:
        raise ConfigError("nothing to check: call backward within watch, or assign its loss")


class Watchable(Generic[P, R]):
    """A function with `watch` as an attribute."""

    watch = staticmethod(watch)

    def __init__(self, function: Callable[P, R]):
        self._function = function
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)


@Watchable
@unfused()  # single operations are looked at
def trace(
    model: nn.Module,
    batch: Any = None,
    *,
    run: Any = None,
    limit: float = math.inf,
    against: nn.Module | str | Path | None = None,
) -> Verdict | None:
    """Find the first operation that made a NaN or Inf in a forward and backward pass.

    `with trace.watch(model, batch) as watched:` runs code that cannot be repeated; then read
    `watched.verdict`.

    Args:
        model: any module, quantised or converted, on any device, in train or eval mode.
        batch: the model's input: a mapping of keyword arguments (as from a tokenizer or data
            loader), an `npt.batch.Batch`, a tensor, or a tuple of arguments. A language model
            without labels gets its input ids as labels. With `run`, it only names samples and
            tokens.
        run: computes the pass instead of `model(batch)`. It returns outputs, or a scalar loss
            (or an object or mapping with a `loss`), which is differentiated here; it may also run
            backward itself. It is called once, and up to five more times after a fault. It must do
            the same each time and not change weights. Only tensors of the model and the batch may
            get gradients. Existing gradients are restored afterwards.
        limit: also find the first magnitude above this, to trace a growth before it overflows.
        against: a reference to compare with: find the first operation whose result differs by more
            than rounding explains, and nothing else. Either a model with the same module names (in
            another dtype, on another device, or compiled without `fullgraph`), or the file of an
            earlier trace; a file that does not exist is written from this pass. `run` is then
            called with the model. All results are held in host memory.

    Returns:
        A verdict on the operation that first made the value that spoilt the loss or gradients; None
        if there is no fault. A mask that leaves a valid token without keys is a fault too, even if
        all results are finite.

    Raises:
        ConfigError: `limit` is not above 0, or `run` changed a weight or returned nothing to check.
    """
    if not limit > 0:
        raise ConfigError(f"limit is {limit}; it must be above 0")
    verdict = _data_fault(model, batch)
    if verdict is not None:
        return verdict
    if against is not None:
        # imported late: no NaN is found by it
        from npt.tracer.against import PassComparison

        return PassComparison(model, batch, run, against).verdict()
    unpadded = run is None
    if unpadded:
        batch = ready(model, batch)
        run = default_run(model, batch)
    with untouched(model, batch):
        with mask_check(model, batch, unpadded) as masks:
            sinks = sinks_of(model, batch, run())
        bad = [sink.label for sink in sinks if sink.bad]
        unsure = any(sink.unsure for sink in sinks)
        del sinks  # and so this pass's gradients
    # only a ledger can judge a mask in an output, or finite numbers
    if bad or unsure or math.isfinite(limit):
        verdict = _Tracer(model, batch, run, limit).verdict()
    if verdict is None and bad:
        return _without_operation(
            "not repeatable",
            bad[0],
            f"{bad[0]} was not finite once, but was finite when everything was run again",
        )
    return verdict or next(iter(masks), None)


def first_fault(model: nn.Module, batch: Any, run: Run, ids: tuple[str, ...]) -> Verdict | None:
    """Return the operation that made the first NaN or Inf of a refused micro-batch of samples with
    `ids`.

    If every number is finite, trace the first one above `EXPLOSION`, since a norm overflows before
    its elements do.
    """
    verdict = trace(model, batch, run=run) or trace(model, batch, run=run, limit=EXPLOSION)
    return verdict and _with_sample(verdict, batch, ids)


def _with_sample(verdict: Verdict, batch: Any, ids: tuple[str, ...]) -> Verdict:
    """Add the sample that a verdict is about: that of its row, or one of a list."""
    row = verdict.row
    if row is not None:
        shape = Tokens(batch).shape
        known = shape is not None and shape[0] == len(ids)
        return replace(verdict, sample=ids[row]) if known else verdict
    inputs = named_inputs(batch) if verdict.phase == "data" else ()
    for name, tensor in inputs:
        if verdict.tensor.startswith(f"{name} ["):
            return _with_sample_of(verdict, tensor, batch, ids)
    return verdict


def _with_sample_of(verdict: Verdict, tensor: Tensor, batch: Any, ids: tuple[str, ...]) -> Verdict:
    samples = len(ids)
    number = _number_in_list(tensor, batch, samples)
    if number is not None:
        return replace(verdict, sample=ids[number])
    if tensor.shape[:1] != (samples,) or samples in tensor.shape[1:]:
        return verdict
    return replace(verdict, row=verdict.index[0], sample=ids[verdict.index[0]])


def _number_in_list(tensor: Tensor, batch: Any, count: int) -> int | None:
    """Return the number of the sample that holds a tensor, in a list of `count` samples."""
    if _is_list_of(count, batch):
        numbers = [i for i, sample in enumerate(batch) if _holds(sample, tensor)]
    else:
        found = [_number_in_list(tensor, part, count) for _, part in parts_of(batch)]
        numbers = [number for number in found if number is not None]
    return next(iter(numbers), None)


def _is_list_of(count: int, batch: Any) -> bool:
    """Tell if this is a list of `count` samples. One with a tensor of a row per sample, as from a
    data loader, is none.
    """
    rows = any(tensor.shape[:1] == (count,) for _, tensor in tensors_in(batch))
    return isinstance(batch, list) and len(batch) == count and not rows


def _holds(sample: Any, tensor: Tensor) -> bool:
    return any(part is tensor for _, part in tensors_in(sample))


class _Tracer:
    """The passes of one trace; arguments as for `trace`."""

    def __init__(self, model: nn.Module, batch: Any, run: Run, limit: float):
        self.model = model
        self.batch = batch
        self.run = run
        self.limit = limit
        self.tokens = Tokens(batch, {tuple(p.shape) for p in model.parameters()})
        self.modules = names_of_modules(model)
        self.externals = list(_externals(model, batch))

    def verdict(self) -> Verdict | None:
        """Return the first fault, or None if this pass was good."""
        ledger, sinks = self._pass(limit=self.limit)
        origins = self._origins(ledger, sinks)
        if not origins:
            return _unexplained(sinks)
        del sinks, ledger  # do not hold one pass's gradients during the next
        origin, label = origins[0]
        close = self._close_up(origin, self.limit)
        if close is None:
            reason = rules.Reason(
                "not repeatable",
                f"{origin.operation} gave {origin.value:g} once, but not when everything was run"
                " again",
            )
            return self._verdict_on(origin, reason, label)
        verdict = self._explained(close, origins)
        overflowed = verdict.cause in _OVERFLOWS and close.external is None
        start = self._start_of_growth(close) if overflowed else None
        return verdict if start is None else _with_growth(verdict, start)

    def verdict_of(self, ledger: OnePass, sinks: list[Sink]) -> Verdict | None:
        """Return the first fault of a pass that is not run again."""
        origins = self._origins(ledger, sinks)
        if not origins:
            return _unexplained(sinks)
        origin, label = origins[0]
        has_cause = origin.inputs or origin.external is not None
        if has_cause:
            return self._explained(origin, origins)
        reason = rules.Reason("unknown", f"{origin} gave {origin.value:g}")
        return self._verdict_on(origin, reason, label)

    def _origins(self, ledger: Ledger, sinks: list[Sink]) -> list[tuple[Origin, str]]:
        """Return the origins of what is bad, the first one first, and what each reached."""
        origins = []
        for sink in filter(lambda sink: sink.badness, sinks):
            origin = ledger.origin_of(sink.tensor)
            # a mask that an output still shows is no fault
            if origin is not None and not (origin.meant and sink.unsure):
                origins.append((origin, sink.label))
        if math.isfinite(self.limit) and ledger.first is not None:
            origins.append((ledger.first, f"a value above {self.limit:g}"))
        return sorted(origins, key=lambda pair: pair[0].number)

    def _explained(self, origin: Origin, origins: list[tuple[Origin, str]]) -> Verdict:
        """Return the verdict on the first of some origins, given with its inputs."""
        reason = rules.explain(origin)
        computed = origin.external is None
        reached = [label for _, label in origins if not label.startswith("a value above")]
        unseen = bool(reached) and all(name.startswith(("gradient", "weight ")) for name in reached)
        if origin.phase == "forward" and computed and unseen:
            reason = rules.hidden(reason)
        return self._verdict_on(origin, reason, origins[0][1])

    def _pass(self, **wanted: Any) -> tuple[Ledger, list[Sink]]:
        # A compiled module has its own operations; compiled as one graph, it raises under a ledger.
        with (
            untouched(self.model, self.batch),
            torch.compiler.set_stance("force_eager"),
            Ledger(self.modules, self.externals, **wanted) as ledger,
        ):
            return ledger, sinks_of(self.model, self.batch, self.run())

    def _close_up(self, origin: Origin, limit: float) -> Origin | None:
        """Return the origin with its inputs and its forward's line; None if it did not recur."""
        if origin.external is not None:
            return origin
        keep = (origin.number, origin.output)
        ledger = self._pass(limit=limit, keep=keep, watch=origin.sequence)[0]
        close = ledger.kept
        if close is None or close.operation != origin.operation:
            return None
        close.hid = ledger.hid
        forward = ledger.watched
        while forward.sequence is not None and not forward.place.source:
            # A double backward: the forward operation is one step further back.
            forward = self._pass(limit=limit, watch=forward.sequence)[0].watched
        close.place = close.place.completed_by(forward.place)
        return close

    def _start_of_growth(self, origin: Origin) -> tuple[Origin, float] | None:
        """Return where the values were halfway to the overflow, in orders of magnitude, and the
        limit that they passed.
        """
        floats = {label: t for label, t in origin.inputs if t.is_floating_point()}
        label, size = rules.largest(floats)
        if size <= rules.HUGE:
            return None
        limit = math.sqrt(size)
        start = self._pass(limit=limit, asked=origin.number)[0].read_origins.get(label)
        if start is not None and start.sequence is not None:
            start = self._close_up(start, limit)
        return None if start is None else (start, limit)

    def _verdict_on(self, origin: Origin, reason: rules.Reason, reached: str) -> Verdict:
        external = origin.external
        name = f"output of {origin.operation}" if external is None else external.name
        module = origin.place.module
        phase = origin.phase
        if external is not None and external.kind != "outside":
            phase = external.kind
            if phase == "state":
                module = external.module
        owner = self.tokens.locate(origin.shape, origin.index)
        if owner.row is None:
            # a weight belongs to no token, but the first result that it spoilt may
            owner = self.tokens.locate(*origin.through)
        return Verdict(
            cause=reason.cause,
            phase=phase,
            layer=layer_of(module),
            module=module,
            operation=str(origin),
            source=origin.place.source,
            tensor=described(name, origin.shape, origin.dtype),
            index=origin.index,
            value=origin.value,
            reached=reached,
            explanation=reason.explanation,
            operands=_operands(origin),
            **owner._asdict(),
        )


def _with_growth(verdict: Verdict, growth: tuple[Origin, float]) -> Verdict:
    """Add the start of an overflow's growth."""
    start, limit = growth
    at = str(list(start.index)) if start.index else ""
    if start.external is None:
        grew = f"first above {limit:g} in {start} in {start.place.module or OUTSIDE}"
        if start.shape:
            grew += f" at {at} of {list(start.shape)}"
        grew += f": {start.value:g}"
        if start.place.source:
            grew += f", {start.place.source}"
        return replace(verdict, grew=grew)
    verdict = replace(
        verdict, grew=f"{start.external.name}{at} was {start.value:g} before the pass"
    )
    if start.external.kind == "outside" or abs(start.value) <= rules.HUGE:
        return verdict
    # the operation is only where it showed
    reason = rules.explain(start)
    explanation = f"{reason.explanation}; {verdict.explanation}"
    return replace(verdict, cause=reason.cause, explanation=explanation)


def _operands(origin: Origin) -> tuple[Operand, ...]:
    operands = [_operand(origin, *given) for given in origin.inputs[:OPERANDS_SHOWN]]
    for name, number in origin.constants.items():
        if name in rules.CONSTANTS:
            constant = Operand(name, "constant", (), absmax=abs(number), value=number)
            operands.append(constant)
    return tuple(operands)


def _operand(origin: Origin, label: str, tensor: Tensor) -> Operand:
    value = None
    if origin.pointwise and tensor.is_floating_point():
        # elsewhere the shapes do not tell which elements met
        value = rules.element_at(tensor, origin.shape, origin.index)
    nan, inf = count(tensor)
    external = origin.externals.get(label)
    return Operand(
        name=label if external is None else external.name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        nan=nan,
        inf=inf,
        absmax=absmax(tensor),
        value=value,
    )


def _externals(model: nn.Module, batch: Any) -> Iterator[External]:
    parameters = model.named_parameters(remove_duplicate=False)
    for name, tensor in chain(parameters, quantization_statistics(model)):
        yield External(plain_name(name), "state", tensor.detach(), no_mask=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield External(plain_name(name), "state", buffer.detach())
    for name, tensor in named_inputs(batch):
        # a number for each sample, such as an advantage, is no mask
        yield External(name, "data", tensor.detach(), tensor.ndim < 2 and "mask" not in name)


def _data_fault(model: nn.Module, batch: Any) -> Verdict | None:
    """Find token ids outside the vocabulary: an IndexError on a CPU, a crash on a GPU."""
    # of samples, or of the inputs of several calls
    for number, part in enumerate(batch if isinstance(batch, list) else ()):
        fault = _data_fault(model, part)
        if fault is not None:
            tensor = f"input {number}.{fault.tensor}"
            return replace(fault, tensor=tensor, row=None, token=None)
    vocabulary = _vocabulary(model)
    entries = vars(batch) if isinstance(batch, Batch) else batch
    if not isinstance(vocabulary, int) or not isinstance(entries, Mapping):
        return None
    for name, operation in _lookups(model, entries).items():
        ids = entries.get(name)
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            continue
        outside = (ids < 0) | (ids >= vocabulary)
        if name == "labels":
            outside &= ids != IGNORE_INDEX
        if not bool(outside.any()):
            continue
        index = tuple(outside.nonzero()[0].tolist())
        found = int(ids[index])
        number = int(outside.sum())
        return Verdict(
            cause="token id",
            phase="data",
            operation=operation,
            index=index,
            tensor=f"{name} {list(ids.shape)}",
            value=float(found),
            reached="nothing, since the lookup was not run",
            explanation=f"the id {found} is outside [0, {vocabulary}) (ids outside: {number})",
            **Tokens(batch).locate(tuple(ids.shape), index)._asdict(),
        )
    return None


def _vocabulary(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:  # a decoder of speech or images has a config of its own
        vocabulary = getattr(getattr(config, "decoder", None), "vocab_size", None)
    return vocabulary


def _lookups(model: nn.Module, entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the operation that looks up the ids of each entry."""
    # transformers' language models ignore the label -100 only; other losses may ignore any.
    inner = getattr(model, "get_base_model", lambda: model)()
    source = type(inner).__module__
    stock = source.startswith(("transformers.", "npt."))
    if stock and reads_labels(inner):
        ids = (*LOOKED_UP, "labels")
        return dict.fromkeys(ids, "embedding")
    # placeholders beyond the vocabulary are replaced before the lookup
    if any(name in entries for name in _MEDIA):
        return {}
    lookups = {"input_ids": "embedding"}
    if stock and hasattr(inner, "lm_head"):
        lookups["labels"] = "cross_entropy"
    return lookups


def _unexplained(sinks: list[Sink]) -> Verdict | None:
    """Return the verdict on the first bad result, if no operation made it."""
    sink = next((sink for sink in sinks if sink.bad), None)
    if sink is None:
        return None
    explanation = f"{sink.label} is not finite, but no operation of the pass made it"
    return _without_operation("outside of torch", sink.label, explanation, sink.tensor)


def _without_operation(cause: str, label: str, explanation: str, tensor: Tensor = _LOST) -> Verdict:
    index = first_bad(tensor)
    return Verdict(
        cause=cause,
        phase="backward" if label.startswith("gradient") else "forward",
        tensor=label,
        index=index,
        value=element(tensor, index),
        reached=label,
        explanation=explanation,
    )
