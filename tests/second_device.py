"""A second device on a machine that has one: its tensors say `meta`, hold numbers all the same, and mix with no others.

Within `second_device()` a tensor that is moved to `meta` becomes one that computes on the CPU what it holds. An operation on tensors
of both devices fails, as on two GPUs; a copy from one to the other does not, and neither does a number of the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

AWAY = torch.device("meta")

_ACROSS = ("aten::_to_copy", "aten::copy_", "aten::_foreach_norm")
"""Operations that take tensors of several devices."""


class Away(Tensor):
    """A tensor on the second device; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Away:
        away = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=AWAY
        )
        away.held = held
        return away

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {tensor.device for tensor in tensors if tensor.device == AWAY or tensor.dim() > 0}
    assert len(devices) < 2 or func._schema.name in _ACROSS, f"{func} on tensors of two devices"
    asked = kwargs.get("device")
    held_args, held_kwargs = tree_map(_held, (args, kwargs))
    if asked is not None:
        held_kwargs["device"] = torch.device("cpu")
    result = func(*held_args, **held_kwargs)
    if func._schema.is_mutable:  # what was changed is the caller's own tensor
        return kwargs.get("out", args[0]) if func._schema.returns else None
    there = any(tensor.device == AWAY for tensor in tensors) if asked is None else torch.device(asked) == AWAY
    return tree_map(lambda leaf: Away(leaf) if there and isinstance(leaf, Tensor) else leaf, result)


def _held(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.device == AWAY and not isinstance(leaf, Away):
        assert leaf.numel() == 0, "a tensor without numbers"  # made by torch.tensor([], device=...), which is no operation
        return leaf.new_empty(leaf.shape, device="cpu")
    return leaf.held if isinstance(leaf, Away) else leaf


@contextmanager
def second_device() -> Iterator[None]:
    """Within the context `meta` is a device that computes. Torch knows of no autocast and no fused optimizer there."""
    autocast, enabled = torch.autocast, torch.is_autocast_enabled

    def none_there(kind: str, **settings: Any) -> Any:
        return nullcontext() if kind == AWAY.type else autocast(kind, **settings)

    with (
        _Dispatch(),
        mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *_, **__: None),
        mock.patch("torch.autocast", none_there),
        mock.patch("torch.is_autocast_enabled", lambda kind="cuda": kind != AWAY.type and enabled(kind)),
    ):
        yield


class _Hook(AlignDevicesHook):
    def init_hook(self, module: nn.Module) -> nn.Module:
        return module  # which lies where it belongs


def _moved(parameter: nn.Parameter) -> nn.Parameter:
    moved: Any = nn.Parameter(Away(parameter.detach().as_subclass(Tensor)), requires_grad=False)
    if hasattr(parameter, "quant_state"):
        moved.quant_state, moved.quant_type = parameter.quant_state, parameter.quant_type
        moved.quant_state.to(AWAY)
    return moved


def spread(model: Any, first_away: int) -> Any:
    """Move the layers from `first_away` on, the final norm and lm_head to the second device, with the hooks that a model gets which
    is spread over several: they carry what a module is given to where it computes. Only within `second_device()`."""
    for part in (*model.model.layers[first_away:], model.model.norm, model.lm_head):
        for module in part.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _moved(parameter)
    layers = model.model.layers
    for part in (model.model.embed_tokens, model.model.rotary_emb, *layers, model.model.norm, model.lm_head):
        device = next((p.device for p in part.parameters()), torch.device("cpu"))
        for module in part.modules():
            add_hook_to_module(module, _Hook(device))
    add_hook_to_module(model, _Hook(torch.device("cpu"), io_same_device=True))
    return model
