"""Faults that are bound to a row of data: whoever trains on it meets the fault, and nobody else.

They meet any trainer alike: hooks of the model look for the row's mark among the token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 64, 12
MARK = VOCABULARY - 1
"""An id that only a row with a fault of the model has."""

Row = dict[str, Tensor]
Plant = Callable[[nn.Module, "Marked"], Any]


class Marked:
    """Knows whether the model computes a marked row, and how often `inside` was computed for it."""

    def __init__(self, model: Any, mark: int):
        self.now, self.calls = False, 0
        self._mark = mark
        model.get_input_embeddings().register_forward_pre_hook(self._look)  # generations too

    def _look(self, _module: Any, ids: tuple[Tensor, ...]) -> None:
        self.now, self.calls = bool((ids[0] == self._mark).any()), 0


def inside(model: nn.Module) -> nn.Module:
    """Return the last activation function: checkpointing computes it again, and backward needs
    its output.
    """
    return [module for name, module in model.named_modules() if name.endswith("mlp.act_fn")][-1]


def trained(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the module and name of the trained tensor that faults of single tensors spoil."""
    named = model.named_parameters()
    name = next(name for name, p in named if p.requires_grad and "layers.1." in name)
    module, _, own = name.rpartition(".")
    return model.get_submodule(module), own


def output(change: Callable[[Tensor], Tensor | None], call: int = 1) -> Plant:
    """The activation's output as `change` makes it, from that call on."""

    def plant(model: nn.Module, marked: Marked) -> None:
        def hook(_module: Any, _inputs: Any, value: Tensor) -> Tensor | None:
            marked.calls += 1
            return change(value) if marked.now and marked.calls >= call else None

        inside(model).register_forward_hook(hook)

    return plant


def output_gradient(change: Callable[[Tensor], Tensor]) -> Plant:
    """The gradient of the activation's output; the loss is finite."""

    def hook(value: Tensor) -> None:
        if value.requires_grad:
            value.register_hook(change)

    return output(hook)


def tensor_gradient(change: Callable[[Tensor], Tensor]) -> Plant:
    """The gradient of one trained tensor; all others and the loss are finite."""

    def plant(model: nn.Module, marked: Marked) -> None:
        module, name = trained(model)
        handles: list[Any] = []

        def hook(*_: Any) -> None:  # a sharded parameter is another tensor while it is whole
            while handles:
                handles.pop().remove()
            if marked.now:
                handles.append(getattr(module, name).register_hook(lambda g: change(g.clone())))

        module.register_forward_pre_hook(hook)

    return plant


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: torch.full_like(tensor, value)


def one_element(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[..., -2, 1] = value  # of an activation the last that counts in every loss
        return changed

    return change


def stop(_tensor: Tensor) -> Tensor:
    raise FloatingPointError("planted")


def at(name: str, place: int, value: int) -> Callable[[Row], Row]:
    """Return a change of one entry of a row."""

    def change(row: Row) -> Row:
        row[name][place] = value
        return row

    return change


DATA_FAULTS: dict[str, Callable[[Row], Row]] = {
    "id-large": at("input_ids", 3, VOCABULARY),
    "id-negative": at("input_ids", 3, -1),
    "label": at("labels", -1, VOCABULARY + 5),
}
MODEL_FAULTS: dict[str, Plant] = {
    "loss-nan": output(lambda value: value * math.nan),
    "loss-inf": output(one_element(math.inf)),
    "gradient-nan": output_gradient(filled(math.nan)),
    "gradient-inf": output_gradient(one_element(-math.inf)),
    "tensor-nan": tensor_gradient(one_element(math.nan)),
    "tensor-inf": tensor_gradient(one_element(math.inf)),
    "tensor-1e20": tensor_gradient(filled(1e20)),
    "tensor-1e30": tensor_gradient(one_element(1e30)),
    "recomputation": output(lambda value: value * math.nan, call=2),
    "raises-forward": output(stop),
    "raises-backward": output_gradient(stop),
    "huge": output_gradient(lambda gradient: gradient * 1e6),
}


def row(seed: int, fault: str | None = None) -> Row:
    """Return token ids and labels, some of which do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MARK, (LENGTH,), generator=generator)
    labels = ids.clone()
    labels[: 1 + seed % 5] = -100
    made = {"input_ids": ids, "labels": labels}
    if fault in DATA_FAULTS:
        return DATA_FAULTS[fault](made)
    if fault is not None:
        ids[0] = MARK
    return made


def plant(model: nn.Module, fault: str | None, mark: int = MARK) -> nn.Module:
    """Let the model fail on marked rows, if the fault is one of the model's."""
    if fault in MODEL_FAULTS:
        MODEL_FAULTS[fault](model, Marked(model, mark))
    return model
