"""--compute_dtype bf16: products of packed weights in bf16, forward and backward, all else in fp32,
as the audit finds it.
"""

from typing import Any

import pytest
import torch
from students import enlarge
from torch import Tensor
from torch.testing import assert_close

import npt
from npt.adapters.attach import attach
from npt.adapters.converted import adapter_parameters, decoder_layers
from npt.adapters.trained import is_fusable
from npt.base.linear import dense_weight, multiply, multiply_backward, product_weight
from npt.base.precision import audit_precision, declared_dtype, policy_dtype
from npt.batch import batch_from_tensors
from npt.config import BaseConfig, NPTConfig, TrainConfig
from npt.distill.strategies import STRATEGIES
from npt.errors import CheckpointError, ConfigError, PrecisionError
from npt.hooks import unfused
from npt.runs.resume import changed_settings

UNIT = torch.finfo(torch.bfloat16).eps / 2


@pytest.fixture
def model(load_model):
    return load_model("nf4", compute_dtype="bf16")


def student(load_model, **arguments: Any):
    model = load_model("nf4", **arguments)
    attach(model, NPTConfig(layers="1-2", rank=4), seed=0)
    enlarge(model, b=20)
    return model


def test_packed_products_are_in_bf16_and_all_else_in_fp32(model) -> None:
    attach(model, NPTConfig(layers="1", rank=4))
    report = audit_precision(model)
    assert report.compute_dtype == {"bfloat16": 28, "float32": 2}  # embedding and head
    assert set(report.adapter_dtype) == {"float32"}
    assert (policy_dtype(model), declared_dtype(model)) == (torch.float32, torch.bfloat16)
    output = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    assert {state.dtype for state in (*output.hidden_states, output.logits)} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: vars(m).update(compute_dtype=torch.float32),
            "expected float32, 4-bit products in bfloat16, but .* computes in float32",
        ),
        (
            lambda m: setattr(m.weight.quant_state, "dtype", torch.float32),
            "computes in bfloat16 forward, float32 backward",
        ),
        (lambda m: vars(m).update(compute_dtype=torch.float16), "computes in float16 forward"),
    ],
)
def test_the_audit_finds_a_module_that_departs_from_the_policy(model, change, message) -> None:
    change(model.model.layers[1].mlp.gate_proj)
    with pytest.raises(PrecisionError, match=message):
        audit_precision(model)


@torch.no_grad()
def test_products_have_bf16s_error_and_the_head_fp32s(model) -> None:
    for module in (model.model.layers[0].mlp.gate_proj, model.lm_head):
        x = torch.randn(64, module.in_features, generator=torch.Generator().manual_seed(0))
        exact = x.double() @ dense_weight(module).double().T
        error = torch.linalg.vector_norm(module(x) - exact) / torch.linalg.vector_norm(exact)
        # operands and result are rounded, each by at most a unit and evenly below it
        packed = module is not model.lm_head
        assert UNIT / 2 < error < 2 * UNIT if packed else error < 1e-6


def test_forward_and_backward_by_hand_are_those_of_the_module(model) -> None:
    module: Any = model.model.layers[0].mlp.gate_proj
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(5, n, generator=generator) for n in (64, 128))
    leaf = x.clone().requires_grad_()
    product = module(leaf)
    product.backward(gradient)
    weight = product_weight(module, torch.float32)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(multiply(module, weight, x), product.detach())
    assert torch.equal(multiply_backward(module, weight, gradient), leaf.grad)


def gradients(model, strategy: str, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    STRATEGIES[strategy](
        model, batch_from_tensors(ids, torch.ones_like(ids)), TrainConfig(strategy=strategy)
    )
    return {name: p.grad.clone() for name, p in adapter_parameters(model).items()}


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_the_fused_path_serves_it_and_agrees_with_the_plain_one(
    load_model, batch, strategy
) -> None:
    model = student(load_model, compute_dtype="bf16")
    layer: Any = decoder_layers(model)[1]
    assert is_fusable(layer, torch.zeros(2, 64))
    fused = gradients(model, strategy, batch.input_ids)
    with unfused():
        plain = gradients(model, strategy, batch.input_ids)
    for name, gradient in fused.items():
        assert torch.isfinite(gradient).all() and gradient.dtype == torch.float32
        # Where fp32 sums in another order fall on the two sides of a bf16 boundary, a product
        # differs by a unit of bf16.
        assert (
            float((gradient - plain[name]).norm()) <= 4 * UNIT * float(plain[name].norm()) + 1e-12
        ), name


def test_outputs_and_gradients_are_fp32s_to_bf16s_rounding(load_model, batch) -> None:
    models = [student(load_model, compute_dtype=dtype) for dtype in ("fp32", "bf16")]
    of_fp32, of_bf16 = (gradients(model, "local", batch.input_ids) for model in models)
    assert any(not torch.equal(of_fp32[name], of_bf16[name]) for name in of_fp32)
    error = sum(float((of_bf16[n] - of_fp32[n]).square().sum()) for n in of_fp32) ** 0.5
    size = sum(float(g.square().sum()) for g in of_fp32.values()) ** 0.5
    assert error < 0.05 * size  # a dozen roundings of half a percent
    with torch.no_grad():
        logits = [model(batch.input_ids).logits for model in models]
    assert float((logits[1] - logits[0]).norm()) < 0.05 * float(logits[0].norm())


def test_where_it_means_nothing_it_is_refused(load_model) -> None:
    with pytest.raises(
        ConfigError, match=r"compute_dtype bf16 has no effect on .*, which is not quantised"
    ):
        load_model(None, compute_dtype="bf16")
    with pytest.raises(ConfigError, match="compute_dtype is 'fp16'; choose from fp32, bf16"):
        load_model("nf4", compute_dtype="fp16")
    with pytest.raises(
        ConfigError,
        match="--compute_dtype bf16 has no effect without --use_quantization: add --use",
    ):
        BaseConfig(compute_dtype="bf16")


def test_a_run_is_not_gone_on_with_in_another_dtype() -> None:
    with pytest.raises(
        CheckpointError, match="trained with --compute_dtype 'bf16', but this run has 'fp32'"
    ):
        changed_settings({"compute_dtype": "bf16"}, {"compute_dtype": "fp32"})
    assert changed_settings({}, {"compute_dtype": "fp32"}) == {}


def test_a_bias_is_rounded_for_products_and_not_in_the_hash(load_model) -> None:
    model = load_model("nf4")
    module: Any = model.model.layers[0].mlp.gate_proj
    module.bias = torch.nn.Parameter(torch.randn(128).bfloat16().float(), requires_grad=False)
    before = npt.base_hash(model)
    npt.base.precision.enforce_policy(model, torch.bfloat16)
    x = torch.randn(3, 64)
    expected = (x.bfloat16() @ dense_weight(module).T + module.bias).float()
    # two units of bf16: the bias is added before or after the rounding
    assert_close(module(x), expected, rtol=2**-6, atol=2**-6)
    # bitsandbytes before 0.50 rounds a copy of it
    assert module.bias.dtype in (torch.bfloat16, torch.float32)
    assert npt.base_hash(model) == before
