"""Hooks: who looks at, or changes, what goes into a module or comes out of it.

Training computes parts of a layer by hand, from frozen weights. It calls the hooks of whoever only
looks, and their presence changes no bit. What anybody else's hook does cannot be known before it is
called, so where one hangs, the modules are called as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from npt.errors import ModelError

H = TypeVar("H", bound=Callable[..., Any])

_LOOKS = "_npt_only_looks"
_LOOKERS = ("transformers.utils.output_capturing", "torch.distributed.fsdp.")
"""Modules of whose hooks it is known. transformers leaves its own on every layer once hidden states
were asked for.
"""


def only_looks(hook: H) -> H:
    """Mark a hook of a module that changes nothing it is shown, neither by what it returns nor in
    place.

    In training it is called where the fused path calls it: on gate_proj, up_proj and down_proj, on
    attention and norms. One on a converted layer or on its MLP is not, since there is no such call;
    one on the activation makes the layer take the plain path.
    """
    setattr(hook, _LOOKS, True)
    return hook


def is_hooked(module: nn.Module) -> bool:
    """Whether somebody looks at, or may change, what goes into a module or comes out of it."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or may_change(module)


def may_change(module: nn.Module) -> bool:
    """Whether what a module gives, or its gradients, may be other than its class makes them: a hook
    of forward or backward that is not known to look only, or a forward in place of its class's.
    Hooks that torch calls for all modules alike are not asked about."""
    if module._backward_hooks or module._backward_pre_hooks or is_replaced(module):
        return True
    return any(
        not _is_looker(hook)
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def _is_looker(hook: Any) -> bool:
    return getattr(hook, _LOOKS, False) or str(getattr(hook, "__module__", None)).startswith(
        _LOOKERS
    )


def is_replaced(module: Any) -> bool:
    """Whether another forward stands in place of that of the module's class.

    Not where it is accelerate's wrapper that `device_map` puts around every layer, in a form that
    brings inputs to the weight's device and does nothing else. One that also brings in weights, or
    that wraps something else, does more. Once it is taken off again, the class's own forward stays
    behind on the module.
    """
    if "forward" not in vars(module):
        return False
    forward, hook, wrapped = (
        vars(module)["forward"],
        getattr(module, "_hf_hook", None),
        getattr(module, "_old_forward", None),
    )
    function = getattr(forward, "func", None)
    return not _is_own(module, forward) and not (
        (getattr(function, "__module__", None), getattr(function, "__name__", None))
        == ("accelerate.hooks", "new_forward")
        and (type(hook).__module__, type(hook).__name__) == ("accelerate.hooks", "AlignDevicesHook")
        and not getattr(hook, "offload", True)
        and _is_own(module, wrapped)
    )


def _is_own(module: Any, forward: Any) -> bool:
    """Whether it is that of the module's class, bound to the module."""
    return getattr(forward, "__func__", None) is type(module).forward and forward.__self__ is module


def call_around(
    module: nn.Module, name: str, compute: Callable[..., Tensor], x: Tensor, **context: Any
) -> Tensor:
    """Return `compute(x, **context)` with the module's hooks around it, where it has any, as if it
    were what the module computes.

    Args:
        module: of whose parts `compute` makes what the module would, in another way.
        name: of the module, for the message.
        compute: in the place of its forward.
        x, context: its arguments, to which hooks in front may do as they like.

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
    own = vars(module).pop("forward", None)
    vars(module)["forward"] = compute
    try:
        return module(x, **context)
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
