"""Check whether an attention mask leaves a valid token without keys.

Softmax over a row without keys is undefined. The result depends on the kernel: NaN (eager, with
-Inf), zeros (SDPA's CPU kernels, with bool and -Inf) or an even mixture of masked keys (with a
finite mask). The last two are wrong but finite, so the masks themselves are checked.

Shapes: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from npt.hooks import only_looks
from npt.tracer.source_location import Tokens, layer_of, plain_name
from npt.tracer.tensors import described
from npt.tracer.verdict import Verdict
from npt.tracer.watchdogs import BadNumber

MASKED = -1e3
"""Additive entries at or below this are masked. It lies between biases, near 0 somewhere in every
row (ALiBi, T5), and stand-ins for -Inf: finfo.min of any dtype, -1e9, -1e4 (bf16 -9984)."""


def mask_fault(mask: Tensor, valid: Tensor) -> BadNumber | None:
    """Find the first row [b, t] with NaN or +Inf, or where a valid query may attend to nothing, and
    its largest entry. Padded queries need no keys. Waits for the device.

    Args:
        mask: [B, 1 or H, T, S], bool (True: may attend) or floating (added to the scores).
        valid: [B, T].
    """
    valid = valid.bool()
    additive = mask.is_floating_point()
    masked = mask <= MASKED if additive else ~mask
    unusable = mask.isnan() | mask.isposinf()
    # [B, T]: a query with no key in some head, and one whose row has NaN or +Inf
    keyless = masked.all(dim=-1).any(dim=1) & valid
    broken = unusable.any(dim=-1).any(dim=1)
    bad = broken if bool(broken.any()) else keyless
    if not bool(bad.any()):
        return None
    first = bad.nonzero()[0]
    b, t = first.tolist()
    name = described("attention mask", mask.shape, mask.dtype)
    if bad is broken:
        value = float(mask[b, :, t].max())
        entries = int(unusable.sum())
        message = (
            f"{name}: {entries} entries are NaN or +Inf, first in row [b={b}, t={t}],"
            " and softmax turns the row into NaN; rebuild the mask"
        )
    else:
        highest = mask[b, :, t].amax(dim=-1)
        # of the head without keys
        value = float(highest.min())
        row = f"at most {value:g}" if additive else "all False"
        message = (
            f"{name}: the valid token at [b={b}, t={t}] may attend to nothing (its row is {row};"
            f" {int(keyless.sum())} of {int(valid.sum())} valid tokens affected): attention"
            " is NaN, or finite but wrong; let every valid token attend to itself"
        )
    return BadNumber(name, (b, t), value, message)


@contextmanager
def mask_check(model: nn.Module, batch: Any, unpadded: bool = False) -> Iterator[list[Verdict]]:
    """Check every attention mask that a module receives within the context. Yield a list, which
    gets the verdict on the first bad mask.

    The batch tells which tokens are valid. Otherwise tokens that no query may attend to count as
    padding, or no token does if the batch is `unpadded`.
    """
    verdicts: list[Verdict] = []
    seen: list[weakref.ref[Tensor]] = []
    tokens = Tokens(batch)
    valid = tokens.valid
    masked = isinstance(batch, Mapping) and batch.get("attention_mask") is not None
    # a mask of another shape than [B, T] may mean padding too
    if unpadded and valid is None and not masked and tokens.shape is not None:
        valid = torch.ones(tokens.shape, dtype=torch.bool)

    def check(name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if verdicts or not isinstance(mask, Tensor):
            return
        usual = mask.dtype == torch.bool or mask.is_floating_point()
        if not usual or mask.ndim != 4 or not mask.numel():
            return
        # every layer gets the same one
        if any(reference() is mask for reference in seen):
            return
        seen.append(weakref.ref(mask))
        if fault := _fault_of(mask.detach(), valid):
            verdicts.append(_verdict(fault, name, mask, tokens))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # which has no hooks
                hook = only_looks(partial(check, plain_name(name)))
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                hooks.callback(handle.remove)
        yield verdicts


def _fault_of(mask: Tensor, valid: Tensor | None) -> BadNumber | None:
    """Return a mask's fault; None also if the valid queries are unknown."""
    rows, _, queries, keys = mask.shape
    square = keys == queries
    if valid is None and square:
        # a token that no query may attend to is padding
        allowed = mask
        if mask.is_floating_point():
            allowed = mask > torch.finfo(mask.dtype).min
        valid = allowed.any(dim=1).any(dim=1)
    if valid is None or tuple(valid.shape) != (rows, queries):
        return None
    valid = valid.to(mask.device)
    if square and mask.dtype == torch.bool:
        sees_itself = mask.diagonal(dim1=2, dim2=3).any(dim=1)
        if not bool((sees_itself & valid).any()):
            return None  # True says masked, as in some models
    return mask_fault(mask, valid)


def _verdict(fault: BadNumber, module: str, mask: Tensor, tokens: Tokens) -> Verdict:
    row, token = fault.index
    return Verdict(
        cause="fully masked row",
        phase="data",
        layer=layer_of(module),
        module=module,
        operation="attention_mask",
        tensor=described("attention_mask", mask.shape, mask.dtype),
        index=fault.index,
        value=fault.value,
        reached="the attention of a valid token, perhaps as finite values",
        explanation=fault.message,
        row=row,
        token=token,
        sample=tokens.sample_of(row),
    )
