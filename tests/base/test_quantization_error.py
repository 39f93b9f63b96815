import math

import pytest
import torch
from torch import nn

from npt.adapters.attach import attach
from npt.adapters.converted import decoder_layers
from npt.base import quantization_error as errors
from npt.base.quantization_error import (
    PRECISIONS,
    choose_precision,
    product_errors,
    set_matmul_precision,
)
from npt.base.rows import set_rows

KINDS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
EPS = 2.0**-24


@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
def test_fp32_products_are_exact_to_rounding_and_of_every_kind(load_model, quantization):
    model = load_model(quantization)
    attach(model)
    found = product_errors(model)
    assert tuple(found) == PRECISIONS and set(found["highest"]) == set(found["high"]) == KINDS
    # sums of at most 128 products: each rounding is half a unit, and they do not all point one way
    assert all(0 < error < 10 * EPS for error in found["highest"].values())


def test_the_setting_and_the_random_state_are_left_as_they_were(load_model, monkeypatch):
    model, seen = load_model(), []
    for setting in ("high", "highest"):
        torch.set_float32_matmul_precision(setting)
        state = torch.get_rng_state()
        try:
            product_errors(model)
            assert torch.get_float32_matmul_precision() == setting
            assert torch.equal(torch.get_rng_state(), state)
        finally:
            torch.set_float32_matmul_precision("highest")

    def failing(module: nn.Module) -> float:
        seen.append(torch.get_float32_matmul_precision())
        if len(seen) > 10:
            raise RuntimeError("no")
        return 0.0

    monkeypatch.setattr(errors, "_error", failing)
    with pytest.raises(RuntimeError):
        product_errors(model)
    assert seen == ["highest"] * 8 + ["high"] * 3  # each kind under each setting
    assert torch.get_float32_matmul_precision() == "highest"


def test_biases_and_rows_are_part_of_the_product(load_model):
    model = load_model()
    mlp = decoder_layers(model)[0].mlp
    mlp.up_proj.bias = nn.Parameter(torch.randn(128), requires_grad=False)
    set_rows(mlp.gate_proj, (torch.rand(128) + 0.5, torch.randn(128)))
    assert all(error < 10 * EPS for error in product_errors(model)["highest"].values())


EXACT = {"up_proj": 2e-7, "lm_head": 3e-7}


@pytest.mark.parametrize(
    ("high", "taken", "why"),
    [
        (EXACT, "highest", "the device has no faster product for high"),
        (
            {"up_proj": 3e-4, "lm_head": 2.9e-4},
            "high",
            "products are off by at most 3.0e-04 of their size (2.0e-07 under highest)",
        ),
        (
            {"up_proj": 2.3e-3, "lm_head": 3e-4},
            "highest",
            "a product of up_proj is off by 2.3e-03 of its size, more than 1e-03",
        ),
        ({"up_proj": 3e-4, "lm_head": math.nan}, "highest", "a product of lm_head is off by nan"),
    ],
)
def test_auto_takes_high_where_it_changes_something_and_little(high, taken, why):
    found, reason = choose_precision({"highest": EXACT, "high": high})
    assert found == taken and why in reason


def test_products_that_are_in_16_bit_anyway_do_not_count_against_high():
    exact = {"up_proj": 2.8e-3, "lm_head": 3e-7}
    assert choose_precision({"highest": exact, "high": {**exact, "lm_head": 3e-4}})[0] == "high"


def test_auto_changes_nothing_on_the_cpu(load_model):
    model = load_model()
    for asked in ("high", "auto"):
        assert set_matmul_precision(asked, model) is None
        assert torch.get_float32_matmul_precision() == {"high": "high", "auto": "highest"}[asked]
