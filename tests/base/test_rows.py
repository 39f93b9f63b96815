import pytest
import torch
from torch import nn
from torch.testing import assert_close

import npt
from npt.base.linear import UpcastLinear, dense_weight
from npt.base.rows import RowScaled, rows_of, set_rows
from npt.errors import ModelError

NAME = "model.layers.1.mlp.gate_proj"


def some_rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 0.5 + torch.rand(count, generator=generator), torch.randn(count, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
def test_the_product_is_that_of_a_dense_layer_with_scaled_rows(load_model, quantization):
    module = load_model(quantization).get_submodule(NAME)
    scale, bias = some_rows(module.out_features)
    x = torch.randn(3, 5, module.in_features)
    expected = x.double() @ (scale[:, None] * dense_weight(module)).double().T + bias
    set_rows(module, (scale, bias))
    # sums of 64 products in fp32 against fp64
    assert_close(module(x).double(), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_taking_the_rows_away_gives_the_layer_back_bit_for_bit(load_model, batch, quantization):
    model = load_model(quantization)
    module = model.get_submodule(NAME)
    before, kind, names = npt.base_hash(model), type(module), list(model.state_dict())
    output = model(batch.input_ids).logits
    set_rows(module, some_rows(module.out_features))
    assert isinstance(module, RowScaled) and isinstance(module, kind)
    assert not torch.equal(model(batch.input_ids).logits, output)
    # Packed bytes and names are as they were while the rows are there.
    assert npt.base_hash(model) == before and list(model.state_dict()) == names
    set_rows(module, None)
    assert type(module) is kind and rows_of(module) is None and not hasattr(module, "row_scale")
    assert torch.equal(model(batch.input_ids).logits, output)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_16_bit_layer_keeps_its_dtype(dtype):
    layer = nn.Linear(8, 4).to(dtype)
    x = torch.randn(2, 8, dtype=dtype)
    scale, bias = some_rows(4)
    plain = layer(x)
    set_rows(layer, (scale, bias))
    assert layer(x).dtype == dtype
    assert torch.equal(layer(x), (scale * plain.float() + bias).to(dtype))


@torch.no_grad()
def test_a_layer_computed_in_fp32_keeps_doing_so():
    layer = UpcastLinear(8, 4, dtype=torch.bfloat16)
    x = torch.randn(2, 8)
    scale, bias = some_rows(4)
    plain = layer(x)
    set_rows(layer, (scale, bias))
    assert torch.equal(layer(x), scale * plain + bias)
    set_rows(layer, None)
    assert type(layer) is UpcastLinear and torch.equal(layer(x), plain)


def test_other_layers_are_refused_and_left_as_they_are():
    layer = nn.Conv1d(4, 4, 1)
    with pytest.raises(
        ModelError,
        match="a Conv1d does not support scale and bias by row; Linear4bit, UpcastLinear, Lin",
    ):
        set_rows(layer, some_rows(4))
    assert type(layer) is nn.Conv1d and not hasattr(layer, "row_scale")
