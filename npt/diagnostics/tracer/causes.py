"""From the operation that made a bad number to the reason why, and the remedy that fits it.

A rule looks at the operation's name and at what went in, nothing else, and the first rule that fits
says the cause. What none of them knows stays `unknown`, with its operands on show: a guess would
cost more time than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from npt.data.batch import IGNORE_INDEX
from npt.diagnostics.tracer.nonfinite import absmax, element
from npt.diagnostics.tracer.operations import Origin
from npt.diagnostics.tracer.verdict import dtype_name

CAUSES: dict[str, str] = {
    "corrupt weight": (
        "load the weights again from a checkpoint in which they are sound, or go back to the last"
        " adapter that loads (debug/verify_fixes.py checks both), and look for the step or the code"
        " that wrote the number"
    ),
    "corrupt absmax": (
        "a statistic of a 4-bit weight is bad: quantise the base again from its checkpoint and"
        " check the file's checksum"
    ),
    "corrupt input": (
        "look at how the batch is made: features, tokenising, truncation and padding may give no"
        " non-finite or huge numbers"
    ),
    "token id": (
        "check that the data was tokenised with the model's own tokenizer, and that the padding id"
        " lies in the vocabulary"
    ),
    "no valid label": (
        "a mean over no label divides by nothing: truncate the prompt, not the completion, or leave"
        " the sample out"
    ),
    "masked label": (
        "the loss asks for a class whose logit is masked with -Inf: do not mask classes that occur"
        " as labels, or ignore those"
    ),
    "cast overflow": (
        "the number does not fit the smaller dtype: compute in fp32, as --use_quantization does"
        " (drop --use_fp16), or in bf16"
    ),
    "low-precision overflow": (
        "the result fits fp32 and not this dtype: compute in fp32 or bf16 (drop --use_fp16,"
        " autocast); of gradients, lower the loss scale"
    ),
    "vanishing norm": (
        "a norm or variance is 0: check the epsilon (rms_norm_eps), and add it under the root, not"
        " behind it"
    ),
    "division by zero": (
        "a count, norm or probability is 0: clamp the divisor, or leave such elements out with"
        " torch.where in front"
    ),
    "fully masked row": (
        "a query has no key: let every row of the mask see one, its own position at least, and zero"
        " padded queries"
    ),
    "exponential overflow": (
        "the logits are too large: subtract their maximum, as softmax and logsumexp do, or scale"
        " them down"
    ),
    "invalid argument": (
        "the function has no value there: clamp its argument (log of 0, root of a negative number)"
    ),
    "infinite slope": (
        "the derivative has no finite value there: keep the argument from the edge (sqrt(x + eps),"
        " clamp in front of log)"
    ),
    "masked gradient": (
        "torch.where hides a bad branch in forward only: make the argument safe in front of the"
        " where as well"
    ),
    "masked arithmetic": (
        "-Inf as a mask was used in arithmetic: mask with torch.where or finfo.min, do not add or"
        " multiply -Inf"
    ),
    "exploding product": (
        "activations have grown too large: look at where they grew; lower the learning rate"
        " (--learning_rate) or the scale of what is added (--additive_scale), raise"
        " --regularization_lambda, start with --safe_mode, watch the residual stream with"
        " --trace_steps"
    ),
    "exploding gradient": (
        "gradients have grown too large: lower --learning_rate, raise --regularization_lambda, or"
        " start with --safe_mode"
    ),
    "written constant": (
        "code wrote a non-finite constant here: look at the line, a hook or an assignment"
    ),
    "beyond the limit": (
        "nothing is broken yet: look at what went in, and at what the numbers become further on"
    ),
    "not repeatable": (
        "the fault did not recur with the same batch, state and random numbers: suspect hardware, a"
        " race, a compiled or non-deterministic kernel (torch.use_deterministic_algorithms), or a"
        " run that does not do the same each time"
    ),
    "outside of torch": (
        "no torch operation of the pass made the number: look at tensors made before it (targets, a"
        " closure, a cache), at numpy code, at memory from torch.empty and at compiled extensions"
    ),
    "unknown": "no rule knows this one: look at the line and at what went in",
}
"""Every cause, and its remedy."""

HUGE = 1e6
"""A finite weight, statistic or activation of this size is no trained model's: theirs stay below a
few thousand.
"""

_SMALL = 1e-3
"""A divisor below this is taken for the reason of an overflow that its quotient is."""

CONSTANTS = ("other", "exponent", "value", "fill_value", "eps")
"""Arguments that are numbers of the program and that a result is made of."""

_DIVISIONS = {"div", "div_", "true_divide", "reciprocal", "reciprocal_", "remainder", "fmod"}
_POWERS = {"rsqrt", "rsqrt_", "pow", "pow_"}
_EXPONENTIALS = {"exp", "exp_", "expm1", "exp2", "sinh", "cosh", "logsumexp"}
_DOMAINS = {
    "log",
    "log_",
    "log2",
    "log10",
    "log1p",
    "sqrt",
    "sqrt_",
    "acos",
    "asin",
    "acosh",
    "atanh",
    "erfinv",
    "xlogy",
}
_DOMAINS |= {"log1p_", "logit", "lgamma", "digamma", *_POWERS}
_SOFTMAXES = {"_softmax", "_safe_softmax", "_log_softmax", "softmax", "log_softmax"}
_WRITERS = {
    "full",
    "full_like",
    "fill",
    "fill_",
    "scalar_tensor",
    "new_full",
    "copy_",
    "where",
    "masked_fill",
    "masked_fill_",
}
_WRITERS |= {
    "index_fill",
    "index_fill_",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "masked_scatter",
    "lift_fresh",
}
_SLOPES = {
    "Sqrt",
    "Log",
    "Log2",
    "Log10",
    "Log1P",
    "Rsqrt",
    "Pow",
    "Div",
    "Reciprocal",
    "Acos",
    "Asin",
    "Acosh",
    "Atanh",
    "Xlogy",
}
_SLOPES |= {"LinalgVectorNorm", "Norm", "Std", "StdMean", "Logit", "Erfinv", "Atan2", "Cdist"}
_AVERAGES = {"mean", "var", "std", "var_mean", "std_mean", "nanmean"}
_NORMALISATIONS = {
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_fused_rms_norm",
}
_NORMALISATIONS |= {
    "_native_batch_norm_legit_no_training",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_batch_norm_with_update",
}
_CASTS = {"_to_copy", "to", "copy_"}


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
    return Finding("unknown", f"{origin.operation} of {_given(origin)} gave {origin.value:g}")


def hidden(finding: Finding) -> Finding:
    """The cause of a number that forward hid from the loss, as a `where` does, and that spoilt the
    gradients all the same.
    """
    if finding.cause not in (
        "invalid argument",
        "division by zero",
        "vanishing norm",
        "exponential overflow",
    ):
        return finding
    return Finding(
        "masked gradient",
        f"{finding.explanation}; the loss does not show it, its gradient is 0 times infinity",
    )


def unrepeated(origin: Origin) -> Finding:
    """Of an operation that gave a bad number in one pass and a good one in the next."""
    return Finding(
        "not repeatable",
        f"{origin.operation} gave {origin.value:g} once, and not when everything was run again",
    )


def _external(origin: Origin) -> Finding:
    assert origin.external is not None
    name, value = origin.external.name, f"{origin.value:g}"
    if math.isfinite(origin.value) and abs(origin.value) <= HUGE:
        return Finding("beyond the limit", f"{name} held {value} before anything was computed")
    if origin.external.kind == "outside":
        return Finding(
            "outside of torch", f"{name} held {value}, and no operation of the pass made it so"
        )
    if origin.external.kind == "data":
        return Finding("corrupt input", f"{name} held {value} before anything was computed")
    if ": " in name:
        return Finding("corrupt absmax", f"the quantisation statistic {name} is {value}")
    return Finding("corrupt weight", f"{name} held {value} before anything was computed")


Rule = Callable[[Origin], Finding | None]


def element_at(tensor: Tensor, shape: tuple[int, ...], index: tuple[int, ...]) -> float | None:
    """The element of `tensor`, broadcast to `shape`, at `index`; None where it does not
    broadcast.
    """
    if tensor.ndim > len(shape) or len(index) != len(shape) or tensor.layout != torch.strided:
        return None
    own = index[len(index) - tensor.ndim :]
    for size, wide in zip(tensor.shape, shape[len(shape) - tensor.ndim :], strict=True):
        if size not in (1, wide):
            return None
    return element(
        tensor, tuple(0 if size == 1 else i for size, i in zip(tensor.shape, own, strict=True))
    )


def _at(origin: Origin, tensor: Tensor | None) -> float | None:
    """The element of an input that met the bad one of the output, under broadcasting."""
    return None if tensor is None else element_at(tensor, origin.shape, origin.index)


def _input(origin: Origin, *names: str) -> Tensor | None:
    return next((tensor for label, tensor in origin.inputs if label in names), None)


def _floats(origin: Origin) -> list[Tensor]:
    return [t for _, t in origin.inputs if (t.is_floating_point() or t.is_complex()) and t.numel()]


def _largest(origin: Origin) -> float:
    return max((absmax(t) for t in _floats(origin)), default=0.0)


def _given(origin: Origin, at: float | None = None) -> str:
    """What went in, for a sentence: the very element where it is known, else the largest; and
    numbers of the program.
    """
    constants = [
        f" and the constant {value:g}"
        for name, value in origin.constants.items()
        if name in CONSTANTS
    ]
    return (f"{at:g}" if at is not None else f"numbers up to {_largest(origin):g}") + "".join(
        constants
    )


def _beyond(origin: Origin) -> Finding | None:
    if not math.isfinite(origin.value):
        return None
    return Finding(
        "beyond the limit", f"{origin.operation} made {origin.value:g} of {_given(origin)}"
    )


def _constant(origin: Origin) -> Finding | None:
    given = [*origin.constants.values(), *(element(t, ()) for t in _floats(origin) if t.ndim == 0)]
    constant = next((c for c in given if not math.isfinite(c)), None)
    return (
        None
        if constant is None
        else Finding("written constant", f"{origin.operation} was given the constant {constant:g}")
    )


def _labels(origin: Origin) -> Finding | None:
    target, logs, weight = (
        _input(origin, "target"),
        _input(origin, "self"),
        _input(origin, "weight"),
    )
    if (
        "nll_loss" not in origin.operation
        or origin.phase == "backward"
        or target is None
        or target.is_floating_point()
    ):
        return None
    ignored = int(origin.constants.get("ignore_index", IGNORE_INDEX))
    valid = target[target != ignored]
    if not valid.numel():
        return Finding(
            "no valid label",
            f"all {target.numel()} labels are {ignored}, and the mean over none of them is"
            f" {origin.value:g}",
        )
    if weight is not None and math.isnan(origin.value) and not bool(weight[valid].any()):
        return Finding(
            "division by zero",
            f"the class weights of all {valid.numel()} labels are 0, and so is their sum",
        )
    if logs is not None and origin.value == math.inf and bool((logs == -math.inf).any()):
        return Finding("masked label", "a label's own log-probability is -Inf")
    return None


def _cast(origin: Origin) -> Finding | None:
    source = _input(origin, "self", "src")
    if (
        origin.operation not in _CASTS
        or source is None
        or not source.is_floating_point()
        or not origin.dtype.is_floating_point
    ):
        return None
    ends = torch.finfo(origin.dtype).max
    if source.dtype == origin.dtype or not ends < torch.finfo(source.dtype).max:
        return None
    value = _at(origin, source)
    value = absmax(source) if value is None else value
    dtypes = f"in {dtype_name(source.dtype)} was cast to {dtype_name(origin.dtype)}"
    return Finding("cast overflow", f"{value:g} {dtypes}, which ends at {ends:g}")


def _mask(origin: Origin) -> Finding | None:
    logits = _input(origin, "self", "input")
    if origin.operation not in _SOFTMAXES or logits is None or tuple(logits.shape) != origin.shape:
        return None
    for axis in reversed(range(logits.ndim)):
        row = logits.movedim(axis, -1)[(*origin.index[:axis], *origin.index[axis + 1 :])]
        if bool((row == -math.inf).all()):
            return Finding(
                "fully masked row",
                f"all {len(row)} logits of the row are -Inf, so the softmax divides 0 by 0",
            )
    return None


def _attention_mask(origin: Origin) -> Finding | None:
    mask = _input(origin, "attn_mask", "attn_bias")
    if (
        mask is None
        or not origin.operation.startswith("_scaled_dot_product")
        or len(origin.shape) != 4
        or mask.ndim < 2
    ):
        return None
    batch, head, query, _ = origin.index
    at = ([batch, head, query][-(mask.ndim - 1) :]) if mask.ndim <= 4 else []
    row = mask[tuple(0 if size == 1 else i for size, i in zip(mask.shape, at, strict=False))]
    if not bool((~row if row.dtype == torch.bool else row == -math.inf).all()):
        return None
    return Finding("fully masked row", f"the mask leaves the query none of {len(row)} keys")


def _written(origin: Origin) -> Finding | None:
    if origin.operation not in _WRITERS or (origin.phase == "backward" and not origin.place.source):
        return None
    what = (
        "a tensor made of Python's or numpy's numbers holds"
        if origin.operation == "lift_fresh"
        else f"{origin.operation} wrote"
    )
    return Finding("written constant", f"{what} {origin.value:g}")


def _slope(origin: Origin) -> Finding | None:
    """Backward of a function at a point where its derivative is infinite."""
    function = origin.node.rpartition("Backward")[0]
    if origin.phase != "backward" or function not in _SLOPES:
        return None
    zeros = [t for t in _floats(origin) if _at(origin, t) == 0.0]
    if not zeros:
        return None
    name = function.lower()
    gave = f"{origin.operation} in its backward gave {origin.value:g}"
    if origin.hid:
        return Finding(
            "masked gradient",
            f"{name} itself gave no finite number, which something hid from the loss, and {gave}",
        )
    if math.isnan(origin.value) and len(zeros) > 1:
        return Finding(
            "masked gradient",
            f"a gradient of 0 came in and the derivative of {name} is infinite: 0 times infinity"
            " is NaN",
        )
    return Finding("infinite slope", f"{name} has no finite derivative at its argument: {gave}")


def _division(origin: Origin) -> Finding | None:
    if origin.operation in _POWERS:
        at = _at(origin, _input(origin, "self"))
        if at is None or (at != 0.0 and not (math.isinf(origin.value) and abs(at) < _SMALL)):
            return None
        power = f"{origin.operation} of {_given(origin, at)} is {origin.value:g}"
        return Finding("vanishing norm", f"{power}: was an epsilon added to the variance?")
    if origin.operation not in _DIVISIONS:
        return None
    inverse = "reciprocal" in origin.operation
    dividend, divisor = (
        None if inverse else _input(origin, "self"),
        _input(origin, "self" if inverse else "other"),
    )
    above, below = _at(origin, dividend), _at(origin, divisor)
    below = origin.constants.get("other") if divisor is None else below
    if (
        below is None
        or abs(below) >= _SMALL
        or (below != 0.0 and above is not None and abs(above) > HUGE)
    ):
        return None
    # A norm is one number for many elements, a divisor of the dividend's own shape is not.
    norm = divisor is not None and divisor.ndim > 0 and divisor.numel() < math.prod(origin.shape)
    quotient = f"{1.0 if above is None else above:g} / {below:g} is {origin.value:g}"
    if norm:
        return Finding(
            "vanishing norm", f"a divisor that many numbers share is {below:g}: {quotient}"
        )
    return Finding("division by zero", quotient)


def _exponential(origin: Origin) -> Finding | None:
    if origin.operation not in _EXPONENTIALS:
        return None
    at = _at(origin, _input(origin, "self"))
    return Finding(
        "exponential overflow", f"{origin.operation} of {_given(origin, at)} is {origin.value:g}"
    )


def _domain(origin: Origin) -> Finding | None:
    if origin.operation not in _DOMAINS:
        return None
    at = _at(origin, _input(origin, "self"))
    if origin.operation in _POWERS and (at is None or at >= 0.0 or not math.isnan(origin.value)):
        return None
    return Finding(
        "invalid argument", f"{origin.operation} of {_given(origin, at)} is {origin.value:g}"
    )


def _nothing(origin: Origin) -> Finding | None:
    source = _input(origin, "self")
    if origin.operation not in _AVERAGES or source is None or not math.isnan(origin.value):
        return None
    if not source.numel():
        return Finding(
            "division by zero",
            f"the {origin.operation} of no element: of a tensor {list(source.shape)}",
        )
    if (
        origin.operation in ("mean", "nanmean")
        or bool((source == -math.inf).any())
        or _largest(origin) > HUGE
    ):
        return None
    return Finding(
        "division by zero",
        f"the {origin.operation} of one element: it is divided by their number less one",
    )


def _normalisation(origin: Origin) -> Finding | None:
    if origin.operation not in _NORMALISATIONS or _largest(origin) > HUGE:
        return None
    variance = _input(origin, "running_var")
    if variance is not None and len(origin.index) > 1 and float(variance[origin.index[1]]) < 0:
        external = origin.externals.get("running_var")
        name = "running_var" if external is None else external.name
        return Finding(
            "corrupt weight",
            f"{name}[{origin.index[1]}] is {float(variance[origin.index[1]]):g}, no variance is"
            " below 0",
        )
    epsilon = f"{origin.constants.get('eps', 0.0):g}"
    return Finding(
        "vanishing norm",
        f"{origin.operation} of a variance of 0 with an epsilon of {epsilon} is {origin.value:g}",
    )


def _hidden_branch(origin: Origin) -> Finding | None:
    """0 * Inf where the Inf was hidden from the loss by a `where`."""
    if origin.operation not in ("mul", "mul_", "addcmul") or not math.isnan(origin.value):
        return None
    if 0.0 not in [_at(origin, t) for t in _floats(origin)]:
        return None
    return Finding(
        "masked gradient" if origin.phase == "backward" else "masked arithmetic",
        "0 was multiplied by an infinity",
    )


def _mask_arithmetic(origin: Origin) -> Finding | None:
    if not any(bool((t == -math.inf).any()) for t in _floats(origin)):
        return None
    return Finding(
        "masked arithmetic",
        f"{origin.operation} of numbers with -Inf among them is {origin.value:g}",
    )


def _low_precision(origin: Origin) -> Finding | None:
    if origin.dtype != torch.float16:
        return None
    ends = torch.finfo(torch.float16).max
    return Finding(
        "low-precision overflow",
        f"{origin.operation} of {_given(origin)} left float16, which ends at {ends:g}",
    )


def _product(origin: Origin) -> Finding | None:
    """Out of finite numbers infinity, or NaN out of such as are huge."""
    sizes = {
        label: absmax(t) for label, t in origin.inputs if t.is_floating_point() or t.is_complex()
    }
    label = max(sizes, key=lambda name: sizes[name], default="")
    largest = sizes.get(label, 0.0)
    if largest > HUGE and label in origin.externals:
        external = origin.externals[label]
        if external.kind == "data":
            return Finding("corrupt input", f"{external.name} is up to {largest:g} in size")
        if ": " in external.name:
            return Finding(
                "corrupt absmax",
                f"the quantisation statistic {external.name} is up to {largest:g}, no trained"
                " weight's is",
            )
        return Finding(
            "corrupt weight", f"{external.name} is up to {largest:g} in size, no trained weight is"
        )
    if largest <= HUGE and not math.isinf(origin.value):
        return None
    ends = (
        f", which ends at {torch.finfo(origin.dtype).max:g}"
        if origin.dtype.is_floating_point
        else ""
    )
    cause = "exploding gradient" if origin.phase == "backward" else "exploding product"
    return Finding(
        cause, f"{origin.operation} of {_given(origin)} left {dtype_name(origin.dtype)}{ends}"
    )


_RULES: tuple[Rule, ...] = (
    _beyond,
    _constant,
    _labels,
    _cast,
    _mask,
    _attention_mask,
    _written,
    _slope,
    _division,
    _exponential,
    _domain,
    _nothing,
    _normalisation,
    _hidden_branch,
    _mask_arithmetic,
    _low_precision,
    _product,
)
