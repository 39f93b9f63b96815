"""One pass of a model: run it, collect its results, and leave the model as it was."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from npt.batch import IGNORE_INDEX, Batch
from npt.errors import ConfigError, kind_of
from npt.random_state import kept_random_state
from npt.tracer.source_location import plain_name
from npt.tracer.tensors import Badness, judge, tensors_in

Run = Callable[[], Any]

_FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


@dataclass(frozen=True)
class Sink:
    """A result to check: a loss, a gradient, or an output, which may contain a mask."""

    label: str
    tensor: Tensor

    @cached_property
    def badness(self) -> Badness:
        return judge(self.tensor)

    @property
    def bad(self) -> bool:
        return bool(self.badness) and not self.unsure

    @property
    def unsure(self) -> bool:
        """Tell if it may be a mask, which only a ledger can judge."""
        return self.label.startswith("output") and self.badness == Badness.SOFT


def names_of_modules(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's modules by id, without what torch.compile adds to them."""
    return {id(module): plain_name(name) for name, module in model.named_modules()}


def default_run(model: nn.Module, batch: Any) -> Run:
    if isinstance(batch, Batch):
        batch = {**_inputs_of(model, batch), "labels": batch.labels}
    if isinstance(batch, Mapping):
        return partial(model, **_labelled(model, batch))
    if isinstance(batch, tuple) or (isinstance(batch, list) and _takes(model, batch)):
        return partial(model, *batch)
    return partial(model, batch)


def _takes(model: nn.Module, batch: list[Any]) -> bool:
    """Tell if a list is one of arguments, as from a data loader, and not of samples."""
    try:
        inspect.signature(model.forward).bind(*batch)
    except TypeError:
        return False
    return True


def _labelled(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Give a language model without labels its input ids as labels."""
    arguments = dict(batch)
    ids = arguments.get("input_ids")
    if "labels" not in arguments and isinstance(ids, Tensor) and _is_language_model(model):
        arguments["labels"] = _labels(ids, arguments.get("attention_mask"))
    return arguments


def _inputs_of(model: nn.Module, batch: Batch) -> Mapping[str, Any]:
    if batch.documents is None:
        return batch.inputs
    # imported late: only the masks of packed rows need transformers
    from npt.adapters.stream import is_known, model_inputs

    return model_inputs(model, batch) if is_known(model) else batch.inputs


def _labels(ids: Tensor, mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        return ids
    valid = mask.bool()
    # padding does not predict the first token after it
    before = F.pad(valid[..., :-1], (1, 0), value=True)
    return ids.masked_fill(~(valid & before), IGNORE_INDEX)


def _is_language_model(model: nn.Module) -> bool:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None and "labels" in inspect.signature(model.forward).parameters


@torch.inference_mode(False)
def ready(model: nn.Module, batch: Any) -> Any:
    """Return the batch on the model's device, without inference tensors, which backward rejects."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Batch):
        return batch.to(device)
    if isinstance(batch, Mapping):
        batch = dict(batch)

    def moved(tensor: Tensor) -> Tensor:
        there = tensor.to(device)
        return there.clone() if tensor.is_inference() else there

    return tree_map_only(Tensor, moved, batch)


def sinks_of(model: nn.Module, batch: Any, result: Any) -> list[Sink]:
    """Return the results of a pass; differentiate a scalar loss first, unless the pass has."""
    leaves = [*_leaves(model, batch)]
    loss = _scalar_loss(result)
    if loss is None:
        results = [(f"output {name}".strip(), tensor) for name, tensor in tensors_in(result)]
    else:
        results = [("loss", loss)]
        # gradients mean that run has called backward itself
        if all(leaf.grad is None for _, leaf in leaves):
            differentiate(loss)
    sinks = [Sink(label, tensor.detach()) for label, tensor in results]
    sinks += gradients_of(leaves)
    if not sinks:
        raise ConfigError(
            f"run returned {kind_of(result)} and made no gradients: return a loss or outputs, or"
            " call backward in it"
        )
    return sinks


def _scalar_loss(result: Any) -> Tensor | None:
    """Return a pass's loss, if that is one number."""
    loss = result
    if isinstance(result, Mapping):
        loss = result.get("loss")
    elif not isinstance(result, Tensor):
        loss = getattr(result, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _leaves(model: nn.Module, batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model and the batch that get gradients."""
    for name, tensor in chain(model.named_parameters(), named_inputs(batch)):
        if tensor.is_leaf and tensor.requires_grad:
            yield name, tensor


def differentiate(loss: Tensor) -> None:
    """Run backward, if the loss has a graph."""
    if not loss.requires_grad:
        return
    _tell_fabric(True)
    try:
        loss.backward()
    finally:
        _tell_fabric(False)


def _tell_fabric(started: bool) -> None:
    """Lightning Fabric refuses a backward that it has not started, which it may have to scale; a
    trace scales none.
    """
    for name in _FABRIC:
        if name in sys.modules:
            vars(sys.modules[name])["_in_fabric_backward"] = started


def named_inputs(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a batch's tensors: entries by name, arguments by position."""
    by_position = isinstance(batch, Tensor | list | tuple)
    for name, tensor in tensors_in(batch):
        yield f"input {name}".strip() if by_position else name, tensor


def gradients_of(leaves: Iterable[tuple[str, Tensor]]) -> list[Sink]:
    """Return the gradients of named tensors, as far as they have one."""
    sinks = []
    for name, leaf in leaves:
        label = f"gradient of {plain_name(name)}"
        # a gradient may have parts; one that is None has none
        sinks += [Sink(*part) for part in tensors_in(leaf.grad, label)]
    return sinks


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
    buffers = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((module._buffers, name, buffer, buffer.detach().clone()))
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")  # torch may lack it
    numpy_state = numpy and numpy.random.get_state()
    # cached casts of weights would have no origin in this pass
    torch.clear_autocast_cache()
    try:
        with (
            kept_random_state(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
        ):
            # a bad gradient from before would not have its origin in this pass
            for leaf, _ in gradients:
                leaf.grad = None
            yield
    finally:
        torch.clear_autocast_cache()
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        for module, training in modes:
            module.training = training
        for leaf, gradient in gradients:
            leaf.grad = gradient
        with torch.no_grad():
            for held, name, buffer, copy in buffers:
                held[name] = buffer
                # writing to one that is equal could spoil a graph that the caller holds
                if not torch.equal(buffer, copy):
                    buffer.copy_(copy)
    for name, count in _writes(model).items():
        if writes.get(name, count) != count:
            raise ConfigError(
                f"run wrote to {plain_name(name)}: pass a run that computes loss and gradients"
                " without an optimizer step"
            )


def _writes(model: nn.Module) -> dict[str, int]:
    versions = {}
    for name, parameter in model.named_parameters():
        # a pass may initialise lazy ones, and inference tensors have no version
        if not is_lazy(parameter) and not parameter.is_inference():
            versions[name] = parameter._version
    return versions
