"""What only a card shows of products: what TF32 costs, what `auto` takes, and bf16 under 4 bit."""

from __future__ import annotations

import pytest
import torch

import npt
from npt.base.quantization_error import (
    LARGEST_ERROR,
    choose_precision,
    product_errors,
    set_matmul_precision,
)
from npt.distill.logit_losses import CHUNK, chunk_rows

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def highest():
    yield
    torch.set_float32_matmul_precision("highest")


def test_auto_takes_high_exactly_where_the_card_has_tf32() -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cuda")
    errors = product_errors(model)
    has_tf32 = torch.cuda.get_device_capability()[0] >= 8
    taken, why = choose_precision(errors)
    assert taken == ("high" if has_tf32 else "highest"), why
    if has_tf32:
        # 11 bits of each operand: 3e-4 over normal numbers. cuBLAS may take an exact kernel for a
        # shape, as for this head on an H100.
        rounded = [error for error in errors["high"].values() if error > 1e-5]
        assert len(rounded) >= len(errors["high"]) - 1 and max(rounded) < LARGEST_ERROR
    assert max(errors["highest"].values()) < 1e-6
    line = set_matmul_precision("auto", model)
    assert line is not None and taken in line and torch.get_float32_matmul_precision() == taken


def test_bf16_products_of_packed_weights_have_bf16s_error_and_train() -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cuda", compute_dtype="bf16")
    errors = product_errors(model)["highest"]
    assert (
        all(1e-3 < error < 1e-2 for kind, error in errors.items() if kind != "lm_head")
        and errors["lm_head"] < 1e-6
    )
    npt.attach(model, npt.NPTConfig(rank=4), seed=0)
    model.zero_grad()
    ids = torch.randint(3, 2048, (2, 40))
    from npt.data.batch import batch_from_tensors
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


def test_chunks_of_logits_are_a_cards() -> None:
    assert chunk_rows(torch.device("cuda"), 2048) > CHUNK // 2048
