"""One pass of a model for those who look at it: what is run, what it comes to, and how nothing of
it is left behind.
"""

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
    """Something that may not be bad in the end, and what it is called: a loss, a gradient, or an
    output, which may be masked.
    """

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


def default_run(model: nn.Module, batch: Any) -> Run:
    """The model on the batch, with labels where it is a language model."""
    if isinstance(batch, Batch):
        inputs: dict[str, Any] = {
            name: getattr(batch, name) for name in ("input_ids", "attention_mask", "position_ids")
        }
        if batch.documents is not None and is_known(model):
            inputs = model_inputs(model, batch)
        batch = {**inputs, "labels": batch.labels}
    if isinstance(batch, Mapping):
        arguments = dict(batch)
        if (
            "labels" not in arguments
            and isinstance(arguments.get("input_ids"), Tensor)
            and _is_language_model(model)
        ):
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
    return (
        head is not None
        and head() is not None
        and "labels" in inspect.signature(model.forward).parameters
    )


def ready(batch: Any, device: torch.device) -> Any:
    """The batch on a device, and fit for backward, which tensors of inference mode are not."""
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
    """What the pass came to. A scalar loss with a graph is differentiated first, if the pass has
    not done so.
    """
    loss = (
        result.get("loss")
        if isinstance(result, Mapping)
        else result
        if isinstance(result, Tensor)
        else getattr(result, "loss", None)
    )
    leaves = [
        (name, leaf)
        for name, leaf in [*model.named_parameters(), *named_inputs(batch)]
        if leaf.is_leaf and leaf.requires_grad
    ]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if loss.requires_grad and all(leaf.grad is None for _, leaf in leaves):
            loss.backward()
        sinks = [Sink("loss", loss.detach())]
    else:
        sinks = [
            Sink(f"output {name}".strip(), tensor.detach()) for name, tensor in _tensors("", result)
        ]
    gradients = [
        (f"gradient of {name}", leaf.grad) for name, leaf in leaves if leaf.grad is not None
    ]
    sinks += [
        Sink(label, tensor)
        for name, gradient in gradients
        for label, tensor in _tensors(name, gradient)
    ]
    if not sinks:
        raise ConfigError(
            f"run gave {kind_of(result)} and no gradients: it has to return a loss or outputs, or"
            " to run backward"
        )
    return sinks


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for part in value.__tensor_flatten__()[0]:
            yield from _tensors(f"{name}.{part}".lstrip("."), getattr(value, part))
    elif isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(f"{name}[{i}]", item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from _tensors(f"{name}.{entry.name}".lstrip("."), getattr(value, entry.name))


def named_inputs(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch: entries by their names, arguments by their positions."""
    for name, tensor in _tensors("", batch):
        yield f"input {name}".strip() if isinstance(batch, Tensor | list | tuple) else name, tensor


@contextmanager
def untouched(model: nn.Module, batch: Any) -> Iterator[None]:
    """Within the context gradients start from nothing and no mode of the caller's stands in the way
    of a backward pass.

    Afterwards gradients, buffers, the modules' modes and random state are as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    leaves = [
        *model.parameters(),
        *(t for _, t in _tensors("", batch) if t.is_leaf and t.requires_grad),
    ]
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    buffers = [
        (module._buffers, name, b, b.detach().clone())
        for module in model.modules()
        for name, b in module._buffers.items()
        if b is not None
    ]
    # An embedding with a largest norm writes to its weights in forward.
    renormed = [
        m.weight
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
    ]
    weights = [(weight, weight.detach().clone()) for weight in renormed]
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
    """How often each parameter was written to, but for those that a pass writes to of its own."""
    renormed = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
    }
    named = [
        (name, p)
        for name, p in model.named_parameters()
        if not is_lazy(p) and id(p) not in renormed
    ]
    return {name: p._version for name, p in named if not p.is_inference()}
