"""Fake devices: the memory counted without storage is that of the same calls with it."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import npt
import npt.base.attention
from npt.adapters.converted import adapter_parameters
from npt.base.random_base import random_base
from npt.config import NPTConfig, TrainConfig
from npt.data.batch import batch_from_tensors
from npt.distill.strategies import drive
from npt.planning import fake_device
from npt.planning.fake_device import FakeDevice, bytes_of
from npt.planning.measure import peak_bytes, storage_bytes, tensors_of

ROWS, LENGTH = 3, 40

LLAMA = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
ADAPTER = NPTConfig(rank=4, layers="1,2")


def stored(quantization: str | None) -> torch.dtype:
    return torch.float32 if quantization is None else torch.bfloat16


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize("tied", [False, True])
def test_a_fake_base_counts_the_bytes_of_a_real_one(quantization, tied) -> None:
    config = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": tied})
    fake = FakeDevice().base(config, quantization, stored(quantization), ADAPTER)
    assert bytes_of(fake) == storage_bytes(
        tensors_of(random_base(config, quantization=quantization, device="cpu"))
    )


@pytest.mark.parametrize(
    ("quantization", "settings"),
    [
        ("nf4", {"strategy": "local"}),
        (
            None,
            {
                "strategy": "local",
                "loss": "nmse_update",
                "token_weighting": "disagreement",
                "regularization_lambda": 0.1,
            },
        ),
        ("nf4", {"strategy": "propagated"}),
        (None, {"strategy": "end_to_end"}),
        ("nf4", {"strategy": "end_to_end", "logit_kl_weight": 0.5}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_the_peak_of_a_fake_micro_batch_is_that_of_a_real_one(quantization, settings) -> None:
    config = TrainConfig(**settings)

    def count() -> tuple[int, int]:
        place = FakeDevice()
        model, batch = (
            place.base(LLAMA, quantization, stored(quantization), ADAPTER),
            place.batch(ROWS, LENGTH),
        )
        return place.peak_of(lambda: drive(model, batch, config)), place.peak_of(
            lambda: drive(model, batch, config)
        )

    counted, again = count()
    gc.collect()  # nothing fake is to be taken for something real
    model = random_base(LLAMA, quantization=quantization, device="cpu")
    npt.attach(model, ADAPTER)
    for parameter in adapter_parameters(model).values():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.randint(300, (ROWS, LENGTH))
    real = batch_from_tensors(ids, torch.ones_like(ids)).to(torch.device("cpu"))
    drive(model, real, config)  # makes what is made once, like tables of positions
    measured = peak_bytes(lambda: drive(model, real, config), "cpu").added
    # The buffers of the attention kernel, some tens of KiB, are in the measured figure alone; all
    # else is the same to the byte.
    assert counted == again and abs(counted - measured) < 0.05 * measured


def test_a_layer_of_the_largest_models_is_counted_without_memory() -> None:
    place = FakeDevice()
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    model: Any = None

    def make() -> None:
        nonlocal model
        model = place.base(config, "nf4", torch.bfloat16, NPTConfig(rank=16, layers="0"))

    # the adapters' start, which is drawn before it is thrown away
    assert peak_bytes(make, "cpu").added < 32 * 2**20
    assert bytes_of(model) > 2**30
    batch = place.batch(1, 512)
    assert place.peak_of(lambda: drive(model, batch, TrainConfig())) > 2**28


def test_few_blocks_of_rows_take_what_all_of_them_take(monkeypatch) -> None:
    """Blocks of some rows, as a layer of a large model has hundreds of."""
    from npt.adapters import fused

    monkeypatch.setitem(fused.BLOCK, "cpu", 12 * 160)
    place = FakeDevice()
    model, batch = place.base(LLAMA, "nf4", torch.bfloat16, ADAPTER), place.batch(ROWS, LENGTH)
    counts = []
    for blocks in (fused.few_blocks, contextlib.nullcontext):
        monkeypatch.setattr(fake_device, "few_blocks", blocks)
        counts += [
            place.peak_of(
                lambda strategy=strategy: drive(model, batch, TrainConfig(strategy=strategy))
            )
            for strategy in ("local", "end_to_end")
        ]
    assert counts[:2] == counts[2:]
    assert len(fused.blocks(torch.empty(ROWS * LENGTH, 160), ADAPTER.rank)) == 10


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_of_fp32_on_cuda_is_counted_in_linear_memory(monkeypatch, attention) -> None:
    """The kernels' shapes are torch's own; that a device takes them is said to it here."""
    monkeypatch.setattr(npt.base.attention, "_on_cuda_in_fp32", lambda *tensors: True)
    monkeypatch.setattr(npt.base.attention, "_has_exact_backward", lambda query, causal: True)
    place = FakeDevice()
    model = place.base(LLAMA, "nf4", torch.bfloat16, ADAPTER, attn_implementation=attention)
    config = TrainConfig(strategy="end_to_end")
    batches = [place.batch(1, length) for length in (512, 1024)]
    short, long = (
        place.peak_of(lambda batch=batch: drive(model, batch, config)) for batch in batches
    )
    scores = 4 * 1024**2 * LLAMA.num_attention_heads
    assert (
        (long < 2.05 * short and long < scores)
        if attention == "sdpa"
        else long > scores + 3 * short / 2
    )
