import bitsandbytes as bnb
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from updates import random_patch

import npt
from npt.adapters.converted import decoder_layers
from npt.base.linear import UpcastLinear, dense_weight, multiply, multiply_backward, product_weight
from npt.base.patched import set_patch
from npt.errors import ModelError
from npt.packed import quantized_linears, unpacked

QUANTIZATIONS = pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
LINEARS = {"gate": (64, 128), "down": (128, 64), "key": (64, 32)}


def linear(model: nn.Module, name: str) -> nn.Module:
    layer = decoder_layers(model)[1]
    return {
        "gate": layer.mlp.gate_proj,
        "down": layer.mlp.down_proj,
        "key": layer.self_attn.k_proj,
    }[name]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
def test_every_linear_of_the_decoder_is_packed_and_nothing_else(load_model, quantization):
    model, plain = load_model(quantization), load_model(None)
    assert [name for name, _ in quantized_linears(model)] == [
        name
        for name, module in plain.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    assert quantized_linears(plain) == []


class Renamed(bnb.nn.Linear4bit): ...


class Doubled(bnb.nn.Linear4bit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_packed_weight_is_read_only_of_a_layer_that_multiplies_with_it(load_model):
    layer = linear(load_model("nf4"), "gate")
    weight = dense_weight(layer)
    set_patch(layer, random_patch(layer, 2))  # its term is beside the weight
    assert torch.equal(unpacked(layer), weight)
    set_patch(layer, None)
    layer.__class__ = Renamed
    assert torch.equal(unpacked(layer), weight)
    layer.__class__ = Doubled
    with pytest.raises(ModelError, match=r"a test_linear\.Doubled, whose own forward"):
        unpacked(layer)


@pytest.mark.parametrize("name", LINEARS)
@QUANTIZATIONS
def test_forward_and_backward_multiply_with_the_same_fp32_weight(load_model, quantization, name):
    """The checkpoint is bf16; a backward that rounded the weight to bf16 would be wrong by 0.4%."""
    module = linear(load_model(quantization), name)
    columns, rows = LINEARS[name]
    x, gradient = normal(0, 5, columns).requires_grad_(), normal(1, 5, rows)
    out = module(x)
    out.backward(gradient)
    weight = dense_weight(module).detach()
    # default tolerance of fp32: the same sums, at most blocked otherwise
    assert_close(out, x.detach() @ weight.T)
    assert_close(x.grad, gradient @ weight)
    if quantization is not None:
        rounded = gradient @ weight.bfloat16().float()
        assert (x.grad - gradient @ weight).abs().max() < 0.1 * (
            rounded - gradient @ weight
        ).abs().max()


@pytest.mark.parametrize("leading", [(1,), (7,), (2, 3)])
@QUANTIZATIONS
def test_an_evaluation_forward_leaves_weight_and_gradient_alone(load_model, quantization, leading):
    """On some CPUs an evaluation forward would repack the weight in place, compute in bf16 and give
    no gradient any more.
    """
    model = load_model(quantization)
    module = linear(model, "gate")
    bytes_before, hash_before = module.weight.data.clone(), npt.base_hash(model)
    x = normal(0, *leading, 64)
    with torch.no_grad():
        evaluated = module(x)
        model(torch.tensor([[5, 6, 7]]))
    model.train()
    trained_on = x.clone().requires_grad_()
    out = module(trained_on)
    out.sum().backward()
    assert torch.equal(out, evaluated)
    assert trained_on.grad is not None
    # default tolerance of fp32
    assert_close(trained_on.grad, torch.ones(*leading, 128) @ dense_weight(module).detach())
    assert torch.equal(module.weight.data, bytes_before)
    assert npt.base_hash(model) == hash_before


class TestMultiply:
    @pytest.mark.parametrize("patch", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("name", LINEARS)
    @QUANTIZATIONS
    def test_has_the_bits_of_the_modules_own_product_and_its_gradient(
        self, load_model, quantization, name, bias, patch
    ):
        module = linear(load_model(quantization), name)
        columns, out_features = LINEARS[name]
        if bias:
            module.bias = nn.Parameter(normal(7, out_features), requires_grad=False)
        if patch:
            set_patch(module, random_patch(module))
        x, gradient = normal(0, 6, columns), normal(1, 6, out_features)
        weight, place = dense_weight(module), torch.empty(6, out_features)
        with torch.no_grad():
            expected = module(x)
            assert torch.equal(multiply(module, weight, x), expected)
            assert multiply(module, weight, x, place) is place and torch.equal(place, expected)
        module(x.requires_grad_()).backward(gradient)
        into = torch.empty(6, columns)
        assert multiply_backward(module, weight, gradient, into) is into
        assert_close(into, x.grad)  # default tolerance of fp32: the same sums
        assert torch.equal(multiply_backward(module, weight, gradient), into)

    def test_a_weight_stored_in_16_bit_is_multiplied_in_fp32_both_ways(self):
        module = nn.Linear(64, 32, bias=False).to(torch.bfloat16).requires_grad_(False)
        module.__class__ = UpcastLinear
        x, gradient = normal(0, 4, 64), normal(1, 4, 32)
        weight = product_weight(module, torch.float32)
        # default tolerance of fp32: the same sums of 64 and of 32 products
        assert_close(multiply(module, weight, x), x @ module.weight.float().T)
        assert_close(multiply_backward(module, weight, gradient), gradient @ module.weight.float())
