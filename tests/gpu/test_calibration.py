"""The closed-form start on a card: that of the CPU."""

from __future__ import annotations

import random

import pytest
import torch

import npt
from npt.batch import Sample

pytestmark = pytest.mark.gpu


def samples() -> list[Sample]:
    source = random.Random(0)
    return [
        Sample(f"random-{n}", tuple(source.randrange(3, 2048) for _ in range(64)))
        for n in range(64)
    ]


def calibrated(device: str) -> npt.Calibration:
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device=device)
    npt.attach(model, npt.NPTConfig(layers="6-7", ranks=(16, 16), init="calibrated"))
    return npt.calibrate(model, tokenizer, samples(), 4096, batch_size=8)


def assert_alike(found: npt.Calibration, expected: npt.Calibration) -> None:
    # The walk draws tokens from the teacher's predictions, on each kind of device its own, and
    # 4-bit weights are quantised with other roundings: figures agree, not bits.
    for index, layer in expected.layers.items():
        assert found.layers[index].nmse == pytest.approx(layer.nmse, rel=0.05)
        assert found.layers[index].kl == pytest.approx(layer.kl, rel=0.25)


def test_a_start_from_a_gpu_is_as_good_and_frees_its_memory() -> None:
    device = torch.device("cuda", 0)
    torch.set_float32_matmul_precision("high")
    try:
        # the libraries' workspaces, and the kernels that CUDA loads at their first use
        calibrated("cuda")
        before = torch.cuda.memory_reserved(device)
        found = calibrated("cuda")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_alike(found, calibrated("cpu"))
    # matrices and the model are gone: less than a large block of the allocator, 20 MiB
    assert torch.cuda.memory_reserved(device) - before < 16 << 20
