"""The recorder: the health of every tensor that a pass through a module produces, without a change
to any of them.

    with Recorder(model) as recorder:
        model(**batch).loss.backward()
    record = recorder.record(step=1)

Each tensor is reduced to a few numbers where it lies (`npt.diagnostics.recorder.statistics`), and
all of them are read at once by `record`. Nothing else is kept: no tensor outlives the recorder's
look at it. Hooks only look. On leaving the block, however it is left, every hook is gone, so a pass
outside of it costs what it did before.

What becomes a row, by its `stage`:

    in            every module: its main input (the first tensor), unless it already has a row as
                  what another module gave
    in.NAME       every module: its other inputs, likewise; masks are left out, their -Inf is meant
    out           every module: its output, of several the first; out.NAME or out.NUMBER: the others
    weight, ...   every parameter, gradient only: what this pass added to it, before any clipping

and of an NPT layer:

    h             the residual stream before the layer
    a             the attention output, after o_proj
    stream        h + a, what the MLP reads if the attention residual is kept
    z             the low-rank code A a
    m_gate ...    multipliers of gate, up, down, with their saturation
    s_gate ...    additive terms of gate, up, down
    gate, up      the products as modulated (before: `mlp.gate_proj out`, `mlp.up_proj out`)
    activation    act(gate)
    product       activation * up, what down_proj reads
    mlp           the MLP's output as modulated
    o             the residual sum after the layer, with its update ratio
    t             the teacher's o, under the local strategy

RMSNorms, q, k and v are modules and so have their `out`. Rows stand in the order in which the pass
reached them. A tensor that several modules name, such as the output of an MLP and of its last
product, is reduced once and has a row under each name. Where a module is called again in the same
pass its stages are numbered from there on: `out#2`. Such calls are the teacher's (first) and the
student's (second) under the end_to_end strategy, and a recomputation under the gradient
checkpointing of a model's own; what `--gradient_checkpointing` computes again is not looked at
twice. Under the local strategy teacher and student go through gate_proj, up_proj and down_proj as
one stack of rows, so the rows of these modules are of both, and through the first two just once
where the attention residual is kept; a converted layer's own forward is not called. A gradient has
the stage of its value; `out@2` is the second backward through it.

Padded positions are left out of every tensor that starts with the batch and time of the mask: of
`valid`, else of the two-dimensional `attention_mask` that the model itself is called with.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from npt.adapters.layer import NPTAdapter
from npt.adapters.modulation import multiplier_spread
from npt.adapters.recompute import is_recomputing
from npt.base.hooks import only_looks
from npt.diagnostics.recorder.record import Direction, Record, Row
from npt.diagnostics.recorder.statistics import FIELDS, share_beyond, summarise
from npt.errors import kind_of

SATURATED = 0.99
"""A multiplier counts as saturated beyond this share of the way from the middle of its form's range
to an end.
"""

_MAIN_INPUTS = ("hidden_states", "inputs_embeds", "input_ids", "input", "x")

# What a stage of an NPT layer is made of; how much it grew from there can be an explosion.
_MADE_OF = {
    "z": "a",
    "activation": "gate",
    "product": "activation",
    "mlp": "product",
    "o": "h",
    "t": "h",
}


@dataclass(frozen=True)
class _Site:
    """A module to be observed. element: it is an element of a list of modules, such as a decoder
    layer. grows: its output may be compared with its input in size, which says nothing of a
    normalisation or an embedding."""

    name: str
    layer: int | None
    element: bool
    grows: bool
    parameters: tuple[str, ...]


@dataclass
class _Entry:
    """A row whose numbers have not been read yet. summary, saturation, update (and what it is an
    update of): where they stand.
    """

    site: _Site
    stage: str
    direction: Direction
    shape: tuple[int, ...]
    dtype: str
    summary: int
    source: int | None = None
    saturation: int | None = None
    update: tuple[int, int] | None = None


@dataclass
class _Known:
    """A tensor that was reduced: its numbers are still the same while it lives and its version
    stands. entries: its rows.
    """

    tensor: weakref.ref[Tensor]
    version: int
    summary: int
    entries: list[int]

    def unchanged(self) -> Tensor | None:
        tensor = self.tensor()
        return tensor if tensor is not None and _version(tensor) == self.version else None


class _Valid:
    """The tokens that count, [B, T] bool, carried to each device once."""

    def __init__(self, mask: Tensor):
        self._on = {mask.device: mask}

    def on(self, device: torch.device) -> Tensor:
        if device not in self._on:
            self._on[device] = next(iter(self._on.values())).to(device)
        return self._on[device]


class Recorder:
    """Records every forward and backward pass through `model` inside its block.

    Numerics, random state and the graph are as without it; `torch.no_grad`, `torch.inference_mode`,
    mixed precision and gradient checkpointing are fine. Only code that itself asks whether it is
    hooked may take another way: torch's `nn.TransformerEncoderLayer` then leaves its fused
    inference path. A tensor that cannot be reduced (a sparse one, say) is skipped, with a warning
    from `record`. Recorders nest, and one can be entered again: it then starts anew.

    Args:
        model: any module.
        gradients: record the gradients of the same tensors, and of the parameters, as well.
        valid: [B, T] bool, True at the tokens that count.
        layers: record only these decoder layers (elements of a `ModuleList`, by index), and what
            lies outside of layers.

    Raises:
        ValueError: `valid` has another number of dimensions; or, when the block begins, the model
            has no such layer.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        gradients: bool = True,
        valid: Tensor | None = None,
        layers: Iterable[int] | None = None,
    ):
        if valid is not None and valid.ndim != 2:
            raise ValueError(
                f"valid has the shape {tuple(valid.shape)}; it says of each token, [B, T], whether"
                " it counts"
            )
        self.model, self.gradients = model, gradients
        self._given = None if valid is None else _Valid(valid.detach().bool())
        self._layers = None if layers is None else frozenset(layers)
        self._undo: list[Callable[[], None]] = []
        self._tensor_hooks: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._entries: list[_Entry] = []
        self._summaries: list[Tensor] = []
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._calls: Counter[tuple[str, str, Direction]] = Counter()
        self._sources: dict[str, tuple[int, _Known]] = {}  # of the modules that are being computed
        self._shown: dict[str, dict[str, _Known]] = {}  # the stages of each NPT layer's pass so far
        self._updates: dict[tuple[int, int], int] = {}
        self._valid = self._given
        self.skipped: list[str] = []

    def __enter__(self) -> Recorder:
        if self._undo:
            raise RuntimeError(
                "this Recorder is inside its block already; make another one to nest them"
            )
        self._forget()
        try:
            self._attach()
        except BaseException:
            self._detach()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._detach()

    def record(self, step: int = 0, micro_batch: int = 0) -> Record:
        """Read what was observed since the block began, or since the last call, and start anew.

        The one moment at which the host waits for the device.

        Args:
            step, micro_batch: what the record is to be called.
        """
        entries, numbers, skipped = self._entries, _read(self._summaries), self.skipped
        self._forget()
        self.skipped = skipped
        self._tensor_hooks = [
            handle for handle in self._tensor_hooks if handle.hooks_dict_ref() is not None
        ]
        if skipped:
            warnings.warn(
                f"{len(skipped)} tensors were not recorded, the first: {skipped[0]}", stacklevel=2
            )
        return Record(step, tuple(_row(entry, numbers) for entry in entries), micro_batch)

    def _attach(self) -> None:
        named = dict(self.model.named_modules())
        sites = {name: _site(name, module, named) for name, module in named.items()}
        missing = (self._layers or frozenset()) - {site.layer for site in sites.values()}
        if missing:
            raise ValueError(
                f"{type(self.model).__name__} has no layer {min(missing)}; leave it out of layers"
            )
        for name, module in named.items():
            site = sites[name]
            if not self._chosen(site):
                continue
            before, after = (
                only_looks(partial(self._before, site)),
                only_looks(partial(self._after, site)),
            )
            self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo.append(module.register_forward_hook(after, with_kwargs=True).remove)
            if isinstance(module, NPTAdapter):
                self._observe(site, module)
        if self.gradients:
            for name, parameter in self.model.named_parameters():
                self._watch_parameter(name, parameter, named, sites)

    def _chosen(self, site: _Site) -> bool:
        return site.layer is None or self._layers is None or site.layer in self._layers

    def _detach(self) -> None:
        for handle in self._tensor_hooks:
            handle.remove()
        for undo in reversed(self._undo):
            undo()
        self._tensor_hooks, self._undo = [], []
        self._known, self._sources, self._shown = {}, {}, {}

    def _observe(self, site: _Site, adapter: NPTAdapter) -> None:
        previous = adapter.observer

        def observe(stages: dict[str, Tensor | None]) -> None:
            self._stages(site, adapter, stages)
            if previous is not None:
                previous(stages)

        def restore() -> None:
            adapter.observer = previous

        adapter.observer = observe
        self._undo.append(restore)

    def _watch_parameter(
        self,
        name: str,
        parameter: nn.Parameter,
        named: Mapping[str, nn.Module],
        sites: Mapping[str, _Site],
    ) -> None:
        if not parameter.requires_grad:
            return
        # A parameter of a list or dictionary of parameters belongs to the module that has it:
        # `npt.B.gate` is `npt`, `B.gate`.
        owner, _, _ = name.rpartition(".")
        while owner and isinstance(named[owner], nn.ParameterDict | nn.ParameterList):
            owner, _, _ = owner.rpartition(".")
        site = sites[owner]
        if not self._chosen(site):
            return
        stage = name[len(owner) + 1 :] if owner else name
        bare = not parameter._backward_hooks

        def look(gradient: Tensor) -> None:
            self._quietly(site, f"gradient of {stage}", self._gradient, site, stage, gradient)

        handle = parameter.register_hook(look)

        def remove() -> None:
            handle.remove()
            if bare and not parameter._backward_hooks:
                # as it was: an empty dictionary of hooks is a trace
                parameter._backward_hooks = None

        self._undo.append(remove)

    # --- what the hooks do. None may raise: the pass that is looked at goes on whatever happens
    # here.

    def _quietly(self, site: _Site, stage: str, look: Callable[..., None], *arguments: Any) -> None:
        try:
            look(*arguments)
        except Exception as error:
            self.skipped.append(
                f"{site.name} {stage}".strip()
                + f": {type(error).__name__}: {error}".splitlines()[0]
            )

    def _before(
        self, site: _Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not is_recomputing():
            self._quietly(site, "in", self._inputs, site, args, kwargs)

    def _after(
        self,
        site: _Site,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if not is_recomputing():
            self._quietly(site, "out", self._outputs, site, output)

    def _inputs(self, site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._sources.pop(site.name, None)
        found = _named_inputs(site, args, kwargs)
        if site.name == "" and self._given is None:
            self._valid = _validity(found)
        found = {name: tensor for name, tensor in found.items() if "mask" not in name}
        main = _main_input(found)
        for name, tensor in found.items():
            known = self._find(tensor)
            if known is None:
                known = self._add(site, "in" if name == main else f"in.{name}", tensor)
            if name == main and site.grows and tensor.is_floating_point():
                self._sources[site.name] = known.entries[0], known

    def _outputs(self, site: _Site, output: Any) -> None:
        source, before = self._sources.pop(site.name, (None, None))
        for position, (name, tensor) in enumerate(_tensors(output)):
            if position == 0:
                known = self._add(
                    site, "out" if name in ("", "0") else f"out.{name}", tensor, source
                )
                if site.element and before is not None:
                    self._add_update(known, tensor, before)
            elif self._find(tensor) is None:
                self._add(site, f"out.{name}", tensor)

    def _stages(self, site: _Site, adapter: NPTAdapter, stages: dict[str, Tensor | None]) -> None:
        if "h" in stages:
            self._shown[site.name] = {}
        found = self._shown.setdefault(site.name, {})
        for stage, tensor in stages.items():
            if tensor is not None and not (stage == "stream" and tensor is stages["h"]):
                self._quietly(site, stage, self._stage, site, adapter, stage, tensor, found)

    def _stage(
        self, site: _Site, adapter: NPTAdapter, stage: str, tensor: Tensor, found: dict[str, _Known]
    ) -> None:
        before = found.get(_MADE_OF.get(stage, ""))
        found[stage] = known = self._add(
            site, stage, tensor, None if before is None else before.entries[-1]
        )
        if stage.startswith("m_"):
            valid = None if self._valid is None else self._valid.on(tensor.device)
            middle, half = multiplier_spread(adapter.config.mult_form, adapter.config.mult_bound)
            beyond = share_beyond(tensor, middle, SATURATED * half, valid)
            self._entries[known.entries[-1]].saturation = self._keep(beyond)
        if stage in ("o", "t") and before is not None:
            self._add_update(known, tensor, before)

    def _gradient(self, site: _Site, stage: str, gradient: Tensor) -> None:
        self._append(site, stage, "gradient", gradient, self._summarise(gradient, None), "@")

    def _gradients(
        self, observed: list[_Entry], entries: list[int], gradient: Tensor, valid: _Valid | None
    ) -> None:
        summary = self._summarise(gradient, valid)
        for index in entries:
            self._append(
                observed[index].site, observed[index].stage, "gradient", gradient, summary, "@"
            )

    # --- rows

    def _add(self, site: _Site, stage: str, tensor: Tensor, source: int | None = None) -> _Known:
        """A row for a tensor that goes forward. One that is known is not reduced again."""
        known = self._find(tensor)
        if known is None:
            known = _Known(
                weakref.ref(tensor), _version(tensor), self._summarise(tensor, self._valid), []
            )
            self._known[_place(tensor)] = known
            if self.gradients and tensor.requires_grad:
                self._watch(site, stage, tensor, known.entries)
        known.entries.append(
            self._append(site, stage, "forward", tensor, known.summary, "#", source)
        )
        return known

    def _watch(self, site: _Site, stage: str, tensor: Tensor, entries: list[int]) -> None:
        """Record the gradient of `tensor` under each name that it has by then."""
        valid, observed = self._valid, self._entries

        def look(gradient: Tensor) -> None:
            self._quietly(
                site, f"gradient of {stage}", self._gradients, observed, entries, gradient, valid
            )

        self._tensor_hooks.append(tensor.register_hook(look))

    def _append(
        self,
        site: _Site,
        stage: str,
        direction: Direction,
        tensor: Tensor,
        summary: int,
        number: str,
        source: int | None = None,
    ) -> int:
        self._calls[site.name, stage, direction] += 1
        call = self._calls[site.name, stage, direction]
        name = stage if call == 1 else f"{stage}{number}{call}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._entries.append(
            _Entry(site, name, direction, tuple(tensor.shape), dtype, summary, source)
        )
        return len(self._entries) - 1

    def _add_update(self, known: _Known, after: Tensor, before_known: _Known) -> None:
        """What the row's tensor adds to the one that it is the next state of."""
        before = before_known.unchanged()
        if (
            before is None
            or after.shape != before.shape
            or after.device != before.device
            or not after.is_floating_point()
        ):
            return
        pair = known.summary, before_known.summary
        if pair not in self._updates:
            self._updates[pair] = self._summarise(after.detach() - before.detach(), self._valid)
        self._entries[known.entries[-1]].update = self._updates[pair], before_known.summary

    def _summarise(self, tensor: Tensor, valid: _Valid | None) -> int:
        if (
            tensor.layout != torch.strided
            or tensor.is_meta
            or is_traceable_wrapper_subclass(tensor)
        ):
            raise TypeError(
                f"{kind_of(tensor)} of layout {tensor.layout} on {tensor.device} cannot be"
                " summed up"
            )
        return self._keep(summarise(tensor, None if valid is None else valid.on(tensor.device)))

    def _keep(self, numbers: Tensor) -> int:
        self._summaries.append(numbers)
        return len(self._summaries) - 1

    def _find(self, tensor: Tensor) -> _Known | None:
        """What is known of these very numbers: another view of the same memory, in the same shape,
        unchanged since.

        An inference tensor counts no changes, so each look at one is a new one.
        """
        known = self._known.get(_place(tensor))
        return (
            known
            if known is not None and not tensor.is_inference() and known.unchanged() is not None
            else None
        )


def _site(name: str, module: nn.Module, named: Mapping[str, nn.Module]) -> _Site:
    layer = None
    parts = name.split(".") if name else []
    for depth, part in enumerate(parts):
        if isinstance(named.get(".".join(parts[:depth])), nn.ModuleList):
            layer = int(part)
            break
    kind: Any = type(module)
    return _Site(
        name=name,
        layer=layer,
        element=layer is not None and isinstance(named.get(name.rpartition(".")[0]), nn.ModuleList),
        grows=not any(word in kind.__name__.lower() for word in ("norm", "embedding")),
        parameters=_parameters(kind),
    )


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    """Names of the positional parameters of a module's forward, as far as it has any."""
    try:
        found = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in found if parameter.kind in positional)


def _tensors(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in nested tuples, lists, mappings and dataclasses; caches and
    the like are none of them.
    """
    if isinstance(value, Tensor):
        yield name, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in fields(value))
    if depth < 3:
        for key, item in items:
            yield from _tensors(item, f"{name}.{key}" if name else str(key), depth + 1)


def _named_inputs(site: _Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that a module is called with, by the names of its parameters."""
    names = (
        *site.parameters[: len(args)],
        *(str(i) for i in range(len(site.parameters), len(args))),
    )
    return dict(_tensors({**dict(zip(names, args, strict=True)), **kwargs}))


def _main_input(found: Mapping[str, Tensor]) -> str:
    """The tensor that goes through the module: one of the usual names, else the first."""
    usual = [name for name in _MAIN_INPUTS if name in found]
    return usual[0] if usual else next(iter(found), "")


def _validity(found: Mapping[str, Tensor]) -> _Valid | None:
    """The tokens that count, from the model's own arguments; None where all do, or nothing says."""
    mask = found.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    valid = mask.detach().bool()
    return None if valid.device.type == "cpu" and bool(valid.all()) else _Valid(valid)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What two views of the same numbers in the same shape have in common; an empty tensor lies
    nowhere.
    """
    at = tensor.data_ptr() or id(tensor)
    return at, tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def _version(tensor: Tensor) -> int:
    """Grows with every change in place; an inference tensor counts none."""
    return -1 if tensor.is_inference() else tensor._version


def _read(vectors: list[Tensor]) -> list[list[float]]:
    """The vectors' numbers, by one transfer for each device."""
    where: dict[torch.device, list[int]] = {}
    for index, vector in enumerate(vectors):
        where.setdefault(vector.device, []).append(index)
    read: list[list[float]] = [[] for _ in vectors]
    for indices in where.values():
        numbers = torch.cat([vectors[i] for i in indices]).tolist()
        start = 0
        for i in indices:
            read[i] = numbers[start : start + vectors[i].numel()]
            start += vectors[i].numel()
    return read


def _row(entry: _Entry, numbers: list[list[float]]) -> Row:
    values = dict(zip(FIELDS, numbers[entry.summary], strict=True))
    count, nan, up, down = (int(values[name]) for name in ("count", "nan", "pos_inf", "neg_inf"))
    finite = count - nan - up - down
    sizes = {
        name: values[name] if finite else None for name in ("min", "max", "mean", "std", "rms")
    }
    update = None
    if entry.update is not None:
        added, before = (numbers[i][FIELDS.index("rms")] for i in entry.update)
        update = added / before if before > 0 and added >= 0 else None  # neither where one is NaN
    return Row(
        module=entry.site.name,
        layer=entry.site.layer,
        stage=entry.stage,
        direction=entry.direction,
        shape=entry.shape,
        dtype=entry.dtype,
        count=count,
        finite_share=finite / count if count else 1.0,
        nan=nan,
        pos_inf=up,
        neg_inf=down,
        absmax=max(abs(values["min"]), abs(values["max"])) if finite else None,
        saturation=None if entry.saturation is None else numbers[entry.saturation][0],
        update_ratio=update,
        source=entry.source,
        **sizes,
    )
