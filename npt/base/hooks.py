"""Hooks: whether anybody looks at, or may change, the input or output of a module.

Training computes parts of a layer by hand, from frozen weights. It calls hooks that only look, and
they change no bit. Any other hook may do anything, so its module is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from npt.errors import ModelError

H = TypeVar("H", bound=Callable[..., Any])

_LOOKS = "_npt_only_looks"
_LOOKERS = ("transformers.utils.output_capturing", "torch.distributed.fsdp.")
"""Modules whose hooks are known to change nothing. transformers leaves its own on every layer once
hidden states were asked for."""


def only_looks(hook: H) -> H:
    """Mark a module's hook that changes nothing, neither by its result nor in place.

    Under the strategy `local` it is called for the student on a converted layer's MLP and its
    parts, and for teacher and student at once on attention and norms; under the others for the two
    in turn, and again when a layer is recomputed. One on the layer itself is not, since there is no
    such call.
    """
    setattr(hook, _LOOKS, True)
    return hook


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def may_change(module: nn.Module) -> bool:
    """Return whether a module's output or gradients may differ from what its class computes: by a
    hook that is not known to look only, or by a forward in place of its class's. Hooks that torch
    calls for all modules alike are not asked about.
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
    """Return whether a module has a forward of its own in place of its class's."""
    return "forward" in vars(module)


def call_around(
    module: nn.Module, name: str, compute: Callable[..., Tensor], x: Tensor, **context: Any
) -> Tensor:
    """Return `compute(x, **context)`, in place of the module's forward, with its hooks called
    around it; refuse a module, which the message calls `name`, whose forward was replaced.
    """
    if is_replaced(module):
        raise ModelError(
            f"the forward of {name} was replaced, and an NPT layer computes in its place; give the"
            " module its own forward back, or load the base without what replaces it (kernels,"
            " offloading)"
        )
    if not (has_forward_hooks(module) or may_change(module)):
        return compute(x, **context)
    vars(module)["forward"] = compute
    try:
        return module(x, **context)
    finally:
        del vars(module)["forward"]
