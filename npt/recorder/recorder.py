"""Record the health of every tensor in a pass through a module, without changing any of them.

    with Recorder(model) as recorder:
        model(**batch).loss.backward()
    record = recorder.record(step=1)

Each tensor is reduced to a few numbers on its device, and `record` reads them all at once. No
tensor is kept alive, and all hooks are removed at the end of the block.

Rows are in the order of the pass. Every module has these stages:

    in            main input (the first tensor), unless it has a row as another module's output
    in.NAME       other inputs, on the same condition; masks are skipped, as their -Inf is intended
    out           output, or the first of several; out.NAME or out.NUMBER: the others
    weight, ...   parameters, gradient only: what this pass adds, before clipping

An NPT layer also has:

    h             the residual stream before the layer
    a             the attention output, after o_proj
    l             what the token itself says of a, if the form has a token part
    u             the code before its threshold, if the form has one
    z             the code
    s_stream      the shift of the stream
    stream        what the MLP reads and adds to, if not h: h plus any shift, and plus a where the
                  attention residual is kept
    m_gate ...    multipliers of gate, up, down, with their saturation
    s_gate ...    additive terms of gate, up, down
    gate, up      the products as modulated (before: `mlp.gate_proj out`, `mlp.up_proj out`)
    activation    act(gate)
    product       activation * up, the input of down_proj
    mlp           the MLP's output as modulated
    o             the residual sum after the layer, with its update ratio
    t             the teacher's o, under the local strategy

A tensor that several modules share has a row under each name. Later calls of a module in the same
pass are numbered, `out#2`: the student's with `--strategy end_to_end`, or a recomputation by the
model's own gradient checkpointing (recomputation by `--gradient_checkpointing` is not recorded).
With `--strategy local` the MLP's rows are the student's. A gradient has the stage of its value;
`out@2` is the second backward through it.

Padding is left out of every tensor whose first two dimensions are those of the mask: `valid`, else
the two-dimensional `attention_mask` argument of the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from npt.adapters.layer import NPTAdapter
from npt.adapters.recompute import is_recomputing
from npt.config.adapter import SATURATED
from npt.hooks import only_looks
from npt.recorder.observations import Observations, Reduced
from npt.recorder.record import Record
from npt.recorder.sites import Site, named_inputs, sites_of
from npt.tracer.tensors import tensors_in

# The stage that each stage of an NPT layer is made from; growth from there can be an explosion.
_MADE_OF = {
    "u": "a",
    "z": "a",
    "s_stream": "a",
    "activation": "gate",
    "product": "activation",
    "mlp": "product",
    "o": "h",
    "t": "h",
}


class Recorder:
    """Records every forward and backward pass through `model` inside its block.

    Does not change numerics, random state or the graph, also under `torch.no_grad`,
    `torch.inference_mode`, mixed precision and gradient checkpointing. Only code that checks for
    hooks may behave differently: torch's `nn.TransformerEncoderLayer` leaves its fused inference
    path. A tensor that cannot be reduced, such as a sparse one, is skipped with a warning from
    `record`. Recorders nest. Entering one again clears it.

    Args:
        model: any module.
        gradients: also record the gradients of these tensors and of the parameters.
        valid: [B, T] bool, True at the tokens that count.

    Raises:
        ValueError: `valid` does not have two dimensions.
    """

    def __init__(self, model: nn.Module, *, gradients: bool = True, valid: Tensor | None = None):
        if valid is not None:
            if valid.ndim != 2:
                raise ValueError(f"valid has the shape {tuple(valid.shape)}: pass a mask [B, T]")
            # once, so that no reduction waits for the copy
            first = next(model.parameters(), valid)
            valid = valid.detach().bool().to(first.device)
        self.model = model
        self.gradients = gradients
        self._valid = valid
        self._hooks: ExitStack | None = None
        self._tensor_hooks: list[RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._observed = Observations(self._valid)
        self._sources: dict[str, Reduced] = {}  # by module that is running
        self._stages: dict[str, dict[str, Reduced]] = {}  # by NPT layer
        self.skipped: list[str] = []

    def __enter__(self) -> Recorder:
        if self._hooks is not None:
            raise RuntimeError("this Recorder is already active: to nest, create another one")
        self._forget()
        with ExitStack() as hooks:
            self._attach(hooks)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._tensor_hooks:
            handle.remove()
        if self._hooks is not None:
            self._hooks.close()
        self._tensor_hooks = []
        self._hooks = None
        self._sources = {}
        self._stages = {}

    def record(self, step: int = 0, micro_batch: int = 0) -> Record:
        """Return everything observed since the block began or the last call, and clear it.

        This is the only time that the host waits for the device.
        """
        rows = self._observed.rows()
        skipped = self.skipped
        self._forget()
        self.skipped = skipped
        self._tensor_hooks = [
            handle for handle in self._tensor_hooks if handle.hooks_dict_ref() is not None
        ]
        if skipped:
            warnings.warn(
                f"{len(skipped)} tensors were not recorded, the first: {skipped[0]}", stacklevel=2
            )
        return Record(step, rows, micro_batch)

    def _attach(self, hooks: ExitStack) -> None:
        modules = dict(self.model.named_modules())
        sites = sites_of(modules)
        for name, module in modules.items():
            site = sites[name]
            look_in = only_looks(partial(self._see, site, "in", self._inputs))
            look_out = only_looks(partial(self._see, site, "out", self._outputs))
            hooks.enter_context(module.register_forward_pre_hook(look_in, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(look_out, with_kwargs=True))
            if isinstance(module, NPTAdapter):
                hooks.callback(setattr, module, "observer", module.observer)
                module.observer = self._observer(site, module)
        if not self.gradients:
            return
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            # A parameter in a ParameterList or ParameterDict belongs to the module around it:
            # `npt.B.gate` is `B.gate` of `npt`.
            owner, _, _ = name.rpartition(".")
            while owner and isinstance(modules[owner], nn.ParameterDict | nn.ParameterList):
                owner, _, _ = owner.rpartition(".")
            site = sites[owner]
            stage = name.removeprefix(owner).lstrip(".")
            look = partial(self._gradients, [(site, stage)], None)  # a weight has no padding
            quietly = partial(self._quietly, site, f"gradient of {stage}", look)
            hooks.enter_context(parameter.register_hook(quietly))

    def _observer(self, site: Site, adapter: NPTAdapter) -> Callable[[dict[str, Any]], None]:
        """Return an observer of an NPT layer's stages that also calls the present one."""
        previous = adapter.observer

        def observe(stages: dict[str, Tensor | None]) -> None:
            self._add_stages(site, adapter, stages)
            if previous is not None:
                previous(stages)

        return observe

    # --- the hooks. None may raise, so that recording cannot stop the pass.

    def _quietly(self, site: Site, stage: str, look: Callable[..., None], *arguments: Any) -> None:
        try:
            look(*arguments)
        except Exception as error:
            reason = f": {type(error).__name__}: {error}".splitlines()[0]
            self.skipped.append(f"{site.name} {stage}".strip() + reason)

    def _see(
        self, site: Site, stage: str, look: Callable[..., None], module: nn.Module, *shown: Any
    ) -> None:
        if not is_recomputing():
            self._quietly(site, stage, look, site, *shown)

    def _inputs(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._sources.pop(site.name, None)
        inputs, main = named_inputs(site, args, kwargs)
        if site.name == "" and self._valid is None:
            self._observed.valid = _validity(inputs)
        for name, tensor in inputs.items():
            if "mask" in name:
                continue
            reduced = self._observed.find(tensor)
            if reduced is None:
                stage = "in" if name == main else f"in.{name}"
                reduced = self._add(site, stage, tensor)
            if name == main and site.grows and tensor.is_floating_point():
                self._sources[site.name] = reduced

    def _outputs(self, site: Site, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        source = self._sources.pop(site.name, None)
        outputs = tensors_in(output)
        name, tensor = next(outputs, ("", None))
        if tensor is None:
            return
        is_first = name in ("", "0")
        stage = "out" if is_first else f"out.{name}"
        if source is None:
            self._add(site, stage, tensor)
        else:
            read = source.entries[0]
            reduced = self._add(site, stage, tensor, read)
            if site.element:
                self._observed.add_update(reduced, tensor, source)
        for name, tensor in outputs:
            if self._observed.find(tensor) is None:
                self._add(site, f"out.{name}", tensor)

    def _add_stages(
        self, site: Site, adapter: NPTAdapter, stages: dict[str, Tensor | None]
    ) -> None:
        if "h" in stages:
            self._stages[site.name] = {}
        for stage, tensor in stages.items():
            if tensor is not None:
                self._quietly(site, stage, self._add_stage, site, adapter, stage, tensor)

    def _add_stage(self, site: Site, adapter: NPTAdapter, stage: str, tensor: Tensor) -> None:
        stages = self._stages.setdefault(site.name, {})
        made_of = stages.get(_MADE_OF.get(stage, ""))
        source = None if made_of is None else made_of.entries[-1]
        reduced = self._add(site, stage, tensor, source)
        stages[stage] = reduced
        if stage.startswith("m_"):
            middle, half = adapter.config.multiplier_spread
            self._observed.add_saturation(reduced, tensor, middle, SATURATED * half)
        if stage in ("o", "t") and made_of is not None:
            self._observed.add_update(reduced, tensor, made_of)

    def _add(self, site: Site, stage: str, tensor: Tensor, source: int | None = None) -> Reduced:
        """Add a forward row. A tensor that is known is not reduced again."""
        reduced = self._observed.find(tensor)
        if reduced is None:
            reduced = self._observed.reduce(tensor)
            if self.gradients and tensor.requires_grad:
                self._watch(site, stage, tensor, reduced.entries)
        self._observed.add(site, stage, tensor, reduced, source)
        return reduced

    def _watch(self, site: Site, stage: str, tensor: Tensor, rows: list[int]) -> None:
        """Record the gradient of `tensor` under every name that it has by then."""
        # those of this pass: `record` may be called before the gradient comes
        valid = self._observed.valid
        entries = self._observed.entries

        def look(gradient: Tensor) -> None:
            names = [(entries[row].site, entries[row].stage) for row in rows]
            self._quietly(site, f"gradient of {stage}", self._gradients, names, valid, gradient)

        self._tensor_hooks.append(tensor.register_hook(look))

    def _gradients(
        self, names: list[tuple[Site, str]], valid: Tensor | None, gradient: Tensor
    ) -> None:
        summary = self._observed.summarise(gradient, valid)
        for site, stage in names:
            self._observed.add_gradient(site, stage, gradient, summary)


def _validity(inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the mask of tokens that count from the model's arguments, or None for all tokens."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.ndim != 2:
        return None
    valid = mask.detach().bool()
    return None if valid.device.type == "cpu" and bool(valid.all()) else valid
