import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, remove_hook_from_module
from torch import nn
from torch.testing import assert_close

import npt
from npt.adapters.attach import decoder_layers
from npt.quant.linear import dense_weight, is_hooked, multiply, multiply_backward, quantized_linears, stacked_product
from npt.quant.precision import UpcastLinear
from npt.quant.rows import set_rows

QUANTIZATIONS = pytest.mark.parametrize("quantization", ["nf4", "fp4", None])
LINEARS = {"gate": (64, 128), "down": (128, 64), "key": (64, 32)}


def linear(model: nn.Module, name: str) -> nn.Module:
    layer = decoder_layers(model)[1]
    return {"gate": layer.mlp.gate_proj, "down": layer.mlp.down_proj, "key": layer.self_attn.k_proj}[name]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("quantization", ["nf4", "fp4"])
def test_every_linear_of_the_decoder_is_packed_and_nothing_else(load_model, quantization):
    model, plain = load_model(quantization), load_model(None)
    assert [name for name, _ in quantized_linears(model)] == [
        name for name, module in plain.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"
    ]
    assert quantized_linears(plain) == []


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize(("quantization", "widest_step"), [("nf4", 0.304), ("fp4", 0.334)])
def test_the_dense_weight_lies_within_half_a_step_of_the_original(load_model, quantization, widest_step, name):
    original = dense_weight(linear(load_model(None), name))
    dense = dense_weight(linear(load_model(quantization), name))
    assert (dense.shape, dense.dtype) == (original.shape, torch.float32)
    blocks = original.reshape(-1, 64)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    # half of the code's widest step, and 2% of the block's largest value for the 8-bit code of that value itself
    assert ((dense.reshape(-1, 64) - blocks).abs() <= (widest_step / 2 + 0.02) * largest).all()
    assert not torch.equal(dense, original)


def test_the_dense_weight_of_a_packed_layer_is_fresh_and_of_a_plain_one_its_own(load_model):
    packed, plain = linear(load_model(), "gate"), linear(load_model(None), "gate")
    before = packed.weight.data.clone()
    dense_weight(packed).zero_()
    assert torch.equal(packed.weight.data, before)
    assert dense_weight(packed).abs().sum() > 0
    assert dense_weight(plain) is plain.weight


@pytest.mark.parametrize("name", LINEARS)
@QUANTIZATIONS
def test_forward_and_backward_multiply_with_the_same_dense_fp32_weight(load_model, quantization, name):
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
        assert (x.grad - gradient @ weight).abs().max() < 0.1 * (rounded - gradient @ weight).abs().max()


@pytest.mark.parametrize("leading", [(1,), (7,), (2, 3)])
@QUANTIZATIONS
def test_an_evaluation_forward_leaves_weight_and_gradient_alone(load_model, quantization, leading):
    """On some CPUs an evaluation forward would repack the weight in place, compute in bf16 and give no gradient any more."""
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
    assert_close(trained_on.grad, torch.ones(*leading, 128) @ dense_weight(module).detach())  # default tolerance of fp32
    assert torch.equal(module.weight.data, bytes_before)
    assert npt.base_hash(model) == hash_before


class TestStackedProduct:
    @pytest.mark.parametrize(("students", "teachers"), [(6, 6), (1, 1), (2, 5)])
    @pytest.mark.parametrize("name", LINEARS)
    @QUANTIZATIONS
    def test_equals_two_calls_in_values_and_gradient(self, load_model, quantization, name, students, teachers):
        module = linear(load_model(quantization), name)
        columns, rows = LINEARS[name]
        student, teacher, gradient = normal(0, students, columns), normal(1, teachers, columns), normal(2, students, rows)
        stacked_in, plain_in = student.clone().requires_grad_(), student.clone().requires_grad_()
        of_student, of_teacher = stacked_product(module, stacked_in, teacher)
        expected = module(plain_in)
        # default tolerance of fp32: another number of rows may take another kernel, that is another order of the sum
        assert_close(of_student, expected)
        assert_close(of_teacher, module(teacher))
        of_student.backward(gradient)
        expected.backward(gradient)
        assert_close(stacked_in.grad, plain_in.grad)

    def test_the_teacher_takes_no_part_in_the_gradient(self, load_model):
        module = linear(load_model(), "gate")
        student, teacher = normal(0, 3, 64).requires_grad_(), normal(1, 3, 64).requires_grad_()
        of_student, of_teacher = stacked_product(module, student, teacher)
        assert of_student.requires_grad
        assert not of_teacher.requires_grad
        of_student.sum().backward()
        assert student.grad.abs().sum() > 0
        assert teacher.grad is None

    def test_one_product_serves_both(self, load_model):
        module = linear(load_model(), "gate")
        rows = []
        module.register_forward_hook(lambda _, __, output: rows.append(len(output)))
        stacked_product(module, normal(0, 3, 64), normal(1, 4, 64))
        assert rows == [7]

    def test_a_weight_stored_in_16_bit_is_multiplied_in_fp32_both_ways(self):
        module = nn.Linear(64, 32, bias=False).to(torch.bfloat16).requires_grad_(False)
        module.__class__ = UpcastLinear
        student, gradient = normal(0, 4, 64).requires_grad_(), normal(1, 4, 32)
        of_student, _ = stacked_product(module, student, normal(2, 4, 64))
        of_student.backward(gradient)
        # default tolerance of fp32: the same sums of 64 and of 32 products
        assert_close(of_student, student.detach() @ module.weight.float().T)
        assert_close(student.grad, gradient @ module.weight.float())


class TestMultiply:
    @pytest.mark.parametrize("rows", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("name", LINEARS)
    @QUANTIZATIONS
    def test_has_the_bits_of_the_modules_own_product_and_its_gradient(self, load_model, quantization, name, bias, rows):
        module = linear(load_model(quantization), name)
        columns, out_features = LINEARS[name]
        if bias:
            module.bias = nn.Parameter(normal(7, out_features), requires_grad=False)
        if rows:
            set_rows(module, (1 + normal(8, out_features), normal(9, out_features)))
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

    def test_a_module_is_hooked_where_somebody_looks_or_has_replaced_its_forward(self, load_model):
        module = linear(load_model(), "gate")
        assert not is_hooked(module)
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(lambda *_: None)
            assert is_hooked(module)
            handle.remove()
            assert not is_hooked(module)
        module.forward = lambda x: x
        assert is_hooked(module)

    def test_accelerates_wrapper_is_no_hook_unless_it_brings_in_weights_or_something_else_is_there(self, load_model):
        module = linear(load_model(), "gate")
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
        assert not is_hooked(module)
        placed = module.forward
        module.forward = lambda x: 2 * placed(x)  # in front of the wrapper
        assert is_hooked(module)
        module.forward = placed
        handle = module.register_forward_hook(lambda *_: None)
        assert is_hooked(module)
        handle.remove()
        assert not is_hooked(module)
        add_hook_to_module(module, ModelHook(), append=True)
        assert is_hooked(module)
        remove_hook_from_module(module)
        forward = module.forward
        module.forward = lambda x: 2 * forward(x)  # behind it
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
        assert is_hooked(module)

    def test_a_weight_that_is_brought_in_for_a_call_alone_is_used_by_that_call_alone(self, load_model):
        module = linear(load_model(None), "gate")
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", offload=True, weights_map=dict(module.state_dict())))
        assert is_hooked(module)
