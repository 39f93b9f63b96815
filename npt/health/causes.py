"""From the operation that made a bad number to the reason why, and the remedy that fits it.

A rule looks at the operation's name and at what went in, nothing else, and the first rule that fits says the cause. What none
of them knows stays `unknown`, with its operands on show: a guess would cost more time than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npt.data.batch import IGNORE_INDEX
from npt.health.operations import Origin

CAUSES: dict[str, str] = {
    "corrupt weight": "load the base again, or go back to the last checkpoint whose adapter loads; debug/verify_fixes.py checks both",
    "corrupt absmax": "a statistic of a 4-bit weight is bad: quantise the base again from its checkpoint and check the file's checksum",
    "corrupt input": "look at how the batch is made: tokenising, truncation and padding may not produce non-finite numbers",
    "token id": "check that the data was tokenised with the model's own tokenizer, and that the padding id lies in the vocabulary",
    "no valid label": "a mean over no label divides by nothing: truncate the prompt, not the completion, or leave the sample out",
    "cast overflow": "the number does not fit the smaller dtype: compute in fp32, as --use_quantization does (drop --use_fp16), or in bf16",
    "low-precision overflow": "the result fits fp32 and not this dtype: compute in fp32 (drop --use_fp16 and autocast)",
    "vanishing norm": "a norm or variance is 0: check the epsilon (rms_norm_eps), and add it under the root, not behind it",
    "division by zero": "a count, norm or probability is 0: clamp the divisor, or leave such elements out with torch.where in front",
    "fully masked row": "a query has no key: build masks with npt.health.masks, which let every row see one, and zero padded queries",
    "exponential overflow": "the logits are too large: subtract their maximum, as softmax and logsumexp do, or scale them down",
    "invalid argument": "the function has no value there: clamp its argument (log of 0, root of a negative number)",
    "infinite slope": "the derivative has no finite value there: keep the argument from the edge (sqrt(x + eps), clamp in front of log)",
    "masked gradient": "torch.where hides a bad branch in forward only: make the argument safe in front of the where as well",
    "masked arithmetic": "-Inf as a mask was used in arithmetic: mask with torch.where or finfo.min, do not add or multiply -Inf",
    "exploding product": (
        "activations have grown too large: lower --additive_scale or --learning_rate, raise --regularization_lambda, start with "
        "--safe_mode, and watch the residual stream grow with --trace_steps"
    ),
    "exploding gradient": "gradients have grown too large: lower --learning_rate, raise --regularization_lambda, or start with --safe_mode",
    "written constant": "code wrote a non-finite constant here: look at the line, a hook or an assignment",
    "beyond the limit": "the numbers were within the limit in front of this operation and beyond it behind: look at what went in",
    "not repeatable": (
        "the fault did not recur with the same batch, state and random numbers: suspect hardware, a race or a non-deterministic "
        "kernel (torch.use_deterministic_algorithms), and run on another device"
    ),
    "outside of torch": "no torch operation made the number: look at hooks, numpy code and compiled extensions on the way",
    "unknown": "look at the operands",
}
"""Every cause, and its remedy."""

HUGE = 1e6
"""A finite weight, statistic or activation of this size is no trained model's: theirs stay below a few thousand."""

_DIVISIONS = {"div", "div_", "true_divide", "reciprocal", "reciprocal_", "remainder", "fmod"}
_POWERS = {"rsqrt", "rsqrt_", "pow", "pow_"}
_EXPONENTIALS = {"exp", "exp_", "expm1", "exp2", "sinh", "cosh", "logsumexp"}
_DOMAINS = {"log", "log_", "log2", "log10", "log1p", "sqrt", "sqrt_", "acos", "asin", "acosh", "atanh", "erfinv", "xlogy"}
_SOFTMAXES = {"_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax"}
_WRITERS = {"full", "full_like", "fill", "fill_", "scalar_tensor", "new_full", "copy_", "where", "masked_fill", "masked_fill_"}
_WRITERS |= {"index_fill", "index_fill_", "index_put", "index_put_", "masked_scatter", "lift_fresh"}
_SLOPES = {"Sqrt", "Log", "Log1P", "Rsqrt", "Pow", "Div", "Reciprocal", "LinalgVectorNorm", "Norm", "Acos", "Asin", "LogSoftmax"}


@dataclass(frozen=True)
class Finding:
    """A cause, and the sentence with the figures that make it one."""

    cause: str
    explanation: str


def explain(origin: Origin) -> Finding:
    """The cause of an origin's bad number."""
    if origin.external is not None:
        return _external(origin)
    for rule in _RULES:
        finding = rule(origin)
        if finding is not None:
            return finding
    return Finding("unknown", f"{origin.operation} gave {origin.value:g}")


def hidden(finding: Finding) -> Finding:
    """The cause of a number that forward hid from the loss, as a `where` does, and that spoilt the gradients all the same."""
    if finding.cause not in ("invalid argument", "division by zero", "vanishing norm", "exponential overflow"):
        return finding
    return Finding("masked gradient", f"{finding.explanation}; the loss does not show it, its gradient is 0 times infinity")


def _external(origin: Origin) -> Finding:
    assert origin.external is not None
    name, value = origin.external.name, f"{origin.value:g}"
    if origin.external.kind == "outside":
        return Finding("outside of torch", f"{name} held {value}, and no operation of the pass made it so")
    if origin.external.kind == "data":
        return Finding("corrupt input", f"{name} held {value} before anything was computed")
    if ": " in name:
        return Finding("corrupt absmax", f"the quantisation statistic {name} is {value}")
    return Finding("corrupt weight", f"{name} held {value} before anything was computed")


Rule = Callable[[Origin], Finding | None]


def _at(origin: Origin, tensor: Tensor) -> float | None:
    """The element of an input that met the bad one of the output, under broadcasting."""
    return element_at(tensor, tuple(origin.tensor.shape), origin.index)


def element_at(tensor: Tensor, shape: tuple[int, ...], index: tuple[int, ...]) -> float | None:
    """The element of `tensor`, broadcast to `shape`, at `index`; None where it does not broadcast."""
    if tensor.ndim > len(shape) or tensor.is_complex():
        return None
    own = index[len(index) - tensor.ndim :]
    for size, wide in zip(tensor.shape, shape[len(shape) - tensor.ndim :], strict=True):
        if size not in (1, wide):
            return None
    return float(tensor[tuple(0 if size == 1 else i for size, i in zip(tensor.shape, own, strict=True))])


def _input(origin: Origin, *names: str) -> Tensor | None:
    return next((tensor for label, tensor in origin.inputs if label in names), None)


def _floats(origin: Origin) -> list[Tensor]:
    return [t for _, t in origin.inputs if t.is_floating_point() and t.numel()]


def _largest(tensors: list[Tensor]) -> float:
    sizes = []
    for t in tensors:
        finite = t[torch.isfinite(t)]
        sizes.append(float(finite.abs().max()) if finite.numel() else 0.0)
    return max(sizes, default=0.0)


def _labels(origin: Origin) -> Finding | None:
    target = _input(origin, "target")
    if "nll_loss" not in origin.operation or target is None or bool((target != IGNORE_INDEX).any()):
        return None
    return Finding("no valid label", f"all {target.numel()} labels are {IGNORE_INDEX}, and the mean over none of them is {origin.value:g}")


def _cast(origin: Origin) -> Finding | None:
    source = _input(origin, "self", "src")
    if origin.operation not in ("_to_copy", "to", "copy_") or source is None or not source.is_floating_point():
        return None
    target = origin.tensor.dtype
    if source.dtype == target or not torch.finfo(target).max < torch.finfo(source.dtype).max:
        return None
    value = _at(origin, source)
    return Finding(
        "cast overflow",
        f"{value if value is not None else _largest([source]):g} in {_short(source.dtype)} was cast to {_short(target)}, "
        f"which ends at {torch.finfo(target).max:g}",
    )


def _constant(origin: Origin) -> Finding | None:
    constant = next((float(t) for t in _floats(origin) if t.ndim == 0 and not math.isfinite(float(t))), None)
    if constant is not None:
        return Finding("written constant", f"{origin.operation} was given the constant {constant:g}")
    if origin.operation not in _WRITERS or (origin.phase == "backward" and not origin.place.source):
        return None
    return Finding("written constant", f"{origin.operation} wrote {origin.value:g}")


def _mask(origin: Origin) -> Finding | None:
    logits = _input(origin, "self", "input")
    if origin.operation not in _SOFTMAXES or logits is None or logits.shape != origin.tensor.shape:
        return None
    row = logits[origin.index[:-1]]
    if not bool((row == -math.inf).all()):
        return None
    return Finding("fully masked row", f"all {len(row)} logits of the row are -Inf, so the softmax divides 0 by 0")


def _attention_mask(origin: Origin) -> Finding | None:
    mask = _input(origin, "attn_mask", "attn_bias")
    if mask is None or not origin.operation.startswith("_scaled_dot_product") or len(origin.index) != 4:
        return None
    rows = mask.expand(*origin.tensor.shape[:2], *mask.shape[-2:]) if mask.ndim == 4 else mask
    row = rows[origin.index[0], origin.index[1], origin.index[2]] if rows.ndim == 4 else rows[origin.index[2]]
    if not bool((~row if row.dtype == torch.bool else row == -math.inf).all()):
        return None
    return Finding("fully masked row", f"the mask leaves the query none of {len(row)} keys")


def _division(origin: Origin) -> Finding | None:
    if origin.operation in _POWERS:
        base = _input(origin, "self")
        at = None if base is None else _at(origin, base)
        if at != 0.0:
            return None
        return Finding("vanishing norm", f"{origin.operation} of exactly 0 is {origin.value:g}: nothing was added to the variance")
    if origin.operation not in _DIVISIONS:
        return None
    divisor = _input(origin, "other") if "reciprocal" not in origin.operation else _input(origin, "self")
    if divisor is None:
        return Finding("division by zero", f"{origin.operation} by the number 0 gave {origin.value:g}")
    at = _at(origin, divisor)
    if at == 0.0:
        # A norm is one number for many elements, a divisor of the dividend's own shape is not.
        cause = "vanishing norm" if divisor.numel() < origin.tensor.numel() and divisor.ndim else "division by zero"
        dividend = _input(origin, "self")
        above = (
            "" if dividend is None or dividend is divisor else f"{_at(origin, dividend):g} / " if _at(origin, dividend) is not None else ""
        )
        return Finding(cause, f"{above}0 is {origin.value:g}")
    if at is not None and abs(at) < 1e-30:
        return Finding("vanishing norm", f"the divisor is {at:g}, the quotient beyond every number")
    return None


def _exponential(origin: Origin) -> Finding | None:
    if origin.operation not in _EXPONENTIALS:
        return None
    return Finding("exponential overflow", f"{origin.operation} of {_largest(_floats(origin)):g} is {origin.value:g}")


def _domain(origin: Origin) -> Finding | None:
    source = _input(origin, "self")
    if origin.operation not in _DOMAINS or source is None:
        return None
    return Finding("invalid argument", f"{origin.operation} of {_at(origin, source):g} is {origin.value:g}")


def _slope(origin: Origin) -> Finding | None:
    """Backward of a function at a point where its derivative is infinite."""
    function = origin.node.rpartition("Backward")[0]
    if origin.phase != "backward" or function not in _SLOPES or _largest(_floats(origin)) > HUGE:
        return None
    zero = any(_at(origin, t) == 0.0 for t in _floats(origin))
    why = "an argument of exactly 0" if zero else "its argument"
    return Finding("infinite slope", f"the derivative of {function.lower()} at {why} is {origin.value:g}")


def _hidden_branch(origin: Origin) -> Finding | None:
    """0 * Inf where the Inf was hidden from the loss by a `where`."""
    if origin.operation not in ("mul", "mul_", "addcmul"):
        return None
    at = [_at(origin, t) for t in _floats(origin)]
    if 0.0 not in at or not math.isnan(origin.value):
        return None
    return Finding("masked gradient" if origin.phase == "backward" else "masked arithmetic", "0 was multiplied by an infinity")


def _mask_arithmetic(origin: Origin) -> Finding | None:
    if origin.operation not in ("add", "sub", "mul", "bmm", "mm", "addmm", "matmul", "sum", "mean"):
        return None
    if not any(bool((t == -math.inf).any()) for t in _floats(origin)):
        return None
    return Finding("masked arithmetic", f"{origin.operation} of numbers with -Inf among them is {origin.value:g}")


def _low_precision(origin: Origin) -> Finding | None:
    if origin.tensor.dtype != torch.float16:
        return None
    return Finding(
        "low-precision overflow",
        f"{origin.operation} of numbers up to {_largest(_floats(origin)):g} left float16, which ends at {torch.finfo(torch.float16).max:g}",
    )


def _product(origin: Origin) -> Finding | None:
    sizes = [(label, _largest([t])) for label, t in origin.inputs if t.is_floating_point() and t.numel()]
    label, largest = max(sizes, key=lambda item: item[1], default=("", 0.0))
    if largest <= HUGE:
        return None
    name = origin.names.get(label, "")
    if ": " in name:
        return Finding("corrupt absmax", f"the quantisation statistic {name} is up to {largest:g}, no trained weight's is")
    if name.endswith((".weight", ".bias")) or ".npt." in name:
        return Finding("corrupt weight", f"{name} is up to {largest:g} in size, no trained weight is")
    ends = torch.finfo(origin.tensor.dtype).max if origin.tensor.is_floating_point() else math.inf
    cause = "exploding gradient" if origin.phase == "backward" else "exploding product"
    return Finding(cause, f"{origin.operation} of numbers up to {largest:g} left {_short(origin.tensor.dtype)}, which ends at {ends:g}")


def _beyond(origin: Origin) -> Finding | None:
    if not math.isfinite(origin.value):
        return None
    return Finding("beyond the limit", f"{origin.operation} made {origin.value:g} of numbers up to {_largest(_floats(origin)):g}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_RULES: tuple[Rule, ...] = (
    _beyond,
    _labels,
    _cast,
    _mask,
    _attention_mask,
    _constant,
    _slope,
    _division,
    _exponential,
    _domain,
    _hidden_branch,
    _mask_arithmetic,
    _low_precision,
    _product,
)
