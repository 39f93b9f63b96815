"""One pass of a model: run it, collect its results, and leave the model as it was."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from npt.batch import IGNORE_INDEX, Batch
from npt.errors import ConfigError, kind_of
from npt.random_state import kept_random_state
from npt.tracer.tensors import Badness, judge, tensors_in

Run = Callable[[], Any]

_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


@dataclass(frozen=True)
class Sink:
    """A result to check: a loss, a gradient, or an output, which may contain a mask."""

    label: str
    tensor: Tensor

    @property
    def bad(self) -> bool:
        return judge(self.tensor) != Badness.FINE and not self.unsure

    @property
    def unsure(self) -> bool:
        """Tell if it may be a mask, which only a ledger can judge."""
        return self.label.startswith("output") and judge(self.tensor) == Badness.SOFT


def default_run(model: nn.Module, batch: Any) -> Run:
    if isinstance(batch, Batch):
        batch = {**_inputs_of(model, batch), "labels": batch.labels}
    if isinstance(batch, Mapping):
        arguments = dict(batch)
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if "labels" not in arguments and isinstance(ids, Tensor) and _is_language_model(model):
            if isinstance(mask, Tensor) and mask.shape == ids.shape:
                # padding does not predict the first token after it
                before = F.pad(mask.bool()[..., :-1], (1, 0), value=True)
                ids = ids.masked_fill(~(mask.bool() & before), IGNORE_INDEX)
            arguments["labels"] = ids
        return lambda: model(**arguments)
    positional = batch if isinstance(batch, tuple | list) else (batch,)
    if isinstance(batch, list):  # of arguments, as from a data loader, or of samples
        try:
            inspect.signature(model.forward).bind(*batch)
        except TypeError:
            positional = (batch,)
    return lambda: model(*positional)


def _inputs_of(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    if batch.documents is None:
        return batch.inputs
    # imported late: only the masks of packed rows need transformers
    from npt.adapters.stream import is_known, model_inputs

    return model_inputs(model, batch) if is_known(model) else batch.inputs


def _is_language_model(model: nn.Module) -> bool:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None and "labels" in inspect.signature(model.forward).parameters


@torch.inference_mode(False)
def ready(model: nn.Module, batch: Any) -> Any:
    """Return the batch on the model's device, without inference tensors, which backward rejects."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Batch):
        return batch.to(device)
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return tree_map_only(
        Tensor, lambda t: t.to(device).clone() if t.is_inference() else t.to(device), batch
    )


def sinks_of(model: nn.Module, batch: Any, result: Any) -> list[Sink]:
    """Return the results of a pass; differentiate a scalar loss first, unless the pass has."""
    loss = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    loss = result.get("loss") if isinstance(result, Mapping) else loss
    named = [*model.named_parameters(), *named_inputs(batch)]
    leaves = [(name, leaf) for name, leaf in named if leaf.is_leaf and leaf.requires_grad]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if loss.requires_grad and all(leaf.grad is None for _, leaf in leaves):
            differentiate(loss)
        sinks = [Sink("loss", loss.detach())]
    else:
        outputs = tensors_in(result)
        sinks = [Sink(f"output {name}".strip(), tensor.detach()) for name, tensor in outputs]
    sinks += gradients_of(leaves)
    if not sinks:
        gave = f"run returned {kind_of(result)} and made no gradients"
        raise ConfigError(f"{gave}: return a loss or outputs, or call backward in it")
    return sinks


def differentiate(loss: Tensor) -> None:
    """Run backward. Lightning Fabric refuses one that it has not started, which it may have to
    scale; a trace scales none.
    """
    loaded: list[Any] = [sys.modules[name] for name in _FABRIC if name in sys.modules]
    for wrappers in loaded:
        wrappers._in_fabric_backward = True
    try:
        loss.backward()
    finally:
        for wrappers in loaded:
            wrappers._in_fabric_backward = False


def named_inputs(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a batch's tensors: entries by name, arguments by position."""
    for name, tensor in tensors_in(batch):
        yield f"input {name}".strip() if isinstance(batch, Tensor | list | tuple) else name, tensor


def gradients_of(leaves: Iterable[tuple[str, Tensor]]) -> list[Sink]:
    """Return the gradients of named tensors, as far as they have one."""
    named = ((name, leaf.grad) for name, leaf in leaves if leaf.grad is not None)
    parts = (part for name, grad in named for part in tensors_in(grad, f"gradient of {name}"))
    return [Sink(*part) for part in parts]


@contextmanager
def untouched(model: nn.Module, batch: Any) -> Iterator[None]:
    """Start a pass without gradients, and with autograd on whatever the caller's mode.

    Afterwards gradients, buffers, train/eval modes and random state are restored.

    Raises:
        ConfigError: the pass wrote to a weight.
    """
    writes = _writes(model)
    modes = [(module, module.training) for module in model.modules()]
    inputs = (t for _, t in tensors_in(batch) if t.is_leaf and t.requires_grad)
    gradients = [(leaf, leaf.grad) for leaf in (*model.parameters(), *inputs)]
    held_by = ((m._buffers, *item) for m in model.modules() for item in m._buffers.items())
    buffers = [(held, name, b, b.detach().clone()) for held, name, b in held_by if b is not None]
    numpy = sys.modules.get("numpy")  # torch may lack it
    states = random.getstate(), numpy and numpy.random.get_state()
    # cached casts of weights would have no origin in this pass
    torch.clear_autocast_cache()
    try:
        with (
            kept_random_state(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
        ):
            for leaf, _ in gradients:
                leaf.grad = None
            yield
    finally:
        torch.clear_autocast_cache()
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
        for module, training in modes:
            module.training = training
        for leaf, gradient in gradients:
            leaf.grad = gradient
        with torch.no_grad():
            for held, name, buffer, copy in buffers:
                held[name] = buffer
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
    for name, count in _writes(model).items():
        if writes.get(name, count) != count:
            raise ConfigError(
                f"run wrote to {name}: pass a run that computes loss and gradients without an"
                " optimizer step"
            )


def _writes(model: nn.Module) -> dict[str, int]:
    counted = ((n, p) for n, p in model.named_parameters() if not (is_lazy(p) or p.is_inference()))
    return {name: parameter._version for name, parameter in counted}
