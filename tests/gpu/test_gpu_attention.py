"""Attention of fp32 on a card: the kernel, its memory, and a backward that gives the same bits
again.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import npt
from npt.adapters.converted import adapter_parameters
from npt.base.attention import _has_backward, repeats_exactly, sdpa_attention, set_deterministic
from npt.base.precision import LARGEST_ERROR, fp32_products
from npt.batch import batch_from_tensors
from npt.config import NPTConfig, TrainConfig
from npt.distill.strategies import drive
from npt.doctor.measure import peak_bytes

pytestmark = pytest.mark.gpu

KERNELS = {"highest": [SDPBackend.EFFICIENT_ATTENTION], "high": [SDPBackend.FLASH_ATTENTION]}
LAYER = SimpleNamespace(num_key_value_groups=4, is_causal=True)


def tensors(length: int, width: int = 128, rows: int = 1) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(rows, length, heads, width) for heads in (32, 8, 8)]
    found = [
        torch.randn(shape, generator=generator, device="cuda").transpose(1, 2) for shape in shapes
    ]
    return [x.detach().requires_grad_() for x in found]


def left_padded(length: int, rows: int) -> Tensor:
    valid = torch.ones(rows, length, dtype=torch.bool, device="cuda")
    valid[-1, : length // 3] = False
    return valid.new_ones(length, length).tril() & valid[:, None, None]


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_the_memory_efficient_kernel_is_reached(masked) -> None:
    q, k, v = tensors(333)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):  # raises where it cannot be had
        sdpa_attention(LAYER, q, k, v, left_padded(333, 1) if masked else None)


@torch.no_grad()
def test_fp16_takes_the_place_of_tf32() -> None:
    q, k, v = tensors(2048)
    exact = sdpa_attention_forward(LAYER, q.double(), k.double(), v.double(), None)[0]
    found = []
    for precision in ("highest", "high"):
        with fp32_products(precision), sdpa_kernel(KERNELS[precision]):
            output, _ = sdpa_attention(LAYER, q, k, v, None)
        found.append(float((output - exact).norm() / exact.norm()))
    assert found[0] < 1e-5 and 1e-4 < found[1] < LARGEST_ERROR


def test_scores_are_never_kept() -> None:
    q, k, v = tensors(8192)
    assert _has_backward(q, True)
    with torch.no_grad():
        taken = peak_bytes(lambda: sdpa_attention(LAYER, q, k, v, None), "cuda")
    # K and V repeated, and the output; the scores would be 64 times a query's bytes
    assert taken < 5 * q.numel() * 4
    both = peak_bytes(lambda: sdpa_attention(LAYER, q, k, v, None)[0].sum().backward(), "cuda")
    assert both < 16 * q.numel() * 4


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("length", [200, 333])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_the_math_kernel(width, length, masked) -> None:
    mask = left_padded(length, 2) if masked else None
    weight = torch.randn(2, length, 32, width, device="cuda")
    if masked:
        weight[-1, : length // 3] = 0
    results = []
    for ours in (True, False):
        inputs = tensors(length, width, rows=2)
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION] if ours else [SDPBackend.MATH]):
            output, _ = (sdpa_attention if ours else sdpa_attention_forward)(
                LAYER, *inputs, mask, scaling=width**-0.5
            )
            torch.where(weight == 0, 0.0, output * weight).sum().backward()
        results.append([x.grad for x in inputs])
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all()
        # sums over hundreds of keys in another order
        assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


@pytest.mark.parametrize("masked", [False, True])
def test_the_backward_gives_the_same_bits_every_time(masked) -> None:
    """Few heads and many keys, for which torch's own choice is many splits."""
    found = []
    for _ in range(10):
        inputs = tensors(2048)
        mask = left_padded(2048, 1) if masked else None
        output, _ = sdpa_attention(LAYER, *inputs, mask, exact=True)
        output.square().sum().backward()
        found.append([x.grad for x in inputs])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("strategy", ["local", "end_to_end"])
def test_a_micro_batch_has_the_same_gradients_every_time(strategy) -> None:
    model, _ = npt.load_base("tiny", quantization="nf4", device="cuda")
    npt.attach(model, NPTConfig(additive_scale=1.0), seed=0)
    set_deterministic(model, True)
    assert repeats_exactly(model)
    ids = torch.randint(3, 2048, (4, 200), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    batch = batch_from_tensors(ids, mask).to(torch.device("cuda"))
    found = []
    for _ in range(5):
        model.zero_grad()
        drive(model, batch, TrainConfig(strategy=strategy))
        found.append([p.grad.clone() for p in adapter_parameters(model).values()])
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )
