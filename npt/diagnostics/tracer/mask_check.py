"""Check of the attention masks of a pass: does one leave a valid token without keys?

Softmax over a row without a key has no answer, so each kernel makes one up: NaN (eager, with -Inf),
zeros (SDPA's CPU kernels, with bool and -Inf) or an even mixture of masked keys (any of them, with
a finite mask). The last two are finite and wrong and reach no loss as NaN, so the masks themselves
are checked, as modules are given them.

Shapes: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from npt.base.hooks import only_looks
from npt.data.batch import Batch
from npt.diagnostics.guards import Finding
from npt.diagnostics.tracer.causes import CAUSES
from npt.diagnostics.tracer.source_location import Tokens, layer_of
from npt.diagnostics.tracer.verdict import Verdict, dtype_name

MASKED = -1e3
"""An additive entry that low is masked. It lies between biases, of which every row has one near 0
(ALiBi, T5), and the numbers used for minus infinity: -Inf, finfo.min of any dtype, or -1e9 and -1e4
(in bf16 -9984) in older code."""


def mask_fault(mask: Tensor, valid: Tensor) -> Finding | None:
    """Find a valid query that may attend to nothing, or a row with an entry that no softmax can
    take (NaN, +Inf). A padded query may be without keys. Waits for the device.

    The mask is [B, 1 or H, T, S], bool (True: may attend) or floating (added to the scores).
    """
    valid = valid.bool()
    masked = mask <= MASKED if mask.is_floating_point() else ~mask
    unusable = mask.isnan() | mask.isposinf()
    keyless, broken = masked.all(dim=-1).any(dim=1), unusable.any(dim=-1).any(dim=1)
    bad = broken if bool(broken.any()) else keyless & valid
    if not bool(bad.any()):
        return None
    b, t = (int(i) for i in bad.nonzero()[0])
    form = _form(mask, masked) if mask.is_floating_point() else "bool"
    said = f"attention mask {list(mask.shape)}, form {form}: "
    if bad is broken:
        value = float(mask[b, :, t].max())
        said += (
            f"{int(unusable.sum())} entries are NaN or +Inf, first in row [b={b}, t={t}], which"
            " comes out as NaN; make the mask anew"
        )
        return Finding("attention mask", (b, t), value, said)
    value = float(mask[b, :, t].amax(dim=-1).min())  # the head without a key has the lowest peak
    row = "all False" if form == "bool" else f"at most {value:g}"
    comes_out = "NaN or zeros, depending on the kernel"
    if form != "bool" and math.isfinite(value):
        comes_out = "a mixture of masked keys, finite and wrong"
    said += (
        f"the valid token at [b={b}, t={t}] may attend to nothing (its row is {row}: {comes_out};"
        f" such are {int((keyless & valid).sum())} valid and {int((keyless & ~valid).sum())} padded"
        f" ones of {valid.numel()}); let every valid token see itself"
    )
    return Finding("attention mask", (b, t), value, said)


def _form(mask: Tensor, masked: Tensor) -> str:
    """Name the masking numbers: -Inf, finfo.min, another low number, several of them, or none."""
    values = mask[masked]
    lowest, infinite = values == torch.finfo(values.dtype).min, values == -math.inf
    kinds = {"-inf": infinite, "finfo.min": lowest, "finite": ~(infinite | lowest)}
    present = [form for form, which in kinds.items() if bool(which.any())]
    return "open" if not present else present[0] if len(present) == 1 else "mixed"


class MaskCheck:
    """Within the context every attention mask that a module is given is checked, once.

    The batch says which tokens are valid. If it does not, a token that no query may attend to is
    taken for padding, or none if the batch is `unpadded`.
    """

    def __init__(self, model: nn.Module, batch: Any, unpadded: bool = False):
        self.verdict: Verdict | None = None
        self._model, self._tokens = model, Tokens(batch)
        given = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        given = batch.attention_mask if isinstance(batch, Batch) else given
        self._valid: Tensor | None = None
        if isinstance(given, Tensor) and given.ndim == 2:
            self._valid = given.bool()
        if unpadded and given is None and self._tokens.shape is not None:
            self._valid = torch.ones(self._tokens.shape, dtype=torch.bool)
        self._seen: list[weakref.ref[Tensor]] = []
        self._hooks = ExitStack()

    def __enter__(self) -> MaskCheck:
        for name, module in self._model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                hook = only_looks(partial(self._check, name))
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._seen.clear()

    def _check(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if self.verdict is not None or not isinstance(mask, Tensor) or mask.ndim != 4:
            return
        if any(seen() is mask for seen in self._seen):
            return
        self._seen.append(weakref.ref(mask))
        if not (mask.dtype == torch.bool or mask.is_floating_point()) or 0 in mask.shape:
            return
        valid = self._valid_queries(mask.detach())
        if valid is None or _means_the_opposite(mask, valid):
            return
        finding = mask_fault(mask.detach(), valid)
        if finding is None:
            return
        row, token = finding.index
        samples = self._tokens.samples
        self.verdict = Verdict(
            cause="fully masked row",
            phase="data",
            layer=layer_of(name),
            module=name,
            operation="attention_mask",
            tensor=f"attention_mask {list(mask.shape)} {dtype_name(mask.dtype)}",
            index=finding.index,
            value=finding.value,
            reached="the attention of a valid token, maybe as finite numbers",
            explanation=finding.message,
            remedy=CAUSES["fully masked row"],
            row=row,
            token=token,
            sample=samples[row] if row < len(samples) else None,
        )

    def _valid_queries(self, mask: Tensor) -> Tensor | None:
        """Return [B, T], which queries are of valid tokens; None if that cannot be told."""
        rows, queries = mask.shape[0], mask.shape[2]
        if self._valid is not None:
            same = tuple(self._valid.shape) == (rows, queries)
            return self._valid.to(mask.device) if same else None
        if mask.shape[3] != queries:
            return None
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        return allowed.any(dim=1).any(dim=1)


def _means_the_opposite(mask: Tensor, valid: Tensor) -> bool:
    """Tell if a boolean mask says True for masked keys, as in some models: then every valid token
    sees itself through it.
    """
    if mask.dtype != torch.bool or mask.shape[2] != mask.shape[3]:
        return False
    itself = mask.diagonal(dim1=2, dim2=3).any(dim=1)
    return not bool((itself & valid.bool()).any())
