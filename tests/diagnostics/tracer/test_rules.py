"""Causes: every rule is met by the fault that it is for, and says it with the figures that make it
one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional as F

import npt
from npt.diagnostics.tracer import rules
from npt.diagnostics.tracer.causes import CAUSES
from npt.diagnostics.tracer.operations import External, Origin
from npt.diagnostics.tracer.rules import element_at
from npt.diagnostics.tracer.source_location import Place
from npt.diagnostics.tracer.verdict import Verdict

NAN, INF = math.nan, math.inf
X = torch.tensor([[0.5, -1.0, 2.0, 3.0], [1.0, 4.0, -2.0, 0.25]])


class Step(nn.Module):
    """A weight of ones times the input, and a function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


def verdict(function: Callable[[Tensor], Tensor], x: Tensor = X) -> Verdict:
    model = Step(function)
    found = npt.trace(model, run=lambda: model(x).sum())
    assert found is not None
    assert found.remedy == CAUSES[found.cause]
    return found


def zero(x: Tensor) -> Tensor:
    return x - x


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(torch.tensor([False, True, False, False]), -INF)


CASES: dict[str, tuple[Callable[[Tensor], Tensor], str, str, str]] = {
    # function, cause, operation, what the explanation must say
    "cast": (
        lambda x: (x * 1e5).half(),
        "cast overflow",
        "_to_copy",
        "-100000 in float32 was cast to float16, which ends at 65504",
    ),
    "cast to fp8": (
        lambda x: (x * 1e5).to(torch.float8_e5m2).float(),
        "cast overflow",
        "_to_copy",
        "float8_e5m2, which ends at 57344",
    ),
    "cast from fp64": (
        lambda x: (x.double() * 1e200).float(),
        "cast overflow",
        "_to_copy",
        "in float64 was cast to float32",
    ),
    "fp16": (
        lambda x: x.half() * 300 * 300,
        "low-precision overflow",
        "mul",
        "and the constant 300 left float16, which ends at 65504",
    ),
    "0/0 of its own shape": (lambda x: x / zero(x), "division by zero", "div", "0.5 / 0 is inf"),
    "0 as a number": (lambda x: x / 0, "division by zero", "div", "0.5 / 0 is inf"),
    "reciprocal": (
        lambda x: zero(x).reciprocal(),
        "division by zero",
        "reciprocal",
        "1 / 0 is inf",
    ),
    "shared divisor": (
        lambda x: x / zero(x).norm(dim=-1, keepdim=True),
        "vanishing norm",
        "div",
        "share is 0: 0.5 / 0 is inf",
    ),
    "tiny divisor in fp16": (
        lambda x: x.half() / 6e-8,
        "division by zero",
        "div",
        "0.5 / 6e-08 is inf",
    ),
    "rsqrt": (lambda x: zero(x).rsqrt(), "vanishing norm", "rsqrt", "rsqrt of 0 is inf"),
    "negative power": (
        lambda x: zero(x) ** -0.5,
        "vanishing norm",
        "pow",
        "pow of 0 and the constant -0.5 is inf",
    ),
    "rsqrt of a negative": (
        lambda x: (-(x**2)).rsqrt(),
        "invalid argument",
        "rsqrt",
        "rsqrt of -0.25 is nan",
    ),
    "root by power": (
        lambda x: (-(x**2)) ** 0.5,
        "invalid argument",
        "pow",
        "pow of -0.25 and the constant 0.5 is nan",
    ),
    "log": (lambda x: zero(x).log(), "invalid argument", "log", "log of 0 is -inf"),
    "log of a negative": (lambda x: x.log(), "invalid argument", "log", "log of -1 is nan"),
    "sqrt": (lambda x: x.sqrt(), "invalid argument", "sqrt", "sqrt of -1 is nan"),
    "acos": (lambda x: x.acos(), "invalid argument", "acos", "acos of 2 is nan"),
    "logit": (lambda x: (zero(x) + 1).logit(), "invalid argument", "logit", "logit of 1 is inf"),
    "exp": (lambda x: (x * 100).exp(), "exponential overflow", "exp", "exp of 200 is inf"),
    "sinh": (lambda x: (x * 100).sinh(), "exponential overflow", "sinh", "sinh of -100 is -inf"),
    "square": (
        lambda x: (x * 1e25) ** 2,
        "exploding product",
        "pow",
        "left float32, which ends at 3.40282e+38",
    ),
    "power of small numbers": (
        lambda x: (x + 500) ** 20,
        "exploding product",
        "pow",
        "of numbers up to 504 and the constant 20",
    ),
    "CTC of too long a target": (
        lambda x: torch.nn.functional.ctc_loss(
            x.log_softmax(-1)[:2, None], torch.tensor([[1, 1]]), (2,), (2,)
        ),
        "impossible alignment",
        "_ctc_loss",
        "is infinite",
    ),
    "matmul": (
        lambda x: (x * 1e25) @ (x * 1e25).t(),
        "exploding product",
        "mm",
        "mm of numbers up to 4e+25",
    ),
    "bf16": (
        lambda x: (x * 1e25).bfloat16() ** 2,
        "exploding product",
        "pow",
        "left bfloat16, which ends at 3.38953e+38",
    ),
    "masked row": (
        lambda x: torch.softmax(masked(x)[:, 1:2], -1),
        "fully masked row",
        "_softmax",
        "all 1 logits of the row are -Inf",
    ),
    "masked column": (
        lambda x: torch.softmax(masked(x), 0),
        "fully masked row",
        "_softmax",
        "all 2 logits of the row are -Inf",
    ),
    "masked log-softmax": (
        lambda x: F.log_softmax(masked(x), 0),
        "fully masked row",
        "_log_softmax",
        "all 2 logits",
    ),
    "mask in arithmetic": (
        lambda x: masked(x) @ zero(x).t(),
        "masked arithmetic",
        "mm",
        "numbers with -Inf among them",
    ),
    "mask minus mask": (
        lambda x: masked(x) - masked(x),
        "masked arithmetic",
        "sub",
        "numbers with -Inf among them",
    ),
    "mask times 0": (
        lambda x: masked(x) * zero(x),
        "masked arithmetic",
        "mul",
        "0 was multiplied by an infinity",
    ),
    "constant": (lambda x: x * NAN, "written constant", "mul", "mul was given the constant nan"),
    "constant tensor": (
        lambda x: x + torch.tensor(INF),
        "written constant",
        "add",
        "add was given the constant inf",
    ),
    "filled": (
        lambda x: x.masked_fill(x > 2, NAN),
        "written constant",
        "masked_fill",
        "the constant nan",
    ),
    "made of numbers": (
        lambda x: x * torch.tensor([1.0, NAN, 1, 1]),
        "written constant",
        "lift_fresh",
        "Python's or numpy's numbers",
    ),
    "mean of none": (
        lambda x: x[:0].mean(),
        "division by zero",
        "mean",
        "the mean of no element: of a tensor [0, 4]",
    ),
    "deviation of one": (
        lambda x: x[:1].std(dim=0),
        "division by zero",
        "std",
        "the std of one element",
    ),
    "layer norm": (
        lambda x: F.layer_norm(zero(x), (4,), eps=0),
        "vanishing norm",
        "native_layer_norm",
        "with an epsilon of 0 is nan",
    ),
    "RMS norm": (
        lambda x: F.rms_norm(zero(x), (4,), eps=0),
        "vanishing norm",
        "rsqrt",
        "rsqrt of 0",
    ),
    "no label": (
        lambda x: F.cross_entropy(x, torch.full((2,), -100)),
        "no valid label",
        "nll_loss_forward",
        "all 2 labels are -100",
    ),
    "no label, another index": (
        lambda x: F.cross_entropy(x, torch.tensor([3, 3]), ignore_index=3),
        "no valid label",
        "nll_loss_forward",
        "all 2 labels are 3",
    ),
    "weights of 0": (
        lambda x: F.cross_entropy(x, torch.tensor([1, 1]), torch.tensor([1.0, 0, 1, 1])),
        "division by zero",
        "nll_loss_forward",
        "the class weights of all 2 labels are 0",
    ),
    "masked label": (
        lambda x: F.cross_entropy(masked(x), torch.tensor([0, 1])),
        "masked label",
        "nll_loss_forward",
        "log-probability is -Inf",
    ),
    "complex": (
        lambda x: torch.view_as_real(torch.complex(x, x) / torch.complex(zero(x), x - x)),
        "division by zero",
        "div",
        " / 0 is ",
    ),
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("case", CASES)
def test_the_cause_of_a_forward_fault_is_said_with_its_figures(case) -> None:
    function, cause, operation, words = CASES[case]
    found = verdict(function)
    assert (found.cause, found.operation, found.phase) == (cause, operation, "forward")
    assert words in found.explanation


BACKWARD: dict[str, tuple[Callable[[Tensor], Tensor], str, str, str]] = {
    "root of 0": (
        lambda x: zero(x).abs().sqrt() + x * 0.0,
        "infinite slope",
        "div in SqrtBackward0",
        "sqrt has no finite derivative",
    ),
    "power of 0": (
        lambda x: zero(x) ** 0.5 + x,
        "infinite slope",
        "pow in PowBackward0",
        "pow has no finite derivative",
    ),
    "arc cosine of 1": (
        lambda x: torch.acos(x * 0 + 1),
        "infinite slope",
        "rsqrt in AcosBackward0",
        "acos has no finite derivative",
    ),
    "hidden root": (
        lambda x: torch.where(x == x, x, (x * 0).sqrt()),
        "masked gradient",
        "div in SqrtBackward0",
        "0 times infinity is NaN",
    ),
    "hidden logarithm": (
        lambda x: torch.where(x == x, x, (x * 0).log()),
        "masked gradient",
        "div in LogBackward0",
        "log itself gave no finite",
    ),
    "hidden quotient": (
        lambda x: torch.where(x == x, x, x / (x * 0)),
        "masked gradient",
        "div in DivBackward0",
        "div itself gave no finite",
    ),
}


@pytest.mark.parametrize("case", BACKWARD)
def test_the_cause_of_a_backward_fault_is_said(case) -> None:
    function, cause, operation, words = BACKWARD[case]
    found = verdict(function)
    assert (found.cause, found.operation, found.phase) == (cause, operation, "backward")
    assert words in found.explanation


def test_a_number_hidden_in_forward_and_met_in_backward_is_masked() -> None:
    found = verdict(lambda x: torch.where(x == x, x, (x * 0).log() * x))
    assert (found.cause, found.operation, found.phase) == ("masked gradient", "log", "forward")
    assert "the loss does not show it" in found.explanation


def test_a_number_that_reached_an_output_was_not_hidden() -> None:
    found = npt.trace(Step(lambda x: zero(x).log()), X)
    assert found is not None and (found.cause, found.reached) == ("invalid argument", "output")


def test_too_large_gradients_explode_and_in_fp16_lack_precision() -> None:
    class Amplify(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor):
            return gradient * ctx.factor * ctx.factor, None

    found = verdict(lambda x: Amplify.apply(x, 1e30))
    assert (found.cause, found.phase, found.operation) == ("exploding gradient", "backward", "mul")
    assert found.source.endswith("gradient * ctx.factor * ctx.factor")
    found = verdict(lambda x: Amplify.apply(x.half(), 1e4).float())
    assert (found.cause, found.phase) == ("low-precision overflow", "backward")


def test_a_mask_without_a_key_is_named_in_fused_kernels_too() -> None:
    def origin(mask: Tensor, index: tuple[int, ...]) -> Origin:
        return Origin(
            0,
            0,
            "_scaled_dot_product_flash_attention_for_cpu",
            "",
            None,
            "forward",
            Place(),
            (2, 3, 4, 8),
            torch.float32,
            index,
            NAN,
            ((2, 3, 4, 8), index),
            inputs=[("query", torch.ones(2, 3, 4, 8)), ("attn_mask", mask)],
        )

    masks = [
        torch.zeros(2, 1, 4, 5),
        torch.zeros(4, 5),
        torch.zeros(3, 4, 5),
        torch.zeros(2, 3, 1, 5),
    ]
    for mask in masks:
        assert rules._attention_mask(origin(mask, (1, 2, 3, 0))) is None
        row = mask[
            tuple(
                0 if size == 1 else i
                for size, i in zip(mask.shape[:-1], (1, 2, 3)[-(mask.ndim - 1) :], strict=True)
            )
        ]
        row.fill_(-INF)
        found = rules.explain(origin(mask, (1, 2, 3, 0)))
        assert found.cause == "fully masked row" and "none of 5 keys" in found.explanation
        assert rules.explain(origin(mask == 0, (1, 2, 3, 0))).cause == "fully masked row"
    assert rules.explain(origin(torch.zeros(2, 1, 4, 5), (0, 0, 0, 0))).cause == "unknown"


def test_a_negative_running_variance_is_a_corrupt_buffer() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4)).eval()
    model[0].running_var[2] = -1.0
    found = npt.trace(model, X)
    assert found is not None and found.cause == "corrupt weight"
    assert "0.running_var[2] is -1" in found.explanation


def test_a_huge_weight_or_input_is_the_cause_and_not_the_product() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[2, 3] = 3e38
    found = npt.trace(model, X * 100)
    assert (
        found is not None
        and found.cause == "corrupt weight"
        and "1.weight is up to 3e+38" in found.explanation
    )
    large = X.clone()
    large[1, 1] = 1e30
    found = npt.trace(Step(lambda x: x * 1e20), large)
    assert (
        found is not None
        and found.cause == "corrupt input"
        and "input[1, 1] was 1e+30" in found.grew
    )


def test_what_no_rule_knows_is_unknown_and_shows_its_figures() -> None:
    found = verdict(lambda x: torch.special.zeta(x.detach(), x.detach()))
    assert found.cause == "unknown" and found.explanation.startswith(
        "special_zeta of numbers up to 4"
    )
    assert found.operands


NAMES = sorted(
    {name for value in vars(rules).values() if isinstance(value, frozenset) for name in value}
    | {
        "nll_loss_forward",
        "nll_loss2d_forward",
        "_scaled_dot_product_flash_attention",
        "mul",
        "addcmul",
        "mm",
        "made_up",
    }
)
LABELS = [
    "self",
    "other",
    "input",
    "target",
    "weight",
    "attn_mask",
    "running_var",
    "src",
    "exponent",
    "tensors[0]",
]
DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e5m2,
]
VALUES = [0.0, 1.0, -1.0, -INF, 3e38, 1e-40, -100.0]
SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(data=st.data())
@settings(deadline=None, max_examples=150, derandomize=True)
def test_no_rule_breaks_whatever_went_in(data) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), max_size=4).map(tuple))
    inputs = []
    for label in data.draw(st.lists(st.sampled_from(LABELS), max_size=4, unique=True)):
        size = data.draw(st.one_of(st.just(shape), SHAPES))
        filled = torch.full(size, data.draw(st.sampled_from(VALUES)), dtype=torch.float64)
        inputs.append(
            (
                label,
                (
                    filled.nan_to_num().to(torch.int64) % 3
                    if label == "target"
                    else filled.to(data.draw(st.sampled_from(DTYPES)))
                ),
            )
        )
    external = External("m: absmax", data.draw(st.sampled_from(["state", "data"])), torch.ones(1))
    origin = Origin(
        number=0,
        output=0,
        operation=data.draw(st.sampled_from(NAMES)),
        node=data.draw(st.sampled_from(["", "SqrtBackward0", "MmBackward0"])),
        sequence=None,
        phase=data.draw(st.sampled_from(["forward", "backward", "recomputation"])),
        place=Place(),
        shape=shape,
        dtype=data.draw(st.sampled_from(DTYPES)),
        index=tuple(data.draw(st.integers(0, n - 1)) for n in shape),
        value=data.draw(st.sampled_from([NAN, INF, -INF, 1e9])),
        shown=(shape, ()),
        hid=data.draw(st.booleans()),
        inputs=inputs,
        constants=data.draw(
            st.dictionaries(
                st.sampled_from(["other", "exponent", "dim", "eps"]),
                st.sampled_from([0, -1, 0.5, NAN]),
            )
        ),
        externals={label: external for label, _ in inputs if data.draw(st.booleans())},
    )
    finding = rules.explain(origin)
    assert finding.cause in CAUSES and finding.explanation
    assert rules.hidden(finding).cause in CAUSES


def test_an_overflow_of_a_huge_dividend_is_no_division_by_zero() -> None:
    assert verdict(lambda x: x * 1e36 / 1e-4).cause == "exploding product"
    assert verdict(lambda x: x.half() * 1e4 / 1e-4).cause == "division by zero"


def test_every_named_cause_has_a_remedy_and_every_remedy_a_cause() -> None:
    named = set()
    for module in (rules, importlib.import_module("npt.diagnostics.tracer.trace")):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value in CAUSES
            ):
                named.add(node.value)
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "Reason"
                and isinstance(node.args[0], ast.Constant)
            ):
                assert node.args[0].value in CAUSES
    assert named == set(CAUSES)
    assert all(remedy and not remedy.endswith(".") for remedy in CAUSES.values())


def test_an_element_is_found_under_broadcasting() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert element_at(x, (4, 2, 3), (3, 1, 2)) == 5.0
    assert element_at(x[:, :1], (2, 3), (1, 2)) == 3.0
    assert element_at(torch.tensor(7.0), (2, 3), (1, 2)) == 7.0
    assert element_at(x, (3, 2), (1, 1)) is None
    assert element_at(x, (3,), (1,)) is None
    assert element_at(x.to_sparse(), (2, 3), (1, 1)) is None
