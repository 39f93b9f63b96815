"""A calibrated start on a card: as near to the teacher as the CPU's, and what the host spends on
it.
"""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import npt
from npt.calibration.placement import Placement, free_bytes
from npt.calibration.plan import Plan
from npt.data.batch import Sample

pytestmark = pytest.mark.gpu

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "calibration_layer.py"


def samples() -> list[Sample]:
    source = random.Random(0)
    return [
        Sample(f"random-{n}", tuple(source.randrange(3, 2048) for _ in range(64)))
        for n in range(64)
    ]


def calibrated(device: str) -> npt.Calibration:
    model, tokenizer = npt.load_base("tiny", quantization="nf4", device=device)
    npt.attach(model, npt.NPTConfig(layers="6-7", rank=16, init="calibrated"))
    return npt.calibrate(model, tokenizer, samples(), 4096, rounds=1, batch_size=8)


def assert_alike(found: npt.Calibration, expected: npt.Calibration) -> None:
    # The first walk draws tokens from the teacher's predictions, on each kind of device its own,
    # and 4-bit weights are quantised with other roundings: errors agree, not bits.
    for index, layer in expected.layers.items():
        assert found.layers[index].nmse_before == pytest.approx(layer.nmse_before, rel=0.05)
        assert found.layers[index].nmse_after == pytest.approx(layer.nmse_after, rel=0.25)


def test_a_calibration_on_a_gpu_is_as_good_and_frees_its_memory() -> None:
    device = torch.device("cuda", 0)
    torch.linalg.eigh(torch.eye(8, dtype=torch.float64, device=device))  # cuSOLVER's own memory
    before = free_bytes(device)
    torch.set_float32_matmul_precision("high")
    try:
        found = calibrated("cuda")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_alike(found, calibrated("cpu"))
    # cuBLAS keeps its workspaces; rows, matrices and the model are gone.
    assert before - free_bytes(device) < 128 << 20


def test_the_host_path_on_a_gpu_gives_what_the_device_path_gives(monkeypatch) -> None:
    on_device = calibrated("cuda")
    monkeypatch.setattr(Plan, "place", lambda *_: Placement())
    on_host = calibrated("cuda")
    for index, layer in on_device.layers.items():
        # LAPACK's and cuSOLVER's eigenvectors of one fp64 matrix, then the same steps.
        assert on_host.layers[index].nmse_after == pytest.approx(layer.nmse_after, rel=0.05)


def test_one_layer_is_timed_with_host_and_device_apart(record_property) -> None:
    spec = importlib.util.spec_from_file_location("calibration_layer", BENCHMARK)
    assert spec is not None and spec.loader is not None
    benchmark: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    for on_host in (False, True):
        found = benchmark.measure("cuda", 1024, 2816, 64, 8192, on_host=on_host)
        record_property("host" if on_host else "device", found)
        assert found["device_seconds"] > 0 and math.isfinite(found["nmse_after"])
        assert (found["host_seconds"] > 0) == on_host  # nothing is factorised on the host otherwise
