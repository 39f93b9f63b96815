"""Calls of modules: find out whether a hook may change their input or output, and compute as if in
their forward.

Training computes parts of a layer from frozen weights without calling their modules. It calls hooks
that only look, and changes no bit by it. A module with any other hook is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import call
from typing import Any, TypeVar

from torch import Tensor, nn

from npt.errors import ModelError

H = TypeVar("H", bound=Callable[..., Any])
T = TypeVar("T")

_LOOKS = "_npt_only_looks"
_LOOKERS = ("transformers.utils.output_capturing", "torch.distributed.fsdp.")
"""Python modules whose hooks change nothing; transformers leaves some on every layer."""

_UNFUSED: ContextVar[bool] = ContextVar("unfused", default=False)


def only_looks(hook: H) -> H:
    """Mark a hook that changes nothing, neither through its result nor in place.

    On a converted layer, the strategy `local` calls it for the student on the MLP and its parts,
    and once for teacher and student on attention and norms. Other strategies call it for each in
    turn, and again when a layer is recomputed. None calls a hook on the layer itself.
    """
    setattr(hook, _LOOKS, True)
    return hook


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def may_change(module: nn.Module) -> bool:
    """Return whether a replaced forward, or a hook not known only to look, may change a module's
    output or gradients. Torch's global hooks are ignored.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return (
        bool(module._backward_hooks or module._backward_pre_hooks)
        or is_replaced(module)
        or not all(map(_only_looks, hooks))
    )


def _only_looks(hook: Any) -> bool:
    return getattr(hook, _LOOKS, False) or str(hook.__module__).startswith(_LOOKERS)


def is_replaced(module: Any) -> bool:
    """Return whether a module has its own forward instead of its class's."""
    return "forward" in vars(module)


def call_around(
    module: nn.Module, name: str, compute: Callable[..., Tensor], x: Tensor, **context: Any
) -> Tensor:
    """Return `compute(x, **context)` in place of the module's forward, with its hooks around it.
    Raise ModelError, with the module's `name`, if its forward was replaced.
    """
    if is_replaced(module):
        raise ModelError(
            f"the forward of {name} was replaced, but an NPT layer computes in its place: restore"
            " the module's own forward, or load the base without the kernels or offloading that"
            " replace it"
        )
    if not (has_forward_hooks(module) or may_change(module)):
        return compute(x, **context)
    vars(module)["forward"] = compute
    try:
        return module(x, **context)
    finally:
        del vars(module)["forward"]


WITHIN = "_npt_within"
"""Attribute of a sharded module: a forward for FSDP (npt/adapters/sharded_base.py)."""


def in_parts(layer: nn.Module) -> bool:
    """Return whether a decoder layer is sharded."""
    return WITHIN in vars(layer)


def within(module: nn.Module, compute: Callable[..., T], *tensors: Tensor) -> T:
    """Return `compute(*tensors)`, run as the forward of a decoder layer or of the decoder.

    FSDP then gathers the weights of a sharded module, and again for backward until the gradients of
    `tensors` exist: pass every tensor that needs one. All processes must make the call.
    """
    return vars(module).get(WITHIN, call)(compute, *tensors)


@contextmanager
def unfused() -> Iterator[None]:
    """Within the context, compute converted layers operation by operation, for inspection."""
    token = _UNFUSED.set(True)
    try:
        yield
    finally:
        _UNFUSED.reset(token)


def is_unfused() -> bool:
    """Return whether the caller is within `unfused`."""
    return _UNFUSED.get()
