"""One pass of a model: run it, collect its results, and leave the model unchanged."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from npt.adapters.stream import model_inputs
from npt.base.families import is_known
from npt.data.batch import IGNORE_INDEX, Batch
from npt.diagnostics.tracer.nonfinite import Badness, judge
from npt.errors import ConfigError, kind_of

Run = Callable[[], Any]


@dataclass(frozen=True)
class Sink:
    """A result that may not be bad, and its name: a loss, a gradient, or an output, which may be
    masked.
    """

    label: str
    tensor: Tensor

    @property
    def bad(self) -> bool:
        return judge(self.tensor) >= (Badness.HARD if self._may_be_masked else Badness.SOFT)

    @property
    def unsure(self) -> bool:
        """Tell if only a ledger can judge it."""
        return self._may_be_masked and judge(self.tensor) == Badness.SOFT

    @property
    def _may_be_masked(self) -> bool:
        return self.label.startswith("output")


def default_run(model: nn.Module, batch: Any) -> Run:
    """Return a call of the model on the batch, with labels if it is a language model."""
    if isinstance(batch, Batch):
        names = ("input_ids", "attention_mask", "position_ids")
        inputs: dict[str, Any] = {name: getattr(batch, name) for name in names}
        if batch.documents is not None and is_known(model):
            inputs = model_inputs(model, batch)
        batch = {**inputs, "labels": batch.labels}
    if isinstance(batch, Mapping):
        arguments = dict(batch)
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if "labels" not in arguments and isinstance(ids, Tensor) and _is_language_model(model):
            if isinstance(mask, Tensor) and mask.shape == ids.shape:
                ids = ids.masked_fill(~mask.bool(), IGNORE_INDEX)
            arguments["labels"] = ids
        return lambda: model(**arguments)
    given = batch if isinstance(batch, tuple | list) else (batch,)
    return lambda: model(*given)


def _is_language_model(model: nn.Module) -> bool:
    """Tell if labels are token ids: transformers' models with a head over their vocabulary."""
    head: Any = getattr(model, "get_output_embeddings", None)
    has_head = head is not None and head() is not None
    return has_head and "labels" in inspect.signature(model.forward).parameters


def ready(batch: Any, device: torch.device) -> Any:
    """Return the batch on a device, fit for backward, which tensors of inference mode are not."""
    if isinstance(batch, Tensor):
        return batch.to(device).clone() if batch.is_inference() else batch.to(device)
    if isinstance(batch, Batch):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: ready(value, device) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        items = [ready(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


def sinks_of(model: nn.Module, batch: Any, result: Any) -> list[Sink]:
    """Return the results of the pass. A scalar loss with a graph is differentiated first, if the
    pass has not done so.
    """
    loss = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    loss = result.get("loss") if isinstance(result, Mapping) else loss
    named = [*model.named_parameters(), *named_inputs(batch)]
    leaves = [(name, leaf) for name, leaf in named if leaf.is_leaf and leaf.requires_grad]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if loss.requires_grad and all(leaf.grad is None for _, leaf in leaves):
            loss.backward()
        sinks = [Sink("loss", loss.detach())]
    else:
        outputs = _tensors("", result)
        sinks = [Sink(f"output {name}".strip(), tensor.detach()) for name, tensor in outputs]
    for name, leaf in leaves:
        if leaf.grad is not None:
            sinks += [Sink(*found) for found in _tensors(f"gradient of {name}", leaf.grad)]
    if not sinks:
        raise ConfigError(
            f"run gave {kind_of(result)} and no gradients: it must return a loss or outputs, or"
            " run backward"
        )
    return sinks


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Tensor):
        if not is_traceable_wrapper_subclass(value):
            yield name, value
            return
        parts = [(f".{part}", getattr(value, part)) for part in value.__tensor_flatten__()[0]]
    elif isinstance(value, Mapping):
        parts = [(f".{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"[{i}]", item) for i, item in enumerate(value)]
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [(f".{entry.name}", getattr(value, entry.name)) for entry in fields(value)]
    for suffix, item in parts:
        yield from _tensors(f"{name}{suffix}".lstrip("."), item)


def named_inputs(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch: entries by their names, arguments by their positions."""
    for name, tensor in _tensors("", batch):
        yield f"input {name}".strip() if isinstance(batch, Tensor | list | tuple) else name, tensor


def _renormed(model: nn.Module) -> list[Tensor]:
    """Return the weights that forward writes to: of embeddings with a largest norm."""
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return [m.weight for m in embeddings if m.max_norm is not None]


@contextmanager
def untouched(model: nn.Module, batch: Any) -> Iterator[None]:
    """Start without gradients and without a mode of the caller's that hinders a backward pass.

    Afterwards gradients, buffers, the modules' modes and random state are as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    inputs = (t for _, t in _tensors("", batch) if t.is_leaf and t.requires_grad)
    gradients = [(leaf, leaf.grad) for leaf in (*model.parameters(), *inputs)]
    buffers = [
        (module._buffers, name, b, b.detach().clone())
        for module in model.modules()
        for name, b in module._buffers.items()
        if b is not None
    ]
    weights = [(weight, weight.detach().clone()) for weight in _renormed(model)]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    states = random.getstate(), numpy.random.get_state()
    # casts of the weights from before this pass would come out of nowhere in it
    torch.clear_autocast_cache()
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
        torch.clear_autocast_cache()
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        for module, training in modes:
            module.training = training
        for leaf, gradient in gradients:
            leaf.grad = gradient
        with torch.no_grad():
            for held, name, buffer, before in buffers:
                if held.get(name) is not buffer:
                    held[name] = buffer
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
            for weight, before in weights:
                weight.copy_(before)


def versions(model: nn.Module) -> dict[str, int]:
    """Return how often each parameter was written to, except those that forward writes to."""
    renormed = {id(weight) for weight in _renormed(model)}
    named = model.named_parameters()
    given = [(name, p) for name, p in named if not is_lazy(p) and id(p) not in renormed]
    return {name: p._version for name, p in given if not p.is_inference()}
