"""What only a card shows of products: what TF32 costs, what `auto` takes, and bf16 under 4 bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npt
from npt.base.linear import dense_weight, multiply, multiply_backward, product_weight
from npt.base.precision import set_matmul_precision

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def highest():
    yield
    torch.set_float32_matmul_precision("highest")


@torch.no_grad()
def product_error(module: Any) -> float:
    """Return the relative error of a product against fp64, of the weight as the layer takes it."""
    x = torch.randn(64, module.in_features, generator=torch.Generator().manual_seed(0)).cuda()
    exact = x.double() @ dense_weight(module).double().T
    return float(torch.linalg.vector_norm(module(x) - exact) / torch.linalg.vector_norm(exact))


def test_auto_takes_high_exactly_where_the_card_has_tf32() -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cuda")
    mlp = model.model.layers[0].mlp
    assert product_error(mlp.up_proj) < 1e-6  # 6e-8 of each of 192 terms, which average out
    set_matmul_precision("auto", model)
    has_tf32 = torch.cuda.get_device_capability()[0] >= 8
    assert torch.get_float32_matmul_precision() == ("high" if has_tf32 else "highest")
    if has_tf32:
        # 11 bits of each operand: 3e-4 over normal numbers
        errors = [product_error(module) for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
        assert max(errors) < 1e-3 and any(error > 1e-5 for error in errors)


def test_a_base_in_16_bit_keeps_its_adapters_in_full_fp32() -> None:
    model, _ = npt.load_base("tiny", device="cuda", use_fp16=True)
    set_matmul_precision("auto", model)
    assert torch.get_float32_matmul_precision() == "highest"


def test_bf16_products_of_packed_weights_have_bf16s_error_and_train() -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cuda", compute_dtype="bf16")
    for module in (m for m in model.model.layers[0].modules() if isinstance(m, torch.nn.Linear)):
        # 8 bits: up to 4e-3 of both operands and the result, 3e-3 in all
        assert 1e-3 < product_error(module) < 5e-3
    assert product_error(model.lm_head) < 1e-6
    npt.attach(model, npt.NPTConfig(rank=4), seed=0)
    model.zero_grad()
    ids = torch.randint(3, 2048, (2, 40))
    from npt.batch import batch_from_tensors
    from npt.distill.local import local

    sums = local(
        model,
        batch_from_tensors(ids, torch.ones_like(ids)).to(torch.device("cuda")),
        npt.TrainConfig(),
    )
    assert torch.isfinite(sums.loss)
    grads = [p.grad for name, p in model.named_parameters() if ".npt." in name]
    assert all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in grads) and any(
        g.any() for g in grads
    )


@torch.no_grad()
@pytest.mark.parametrize("into", [False, True])
def test_a_bf16_product_by_hand_is_not_rounded_once_more(into) -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cuda", compute_dtype="bf16")
    module = model.model.layers[0].mlp.up_proj
    x, weight = torch.randn(64, module.in_features).cuda(), product_weight(module, torch.float32)
    out = x.new_empty(64, module.out_features) if into else None
    exact = x.bfloat16().double() @ weight.double().T
    product = multiply(module, weight, x, out)
    assert product.dtype == torch.float32 and (out is None or product is out)
    assert torch.linalg.vector_norm(product - exact) < 1e-6 * torch.linalg.vector_norm(exact)
    gradient = multiply_backward(module, weight, product)
    exact = product.bfloat16().double() @ weight.double()
    assert torch.linalg.vector_norm(gradient - exact) < 1e-6 * torch.linalg.vector_norm(exact)
