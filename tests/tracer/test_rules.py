"""Causes: every rule is met by the fault that it is for, and says it with the figures that make it
one.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import npt
from npt.tracer import against, mask_check, rules, trace
from npt.tracer.verdict import CAUSES, Verdict

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
    assert found is not None and found.remedy == CAUSES[found.cause]
    return found


def zero(x: Tensor) -> Tensor:
    return x - x


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(torch.tensor([False, True, False, False]), -INF)


def ctc(
    x: Tensor, targets: Tensor, sizes: list[int], make: Callable[[Any], Any] = torch.tensor
) -> Tensor:
    """Of two samples with four frames."""
    logs = x.T.unsqueeze(-1).expand(4, 2, 6).log_softmax(-1)
    return F.ctc_loss(logs, targets, make([4, 4]), make(sizes))


def ctc_of_one(x: Tensor, targets: Tensor) -> Tensor:
    """Of a sample with four frames, without a batch."""
    logs = x[0].unsqueeze(-1).expand(4, 6).log_softmax(-1)
    return F.ctc_loss(logs, targets, torch.tensor(4), torch.tensor(len(targets)))


# The tables keep their lines: function; cause, operation, what the explanation must say.
# fmt: off
CASES: dict[Callable[[Tensor], Tensor], str] = {
    lambda x: (x * 1e5).half():
        "cast overflow; _to_copy; -100000 in float32 was cast to float16, whose maximum is 65504",
    lambda x: (x * 1e5).to(torch.float8_e5m2).float():
        "cast overflow; _to_copy; float8_e5m2, whose maximum is 57344",
    lambda x: (x.double() * 1e200).float():
        "cast overflow; _to_copy; in float64 was cast to float32",
    lambda x: x.half() * 300 * 300:
        "low-precision overflow; mul; constant 300 overflowed float16, whose maximum is 65504",
    lambda x: x / zero(x): "division by zero; div; 0.5 / 0 is inf",
    lambda x: x / 0: "division by zero; div; 0.5 / 0 is inf",
    lambda x: zero(x).reciprocal(): "division by zero; reciprocal; 1 / 0 is inf",
    lambda x: x / zero(x).norm(dim=-1, keepdim=True):
        "vanishing norm; div; by many elements is 0: 0.5 / 0 is inf",
    lambda x: x.half() / 6e-8: "division by zero; div; 0.5 / 6e-08 is inf",
    lambda x: x.half() * 1e4 / 1e-4: "division by zero; div; ",
    lambda x: x * 1e36 / 1e-4: "exploding product; div; ",
    lambda x: zero(x).rsqrt(): "vanishing norm; rsqrt; rsqrt of 0 is inf",
    lambda x: zero(x) ** -0.5: "vanishing norm; pow; pow of 0 and the constant -0.5 is inf",
    lambda x: (-(x**2)).rsqrt(): "invalid argument; rsqrt; rsqrt of -0.25 is nan",
    lambda x: (-(x**2)) ** 0.5: "invalid argument; pow; pow of -0.25 and the constant 0.5 is nan",
    lambda x: zero(x).log(): "invalid argument; log; log of 0 is -inf",
    lambda x: x.sqrt(): "invalid argument; sqrt; sqrt of -1 is nan",
    lambda x: (zero(x) + 1).logit(): "invalid argument; logit; logit of 1 is inf",
    lambda x: (x * 100).exp(): "exponential overflow; exp; exp of 200 is inf",
    lambda x: (x * 100).sinh(): "exponential overflow; sinh; sinh of -100 is -inf",
    lambda x: (x * 1e25) ** 2: "exploding product; pow; float32, whose maximum is 3.40282e+38",
    lambda x: (x + 500) ** 20: "exploding product; pow; of numbers up to 504 and the constant 20",
    lambda x: (x * 1e25) @ (x * 1e25).t(): "exploding product; mm; mm of numbers up to 4e+25",
    lambda x: (x * 1e25).bfloat16() ** 2:
        "exploding product; pow; overflowed bfloat16, whose maximum is 3.38953e+38",
    lambda x: torch.softmax(masked(x)[:, 1:2], -1):
        "fully masked row; _softmax; all 1 logits of the row are -Inf",
    lambda x: torch.softmax(masked(x), 0):
        "fully masked row; _softmax; all 2 logits of the row are -Inf",
    lambda x: F.log_softmax(masked(x), 0): "fully masked row; _log_softmax; all 2 logits",
    lambda x: masked(x) @ zero(x).t(): "masked arithmetic; mm; numbers that include -Inf",
    lambda x: masked(x) - masked(x): "masked arithmetic; sub; numbers that include -Inf",
    lambda x: masked(x) * zero(x): "masked arithmetic; mul; 0 was multiplied by infinity",
    lambda x: x * NAN: "written constant; mul; mul was given the constant nan",
    lambda x: x + torch.tensor(INF): "written constant; add; add was given the constant inf",
    lambda x: x.masked_fill(x > 2, NAN): "written constant; masked_fill; the constant nan",
    lambda x: x * torch.tensor([1.0, NAN, 1, 1]):
        "written constant; lift_fresh; Python or NumPy numbers",
    lambda x: x[:0].mean(): "division by zero; mean; the mean of no elements (shape [0, 4])",
    lambda x: x[:1].std(dim=0): "division by zero; std; the std of one element",
    lambda x: F.layer_norm(zero(x), (4,), eps=0):
        "vanishing norm; native_layer_norm; with an epsilon of 0 is nan",
    lambda x: F.rms_norm(zero(x), (4,), eps=0): "vanishing norm; rsqrt; rsqrt of 0",
    lambda x: F.cross_entropy(x, torch.full((2,), -100)):
        "no valid label; nll_loss_forward; all 2 labels are -100",
    lambda x: F.cross_entropy(x, torch.tensor([3, 3]), ignore_index=3):
        "no valid label; nll_loss_forward; all 2 labels are 3",
    lambda x: F.cross_entropy(masked(x), torch.tensor([0, 1])):
        "masked label; nll_loss_forward; of a label is -Inf",
    lambda x: ctc(x, torch.tensor([[1, 2, 3, 1, 2], [1, 1, 2, 0, 0]]), [5, 3]):
        "too few frames; _ctc_loss; sample 0 has 4 frames, but its 5 labels need 5",
    lambda x: ctc(x, torch.tensor([1, 2, 1, 1, 2, 2]), [2, 4]):
        "too few frames; _ctc_loss; sample 1 has 4 frames, but its 4 labels need 6",
    lambda x: ctc(x, torch.tensor([1, 2, 1, 1, 2, 2]), [2, 4], tuple):
        "too few frames; _ctc_loss; sample 1 has 4 frames, but its 4 labels need 6",
    lambda x: ctc_of_one(x, torch.tensor([1, 1, 2, 3])):
        "too few frames; _ctc_loss; sample 0 has 4 frames, but its 4 labels need 5",
    lambda x: torch.special.zeta(x.detach(), x.detach()):
        "unknown; special_zeta; special_zeta of numbers up to 4",
}
BACKWARD: dict[Callable[[Tensor], Tensor], str] = {
    lambda x: zero(x).abs().sqrt() + x * 0.0:
        "infinite slope; div in SqrtBackward0; sqrt has no finite derivative",
    lambda x: zero(x) ** 0.5 + x: "infinite slope; pow in PowBackward0; pow has no finite",
    lambda x: torch.acos(x * 0 + 1): "infinite slope; rsqrt in AcosBackward0; acos has no finite",
    lambda x: torch.where(x == x, x, (x * 0).sqrt()):
        "masked gradient; div in SqrtBackward0; 0 times infinity is NaN",
    lambda x: torch.where(x == x, x, (x * 0).log()):
        "masked gradient; div in LogBackward0; log itself was not finite",
    lambda x: torch.where(x == x, x, x / (x * 0)):
        "masked gradient; div in DivBackward0; div itself was not finite",
}
# fmt: on


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("function", [*CASES, *BACKWARD])
def test_the_cause_of_a_fault_is_said_with_its_figures(function) -> None:
    phase = "forward" if function in CASES else "backward"
    cause, operation, words = ({**CASES, **BACKWARD})[function].split("; ")
    found = verdict(function)
    assert (found.cause, found.operation, found.phase) == (cause, operation, phase)
    assert words in found.explanation and (found.operands or operation == "lift_fresh")


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


def test_a_huge_weight_or_input_is_the_cause_and_not_the_product() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[2, 3] = 3e38
    found = npt.trace(model, X * 100)
    assert (
        found is not None
        and found.cause == "corrupt weight"
        and "1.weight holds values up to 3e+38" in found.explanation
    )
    large = X.clone()
    large[1, 1] = 1e30
    found = npt.trace(Step(lambda x: x * 1e20), large)
    assert (
        found is not None
        and found.cause == "corrupt input"
        and "input[1, 1] was 1e+30" in found.grew
    )


def test_a_negative_running_variance_is_the_cause_and_not_a_small_epsilon() -> None:
    model = nn.BatchNorm1d(4).eval()
    model.get_buffer("running_var")[2] = -0.25
    found = npt.trace(model, run=lambda: model(X).sum())
    assert found is not None and found.cause == "corrupt weight"
    assert "running_var[2] holds -0.25, and a variance cannot be negative" in found.explanation


def test_every_cause_is_given_by_some_rule_and_has_a_remedy() -> None:
    sources = "".join(inspect.getsource(module) for module in (against, mask_check, rules, trace))
    assert all(f'"{cause}"' in sources for cause in CAUSES)
    assert all(remedy and not remedy.endswith(".") for remedy in CAUSES.values())
