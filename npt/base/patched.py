"""Patches: a low-rank term beside a frozen linear layer, exact on a 4-bit base.

    y = W x + b + outer (inner x)

W is not written. The layer's class is swapped for a subclass, and the two matrices are buffers
outside the state dict, so the base keeps its names and its hash.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor, nn

from npt.base.linear import Patch, UpcastLinear, linear_kind, patch_of, patch_term
from npt.errors import ModelError, kind_of


class Patched(nn.Module):
    """Mix-in, placed before the layer's class, that adds a patch to its product."""

    patch: Patch

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] from [..., in], in the dtype of the layer's product."""
        y = super().forward(x)
        with torch.autocast(y.device.type, enabled=False):
            return (y.to(torch.float32) + patch_term(self.patch, x)).to(y.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move with the layer but ignore casts."""
        super()._apply(fn, recurse)
        outer, inner = (part.to(fn(part).device) for part in self.patch)
        self.patch = outer, inner
        return self


@linear_kind
class PatchedLinear4bit(Patched, bnb.nn.Linear4bit): ...


@linear_kind
class PatchedUpcastLinear(Patched, UpcastLinear): ...


@linear_kind
class PatchedLinear(Patched, nn.Linear): ...


_FORMS: dict[type[nn.Module], type[Patched]] = {
    cls.__bases__[1]: cls for cls in (PatchedLinear4bit, PatchedUpcastLinear, PatchedLinear)
}


def set_patch(module: Any, patch: Patch | None) -> None:
    """Set the patch of a linear layer; None removes it. Raise ModelError if it supports none."""
    check_patchable(module)
    if isinstance(module, Patched):
        module.__class__ = type(module).__bases__[1]
        del module.patch
    if patch is not None:
        outer, inner = (part.to(module.weight.device, torch.float32) for part in patch)
        assert outer.shape == (module.out_features, len(inner))
        assert inner.shape[1] == module.in_features
        module.patch = outer, inner
        module.__class__ = _FORMS[type(module)]


def check_patchable(module: Any) -> None:
    """Raise ModelError for a layer that does not support a patch."""
    if type(module) not in _FORMS and patch_of(module) is None:
        names = ", ".join(c.__name__ for c in _FORMS)
        raise ModelError(f"{kind_of(module)} does not support a patch; {names} do")
