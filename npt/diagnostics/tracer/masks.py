"""Attention masks in which every row has a key, a look at masks made elsewhere, and the proof that
padding leaks nowhere.

Softmax over a row without a key has no answer, so each kernel makes one up: NaN (eager, with -Inf),
zeros (SDPA's CPU kernels, with bool and -Inf) or a mixture of what was masked (any of them, with a
finite mask). At a padded query nobody reads that answer, yet the next layer takes it as a key, and
a masked key still takes part in the sums, at weight 0: 0 * NaN is NaN. Backward is worse: one NaN
row of the softmax reaches the gradient of every key, even where its output is thrown away. Hence
two rules: every row gets a key, and what stands at padding is zero.

What a kernel takes: eager adds the mask to the scores, so it needs the additive form (a bool one
adds 1 and masks nothing); SDPA takes bool or additive; flash kernels on a GPU take none, only
`is_causal`, which is enough where padding stands on the right, behind every valid token.

Shapes: B batch, T queries, S keys, P keys of the cache, H heads; `...` is any trailing shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from npt.diagnostics.guards import Finding

MASKED = -1e3
"""An additive entry that low is masked. It lies between biases, of which every row has one near 0
(ALiBi, T5), and what stands in for minus infinity: -Inf, finfo.min of any dtype, or -1e9 and -1e4
(in bf16 -9984) in older code."""

FINITE = (1.0, 100.0)
NON_FINITE = (math.nan, math.inf)

Form = Literal["bool", "-inf", "finfo.min", "finite", "mixed", "open"]


def self_attention_mask(
    valid_q: Tensor,
    *,
    valid_past: Tensor | None = None,
    causal: bool = True,
    document_ids: Tensor | None = None,
    dtype: torch.dtype = torch.bool,
) -> Tensor:
    """Who may attend to whom among the tokens of one sequence, with a key in every row.

    A valid query sees the valid keys, none after itself if `causal`, and of its own document only.
    A padded query would see nothing: it is given its own position. What comes out there means
    nothing and is to be ignored or zeroed (`zero_padded`), but it is finite where the states are,
    and reads no other position.

    Args:
        valid_q: [B, T] bool, or ones and zeros, wherever the padding stands.
        valid_past: [B, P] likewise, for the keys that a cache holds in front of the queries. Of a
            tokenizer's mask over P + T tokens: `mask[:, -T:]` and `mask[:, :-T]`.
        document_ids: [B, P + T] integers, for packed rows.
        dtype: bool (True: may attend) or the dtype of the scores (0: may attend, finfo.min: may
            not). Not -Inf, which is one slip from NaN: -Inf - -Inf in a softmax, 0 * -Inf where
            masks are scaled. finfo.min of a wider dtype becomes -Inf when it is cast.

    Returns:
        [B, 1, T, P + T].

    Raises:
        ValueError: a validity that is not [B, T] of bool or integers, ids of another shape, or an
            integer `dtype`.
    """
    queries = _validity("valid_q", valid_q)
    keys = (
        queries
        if valid_past is None
        else torch.cat([_validity("valid_past", valid_past), queries], dim=1)
    )
    key = torch.arange(keys.shape[1], device=keys.device)
    query = key[keys.shape[1] - queries.shape[1] :, None]
    allowed = queries[:, :, None] & keys[:, None, :]
    if causal:
        allowed = allowed & (key <= query)
    if document_ids is not None:
        if document_ids.shape != keys.shape:
            raise ValueError(
                f"document_ids is {list(document_ids.shape)}; it needs one id for each of the keys"
                f" {list(keys.shape)}"
            )
        allowed = allowed & (
            document_ids[:, key.numel() - query.numel() :, None] == document_ids[:, None, :]
        )
    return _with_a_key(allowed, key == query, dtype)


def cross_attention_mask(
    valid_q: Tensor, valid_enc: Tensor, *, dtype: torch.dtype = torch.bool
) -> Tensor:
    """Which encoder positions each query may attend to, with a key in every row.

    A valid query sees the valid positions. A padded one would see nothing: it is given the first
    valid position. Where an encoder row is empty, its queries are all given position 0. What comes
    out of either means nothing; it is zeroed with `zero_padded(output, valid_q & valid_enc.any(-1,
    keepdim=True))`.

    Args:
        valid_q: [B, T] bool, or ones and zeros.
        valid_enc: [B, S] likewise.
        dtype: as in `self_attention_mask`.

    Returns:
        [B, 1, T, S].

    Raises:
        ValueError: as in `self_attention_mask`, or an encoder of no positions at all, where there
            is no key to give.
    """
    queries, keys = _validity("valid_q", valid_q), _validity("valid_enc", valid_enc)
    if keys.shape[1] == 0:
        raise ValueError(
            f"valid_enc is {list(keys.shape)}: no position to attend to; leave cross-attention out,"
            " or pad the encoder to one"
        )
    # of equals the first; 0 where the row is empty
    first = keys.to(torch.uint8).argmax(dim=-1, keepdim=True)
    spare = torch.arange(keys.shape[1], device=keys.device) == first
    return _with_a_key(queries[:, :, None] & keys[:, None, :], spare[:, None, :], dtype)


def zero_padded(states: Tensor, valid: Tensor) -> Tensor:
    """Zeros at padded positions, whatever stood there: NaN as well, and NaN in their gradient.
    Multiplying does neither.

    Embeddings are to be zeroed in front of the first layer: afterwards would be too late for a
    gradient that passes through an operation with NaN in it.

    Args:
        states: [B, T, ...].
        valid: [B, T] bool, or ones and zeros.
    """
    return torch.where(_beside(_validity("valid", valid), states), states, 0)


def padding_influence(
    run: Callable[[Tensor], Tensor],
    states: Tensor,
    valid: Tensor,
    *,
    valid_out: Tensor | None = None,
    scales: Sequence[float] = FINITE + NON_FINITE,
) -> float:
    """How much valid outputs move when other things stand at padded positions: exactly 0.0 where
    nothing leaks.

    A mask alone keeps out finite content, to the last bit. NaN and Inf it does not, in any kernel:
    `run` passes for those only if it zeroes padding first.

    Args:
        run: states [B, T, ...] to outputs [B, T, ...], deterministic (a model in evaluation mode).
        states: embeddings or any other input that is padded.
        valid: [B, T], which of the states are not to be replaced.
        valid_out: which outputs have to stay, [B, T of the outputs]; default `valid`. In
            cross-attention the states are the encoder's and the outputs the decoder's.
        scales: padding is replaced by normal noise times each of these; times NaN or Inf, it is
            that.

    Returns:
        The largest absolute change; Inf where a valid output is not finite, before or after.
        Without padding, 0.0 says nothing.
    """
    keep = _beside(_validity("valid", valid), states)
    read = _validity("valid_out", valid if valid_out is None else valid_out)
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states)
    changes = [0.0]
    with torch.no_grad():
        before = run(states)[read].double()
        for scale in scales:
            after = run(torch.where(keep, states, noise * scale))[read].double()
            change = (after - before).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            changes += [float(change.max())] if change.numel() else []
    return max(changes)


@dataclass(frozen=True)
class MaskReport:
    """What `inspect_mask` found.

    form: what masks: bool, -Inf, finfo.min of the mask's dtype, another low number (finite),
    several of them (mixed), or nothing at all (open). rows: queries, over the batch. keyless_valid,
    keyless_padded: of them, those that may attend to nothing, in any head. unusable: entries that
    are NaN or +Inf, which turn their rows into NaN. first: [b, t] of the first row with one of
    those, else without a key, valid before padded. value: the largest entry of that row, in the
    guilty head.
    """

    shape: tuple[int, ...]
    form: Form
    rows: int
    keyless_valid: int
    keyless_padded: int
    unusable: int
    first: tuple[int, int] | None
    value: float | None

    @property
    def sound(self) -> bool:
        """Every valid query has a key, and every entry is usable. Padded queries may be without
        keys.
        """
        return self.keyless_valid == self.unusable == 0

    def __str__(self) -> str:
        head = f"attention mask {list(self.shape)}, form {self.form}"
        if self.first is None or self.value is None:
            return f"{head}: each of {self.rows} rows has a key"
        where = f"[b={self.first[0]}, t={self.first[1]}]"
        if self.unusable:
            return (
                f"{head}: {self.unusable} entries are NaN or +Inf, first in row {where}, which"
                " comes out as NaN; make the mask anew"
            )
        finite = self.form != "bool" and math.isfinite(self.value)
        row = (
            "its row is all False" if self.form == "bool" else f"its row is at most {self.value:g}"
        )
        row += (
            ": a mixture of masked keys, finite and wrong"
            if finite
            else ": NaN or zeros, depending on the kernel"
        )
        counts = (
            f"such are {self.keyless_valid} valid and {self.keyless_padded} padded ones of"
            f" {self.rows}"
        )
        if self.keyless_valid:
            return (
                f"{head}: the valid token at {where} may attend to nothing ({row}; {counts}); let"
                " every valid token see itself"
            )
        return f"{head}: only padded tokens may attend to nothing, first {where} ({row}; {counts})"


def inspect_mask(mask: Tensor, valid_q: Tensor | None = None) -> MaskReport:
    """Look for rows that may attend to nothing, in any of the forms that masks take.

    Of what a kernel makes of such a row, only NaN shows later. Zeros and mixtures reach no loss as
    NaN, so the mask itself has to be looked at. Waits for the device.

    Args:
        mask: [B, 1 or H, T, S], [B, T, S] or [T, S]; bool (True: may attend) or floating (added to
            the scores; `MASKED` or lower: may not attend). B and T may be 1 for all. A flash
            kernel's [B, T] validity has no rows: it is read as [T, S].
        valid_q: [B, T] bool, or ones and zeros; default all valid.

    Raises:
        ValueError: an integer mask, as a tokenizer makes it: that is validity, and added to scores
            it masks nothing; or shapes that do not fit.
    """
    if not (mask.dtype == torch.bool or mask.is_floating_point()) or not 2 <= mask.ndim <= 4:
        raise ValueError(
            f"attention mask is {mask.dtype} {list(mask.shape)}; it has to be bool or floating and"
            " [B, H, T, S], [B, T, S] or [T, S]; make one of a tokenizer's ones and zeros with"
            " self_attention_mask"
        )
    entries = mask.detach().unsqueeze(-3) if mask.ndim < 4 else mask.detach()
    entries = entries.unsqueeze(0) if entries.ndim == 3 else entries
    additive = mask.is_floating_point()
    masked = entries <= MASKED if additive else ~entries
    unusable = entries.isnan() | entries.isposinf()
    size = (entries.shape[0], entries.shape[2])
    valid = (
        torch.ones(size, dtype=torch.bool, device=mask.device)
        if valid_q is None
        else _validity("valid_q", valid_q)
    )
    if any(own not in (1, wanted) for own, wanted in zip(size, valid.shape, strict=True)):
        raise ValueError(
            f"attention mask {list(mask.shape)} has rows for {list(size)} queries, valid_q is"
            f" {list(valid.shape)}"
        )
    keyless, broken = (
        heads.any(dim=1).expand(valid.shape) for heads in (masked.all(dim=-1), unusable.any(dim=-1))
    )
    first = value = None
    for found in (broken, keyless & valid, keyless):
        if bool(found.any()):
            b, t = (int(i) for i in found.nonzero()[0])
            # [H, S]; the head without a key has the lowest peak
            row = entries.expand(len(valid), -1, valid.shape[1], -1)[b, :, t]
            peak = (
                row.max()
                if found is broken
                else row.amax(dim=-1).min()
                if row.numel()
                else -math.inf
            )
            first, value = (b, t), float(peak)
            break
    return MaskReport(
        shape=tuple(mask.shape),
        form=_form(entries, masked) if additive else "bool",
        rows=valid.numel(),
        keyless_valid=int((keyless & valid).sum()),
        keyless_padded=int((keyless & ~valid).sum()),
        unusable=int(unusable.sum()),
        first=first,
        value=value,
    )


def mask_fault(mask: Tensor, valid_q: Tensor | None = None) -> Finding | None:
    """A valid query that may attend to nothing, or an entry that no softmax can take; see
    `inspect_mask`.
    """
    report = inspect_mask(mask, valid_q)
    if report.sound or report.first is None or report.value is None:
        return None
    return Finding("attention mask", report.first, report.value, str(report))


def _validity(name: str, valid: Tensor) -> Tensor:
    if valid.ndim != 2 or valid.is_floating_point():
        raise ValueError(
            f"{name} is {valid.dtype} {list(valid.shape)}; it has to be [B, T] and bool, or"
            " integers: 1 valid, 0 padded"
        )
    return valid.bool()


def _beside(valid: Tensor, states: Tensor) -> Tensor:
    """[B, T] with as many dimensions as the states [B, T, ...]."""
    return valid[(...,) + (None,) * (states.ndim - 2)]


def _with_a_key(allowed: Tensor, spare: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, S] of what is allowed, `spare` in the rows where nothing is: [B, 1, T, S] in the form
    that `dtype` asks for.
    """
    mask = torch.where(allowed.any(dim=-1, keepdim=True), allowed, spare)[:, None]
    if dtype == torch.bool:
        return mask
    if not dtype.is_floating_point:
        raise ValueError(
            f"a mask of {dtype} is neither bool nor added to scores; pass torch.bool or the dtype"
            " of the scores"
        )
    return torch.where(mask, mask.new_zeros((), dtype=dtype), torch.finfo(dtype).min)


def _form(entries: Tensor, masked: Tensor) -> Form:
    values = entries[masked]
    kinds: dict[Form, Tensor] = {
        "-inf": values == -math.inf,
        "finfo.min": values == torch.finfo(values.dtype).min,
    }
    kinds["finite"] = ~(kinds["-inf"] | kinds["finfo.min"])
    present: list[Form] = [form for form, which in kinds.items() if bool(which.any())]
    return "open" if not present else present[0] if len(present) == 1 else "mixed"
