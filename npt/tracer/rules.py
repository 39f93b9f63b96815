"""Rules that explain why an operation made a NaN or Inf.

Each rule looks at the operation's name and inputs, and the first one that fits names the cause. If
none fits, the cause is `unknown`, since a wrong guess would cost more time than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from npt.batch import IGNORE_INDEX
from npt.tracer.operations import WRITERS, External, Origin, names
from npt.tracer.tensors import absmax, dtype_name, element

HUGE = 1e6
"""No trained model has finite weights, statistics or activations this large; they stay below a few
thousand.
"""

_SMALL = 1e-3
"""If a quotient overflows, a divisor below this is taken for the cause."""

CONSTANTS = ("other", "exponent", "value", "fill_value", "eps")
"""Arguments that are numbers in the code and enter the result."""

DIVISIONS = names("div div_ true_divide reciprocal reciprocal_ remainder fmod")
POWERS = names("rsqrt rsqrt_ pow pow_")
EXPONENTIALS = names("exp exp_ expm1 exp2 sinh cosh logsumexp")
DOMAINS = POWERS | names(
    "log log_ log2 log10 log1p log1p_ sqrt sqrt_ acos asin acosh atanh erfinv xlogy logit lgamma"
    " digamma"
)
SOFTMAXES = names("_softmax _safe_softmax _log_softmax softmax log_softmax")
WRITTEN = WRITERS | names("index_fill index_fill_ masked_scatter")
SLOPES = names(
    "Sqrt Log Log2 Log10 Log1P Rsqrt Pow Div Reciprocal Acos Asin Acosh Atanh Xlogy"
    " LinalgVectorNorm Norm Std StdMean Logit Erfinv Atan2 Cdist"
)
AVERAGES = names("mean var std var_mean std_mean")
NORMALISATIONS = ("layer_norm", "group_norm", "batch_norm", "rms_norm")
"""Parts of operation names."""

CASTS = names("_to_copy to copy_")
PRODUCTS = names("mul mul_ addcmul")
LONG_PRODUCTS = names("pow pow_ prod cumprod cumprod_ _linalg_det linalg_matrix_exp lgamma")
"""Operations that overflow for moderate inputs: they multiply often, or grow fast."""


class Reason(NamedTuple):
    """A cause, and a sentence with the values that show it."""

    cause: str
    explanation: str


def explain(origin: Origin) -> Reason:
    if origin.external is not None:
        return _external(origin, origin.external)
    for operations, rule in _RULES:
        asked = operations is None or origin.operation in operations
        if asked and (reason := rule(origin)):
            return reason
    return Reason("unknown", f"{origin.operation} of {_given(origin)} gave {origin.value:g}")


def hidden(reason: Reason) -> Reason:
    """Return the reason for a value that forward hid from the loss but not from gradients."""
    hideable = ("invalid argument", "division by zero", "vanishing norm", "exponential overflow")
    if reason.cause not in hideable:
        return reason
    return Reason(
        "masked gradient",
        f"{reason.explanation}; the loss does not show it, but its gradient is 0 times infinity",
    )


def _external(origin: Origin, external: External) -> Reason:
    held = f"{external.name} held {origin.value:g}"
    if math.isfinite(origin.value) and abs(origin.value) <= HUGE:
        return Reason("beyond the limit", f"{held} before the pass")
    if external.kind == "outside":
        return Reason("outside of torch", f"{held}, but no operation of the pass made it")
    return Reason(_corrupt(external), f"{held} before the pass")


def _corrupt(external: External) -> str:
    if external.kind == "data":
        return "corrupt input"
    return "corrupt absmax" if ": " in external.name else "corrupt weight"


def element_at(tensor: Tensor, shape: tuple[int, ...], index: tuple[int, ...]) -> float | None:
    """Return the element at `index` of `tensor` broadcast to `shape`; None if it cannot be."""
    if len(index) != len(shape) or tensor.layout != torch.strided:
        return None
    try:
        return element(tensor.detach().expand(shape), index)
    except RuntimeError:
        return None


def _input(origin: Origin, *names: str) -> Tensor | None:
    return next((tensor for label, tensor in origin.inputs if label in names), None)


def _at(origin: Origin, tensor: Tensor | None) -> float | None:
    """Return the input element, after broadcasting, that the bad output element came from."""
    return None if tensor is None else element_at(tensor, origin.shape, origin.index)


def _at_self(origin: Origin) -> float | None:
    return _at(origin, _input(origin, "self"))


def _floats(origin: Origin) -> dict[str, Tensor]:
    floats = {}
    for name, tensor in origin.inputs:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            floats[name] = tensor
    return floats


def _has_mask(tensor: Tensor) -> bool:
    return bool((tensor == -math.inf).any())


def _zeros(origin: Origin) -> int:
    """Return how many of the elements that the bad one came from are 0."""
    return [_at(origin, tensor) for tensor in _floats(origin).values()].count(0.0)


def largest(tensors: Mapping[str, Tensor]) -> tuple[str, float]:
    """Return the name and size of the largest finite magnitude; "" and 0 without tensors."""
    sizes = {name: absmax(tensor) for name, tensor in tensors.items()}
    name = max(sizes, key=lambda name: sizes[name], default="")
    return name, sizes.get(name, 0.0)


def _largest(origin: Origin) -> float:
    return largest(_floats(origin))[1]


def _given(origin: Origin, at: float | None = None) -> str:
    """Describe the inputs: the element `at`, or the largest one, and constants."""
    text = f"{at:g}" if at is not None else f"numbers up to {_largest(origin):g}"
    for name, value in origin.constants.items():
        if name in CONSTANTS:
            text += f" and the constant {value:g}"
    return text


def _result(origin: Origin, at: float | None = None) -> str:
    return f"{origin.operation} of {_given(origin, at)} is {origin.value:g}"


def _beyond(origin: Origin) -> Reason | None:
    if not math.isfinite(origin.value):
        return None
    return Reason("beyond the limit", _result(origin))


def _constant(origin: Origin) -> Reason | None:
    scalars = [element(t, ()) for t in _floats(origin).values() if t.ndim == 0]
    numbers = (*origin.constants.values(), *scalars)
    bad = [number for number in numbers if not math.isfinite(number)]
    if not bad:
        return None
    return Reason("written constant", f"{origin.operation} was given the constant {bad[0]:g}")


def _labels(origin: Origin) -> Reason | None:
    target = _input(origin, "target")
    if "nll_loss" not in origin.operation or origin.phase == "backward" or target is None:
        return None
    ignored = int(origin.constants.get("ignore_index", IGNORE_INDEX))
    if bool((target == ignored).all()):
        return Reason(
            "no valid label",
            f"all {target.numel()} labels are {ignored}, and the mean over no labels is"
            f" {origin.value:g}",
        )
    logs = _input(origin, "self")
    if logs is not None and origin.value == math.inf and _has_mask(logs):
        return Reason("masked label", "the log-probability of a label is -Inf")
    return None


def _frames(origin: Origin) -> Reason | None:
    """CTC, which puts each label on a frame of its own, and a blank between two equal ones."""
    targets = _input(origin, "targets")
    frames = _input(origin, "input_lengths")
    sizes = _input(origin, "target_lengths")
    if targets is None or frames is None or sizes is None or not origin.index:
        return None
    # without a batch they are single numbers
    sizes = sizes.reshape(-1)
    sample = origin.index[0]
    have = int(frames.reshape(-1)[sample])
    size = int(sizes[sample])
    if targets.ndim == 2:
        own = targets[sample][:size]
    else:
        # all samples' labels in one row
        start = int(sizes[:sample].sum())
        own = targets[start : start + size]
    blanks = int((own[1:] == own[:-1]).sum())
    needed = size + blanks
    if have >= needed:
        return None
    return Reason(
        "too few frames", f"sample {sample} has {have} frames, but its {size} labels need {needed}"
    )


def _cast(origin: Origin) -> Reason | None:
    source = _input(origin, "self", "src")
    if source is None or not source.is_floating_point() or not origin.dtype.is_floating_point:
        return None
    ends = torch.finfo(origin.dtype).max
    if ends >= torch.finfo(source.dtype).max:
        return None
    value = _at(origin, source)
    if value is None:
        value = absmax(source)
    return Reason(
        "cast overflow",
        f"{value:g} in {dtype_name(source.dtype)} was cast to {dtype_name(origin.dtype)}, whose"
        f" maximum is {ends:g}",
    )


def _mask(origin: Origin) -> Reason | None:
    logits = _input(origin, "self", "input")
    if logits is None or tuple(logits.shape) != origin.shape:
        return None
    for axis in reversed(range(logits.ndim)):
        others = origin.index[:axis] + origin.index[axis + 1 :]
        row = logits.movedim(axis, -1)[others]
        masked = row == -math.inf
        if bool(masked.all()):
            return Reason(
                "fully masked row",
                f"all {len(row)} logits of the row are -Inf, so softmax divides 0 by 0",
            )
    return None


def _written(origin: Origin) -> Reason | None:
    if origin.phase == "backward" and not origin.place.source:
        return None
    wrote = f"{origin.operation} wrote"
    if origin.operation == "lift_fresh":
        wrote = "a tensor made from Python or NumPy numbers holds"
    return Reason("written constant", f"{wrote} {origin.value:g}")


def _slope(origin: Origin) -> Reason | None:
    function = origin.node.rpartition("Backward")[0]
    if origin.phase != "backward" or function not in SLOPES:
        return None
    zeros = _zeros(origin)
    if not zeros:
        return None
    name = function.lower()
    gave = f"{origin.operation} in its backward gave {origin.value:g}"
    if origin.hid:
        return Reason(
            "masked gradient",
            f"{name} itself was not finite, which was hidden from the loss, and {gave}",
        )
    if math.isnan(origin.value) and zeros > 1:
        return Reason(
            "masked gradient",
            f"the incoming gradient is 0 and the derivative of {name} is infinite: 0 times infinity"
            " is NaN",
        )
    return Reason("infinite slope", f"{name} has no finite derivative at its argument: {gave}")


def _power(origin: Origin) -> Reason | None:
    at = _at_self(origin)
    if at is None:
        return None
    overflowed = math.isinf(origin.value) and abs(at) < _SMALL
    if at != 0.0 and not overflowed:
        return None
    return Reason("vanishing norm", _result(origin, at))


def _division(origin: Origin) -> Reason | None:
    above = _at_self(origin)
    divisor = _input(origin, "other")
    if "reciprocal" in origin.operation:
        above = None
        divisor = _input(origin, "self")
    below = _at(origin, divisor)
    if divisor is None:
        below = origin.constants.get("other")
    if above is None:
        above = 1.0
    if below is None or abs(below) >= _SMALL or (below != 0.0 and abs(above) > HUGE):
        return None
    quotient = f"{above:g} / {below:g} is {origin.value:g}"
    # A norm is one number for many elements; a divisor of the dividend's shape is no norm.
    elements = math.prod(origin.shape)
    if divisor is None or divisor.ndim == 0 or divisor.numel() >= elements:
        return Reason("division by zero", quotient)
    return Reason("vanishing norm", f"a divisor shared by many elements is {below:g}: {quotient}")


def _exponential(origin: Origin) -> Reason:
    at = _at_self(origin)
    return Reason("exponential overflow", _result(origin, at))


def _domain(origin: Origin) -> Reason | None:
    at = _at_self(origin)
    inside = at is None or at >= 0.0
    if origin.operation in POWERS and (inside or not math.isnan(origin.value)):
        return None
    return Reason("invalid argument", _result(origin, at))


def _average(origin: Origin) -> Reason | None:
    source = _input(origin, "self")
    if source is None or not math.isnan(origin.value):
        return None
    what = "one element divides by n - 1 = 0"
    if not source.numel():
        what = f"no elements (shape {list(source.shape)})"
    elif origin.operation == "mean" or _largest(origin) > HUGE or _has_mask(source):
        return None
    return Reason("division by zero", f"the {origin.operation} of {what}")


def _normalisation(origin: Origin) -> Reason | None:
    if not any(part in origin.operation for part in NORMALISATIONS):
        return None
    if (negative := _negative_variance(origin)) or _largest(origin) > HUGE:
        return negative
    epsilon = origin.constants.get("eps", 0.0)
    return Reason(
        "vanishing norm",
        f"{origin.operation} of a variance of 0 with an epsilon of {epsilon:g} is {origin.value:g}",
    )


def _negative_variance(origin: Origin) -> Reason | None:
    """Batch norm in eval mode, which takes the root of a buffer that is finite but below 0."""
    external = origin.externals.get("running_var")
    variance = _input(origin, "running_var")
    if external is None or variance is None or len(origin.index) < 2:
        return None
    channel = origin.index[1]
    held = element(variance, (channel,))
    if held + origin.constants.get("eps", 0.0) >= 0.0:
        return None
    return Reason(
        _corrupt(external),
        f"{external.name}[{channel}] holds {held:g}, and a variance cannot be negative",
    )


def _hidden_branch(origin: Origin) -> Reason | None:
    if not math.isnan(origin.value) or not _zeros(origin):
        return None
    cause = "masked gradient" if origin.phase == "backward" else "masked arithmetic"
    return Reason(cause, "0 was multiplied by infinity")


def _mask_arithmetic(origin: Origin) -> Reason | None:
    if not any(map(_has_mask, _floats(origin).values())):
        return None
    return Reason(
        "masked arithmetic", f"{origin.operation} of numbers that include -Inf is {origin.value:g}"
    )


def _low_precision(origin: Origin) -> Reason | None:
    if origin.dtype != torch.float16:
        return None
    return Reason(
        "low-precision overflow",
        f"{origin.operation} of {_given(origin)} overflowed float16, whose maximum is 65504",
    )


def _product(origin: Origin) -> Reason | None:
    label, size = largest(_floats(origin))
    external = origin.externals.get(label)
    if size > HUGE and external is not None:
        return Reason(
            _corrupt(external),
            f"{external.name} holds values up to {size:g}, far beyond any trained model",
        )
    # an infinity from moderate numbers has another reason, unless there are many factors
    grows = math.isinf(origin.value) and origin.operation in LONG_PRODUCTS
    if size <= HUGE and not grows:
        return None
    text = f"{origin.operation} of {_given(origin)} overflowed {dtype_name(origin.dtype)}"
    if origin.dtype.is_floating_point:
        text += f", whose maximum is {torch.finfo(origin.dtype).max:g}"
    cause = "exploding gradient" if origin.phase == "backward" else "exploding product"
    return Reason(cause, text)


_RULES: tuple[tuple[frozenset[str] | None, Callable[[Origin], Reason | None]], ...] = (
    (None, _beyond),
    (None, _constant),
    (None, _labels),
    (names("_ctc_loss ctc_loss"), _frames),
    (CASTS, _cast),
    (SOFTMAXES, _mask),
    (WRITTEN, _written),
    (None, _slope),
    (POWERS, _power),
    (DIVISIONS, _division),
    (EXPONENTIALS, _exponential),
    (DOMAINS, _domain),
    (AVERAGES, _average),
    (None, _normalisation),
    (PRODUCTS, _hidden_branch),
    (None, _mask_arithmetic),
    (None, _low_precision),
    (None, _product),
)
"""Rules in order, each with the operations that it covers; None for all."""
