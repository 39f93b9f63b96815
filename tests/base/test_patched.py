import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from updates import random_patch

import npt
from npt.base.linear import UpcastLinear, dense_weight, multiply, multiply_backward, patch_of
from npt.base.patched import Patched, set_patch
from npt.errors import ModelError

NAME = "model.layers.1.mlp.down_proj"


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
def test_the_product_is_that_of_a_dense_layer_with_the_patch_added(load_model, quantization):
    module = load_model(quantization).get_submodule(NAME)
    outer, inner = random_patch(module)
    x = torch.randn(3, 5, module.in_features)
    expected = x.double() @ (dense_weight(module).double() + outer.double() @ inner.double()).T
    set_patch(module, (outer, inner))
    # sums of 128 products in fp32 against fp64
    assert_close(module(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("quantization", ["nf4", None])
def test_products_without_the_layers_forward_have_the_patch_too(load_model, quantization):
    """The local strategy multiplies by the dense weight, forward and backward."""
    module = load_model(quantization).get_submodule(NAME)
    set_patch(module, random_patch(module))
    weight = dense_weight(module)
    x = torch.randn(7, module.in_features, requires_grad=True)
    y = module(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    with torch.no_grad():
        # the same sums in another order
        assert_close(multiply(module, weight, x), y, rtol=1e-5, atol=1e-4)
        assert_close(multiply_backward(module, weight, grad), x.grad, rtol=1e-5, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_taking_the_patch_away_gives_the_layer_back_bit_for_bit(load_model, batch, quantization):
    model = load_model(quantization)
    module = model.get_submodule(NAME)
    before, kind, names = npt.base_hash(model), type(module), list(model.state_dict())
    output = model(batch.input_ids).logits
    set_patch(module, random_patch(module))
    assert isinstance(module, Patched) and isinstance(module, kind)
    assert not torch.equal(model(batch.input_ids).logits, output)
    # Packed bytes and names are as they were while the patch is there.
    assert npt.base_hash(model) == before and list(model.state_dict()) == names
    set_patch(module, None)
    assert type(module) is kind and patch_of(module) is None and "patch" not in vars(module)
    assert torch.equal(model(batch.input_ids).logits, output)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_keeps_its_dtype_and_the_patch_its_own(dtype):
    layer = nn.Linear(8, 4)
    outer, inner = random_patch(layer)
    set_patch(layer, (outer, inner))
    layer = copy.deepcopy(layer).to(dtype)
    x = torch.randn(2, 8, dtype=dtype)
    assert all(part.dtype == torch.float32 for part in patch_of(layer))
    plain = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer(x), (plain.float() + x.float() @ inner.T @ outer.T).to(dtype))


@torch.no_grad()
def test_a_layer_computed_in_fp32_keeps_doing_so():
    layer = UpcastLinear(8, 4, dtype=torch.bfloat16)
    x = torch.randn(2, 8)
    plain = layer(x)
    outer, inner = random_patch(layer)
    set_patch(layer, (outer, inner))
    assert torch.equal(layer(x), plain + x @ inner.T @ outer.T)
    set_patch(layer, None)
    assert type(layer) is UpcastLinear and torch.equal(layer(x), plain)


def test_other_layers_are_refused_and_left_as_they_are():
    layer = nn.Conv1d(4, 4, 1)
    with pytest.raises(
        ModelError, match="a Conv1d does not support a patch; Linear4bit, UpcastLinear, Lin"
    ):
        set_patch(layer, (torch.ones(4, 1), torch.ones(1, 4)))
    assert type(layer) is nn.Conv1d and not hasattr(layer, "patch")
