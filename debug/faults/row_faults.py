"""Faults that belong to a row of data, for any trainer: the fault occurs whenever the row is
trained on, because hooks of the model look for the row's mark among the token ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 64, 12
MARK = VOCABULARY - 1
"""An id that only rows with a model fault have."""

Row = dict[str, Tensor]
Plant = Callable[[nn.Module, "Marked"], Any]


class Marked:
    """Track whether the model computes a marked row, and how often it has computed `inside`."""

    def __init__(self, model: Any, mark: int):
        self.now, self.calls = False, 0
        self._mark = mark
        model.get_input_embeddings().register_forward_pre_hook(self._look)  # in generations too

    def _look(self, _module: Any, ids: tuple[Tensor, ...]) -> None:
        self.now, self.calls = bool((ids[0] == self._mark).any()), 0


def inside(model: nn.Module) -> nn.Module:
    """Return the last activation function. Checkpointing recomputes it, and backward needs its
    output.
    """
    return [module for name, module in model.named_modules() if name.endswith("mlp.act_fn")][-1]


def trained(model: nn.Module) -> tuple[nn.Module, str]:
    """Return module and name of the trained tensor that single-tensor faults change."""
    named = model.named_parameters()
    name = next(name for name, p in named if p.requires_grad and "layers.1." in name)
    module, _, own = name.rpartition(".")
    return model.get_submodule(module), own


def output(change: Callable[[Tensor], Tensor | None], call: int = 1) -> Plant:
    """Change the activation's output, from the given call on."""

    def plant(model: nn.Module, marked: Marked) -> None:
        def hook(_module: Any, _inputs: Any, value: Tensor) -> Tensor | None:
            marked.calls += 1
            return change(value) if marked.now and marked.calls >= call else None

        inside(model).register_forward_hook(hook)

    return plant


def output_gradient(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change the gradient of the activation's output; the loss stays finite."""

    def hook(value: Tensor) -> None:
        if value.requires_grad:
            value.register_hook(change)

    return output(hook)


def tensor_gradient(change: Callable[[Tensor], Tensor]) -> Plant:
    """Change the gradient of one trained tensor; all others and the loss stay finite."""

    def plant(model: nn.Module, marked: Marked) -> None:
        module, name = trained(model)
        handles: list[Any] = []

        def hook(*_: Any) -> None:  # a sharded parameter is another tensor while it is gathered
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
        changed[..., -2, 1] = value  # the last element of an activation that every loss counts
        return changed

    return change


def stop(_tensor: Tensor) -> Tensor:
    raise FloatingPointError("planted")


def at(name: str, place: int, value: int) -> Callable[[Row], Row]:
    """Return a function that sets one entry of a row."""

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
    """Return token ids and labels; some labels are ignored."""
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
    """Make the model fail on marked rows, if the fault is a model fault."""
    if fault in MODEL_FAULTS:
        MODEL_FAULTS[fault](model, Marked(model, mark))
    return model
