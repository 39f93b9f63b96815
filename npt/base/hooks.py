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

    In training it is called on gate_proj, up_proj, down_proj, attention and norms. One on a
    converted layer or its MLP is not, since there is no such call; one on the activation makes the
    layer take the plain path.
    """
    setattr(hook, _LOOKS, True)
    return hook


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_hooked(module: nn.Module) -> bool:
    """Return whether anybody looks at, or may change, a module's input or output."""
    return has_forward_hooks(module) or may_change(module)


def may_change(module: nn.Module) -> bool:
    """Return whether a module's output or gradients may differ from what its class computes.

    Because of a hook of forward or backward that is not known to look only, or a forward in place
    of its class's. Hooks that torch calls for all modules alike are not asked about.
    """
    return (
        bool(module._backward_hooks or module._backward_pre_hooks)
        or is_replaced(module)
        or not all(map(_only_looks, module._forward_hooks.values()))
        or not all(map(_only_looks, module._forward_pre_hooks.values()))
    )


def _only_looks(hook: Any) -> bool:
    return getattr(hook, _LOOKS, False) or str(getattr(hook, "__module__", None)).startswith(
        _LOOKERS
    )


def is_replaced(module: Any) -> bool:
    """Return whether a module has another forward in place of its class's.

    Not counted is the wrapper of accelerate that `device_map` puts around every layer, in the form
    that only brings inputs to the weight's device: one that also brings in weights, or wraps
    another forward, does more. Once removed it leaves the class's own forward on the module.
    """
    if "forward" not in vars(module):
        return False
    forward = vars(module)["forward"]
    if _is_own(module, forward):
        return False
    function, hook = getattr(forward, "func", None), getattr(module, "_hf_hook", None)
    return not (
        (getattr(function, "__module__", None), getattr(function, "__name__", None))
        == ("accelerate.hooks", "new_forward")
        and (type(hook).__module__, type(hook).__name__) == ("accelerate.hooks", "AlignDevicesHook")
        and not getattr(hook, "offload", True)
        and _is_own(module, getattr(module, "_old_forward", None))
    )


def _is_own(module: Any, forward: Any) -> bool:
    """Return whether `forward` is that of the module's class, bound to the module."""
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


def call_around(
    module: nn.Module, name: str, compute: Callable[..., Tensor], x: Tensor, **context: Any
) -> Tensor:
    """Return `compute(x, **context)` with the module's hooks called around it.

    Args:
        module: whose forward `compute` takes the place of.
        name: of the module, for the message.
        compute: computes the module's output in another way.
        x, context: its arguments, which hooks before it may change.

    Raises:
        ModelError: another forward was put in place of that of its class.
    """
    if is_replaced(module):
        raise ModelError(
            f"the forward of {name} was replaced, and an NPT layer computes in its place; give the"
            " module its own forward back, or load the base without what replaces it (kernels,"
            " offloading)"
        )
    if not is_hooked(module):
        return compute(x, **context)
    forward = vars(module).pop("forward", None)
    vars(module)["forward"] = compute
    try:
        return module(x, **context)
    finally:
        del vars(module)["forward"]
        if forward is not None:
            vars(module)["forward"] = forward
