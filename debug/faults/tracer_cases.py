"""Faults for the tracer to find in the embedded 4-bit model, each with its true place. Those in
other models are in `module_cases.py`.

The truth follows from how a fault is planted, never from the tracer: the changed tensor and
element, and the operation that torch runs on them. Where a product overflows, the first element is
computed here in fp64.

Shapes: the batch has 2 rows of 16 and 12 valid tokens. The local strategy gathers their N = 28 rows
and stacks the student's before the teacher's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from faults.bench import Fault, Fill, Setting, Student, module_of, no_fault
from faults.module_cases import MODULE_CASES, ModuleCase
from faults.persistent_faults import PersistentFault, frozen, statistic, weight
from faults.places import Truth
from faults.transient_faults import (
    Index,
    attribute,
    cross_entropy_of_nothing,
    eager,
    extra_loss,
    gradient_hooked,
    id_at,
    in_fp16,
    label_at,
    mask_row,
    output_of,
    reverse_kl,
    together,
    trained_head,
)
from npt.base.linear import dense_weight
from npt.batch import Batch

LOCAL = Setting(layers="2,5", windows=1)
END_TO_END = replace(LOCAL, strategy="end_to_end")
WITH_LOGITS = replace(END_TO_END, logit_kl_weight=1.0)
LEFT = replace(LOCAL, padding="left")
CLEAN = (LOCAL, END_TO_END, WITH_LOGITS, LEFT, replace(LEFT, strategy="end_to_end"))
"""Settings in which the clean model must have no verdict."""
PLACE = (0, 0)


Computed = Callable[[Student, Batch], Truth]


@dataclass(frozen=True)
class Case:
    """A planted fault.

    Attributes:
        truth: fixed, or computed from the clean student and its batch.
        fault: of the micro-batch.
        act: applied to the student first.
        plain: trace the model's own forward and loss, not a training step.
        made: the place that made the value, if the truth has none: a tracer that repeats the pass
            cannot see it.
    """

    id: str
    name: str
    group: str
    truth: Truth | Computed
    fault: Fault = no_fault
    act: PersistentFault | Callable[[Student], Any] | None = None
    setting: Setting = LOCAL
    plain: bool = False
    made: Truth | None = None


# --- changes of activations that only the tracer needs


def changed(module: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Change the output of `module`."""
    return output_of(module, lambda output, _batch: change(output))


def recomputed(module: str, index: Index) -> Fault:
    """Put a NaN into the output of `module`, only when backward recomputes it."""

    def change(output: Tensor) -> Tensor:
        again = torch._C._current_autograd_node() is not None
        at = one_hot(output, index) & again
        return output.masked_fill(at, math.nan)  # planted: recomputation

    return changed(module, change)


def once(module: str) -> Fault:
    """Return NaN from `module` at its first call only, like a bit flip in a cache."""

    @contextmanager
    def fault(student: Student, batch: Batch) -> Iterator[tuple[Batch, Fill | None]]:
        calls = 0

        def change(output: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return output * math.nan if calls == 1 else output  # planted: transient

        with changed(module, change)(student, batch) as result:
            yield result

    return fault


def zeroed_token(row: int, token: int) -> Fault:
    """Set the embedding of one token to zero."""

    def change(output: Tensor) -> Tensor:
        output = output.clone()
        output[row, token] = 0.0
        return output

    return changed("model.embed_tokens", change)


class Amplify(torch.autograd.Function):
    """The identity. Its backward multiplies one element of the gradient by 1e38 twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, row: int, column: int) -> Tensor:
        ctx.at = (row, column)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        factor = torch.ones_like(gradients[0])
        factor[ctx.at] = 1e38
        return gradients[0] * factor * factor, None, None  # planted: own-backward


def one_hot(like: Tensor, index: Index) -> Tensor:
    """Return a boolean tensor that is True at one element."""
    at = torch.zeros(like.shape, dtype=torch.bool)
    at[index] = True
    return at


def put(x: Tensor, index: Index, value: float) -> Tensor:
    """Replace one element of `x` in one differentiable operation."""
    return torch.where(one_hot(x, index), value, x)


def applied(
    function: Callable[[Tensor], Tensor], index: Index, value: float
) -> Callable[[Tensor], Tensor]:
    """Apply `function` to harmless numbers, and to `value` at one element."""

    def change(x: Tensor) -> Tensor:
        harmless = put(x.abs().clamp(0.1, 1.0), index, value)
        # planted: forward-exp, forward-log, forward-sqrt, decoy, left-padding
        return function(harmless)

    return change


def product_in_fp16(x: Tensor) -> Tensor:
    """Compute 300 * 300 in fp16 at one element."""
    half = put(x, (3, 17), 300.0).half()
    return (half * half).float()  # planted: product-fp16


def unit_vectors(x: Tensor) -> Tensor:
    """Divide [B, T, D] states by their norms, with one token's state set to zeros."""
    at = torch.ones(x.shape)
    at[0, 6] = 0.0
    return (x * at) / (x * at).norm(dim=-1, keepdim=True)  # planted: unit-vector


def hidden_log(x: Tensor) -> Tensor:
    """Return x + x log x with its 0 log 0 masked by a `where` afterwards, a common mistake."""
    y = x * ~one_hot(x, (4, 3))
    return x + torch.where(y == 0, 0.0, y * y.abs().log())  # planted: hidden-log


def root_at_zero(x: Tensor) -> Tensor:
    """Return x + sqrt(0) at one element, where the root's derivative is infinite."""
    zero = torch.where(one_hot(x, (4, 3)), x - x.detach(), 1.0)
    return x + torch.sqrt(zero)  # planted: slope-sqrt


def decoy(x: Tensor) -> Tensor:
    """Return x through a `where` that masks a NaN."""
    return torch.where(x == x, x, (x - x) / (x - x))


def written(gradient: Tensor) -> Tensor:
    at = torch.tensor([2]), torch.tensor([5])
    return gradient.index_put(at, torch.tensor(math.nan))  # planted: gradient-hook


def with_nan(x: Tensor) -> Tensor:
    return x.masked_fill(one_hot(x, (2, 9)), math.nan)  # planted: written


def mean_of_none(student: Student, _batch: Batch) -> Tensor:
    nothing = student.parameters["model.layers.2.npt.A"].sum() * 0
    return nothing / torch.zeros(())  # planted: mean-of-none


def embedding_of(row: int, token: int, column: int, value: float) -> tuple[Computed, Any]:
    """Return truth and act for the embedding of one token of the batch."""

    def at(batch: Batch) -> Index:
        return int(batch.input_ids[row, token]), column

    def act(student: Student) -> None:
        frozen("model.embed_tokens.weight", at(student.setting.batch(PLACE)), value)(student)

    def truth(_student: Student, batch: Batch) -> Truth:
        return Truth("state", "model.embed_tokens", "embedding", at(batch), "corrupt weight")

    return truth, act


def overflow_of(fault: PersistentFault) -> Computed:
    """Return the truth of a fault in a weight's statistic: the first element of the product of the
    module's input and weight that overflows fp32.
    """
    module = fault.name.split(": ")[0]

    def truth(student: Student, batch: Batch) -> Truth:
        layer, seen = module_of(student, module), []
        handle = layer.register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0].detach().double())
        )
        student.fill(batch)
        handle.remove()
        clean = dense_weight(layer)
        fault(student)
        product = F.linear(seen[0], dense_weight(layer).double())
        assert not torch.equal(clean, dense_weight(layer))
        (first,) = (product.abs() > torch.finfo(torch.float32).max).nonzero()[:1].tolist()
        token = (first[0], first[1])
        return Truth("forward", module, "gemm_4bit", tuple(first), "corrupt absmax", token)

    return truth


def first_underflow(student: Student, batch: Batch) -> Truth:
    """Return the truth of `reverse_kl`: the student's first probability that underflows to 0."""
    with torch.no_grad():
        logits = student.model(batch.input_ids, attention_mask=batch.attention_mask).logits
    (first,) = (torch.softmax(logits / 0.05, dim=-1) == 0).nonzero()[:1].tolist()
    return Truth("forward", "", "log", tuple(first), "masked gradient", (first[0], first[1]))


# --- the cases

ACT = "model.layers.5.mlp.act_fn"
DOWN = "model.layers.5.mlp.down_proj"
ATTENTION = "model.layers.1.self_attn"
HUGE_ABSMAX = statistic(f"{ATTENTION}.q_proj: state2.absmax", (0,), 1e38)
NAN, INF = math.nan, math.inf

# Unformatted tables: the formatter would write one word a line.
# fmt: off


def _state() -> list[Case]:
    of_token, to_token = embedding_of(0, 4, 11, INF)
    norm, up = "model.layers.3.post_attention_layernorm", "model.layers.3.mlp.up_proj"
    return [
        Case("adapter-nan", "NaN in A of layer 5", "weight",
             Truth("state", "model.layers.5.npt", "mm", (1, 7), "corrupt weight", (0, 0)),
             act=weight("model.layers.5.npt.A", (1, 7), NAN)),
        Case("adapter-inf", "Inf in M.gate of layer 2, student's stream", "weight",
             Truth("state", "model.layers.2.npt.M", "mm", (3, 2), "corrupt weight", (0, 0)),
             act=weight("model.layers.2.npt.M.gate", (3, 2), INF), setting=END_TO_END),
        Case("norm-weight", "NaN in an RMSNorm's weight", "weight",
             Truth("state", norm, "mul", (9,), "corrupt weight", (0, 0)),
             act=frozen(f"{norm}.weight", (9,), NAN)),
        Case("embedding-row", "Inf in the embedding of one token", "weight",
             of_token, act=to_token),
        Case("head-weight", "NaN in lm_head, the model's own loss", "weight",
             Truth("state", "lm_head", "_to_copy", (5, 3), "corrupt weight"),
             act=frozen("lm_head.weight", (5, 3), NAN), plain=True),
        Case("absmax-nan", "NaN in a 4-bit weight's second-level absmax", "absmax",
             Truth("state", up, "gemm_4bit", (1,), "corrupt absmax", (0, 0)),
             act=statistic(f"{up}: state2.absmax", (1,), NAN)),
        Case("offset-inf", "Inf in a 4-bit weight's offset", "absmax",
             Truth("state", DOWN, "gemm_4bit", (), "corrupt absmax", (0, 0)),
             act=statistic(f"{DOWN}: offset", (), INF)),
        Case("absmax-huge", "a finite 1e38 in a 4-bit weight's absmax", "absmax",
             overflow_of(HUGE_ABSMAX), act=HUGE_ABSMAX),
    ]


def _low_precision_and_masks() -> list[Case]:
    return [
        Case("cast-fp16", "1e5 cast to fp16 inside a 4-bit layer", "cast",
             Truth("forward", DOWN, "_to_copy", (3, 17), "cast overflow", (0, 3)),
             in_fp16(DOWN, lambda x: put(x, (3, 17), 1e5))),
        Case("product-fp16", "300 * 300 in fp16", "cast",
             Truth("forward", ACT, "mul", (3, 17), "low-precision overflow", (0, 3)),
             changed(ACT, product_in_fp16)),
        *(Case(f"mask-{form.split('.')[0]}",
               f"a valid token's mask row all {lowest}: finite but wrong", "mask",
               Truth("data", ATTENTION, "attention_mask", (0, 5), "fully masked row", (0, 5)),
               mask_row(1, 0, 5, form))
          for form, lowest in (("bool", "False"), ("finfo.min", "finfo.min"))),
        Case("mask-inf", "a valid token's mask row all -Inf, attention written out", "mask",
             Truth("forward", ATTENTION, "_softmax", (0, 0, 5, 0), "fully masked row", (0, 5)),
             eager(mask_row(1, 0, 5, "-inf"))),
    ]


def _divisions_and_products() -> list[Case]:
    norm, projection = "model.layers.0.input_layernorm", "model.layers.3.self_attn.o_proj"
    return [
        Case("norm-epsilon", "RMSNorm without epsilon on a token whose state is 0", "division",
             Truth("forward", norm, "rsqrt", (0, 4, 0), "vanishing norm", (0, 4)),
             together(attribute(norm, "variance_epsilon", 0.0), zeroed_token(0, 4))),
        Case("unit-vector", "a vector divided by its norm of 0", "division",
             Truth("forward", projection, "div", (0, 6, 0), "vanishing norm", (0, 6)),
             changed(projection, unit_vectors)),
        Case("mean-of-none", "a mean over no tokens", "division",
             Truth("forward", "", "div", (), "division by zero"), extra_loss(mean_of_none)),
        Case("no-labels", "cross-entropy with every label ignored", "data",
             Truth("forward", "", "nll_loss_forward", (), "no valid label"),
             extra_loss(cross_entropy_of_nothing("mean"))),
        Case("residual-amplified", "the residual stream times 1e25 after layer 4", "explosion",
             Truth("forward", "model.layers.5", "pow", (0, 0), "exploding product", (0, 0)),
             changed("model.layers.4", lambda x: x * 1e25)),
        Case("attention-logits", "queries and keys times 1e25: the attention logits overflow",
             "explosion", Truth("forward", ATTENTION, "bmm", (0, 0, 0), "exploding product"),
             eager(together(changed(f"{ATTENTION}.q_proj", lambda x: x.abs() * 1e25),
                            changed(f"{ATTENTION}.k_proj", lambda x: x.abs() * 1e25)))),
        Case("modulation-huge", "residual times modulation overflows fp32", "explosion",
             Truth("forward", "model.layers.2.mlp", "mul", (0, 7), "exploding product", (0, 0)),
             together(changed("model.layers.2.mlp.act_fn", lambda x: put(x, (0, 7), 1e30)),
                      changed("model.layers.2.mlp.up_proj", lambda x: put(x, (0, 7), 1e30)))),
    ]


def _functions() -> list[Case]:
    invalid = "invalid argument"
    functions = [
        ("exp", "exp(100)", 100.0, torch.exp, "exponential overflow"),
        ("log", "the logarithm of 0", 0.0, torch.log, invalid),
        ("sqrt", "the square root of a negative number", -1.0, torch.sqrt, invalid),
    ]
    return [
        *(Case(f"forward-{id}", name, "forward", Truth("forward", ACT, id, (2, 9), cause, (0, 2)),
               changed(ACT, applied(function, (2, 9), value)))
          for id, name, value, function, cause in functions),
        Case("written", "a hook that writes NaN into an activation", "forward",
             Truth("forward", ACT, "masked_fill", (2, 9), "written constant", (0, 2)),
             changed(ACT, with_nan)),
        Case("decoy", "a NaN masked by where, before the real one", "forward",
             Truth("forward", ACT, "log", (2, 9), invalid, (0, 2)),
             together(changed("model.layers.1.mlp.act_fn", decoy),
                      changed(ACT, applied(torch.log, (2, 9), 0.0)))),
        # row 1 begins with 4 padded positions, so gathered row 16 is its token 4
        Case("left-padding", "square root of a negative number, left padding", "forward",
             Truth("forward", ACT, "sqrt", (16, 9), invalid, (1, 4)),
             changed(ACT, applied(torch.sqrt, (16, 9), -1.0)), setting=LEFT),
    ]


def _backward() -> list[Case]:
    return [
        Case("slope-sqrt", "the derivative of a square root at 0", "backward",
             Truth("backward", ACT, "div in SqrtBackward0", (4, 3), "infinite slope", (0, 4)),
             changed(ACT, root_at_zero)),
        Case("hidden-log", "x log x at 0, masked by a later where", "backward",
             Truth("forward", ACT, "log", (4, 3), "masked gradient", (0, 4)),
             changed(ACT, hidden_log)),
        Case("gradient-hook", "a hook that writes NaN into a gradient", "backward",
             Truth("backward", "model.layers.5.npt", "index_put", (2, 5), "written constant"),
             gradient_hooked(written, "model.layers.5.npt.A")),
        Case("own-backward", "a custom function whose backward overflows fp32", "backward",
             Truth("backward", ACT, "mul", (4, 3), "exploding gradient", (0, 4)),
             changed(ACT, lambda x: Amplify.apply(x, 4, 3))),
        Case("reverse-kl", "reverse KL at T = 0.05: finite loss, NaN gradient", "backward",
             first_underflow, extra_loss(reverse_kl)),
        Case("recomputation", "NaN in the recomputed logits only", "backward",
             Truth("recomputation", "lm_head", "masked_fill", (3, 5), "written constant", (0, 3)),
             trained_head(recomputed("lm_head", (3, 5))), setting=WITH_LOGITS),
    ]


def _data() -> list[Case]:
    return [
        Case("token-id", "a token id outside the vocabulary", "data",
             Truth("data", "", "embedding", (1, 3), "token id", (1, 3)), id_at(1, 3, 9999)),
        Case("label", "a label outside the vocabulary", "data",
             Truth("data", "", "cross_entropy", (0, 2), "token id", (0, 2)),
             label_at(0, 2, -7), plain=True),
        Case("transient", "NaN at the first call only", "transient",
             Truth("forward", "", "", (), "not repeatable"), once("model.layers.3"),
             made=Truth("forward", "model.layers.3", "mul", (), "not repeatable")),
    ]


# fmt: on


def all_cases() -> list[Case | ModuleCase]:
    """Return every planted fault. Ids are unique."""
    groups = (_state, _low_precision_and_masks, _divisions_and_products, _functions, _backward)
    embedded = [case for group in (*groups, _data) for case in group()]
    return [*embedded, *MODULE_CASES]
