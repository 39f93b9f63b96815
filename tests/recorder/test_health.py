"""The health of any one tensor: a line, or an error that says what is in it and where."""

import math

import bitsandbytes as bnb
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from npt.diagnostics import check
from npt.errors import ConfigError, NumericalError


def spoiled(dtype: torch.dtype, value: float, at: tuple[int, ...] = (1, 0)) -> Tensor:
    tensor = torch.ones(2, 3, dtype=dtype)
    tensor[at] = value
    return tensor


def test_a_healthy_tensor_is_a_line() -> None:
    row = check(torch.tensor([[1.0, -3.0], [2.0, 4.0]]), "hidden")
    assert str(row) == "hidden: float32 [2, 2], -3 to 4, mean 1, deviation 2.55, RMS 2.74"
    assert (row.min, row.max, row.count) == (-3.0, 4.0, 4)


@pytest.mark.parametrize(
    ("tensor", "line"),
    [
        (torch.tensor(2.0), "x: float32 [], 2 to 2, mean 2, deviation 0, RMS 2"),
        (torch.zeros(0, 3), "x: float32 [0, 3], no elements"),
        (torch.tensor([1, 2**40]), "x: int64 [2], 1 to 1.1e+12,"),
        (torch.tensor([True, False]), "x: bool [2], 0 to 1, mean 0.5,"),
        (torch.ones(3).to(torch.float8_e4m3fn), "x: float8_e4m3fn [3], 1 to 1,"),
        (torch.full((2,), 6e4, dtype=torch.float16), "x: float16 [2], 6e+04 to 6e+04,"),
        (torch.full((2,), 1e300, dtype=torch.float64), "x: float64 [2], 1e+300 to 1e+300,"),
        (torch.tensor([3 - 4j]), "x: complex64 [1], -4 to 3,"),
        (torch.eye(3).to_sparse(), "x: float32 [3], 1 to 1,"),
        (torch.ones(4).expand(3, 4), "x: float32 [3, 4], 1 to 1,"),
        (nn.Parameter(torch.ones(2)), "x: float32 [2], 1 to 1,"),
    ],
    ids=lambda value: str(value.dtype) if isinstance(value, Tensor) else "",
)
def test_any_tensor_has_a_line(tensor, line) -> None:
    assert str(check(tensor, "x")).startswith(line)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_that_is_not_finite_is_an_error(dtype, value) -> None:
    tensor = spoiled(dtype, value)
    with pytest.raises(NumericalError) as error:
        check(tensor, "loss of layer 3")
    counts = [int(math.isnan(value)), int(value == math.inf), int(value == -math.inf)]
    said = "{} NaN, {} +Inf, {} -Inf of 6, otherwise 1 to 1".format(*counts)
    name = str(dtype).removeprefix("torch.")
    assert str(error.value).startswith(f"loss of layer 3: {name} [2, 3], {said}")
    assert str(error.value).endswith(
        "the first at [1, 0]; to find the operation that made it, call npt.trace(model, batch)"
    )
    assert "\n" not in str(error.value)


def test_a_scalar_and_a_tensor_without_a_finite_number() -> None:
    with pytest.raises(NumericalError, match=r"^loss: float32 \[\], 1 NaN, 0 \+Inf, 0 -Inf of 1;"):
        check(torch.tensor(math.nan), "loss")
    with pytest.raises(NumericalError, match=r"^tensor: float16 \[2\], 0 NaN, 2 \+Inf, .*at \[0\]"):
        check(torch.full((2,), math.inf, dtype=torch.float16))


def test_a_4_bit_weight_is_judged_by_what_it_stands_for() -> None:
    linear = bnb.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
    linear.weight = bnb.nn.Params4bit(torch.ones(64, 64), quant_type="nf4").to("cpu")
    assert linear.weight.dtype == torch.uint8
    assert str(check(linear.weight, "weight")).startswith("weight: float32 [64, 64], 1 to 1,")
    linear.weight.quant_state.offset.fill_(math.nan)
    with pytest.raises(NumericalError, match=r"^weight: float32 \[64, 64\], 4096 NaN"):
        check(linear.weight, "weight")


def test_a_tensor_whose_numbers_cannot_be_read_is_refused() -> None:
    said = r"^x: a TwoTensor of layout .* is not supported; pass its parts or its dequantised"
    with pytest.raises(ConfigError, match=said):
        check(TwoTensor(torch.ones(2), torch.ones(2)), "x")


@pytest.mark.parametrize("value", [None, 1.0, [1.0], "x"])
def test_what_is_no_tensor_is_refused(value) -> None:
    with pytest.raises(ConfigError, match=r"^x is .*, not a tensor: pass a torch.Tensor$"):
        check(value, "x")


def test_a_tensor_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^x is float32 \[2\] on the meta device, which has no"):
        check(torch.empty(2, device="meta"), "x")


def test_looking_changes_nothing() -> None:
    tensor = torch.randn(4, 4, requires_grad=True)
    before, state = tensor.detach().clone(), torch.get_rng_state()
    check(tensor * 2, "product")
    assert torch.equal(tensor, before) and tensor.grad is None
    assert torch.equal(state, torch.get_rng_state())
    with torch.inference_mode():
        check(torch.ones(2), "x")
